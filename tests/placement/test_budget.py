"""A budget split over groups, against every other split."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.placement.budget import caches, split_budget
from slipstream_jax.placement.curves import Curve, lru_curve
from slipstream_jax.store.host_table import unique_rows


@st.composite
def curves(draw):
  """Loads that fall as capacities grow, to 0 where all rows are kept."""
  rows = draw(st.integers(1, 12))
  falls = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
  loads = np.cumsum([0, *falls])[::-1].astype(float)
  kept = draw(st.lists(st.integers(1, rows), unique=True).map(sorted))
  capacities = np.array(sorted({*kept, rows}))
  none = np.zeros(0)
  hits = np.zeros((0, len(capacities)))
  return Curve(capacities, none, hits, loads[capacities], float(loads[0]))


def hull_of(curve):
  """Loads of every capacity by the best mix of two that were measured."""
  x = np.array([0, *curve.capacities])
  y = np.array([curve.rows_used, *curve.loads])
  best = np.interp(np.arange(x[-1] + 1), x, y)
  for a, b in itertools.combinations(range(len(x)), 2):
    between = np.arange(x[a], x[b] + 1)
    line = y[a] + (y[b] - y[a]) * (between - x[a]) / (x[b] - x[a])
    best[between] = np.minimum(best[between], line)
  return best


@given(
  st.lists(st.tuples(curves(), st.integers(1, 7)), min_size=1, max_size=3),
  st.integers(0, 150),
)
def test_no_other_split_loads_fewer_bytes(groups, budget):
  all_curves, sizes = zip(*groups, strict=True)
  found = split_budget(all_curves, sizes, budget)
  assert sum(c * s for c, s in zip(found, sizes, strict=True)) <= budget
  hulls = [hull_of(curve) for curve in all_curves]

  def loaded(capacities):
    return sum(
      hull[c] * size
      for hull, c, size in zip(hulls, capacities, sizes, strict=True)
    )

  best = min(
    loaded(split)
    for split in itertools.product(*(range(len(hull)) for hull in hulls))
    if sum(c * s for c, s in zip(split, sizes, strict=True)) <= budget
  )
  # Rows are whole: less than a row of each group may be left over, and the
  # steepest fall of any hull is what that can cost.
  steepest = max(float(max(-np.diff(hull), default=0)) for hull in hulls)
  spare = steepest * (sum(sizes) - min(sizes))
  assert loaded(found) <= best + spare + 1e-9
  if len(groups) == 1 or len({*sizes}) == 1:
    assert loaded(found) <= best + 1e-9


def test_a_group_of_few_popular_rows_goes_first():
  rng = np.random.default_rng(0)
  few = [unique_rows(rng.integers(0, 20, (30, 2)), 1000) for _ in range(20)]
  many = [unique_rows(rng.integers(0, 1000, (30, 2)), 1000) for _ in range(20)]
  made = [
    lru_curve(batches, np.array([0, 1000]), np.array([10, 20, 100, 1000]))
    for batches in (few, many)
  ]
  assert made[1].rows_used == np.mean([len(batch.rows) for batch in many])
  assert split_budget(made, [64, 64], 64 * 20)[0] == 20
  assert split_budget(made, [64, 64], 0) == (0, 0)
  first, second = split_budget(made, [64, 64], 64 * 2000)
  assert first >= 20
  assert second == 1000


def test_no_rows_are_kept_by_streaming():
  assert [one.name for one in caches([3, 0])] == ['cached', 'streamed']
  assert caches([3, 0], 'lru')[0].capacity == 3


@pytest.mark.parametrize(
  ('sizes', 'budget', 'said'),
  [([4, 4], 1, 'bytes of a row'), ([0], 1, 'at least 1'), ([4], -1, 'least 0')],
)
def test_what_is_no_budget(sizes, budget, said):
  curve = Curve(np.array([1]), np.zeros(0), np.zeros((0, 1)), np.zeros(1), 1.0)
  with pytest.raises(UserError, match=said):
    split_budget([curve], sizes, budget)
