"""Popularity and the example classifier against brute force."""

from collections import Counter
import fractions
import pickle

from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.selection.base import ExampleFacts, joined
from slipstream_jax.selection.hot import (
  access_counts,
  hot_by_group,
  hot_rows,
  popular_rows,
  popular_rows_of_groups,
  rows_by_share,
)
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.selection.staleness import (
  classify,
  example_changes,
)
from slipstream_jax.tables import offsets, Table, TableSet

N = 24
TABLE_ROWS = (3, 9, 12)

profiles = hnp.arrays(
  st.sampled_from([np.int32, np.int64]),
  hnp.array_shapes(min_dims=2, max_dims=3, max_side=9),
  elements=st.integers(-1, N - 1),
).filter(lambda profile: (profile >= 0).any())


def by_count(counts):
  """Rows of a Counter, most popular first, ties by row."""
  return sorted(counts, key=lambda row: (-counts[row], row))


@given(profile=profiles, room=st.integers(1, N), row_bytes=st.integers(1, 99))
def test_popular_rows_equal_a_counter(profile, room, row_bytes):
  counts = Counter(profile[profile >= 0].tolist())
  # One byte short of another row.
  budget = room * row_bytes + row_bytes - 1
  rows = popular_rows(access_counts(profile, N), budget, row_bytes)
  assert rows.tolist() == by_count(counts)[:room]
  assert rows.dtype == np.int64


@given(
  counts=hnp.arrays(np.int32, N, elements=st.integers(0, 9)),
  sizes=st.lists(
    st.sampled_from([1, 2, 8, 12, 64]),
    min_size=len(TABLE_ROWS),
    max_size=len(TABLE_ROWS),
  ),
  budget=st.integers(1, 900),
)
@example(
  # Row 13 is next and does not fit; row 3 would.
  np.bincount([3, 12, 12, 13, 13], minlength=N).astype(np.int32),
  [1, 8, 12],
  20,
)
def test_rows_of_unlike_sizes_are_ranked_by_uses_per_byte(
  counts, sizes, budget
):
  starts = offsets(TABLE_ROWS)
  size_of = {
    row: sizes[int((starts[1:] <= row).sum())]
    for row in np.flatnonzero(counts).tolist()
  }
  fitting = [row for row, size in size_of.items() if size <= budget]

  def worth(row):
    return fractions.Fraction(int(counts[row]), size_of[row])

  fitting.sort(key=lambda row: (-worth(row), row))
  expected, left = [], budget
  for row in fitting:
    left -= size_of[row]
    if left < 0:
      break
    expected.append(row)
  if not expected:
    with pytest.raises(UserError):
      popular_rows(counts, budget, sizes, starts)
    return
  assert popular_rows(counts, budget, sizes, starts).tolist() == expected


@given(
  counts=hnp.arrays(np.int32, N, elements=st.integers(0, 4)),
  sizes=st.lists(
    st.sampled_from([1, 2, 8]),
    min_size=len(TABLE_ROWS),
    max_size=len(TABLE_ROWS),
  ),
  budget=st.integers(1, 60),
)
def test_rows_by_share_equal_those_above_the_smallest_that_fits(
  counts, sizes, budget
):
  starts = offsets(TABLE_ROWS)
  share, size_of = {}, {}
  for row in np.flatnonzero(counts).tolist():
    table = int((starts[1:] <= row).sum())
    total = int(counts[starts[table] : starts[table + 1]].sum())
    share[row] = fractions.Fraction(int(counts[row]), total)
    size_of[row] = sizes[table]
  best = []
  for least in sorted({*share.values()}):
    hot = [row for row in share if share[row] >= least]
    if sum(size_of[row] for row in hot) <= budget:
      best = hot
      break
  if not best:
    with pytest.raises(UserError):
      rows_by_share(counts, budget, sizes, starts)
    return
  rows = rows_by_share(counts, budget, sizes, starts).tolist()
  assert rows == sorted(best, key=lambda row: (-share[row], row))


@given(
  counts=hnp.arrays(np.int32, 30, elements=st.integers(0, 9)),
  rooms=st.tuples(st.integers(1, 30), st.integers(1, 30)),
)
def test_the_most_popular_rows_of_each_group(counts, rooms):
  tables = TableSet({'a': Table(12, 2), 'b': Table(8, 3), 'c': Table(10, 2)})
  groups = [[*range(12), *range(20, 30)], [*range(12, 20)]]
  expected = [
    by_count({row: counts[row] for row in rows if counts[row]})[:room]
    for rows, room in zip(groups, rooms, strict=True)
  ]
  if not all(expected):
    with pytest.raises(UserError, match='needs lookups'):
      popular_rows_of_groups(counts, tables, rooms)
    return
  found = popular_rows_of_groups(counts, tables, rooms)
  assert found.tolist() == expected[0] + expected[1]
  whole, (first, second) = hot_by_group(hot_rows(found[::-1], 30), tables)
  assert whole.rows.tolist() == expected[0][::-1] + expected[1][::-1]
  own = [groups[0].index(row) for row in expected[0][::-1]]
  assert first.rows.tolist() == own
  assert second.rows.tolist() == [row - 12 for row in expected[1][::-1]]
  for hot, size in ((whole, 30), (first, 22), (second, 8)):
    again = hot_rows(hot.rows, size)
    np.testing.assert_array_equal(hot.place, again.place)


@pytest.mark.parametrize(
  ('profile', 'budget', 'row_bytes', 'says'),
  [
    ([[-1, -1]], 64, 64, 'needs lookups'),
    ([[3]], 63, 64, '63 bytes'),
    ([[3]], -1, 64, '-1 bytes'),
    ([[3]], 64, 0, 'got 0'),
  ],
)
def test_popularity_refuses(profile, budget, row_bytes, says):
  counts = access_counts([np.array(profile)], N)
  with pytest.raises(UserError, match=says):
    popular_rows(counts, budget, row_bytes)


def kinds_by_hand(hot, lookups, stale, alpha):
  """What `classify` says, one example after the other, from sets of rows.

  `hot` and `stale` are sets of global rows; alpha as `classify` takes it.
  """
  kinds = []
  for one in lookups.tolist():
    lists = [table if isinstance(table, list) else [table] for table in one]
    if not isinstance(alpha, tuple):
      lists = [[row for table in lists for row in table]]
    most = len(lists[0])
    needed = alpha if isinstance(alpha, tuple) else [alpha or most]
    lists = [[row for row in table if row >= 0] for table in lists]
    real = [row for table in lists for row in table]
    is_hot = all(row in hot for row in real)
    enough = all(
      sum(row in stale for row in table) >= min(least, len(table))
      for table, least in zip(lists, needed, strict=True)
    )
    share = sum(row in stale for row in real) / max(len(real), 1)
    kinds.append((is_hot, bool(is_hot and real and enough), share))
  return kinds


@st.composite
def batches(draw):
  """Hot rows, lookups with padding and duplicates, and an alpha or none."""
  shape = draw(hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=5))
  few = draw(st.integers(1, N - 1))  # few rows: hot examples, and duplicates
  dtype = draw(st.sampled_from([np.int32, np.int64]))
  lookups = draw(hnp.arrays(dtype, shape, elements=st.integers(-1, few)))
  hot = draw(
    st.lists(st.integers(0, N - 1), min_size=1, max_size=N, unique=True)
  )
  per_table = int(np.prod(shape[2:]))
  alpha = draw(
    st.none()
    | st.integers(1, shape[1] * per_table)
    | st.tuples(*[st.integers(1, per_table)] * shape[1])
  )
  return lookups, np.array(hot), alpha


@given(batch=batches(), data=st.data())
def test_kinds_equal_brute_force(batch, data):
  lookups, rows, alpha = batch
  mask = data.draw(hnp.arrays(bool, len(rows)))
  hot = hot_rows(rows, N)
  stale = hot.with_cold(mask, False)
  kinds = classify(hot.places(lookups), stale, alpha)
  expected = kinds_by_hand(
    set(rows.tolist()), lookups, set(rows[mask].tolist()), alpha
  )
  np.testing.assert_array_equal(kinds.hot, [kind[0] for kind in expected])
  np.testing.assert_array_equal(kinds.stale, [kind[1] for kind in expected])
  np.testing.assert_array_equal(
    kinds.stale_share, np.float32([kind[2] for kind in expected])
  )


@given(batch=batches(), data=st.data())
def test_an_example_is_stale_above_its_change(batch, data):
  lookups, rows, alpha = batch
  values = st.sampled_from([0.0, 0.25, 0.5, 1.0, np.inf, np.nan])
  change = data.draw(hnp.arrays(np.float32, len(rows), elements=values))
  hot = hot_rows(rows, N)
  changes = example_changes(
    hot.places(lookups), hot.with_cold(change, -1), alpha
  )
  assert changes.dtype == np.float32
  for threshold in (0.0, 0.25, 0.3, 0.5, 2.0):
    stale = hot.with_cold(change < threshold, False)
    np.testing.assert_array_equal(
      classify(hot.places(lookups), stale, alpha).stale, changes < threshold
    )


def test_no_examples_are_no_error():
  hot = hot_rows(np.array([3, 1]), N)
  stale = hot.with_cold(np.array([True, False]), False)
  for alpha in (None, 1, (1, 1)):
    kinds = classify(hot.places(np.empty((0, 2), np.int32)), stale, alpha)
    assert [field.shape for field in kinds] == [(0,)] * 3


@pytest.mark.parametrize(
  ('alpha', 'says'),
  [
    (13, r'\[1, 12\] for 12 lookups, got 13'),
    (0, 'got 0'),
    (-1, 'got -1'),
    ((4, 4, 5), r'\[1, 4\] for 4 lookups of each of 3 tables'),
    ((4, 4), r'got \(4, 4\)'),
    ((4, 0, 4), r'got \(4, 0, 4\)'),
  ],
)
def test_alpha_out_of_range_is_refused(alpha, says):
  hot = hot_rows(np.arange(2), N)
  places = hot.places(np.zeros((2, 3, 4), np.int64))
  with pytest.raises(UserError, match=says):
    classify(places, hot.with_cold(np.ones(2, bool), False), alpha)
  with pytest.raises(UserError, match=says):
    example_changes(places, hot.with_cold(np.ones(2), -1), alpha)


@pytest.mark.parametrize('rows', [[], [3, 3], [-1, 2], [N]])
def test_hot_rows_out_of_range_are_refused(rows):
  with pytest.raises(UserError, match=f'{len(rows)} rows'):
    hot_rows(np.array(rows, np.int64), N)


@pytest.mark.parametrize('name', ['random', 'random_weighted', 'surprise'])
def test_a_policy_pickles(name):
  assert pickle.loads(pickle.dumps(POLICIES[name])) == POLICIES[name]


def test_columns_that_are_no_numpy_arrays_are_joined_whole():
  facts = [
    ExampleFacts(*(jax.device_put(np.full(2, number)) for _ in range(4)))
    for number in (1, 2)
  ]
  assert joined(facts).labels.tolist() == [1, 1, 2, 2]
  assert (joined(facts).scores, joined(facts).constant) == (None, 0.0)
