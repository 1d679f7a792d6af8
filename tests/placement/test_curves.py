"""Miss-ratio curves against caches that are looked through row by row."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.placement.sizing import (
  capacity_grid,
  lru_curve,
  simulate,
  static_curve,
)
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.host_table import unique_rows
from slipstream_jax.tables import offsets

ROWS = (5, 30, 65)
N = sum(ROWS)
EVERY = np.arange(1, N + 1)

streams = st.lists(
  st.lists(st.integers(-1, N - 1), min_size=1, max_size=30),
  min_size=1,
  max_size=15,
)


def found_of(stream, popular=None):
  return [
    unique_rows(np.array([batch], np.int64), N, popular) for batch in stream
  ]


def hits_of_lru(stream, capacity, first=()):
  """Hits by table and loads of a cache that is a list, oldest row first."""
  held = list(first)[:capacity][::-1]
  hits, loads = np.zeros(len(ROWS)), 0
  for batch in stream:
    real = [row for row in batch if row >= 0]
    for row in real:
      if row in held:
        hits[np.searchsorted(offsets(ROWS), row, side='right') - 1] += 1
    used = list(dict.fromkeys(real))
    loads += len(set(used) - set(held))
    held = [row for row in held if row not in used] + used
    held = held[-capacity:]
  return hits, loads / len(stream)


@given(streams, st.permutations(range(N)), st.integers(0, N))
def test_lru_curve_is_every_lru_cache_at_once(stream, order, warm):
  first = np.array(order[:warm], np.int64)
  curve = lru_curve(found_of(stream), offsets(ROWS), EVERY, first=first)
  largest = max(len(set(batch)) for batch in stream)
  for capacity in range(largest, N + 1, 7):
    hits, loads = hits_of_lru(stream, capacity, order[:warm])
    np.testing.assert_array_equal(curve.hits[:, capacity - 1], hits)
    assert curve.loads[capacity - 1] == pytest.approx(loads)
  assert curve.lookups.sum() == sum(row >= 0 for b in stream for row in b)


@given(streams, st.permutations(range(N)), st.integers(1, N))
def test_static_curve_is_every_pinned_set_at_once(stream, order, known):
  popular = hot_rows(np.array(order[:known]), N)
  found = found_of(stream, popular)
  curve = static_curve(found, offsets(ROWS), EVERY, popular)
  for capacity in range(1, known + 1, 9):
    pinned = hot_rows(popular.rows[:capacity], N)
    moved = simulate(PLACEMENTS['pinned'], found_of(stream, pinned), N, pinned)
    assert curve.hit_rate[capacity - 1] == pytest.approx(moved.hit_rate)
    assert curve.loads[capacity - 1] == pytest.approx(moved.rows_loaded)


def test_the_planner_of_lru_agrees_with_its_curve():
  rng = np.random.default_rng(0)
  stream = (N * rng.random((1000, 3)) ** 2).astype(int).tolist()
  popular = hot_rows(np.arange(N), N)
  found = found_of(stream, popular)
  curve = lru_curve(found, offsets(ROWS), EVERY, first=popular.rows)
  for capacity in (15, 40, 80):
    moved = simulate(cached(capacity, 'lru'), found, N, popular)
    # Of rows that one batch used last, another may leave first: a few.
    assert moved.hit_rate == pytest.approx(
      curve.hit_rate[capacity - 1], abs=0.01
    )


def test_distances_outlive_renumbering():
  """After 2^16 uses times are given anew."""
  rng = np.random.default_rng(1)
  stream = [rng.permutation(N)[:60].tolist() for _ in range(1500)]
  curve = lru_curve(found_of(stream), offsets(ROWS), EVERY)
  for capacity in (60, 75, 95):
    hits, loads = hits_of_lru(stream, capacity)
    np.testing.assert_array_equal(curve.hits[:, capacity - 1], hits)
    assert curve.loads[capacity - 1] == pytest.approx(loads)


def test_a_sample_of_the_rows_estimates_the_curve():
  rng = np.random.default_rng(2)
  rows = 40_000
  stream = (rows * rng.random((100, 800)) ** 4).astype(np.int64)
  found = [unique_rows(batch[None], rows) for batch in stream]
  grid = capacity_grid(rows, 1000)
  starts = np.array([0, rows])
  whole = lru_curve(found, starts, grid)
  part = lru_curve(found, starts, grid, sample_rate=0.2)
  assert part.hit_rate == pytest.approx(whole.hit_rate, abs=0.02)
  assert (part.hit_rate != whole.hit_rate).any()
  assert part.loads == pytest.approx(whole.loads, rel=0.08)


def test_grid_ends_at_all_rows():
  assert capacity_grid(1_000_000)[[0, -1]].tolist() == [256, 1_000_000]
  assert capacity_grid(10).tolist() == [10]
  assert (np.diff(capacity_grid(12345)) > 0).all()


@pytest.mark.parametrize('rate', [0.0, 1.5])
def test_sample_rate_is_checked(rate):
  with pytest.raises(UserError, match=str(rate)):
    lru_curve([], offsets(ROWS), EVERY, sample_rate=rate)
