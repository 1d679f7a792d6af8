"""Sequences of user events: points to predict, cut from a log on demand.

A point is one event of a user, its *candidate*, and the events of that user
just before it, its *history*. It gives two examples: one with the candidate,
and one with a random item that the user never touched. Both have the same
history, so only the candidate tells them apart.
"""

from typing import NamedTuple, no_type_check

from jaxtyping import Int, UInt32
import numpy as np
import polars as pl

from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import END
from slipstream_jax.hashing import hashed, kernel, unit

_TRIES = 64  # random draws of an item, before a linear search


class Events(NamedTuple):
  """A log of n events; 16 bytes each."""

  users: UInt32[np.ndarray, ' n']
  items: UInt32[np.ndarray, ' n']
  categories: UInt32[np.ndarray, ' n']
  times: Int[np.ndarray, ' n']
  """Seconds, i32."""


class Points(NamedTuple):
  """p points of a log, each of which gives two examples."""

  candidates: Int[np.ndarray, ' p']
  """Index of the candidate among the events, i64. Its history ends there."""
  history: Int[np.ndarray, ' p']
  """Number of events of the history, i32."""

  def take(self, index: np.ndarray) -> 'Points':
    """Returns the points at `index`."""
    return Points(*(column[index] for column in self))


class Catalogue(NamedTuple):
  """Unique items to draw from, sorted by id; or the items that were drawn."""

  items: UInt32[np.ndarray, ' m']
  categories: UInt32[np.ndarray, ' m']
  """Category of the item's first event."""


def by_user(columns: list[np.ndarray]) -> Events:
  """Sorts events by (user, time). Ties keep their order.

  Args:
    columns: the columns of `Events`, in its order. The list is emptied, so that
      at most 32 bytes per event are in use at any time: 3.2 GB for Taobao.
  """
  times, categories, items, users = (columns.pop() for _ in range(4))
  # One key of both needs one sort. Users and times are later read from the key,
  # and each array is deleted as early as possible.
  key = users.astype(np.uint64)
  del users
  key <<= np.uint64(32)
  key |= times.astype(np.uint64)
  del times
  order = np.argsort(key, kind='stable')
  items = items[order]
  categories = categories[order]
  key = key[order]
  del order
  seconds = key.astype(np.uint32).astype(np.int32)  # the lower half: the times
  key >>= np.uint64(32)
  return Events(key.astype(np.uint32), items, categories, seconds)


def user_starts(events: Events) -> Int[np.ndarray, ' u_and_1']:
  """Returns the first event of each user, then n: i64[users + 1]."""
  new = np.flatnonzero(events.users[1:] != events.users[:-1]) + 1
  return np.concatenate([[0], new, [len(events.users)]]).astype(np.int64)


def choose_points(
  starts: Int[np.ndarray, ' u_and_1'],
  *,
  steps: int = 20,
  per_user: int = 10,
  min_history: int = 10,
  seed: int = 0,
) -> Points:
  """Chooses random points of every user among those with enough history.

  Args:
    starts: from `user_starts`.
    steps: most events of a history.
    per_user: most points of a user.
    min_history: number of earlier events that a candidate needs.
    seed: seed of the choice.
  """
  # `_choose` finds exactly `count` points.
  able = np.maximum(np.diff(starts) - min_history, 0)
  count = int(np.minimum(able, per_user).sum())
  points = Points(np.empty(count, np.int64), np.empty(count, np.int32))
  _choose(starts, steps, per_user, min_history, _key(seed, 0), *points)
  return points


def catalogue(events: Events, before: int | None = None) -> Catalogue:
  """Returns the unique items of the log, or of its part before a time."""
  frame = pl.DataFrame({'item': events.items, 'category': events.categories})
  if before is not None:
    frame = frame.filter(pl.Series(events.times < before))
  # Not np.unique: it would sort 8 bytes more per event.
  frame = frame.unique('item', keep='first', maintain_order=True).sort('item')
  return Catalogue(frame['item'].to_numpy(), frame['category'].to_numpy())


def draw_negatives(
  events: Events,
  starts: Int[np.ndarray, ' u_and_1'],
  points: Points,
  known: Catalogue,
  seed: int = 0,
) -> Catalogue:
  """Draws for each point an item that its user never touched.

  Neither earlier nor later events of the user have the item. All such items are
  equally likely. The draw depends only on the seed, the candidate's index and
  the items.

  Args:
    events: from `by_user`.
    starts: from `user_starts`.
    points: p points.
    known: items to draw from.
    seed: seed of the draws.

  Returns:
    The p items with their categories.

  Raises:
    UserError: a user has touched every item.
  """
  candidates = points.candidates
  users = np.searchsorted(starts, candidates, 'right') - 1
  places = np.empty(len(candidates), np.int64)
  bad = _draw(
    *(events.items, starts, users, candidates, known.items),
    *(_key(seed, 1), places),
  )
  if bad < len(candidates):
    raise UserError(
      'for each user there must be an item that they never touched',
      got=f'{len(known.items)} items in all',
      where=f'user {events.users[candidates[bad]]}',
      hint='give a longer log',
    )
  return Catalogue(known.items[places], known.categories[places])


def cut(
  events: Events,
  points: Points,
  drawn: Catalogue,
  steps: int,
  examples: Int[np.ndarray, ' b'],
) -> Int[np.ndarray, 'b 3 L']:
  """Returns users, items and categories of some examples.

  Args:
    events: from `by_user`.
    points: points with two examples each: 2 i is point i with its own
      candidate, 2 i + 1 with the item drawn for it.
    drawn: the item drawn for each point.
    steps: most events of a history; L is steps + 1.
    examples: numbers of the examples.

  Returns:
    Ids, i64. `END` pads short histories at the front. The user is repeated at
      every step.
  """
  point, back = examples >> 1, np.arange(-steps, 1)
  # Places before the user's first event are masked and not read.
  places = points.candidates[point][:, None] + back
  there = -back <= points.history[point][:, None]
  ids = np.full((len(examples), 3, steps + 1), END, np.int64)
  for feature, column in enumerate(events[:3]):
    ids[:, feature][there] = column[places[there]]
  of_drawn = examples % 2 == 1
  for feature, column in enumerate(drawn, start=1):
    ids[of_drawn, feature, -1] = column[point[of_drawn]]
  return ids


def _key(seed: int, use: int) -> np.uint64:
  """Returns a separate key for each use of the seed."""
  return np.uint64(hashed(np.uint64(seed), use))


@kernel
@no_type_check
def _choose(
  starts: np.ndarray,
  steps: int,
  per_user: int,
  min_history: int,
  key: np.uint64,
  candidates: np.ndarray,
  history: np.ndarray,
) -> None:
  """Fills the arrays of `Points`, in the order of the events.

  Selection sampling (Knuth, volume 2, algorithm S): every choice of as many
  points as wanted is equally likely.
  """
  chosen = 0
  for user in range(len(starts) - 1):
    first, end = starts[user], starts[user + 1]
    # Negative for a user of few events, for whom the loop is empty.
    left = end - first - min_history
    wanted = min(per_user, left)
    for place in range(first + min_history, end):
      if unit(hashed(key, place)) * left < wanted:
        candidates[chosen] = place
        history[chosen] = min(place - first, steps)
        chosen += 1
        wanted -= 1
      left -= 1


@kernel
@no_type_check
def _draw(
  touched: np.ndarray,
  starts: np.ndarray,
  users: np.ndarray,
  candidates: np.ndarray,
  items: np.ndarray,
  key: np.uint64,
  out: np.ndarray,
) -> int:
  """Fills `out`. Returns the first point that has no item, or p."""
  count = len(items)
  for point in range(len(candidates)):
    mine = touched[starts[users[point]] : starts[users[point] + 1]]
    # A user may have touched almost all items. Then all `count` items are tried
    # in order, starting after the last one drawn.
    at, tries = 0, 0
    while tries < _TRIES + count:
      if tries < _TRIES:
        # Depends on the place in the log, not on the other points chosen.
        bits = hashed(key, candidates[point] * _TRIES + tries)
        at = np.int64(bits % np.uint64(count))
      else:
        at = (at + 1) % count
      # Users have about a hundred events, too few for a set to pay off.
      if not np.any(mine == items[at]):
        break
      tries += 1
    if tries == _TRIES + count:
      return point
    out[point] = at
  return len(candidates)
