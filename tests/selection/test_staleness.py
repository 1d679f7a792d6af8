"""Row changes, stale rows, and the exact threshold, each against an oracle."""

import math

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.selection.staleness import (
  exact_threshold,
  example_change,
  row_change,
  stale_rows,
)

SHARES = st.floats(0, 1) | st.sampled_from([0.0, 0.3, 0.5, 1.0])
CHANGES = st.lists(
  st.floats(0, 1, width=32, allow_subnormal=False)
  | st.sampled_from([0.0, 1e-3, math.inf, math.nan, 3e38]),
  min_size=1,
  max_size=60,
).map(lambda values: np.array(values, np.float32))


def published_threshold(changes, target, tolerance=0.08):
  """The reference's bisection; None where it would drop nothing."""
  low, high = 0.0, 0.1
  for _ in range(25):
    middle = (low + high) / 2
    rate = np.mean(changes < middle)
    if abs(rate - target) <= tolerance:
      return middle
    low, high = (middle, high) if rate < target else (low, middle)
  return None


def brute_example_change(change, lookups, alpha):
  found = []
  for row in lookups.reshape(len(lookups), -1):
    values = [change[i] for i in row if i >= 0]
    if not values or min(np.nan_to_num(values, nan=0)) < 0:
      found.append(math.inf)
      continue
    values = sorted(math.inf if np.isnan(v) else v for v in values)
    found.append(values[min(alpha, len(values)) - 1])
  return np.array(found, change.dtype)


@pytest.mark.parametrize('shape', [(5,), (5, 3), (5, 2, 4)])
def test_row_change_is_the_largest_element(shape):
  rng = np.random.default_rng(0)
  rows, before = rng.normal(size=(2, *shape)).astype(np.float32)
  expected = np.abs(rows - before).reshape(5, -1).max(1)
  np.testing.assert_array_equal(row_change(rows, before), expected)
  on_device = jax.jit(row_change)(*jax.device_put((rows, before)))
  np.testing.assert_array_equal(jax.device_get(on_device), expected)


def test_half_precision_rows_change_in_full_precision():
  half = np.array([[1.0], [1.001]], jnp.bfloat16)
  assert row_change(half, half[::-1]).dtype == np.float32


def test_a_broken_row_is_never_stale():
  rows = np.array([[np.nan, 0], [0, 0]], np.float32)
  change = row_change(rows, np.zeros_like(rows))
  np.testing.assert_array_equal(stale_rows(change, np.inf), [False, True])


def test_stale_is_strict_and_needs_touches():
  change = np.array([0.0, 0.5, 0.25, 0.0], np.float32)
  touches = np.array([1, 3, 2, 0])
  for min_touches, expected in {
    0: [True, False, True, True],
    1: [True, False, True, False],
    2: [False, False, True, False],
  }.items():
    stale = stale_rows(change, 0.5, touches, min_touches)
    np.testing.assert_array_equal(stale, expected)
    jitted = jax.jit(lambda c, t, least: stale_rows(c, 0.5, t, least))
    stale = jitted(*jax.device_put((change, touches, min_touches)))
    np.testing.assert_array_equal(jax.device_get(stale), expected)


@given(
  change=hnp.arrays(
    np.float32,
    7,
    elements=st.sampled_from([0, 0.25, 0.5, 1, 2, -1, math.inf, math.nan]),
  ),
  lookups=hnp.arrays(
    np.int32,
    st.sampled_from([(4, 3), (6, 1), (3, 2, 3)]),
    elements=st.integers(-1, 6),
  ),
  data=st.data(),
)
def test_example_change_is_the_nth_smallest(change, lookups, data):
  alpha = data.draw(st.integers(1, math.prod(lookups.shape[1:])))
  expected = brute_example_change(change, lookups, alpha)
  found = example_change(change, lookups, alpha)
  np.testing.assert_array_equal(found, expected, strict=True)
  # What it is for: stale iff alpha lookups, or all there are, are stale.
  for threshold in (0.0, 0.3, 1.5):
    for changed, row in zip(
      found, lookups.reshape(len(found), -1), strict=True
    ):
      real = change[row[row >= 0]]
      hot = len(real) and not (real < 0).any()
      stale = (real < threshold).sum() >= min(alpha, len(real))
      assert (changed < threshold) == bool(hot and stale)


def test_example_change_runs_inside_jit():
  rng = np.random.default_rng(1)
  change = rng.random(20).astype(np.float32)
  lookups = rng.integers(-1, 20, (50, 3, 2)).astype(np.int32)
  found = jax.jit(example_change, static_argnums=2)(
    *jax.device_put((change, lookups)), 4
  )
  np.testing.assert_array_equal(
    jax.device_get(found), example_change(change, lookups, 4), strict=True
  )


@given(changes=CHANGES, share=SHARES)
def test_no_threshold_comes_nearer(changes, share):
  dropped = int((changes < np.float32(exact_threshold(changes, share))).sum())
  wanted = math.floor(share * len(changes))
  finite = changes[np.isfinite(changes)]
  cuts = {0} | {int((changes <= value).sum()) for value in finite}
  # The nearest; of two equally near, the one that drops fewer.
  assert dropped == min(cuts, key=lambda cut: (abs(cut - wanted), cut))


@jax.jit
def count_below(changes, threshold):
  return (changes < threshold).sum()


def test_a_device_sees_the_smallest_threshold():
  # It flushes subnormal numbers to zero: 1e-45 would drop nothing there.
  changes = np.array([0.0, 1e-45, 1e-40, 1.0], np.float32)
  threshold = np.float32(exact_threshold(changes, 0.75))
  assert (changes < threshold).sum() == 3
  assert jax.device_get(count_below(*jax.device_put((changes, threshold)))) == 3


@pytest.mark.parametrize('kind', ['random', 'heavy-tied', 'all-equal'])
@pytest.mark.parametrize('target', [0.1, 0.3, 0.5, 0.9])
def test_the_published_bisection_lands_near(kind, target):
  rng = np.random.default_rng(2)
  changes = {
    'random': rng.random(2000) * 0.1,
    'heavy-tied': rng.choice([0.0, 1e-3, 0.02, 0.05], 2000),
    'all-equal': np.full(2000, 0.01),
  }[kind].astype(np.float32)
  exact = np.mean(changes < exact_threshold(changes, target))
  published = published_threshold(changes, target)
  if published is not None:
    rate = np.mean(changes < published)
    assert abs(exact - target) <= abs(rate - target) + 1 / 2000 <= 0.081
  else:  # no rate is within its tolerance; ours is still the nearest
    assert kind != 'random'
    cuts = [0.0] + [np.mean(changes <= value) for value in np.unique(changes)]
    assert min(abs(np.array(cuts) - target)) > 0.08
    assert abs(exact - target) <= min(abs(np.array(cuts) - target)) + 1 / 2000


@pytest.mark.parametrize('target', [-0.1, 1.5, math.nan, math.inf])
def test_a_drop_target_is_a_share(target):
  with pytest.raises(UserError, match=rf'\[0, 1\], got {target} '):
    exact_threshold(np.ones(3, np.float32), target)


def test_an_empty_sample_is_refused():
  with pytest.raises(UserError, match='got 0 examples'):
    exact_threshold(np.ones(0, np.float32), 0.5)


@pytest.mark.parametrize('alpha', [-1, 0, 4])
def test_alpha_counts_lookups(alpha):
  change = np.ones(5, np.float32)
  with pytest.raises(UserError, match=rf'\[1, 3\] .* got {alpha} '):
    example_change(change, np.zeros((2, 3), np.int32), alpha)
