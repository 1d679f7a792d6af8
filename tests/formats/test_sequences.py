"""Points of a log, the items drawn against them, and what is cut of both."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import END
from slipstream_jax.formats.taobao import (
  by_user,
  Catalogue,
  choose_points,
  cut,
  draw_negatives,
  Events,
  user_starts,
)


@settings(max_examples=60, deadline=None)
@given(
  st.lists(st.integers(1, 30), min_size=1, max_size=8),
  st.integers(1, 8),
  st.integers(1, 12),
  st.integers(1, 5),
  st.integers(0, 2**40),
)
def test_points_are_as_many_as_wanted(counts, per_user, least, steps, seed):
  starts = np.concatenate([[0], np.cumsum(counts)])
  points = choose_points(
    starts, per_user=per_user, min_history=least, seed=seed
  )
  users = np.searchsorted(starts, points, 'right') - 1
  before = points - starts[users]
  assert (np.diff(points) > 0).all()
  assert (before >= least).all()
  # What is cut before them is as long.
  column = np.arange(starts[-1], dtype=np.uint32)
  of_events = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
  events = Events(of_events, column, column, column.astype(np.int32))
  drawn = Catalogue(points.astype(np.uint32), points.astype(np.uint32))
  examples = cut(events, points, drawn, steps, np.arange(2 * len(points)))
  lengths = (examples[::2, 1] != END).sum(axis=1)
  np.testing.assert_array_equal(lengths - 1, np.minimum(before, steps))
  wanted = [min(per_user, max(0, count - least)) for count in counts]
  assert np.bincount(users, minlength=len(counts)).tolist() == wanted


def test_choices_and_draws_are_even():
  """Every able event, and every item never touched, is as likely."""
  starts = np.arange(0, 20_001, 20)
  points = choose_points(starts, per_user=3, min_history=4)
  chosen = np.bincount(points % 20, minlength=20)
  assert not chosen[:4].any()
  # 3000 over 16 places are 187 each; five standard deviations are 62.
  assert np.ptp(chosen[4:]) < 124
  zeros = np.zeros(20_000, np.uint32)
  # Users touch items 0 to 19 of 25; 3000 draws of 5 are 600 each.
  touched = np.tile(np.arange(20, dtype=np.uint32), 1000)
  events = Events(zeros, touched, zeros, zeros)
  items = np.arange(25, dtype=np.uint32)
  known = Catalogue(items, items + 7)
  drawn, categories = draw_negatives(events, starts, points, known)
  np.testing.assert_array_equal(categories, drawn + 7)
  counts = np.bincount(drawn, minlength=25)
  assert not counts[:20].any()
  assert np.ptp(counts[20:]) < 220
  other = draw_negatives(events, starts, points, known, seed=1).items
  assert (drawn != other).mean() > 0.5


def test_a_rare_item_is_found_in_turn():
  zeros = np.zeros(300, np.uint32)
  touched = np.delete(np.arange(301, dtype=np.uint32), 123)
  events, starts = Events(zeros, touched, zeros, zeros), np.array([0, 300])
  items = np.arange(301, dtype=np.uint32)
  points = np.arange(10, 300)
  known = Catalogue(items, items)
  assert (draw_negatives(events, starts, points, known).items == 123).all()
  with pytest.raises(UserError, match=r'never touched.* got 300 items.*user 0'):
    draw_negatives(events, starts, points, Catalogue(touched, touched))


def test_what_is_cut_is_a_history_and_a_candidate():
  ids = np.arange(2**32 - 6, 2**32, dtype=np.uint32)  # ids of 32 bits
  users = np.array([3, 3, 3, 2, 1, 1], np.uint32)
  events = Events(2**31 - users, ids, ids - 1, np.arange(6, dtype=np.int32))
  points = np.array([2, 5])
  drawn = Catalogue(np.array([7, 8], np.uint32), np.array([9, 10], np.uint32))
  examples = cut(events, points, drawn, 3, np.arange(4))
  first = 2**32 - 6
  own = [[END, first, first + 1, first + 2], [END, END, first + 4, first + 5]]
  assert examples[::2, 1].tolist() == own
  assert examples[1::2, 1].tolist() == [[*own[0][:3], 7], [*own[1][:3], 8]]
  assert examples[:, 2, -1].tolist() == [first + 1, 9, first + 4, 10]
  assert examples[3, 0].tolist() == [END, END, *[2**31 - 1] * 2]
  again = cut(events, points, drawn, 3, np.array([3, 0]))
  np.testing.assert_array_equal(again, examples[[3, 0]])


def test_events_of_one_second_keep_their_order():
  users = np.array([2, 1, 2, 1, 2], np.uint32)
  times_ = np.array([5, 9, 5, 3, 2], np.int32) + 10**9
  items = np.arange(5, dtype=np.uint32)
  found = by_user([users, items, items + 7, times_])
  assert found.items.tolist() == [3, 1, 4, 0, 2]
  assert found.users.tolist() == [1, 1, 2, 2, 2]
  assert (found.times - 10**9).tolist() == [3, 9, 2, 5, 5]
  assert found.categories.tolist() == [10, 8, 11, 7, 9]
  assert user_starts(found).tolist() == [0, 2, 5]
