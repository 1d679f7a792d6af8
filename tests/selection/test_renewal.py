"""Hot rows that are counted again where popularity drifts."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np

from slipstream_jax.checkpoint.state import pack, unpack
from slipstream_jax.schedules.rebatch import only_hot
from slipstream_jax.selection.hot import (
  hot_rows,
  noted,
  Recount,
  recount_of,
  recount_state,
  renewed,
)


@given(st.integers(0, 99), st.sampled_from([(4,), (3, 2), (1, 0)]))
def test_an_example_is_hot_if_all_its_real_lookups_are(seed, width):
  rng = np.random.default_rng(seed)
  hot = hot_rows(rng.permutation(20)[:15], 20)
  lookups = rng.integers(-1, 20, (30, *width))
  expected = [
    all(row in hot.rows for row in one.ravel() if row >= 0) for one in lookups
  ]
  assert only_hot(hot, lookups).tolist() == expected


@given(st.integers(2, 60), st.data(), st.lists(st.integers(0, 9), max_size=4))
def test_rows_that_came_more_often_take_places(num_rows, data, seeds):
  number = data.draw(st.integers(1, num_rows))
  rng = np.random.default_rng(number)
  first = hot_rows(rng.permutation(num_rows)[:number], num_rows)
  recount = Recount(first)
  for seed in seeds:
    rng = np.random.default_rng(seed)
    lookups = (rng.random((30, 3)) ** 3 * num_rows).astype(np.int64)
    lookups[rng.random((30, 3)) < 0.1] = -1
    before = recount.hot
    recount = renewed(noted(recount, lookups, 1))
    counts = np.bincount(lookups[lookups >= 0], minlength=num_rows)
    hot = recount.hot
    # As many as before, each at one place, and both directions agree.
    assert len(np.unique(hot.rows)) == number
    np.testing.assert_array_equal(hot.place[hot.rows], np.arange(number))
    assert (hot.place[:-1] < number).sum() == number
    assert hot.place[-1] == -1
    # Who stays keeps its place; who came did so more often than who went.
    came = hot.rows != before.rows
    went, new = before.rows[came], hot.rows[came]
    assert (counts[new] > counts[went]).all()
    assert (counts[new] >= 2).all()
    # None is left that should have come.
    cold = np.setdiff1d(np.arange(num_rows), hot.rows)
    most = counts[cold].max(initial=0)
    assert most < 2 or most <= counts[hot.rows].min()
    assert recount.recent == ()


def test_hot_examples_come_back_after_a_drift():
  rng = np.random.default_rng(0)
  first = hot_rows(np.arange(100), 1000)
  later = rng.integers(500, 600, (2000, 4))
  recount = renewed(noted(Recount(first), later, 1))
  assert only_hot(first, later).mean() == 0
  assert only_hot(recount.hot, later).mean() == 1
  assert first.rows.tolist() == list(range(100))  # the engine's stay


@given(st.integers(0, 99), st.integers(0, 3))
def test_a_position_holds_it(seed, periods):
  rng = np.random.default_rng(seed)
  first = hot_rows(rng.permutation(40)[:15], 40)
  recount = Recount(first)
  for _ in range(periods):
    recount = renewed(noted(recount, rng.integers(-1, 40, (50, 2)), 1))
  recount = noted(recount, rng.integers(-1, 40, (9, 2), np.int32), 1)
  packed = pack(recount_state(recount, first))
  again = recount_of(unpack(packed.state, packed.data), first)
  for one, two in zip(recount.hot, again.hot, strict=True):
    np.testing.assert_array_equal(one, two)
  after = renewed(recount).hot, renewed(again).hot
  np.testing.assert_array_equal(after[0].rows, after[1].rows)


def test_little_is_kept_of_a_long_period():
  recount = Recount(hot_rows(np.arange(4), 9))
  lookups = np.zeros((2048, 26), np.int32)
  for _ in range(3):
    recount = noted(recount, lookups, 1000)
  assert sum(map(len, recount.recent)) == 3 * 40 * 26
  assert all(part.dtype == np.int32 for part in recount.recent)
