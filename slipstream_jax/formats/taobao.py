"""Taobao's user behaviour as sequences, the examples of TBSM.

The set is Alibaba Tianchi's "User Behavior Data from Taobao for
Recommendation": lines of user, item, category, behaviour and time, separated by
commas, without a header. As in TBSM (arXiv 2008.11922) and its released code,
an example is up to 20 events of a user, of any behaviour, and the item that
came next, or a random one.

A point is one event of a user and the history before it. It gives two examples
with the same history: one with the event's item, its *candidate*, and one with
a random item that the user never touched. TBSM's code holds out users whose log
ends late. Here the test part is the last stretch of time, so no training
example is later than a test example.
"""

from collections.abc import Iterator
import functools
import os
import pathlib
from typing import NamedTuple, no_type_check

from jaxtyping import Int, UInt32
import numpy as np
import polars as pl

from slipstream_jax.errors import check_seed, check_whole, UserError
from slipstream_jax.formats import lines, text
from slipstream_jax.formats.base import (
  BadLines,
  check_share,
  Chunk,
  END,
  Part,
  RawData,
  train_and_test,
)
from slipstream_jax.formats.lines import Column, Schema
from slipstream_jax.hashing import hashed, kernel, unit
from slipstream_jax.tables import features_of

TABLES = ('user', 'item', 'category')
BEHAVIOURS = ('pv', 'cart', 'fav', 'buy')
# `lines` reads a word as a big-endian number.
_CODES = [int.from_bytes(name.encode()) for name in BEHAVIOURS]
_CHUNK = 1 << 15  # examples; 504 bytes each
_TRIES = 64  # random draws of an item, before a linear search

SCHEMA = Schema(
  (
    *(lines.ID._replace(name=name) for name in TABLES),
    Column(
      'behaviour',
      f'a behaviour must be one of {", ".join(BEHAVIOURS)}',
      lines.ID.hint,
      lines.WORD,
      (2, 4),
      fits=lambda words: np.isin(words, _CODES),
    ),
    Column(
      'time',
      'a time must be in seconds, 10 digits up to 2**31 - 1',
      lines.ID.hint,
      10,
      (10, 10),
      fits=lambda times: (times >= 10**9) & (times < 1 << 31),
    ),
  ),
  delimiter=b',',
)


class Events(NamedTuple):
  """A log of n events; 16 bytes each."""

  users: UInt32[np.ndarray, ' n']
  items: UInt32[np.ndarray, ' n']
  categories: UInt32[np.ndarray, ' n']
  times: Int[np.ndarray, ' n']
  """Seconds, i32."""


Points = Int[np.ndarray, ' _']
"""Index of each point's candidate among the events, i64."""


class Catalogue(NamedTuple):
  """Unique items to draw from, sorted by id; or the items that were drawn."""

  items: UInt32[np.ndarray, ' m']
  categories: UInt32[np.ndarray, ' m']
  """Category of the item's first event."""


class _Log(NamedTuple):
  """The log, and its points to train and to test on."""

  events: Events
  parts: tuple[tuple[Points, Catalogue], tuple[Points, Catalogue]]
  """For training and for testing: points, and the item drawn for each."""
  start: int
  """Time of the first test point."""


def taobao_raw(
  path: str | os.PathLike[str],
  *,
  steps: int = 20,
  per_user: int = 10,
  min_history: int = 10,
  test_share: float = 0.2,
  bad_lines: int = 0,
  seed: int = 0,
) -> RawData:
  """Returns Taobao's UserBehavior log as sequences; L is steps + 1.

  The test part is the points from some time on. Half of the examples are drawn
  items: for training from the items known before that time, for testing from
  all.

  The whole log is read into memory, because a user's events are scattered: 12
  bytes per event, and as much again while it is sorted. In memory, rows are
  numbered by the events before the split. Packed data count ids as the
  sequences use them, and a user once per step.

  Args:
    path: the file, plain or gzip.
    steps: most events of a history.
    per_user: most points of a user. Each gives two examples.
    min_history: earlier events that a point needs.
    test_share: share of the points to test on, the latest ones.
    bad_lines: number of malformed lines that may be skipped. The last line of a
      file that is cut off is malformed, because a time must have 10 digits.
    seed: seed of the choice of points and of drawn items.

  Raises:
    UserError: a bad argument. Reading raises the errors of `lines.read`, and
      one if there are no points to train on or to test on.
  """
  bad, reading = (BadLines(bad_lines, 'taobao_raw') for _ in range(2))
  check_share(test_share, 'taobao_raw')
  check_seed(seed, 'taobao_raw, seed')
  numbers = {'steps': steps, 'per_user': per_user, 'min_history': min_history}
  for name, value in numbers.items():
    check_whole(value, 1, f'taobao_raw, {name}', 'set it to 1 or more')

  @functools.cache  # both parts and the numbers of rows need all of it
  def log() -> _Log:
    columns = lines.read_columns(
      *(path, SCHEMA, reading, ('u4', 'u4', 'u4', 'i4')),
      lambda fields: [*fields[:3], fields[4]],
    )
    events = by_user(columns)
    starts = user_starts(events)
    points = choose_points(
      starts, per_user=per_user, min_history=min_history, seed=seed
    )
    return _split(events, starts, points, test_share, seed, path)

  def chunks(which: int) -> Iterator[tuple[Chunk, int]]:
    events, parts, _ = log()
    # Both parts read the whole file. Its bad lines count with the first part
    # only, also if a preparation resumes with the second.
    if which == 0:
      bad.restore(reading.count)
    return _chunks(events, *parts[which], steps, size)

  def before_split() -> tuple[np.ndarray, ...]:
    events, _, start = log()
    early = events.times < start
    return tuple(ids[early].astype(np.int64) for ids in events[:3])

  size = os.stat(path).st_size if os.path.exists(path) else 0
  # The file's size counts for the first part only.
  parts = [('train', size), ('test', 0)]
  return RawData(
    name=f'Taobao user behaviour, {pathlib.Path(path).name}',
    features=features_of(TABLES, steps + 1),
    dense_features=steps + 1,
    parts=tuple(
      Part(f'{path}, {name}', bytes_, functools.partial(chunks, which))
      for which, (name, bytes_) in enumerate(parts)
    ),
    split=lambda examples, parts: train_and_test(examples, parts[1]),
    bad=bad,
    settings={
      **numbers,
      'test_share': test_share,
      'seed': seed,
      # The journal checks only parts that are files, and these are not.
      'changed': text.changed(path),
    },
    format='taobao',
    counted=before_split,
  )


def _split(
  events: Events,
  starts: Int[np.ndarray, ' u_and_1'],
  points: Points,
  test_share: float,
  seed: int,
  path: str | os.PathLike[str],
) -> _Log:
  """Splits points by time, and draws an item for each."""
  times = events.times[points]
  order = np.argsort(times, kind='stable')
  points, times = points[order], times[order]
  count = len(times)
  start = int(times[count - max(1, round(count * test_share))]) if count else 0
  # Split by time, so that all points of one second are on the same side.
  split = int(np.searchsorted(times, start))
  if not 0 < split < count:
    raise UserError(
      'there must be points to train on and, later, points to test on',
      got=f'{split} and {count - split}',
      where=str(path),
      hint='lower min_history, or give a longer log',
    )
  train, test = points[:split], points[split:]
  early, known = catalogue(events, start), catalogue(events)
  parts = (
    (train, draw_negatives(events, starts, train, early, seed)),
    (test, draw_negatives(events, starts, test, known, seed)),
  )
  return _Log(events, parts, start)


def _chunks(
  events: Events, points: Points, drawn: Catalogue, steps: int, size: int
) -> Iterator[tuple[Chunk, int]]:
  """Yields chunks of examples with the bytes read so far.

  Dense features are the relative position of each step, 0 to 1 - 1/L, as in
  TBSM's code.
  """
  count, length = 2 * len(points), steps + 1
  places = np.arange(length, dtype=np.float32) / np.float32(length)
  for first in range(0, count, _CHUNK):
    examples = np.arange(first, min(first + _CHUNK, count))
    labels = (examples % 2 == 0).astype(np.float32)
    dense = np.tile(places, (len(examples), 1))
    ids = cut(events, points, drawn, steps, examples)
    chunk = Chunk(labels, dense, ids.reshape(len(ids), 3 * length))
    yield chunk, size * (first + len(examples)) // count


def by_user(columns: list[np.ndarray]) -> Events:
  """Sorts events by (user, time). Ties keep their order.

  `columns` are those of `Events`. The list is emptied, so that at most 32 bytes
  per event are in use at any time: 3.2 GB for Taobao.
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
  per_user: int = 10,
  min_history: int = 10,
  seed: int = 0,
) -> Points:
  """Chooses random points of every user; see `taobao_raw`, `user_starts`."""
  # `_choose` finds exactly this many points.
  able = np.maximum(np.diff(starts) - min_history, 0)
  points = np.empty(int(np.minimum(able, per_user).sum()), np.int64)
  _choose(starts, per_user, min_history, _key(seed, 0), points)
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
  """Draws for each point one of the known items that its user never touched.

  All such items are equally likely. The draw depends only on the seed, the
  candidate's index and the items.

  Raises:
    UserError: a user has touched every item.
  """
  users = np.searchsorted(starts, points, 'right') - 1
  places = np.empty(len(points), np.int64)
  bad = _draw(
    *(events.items, starts, users, points, known.items),
    *(_key(seed, 1), places),
  )
  if bad < len(points):
    raise UserError(
      'for each user there must be an item that they never touched',
      got=f'{len(known.items)} items in all',
      where=f'user {events.users[points[bad]]}',
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
  """Returns the ids of users, items and categories of some examples, i64.

  Example 2 i is point i with its own candidate, 2 i + 1 with the item drawn for
  it. `END` pads short histories at the front. The user is repeated at each of
  the L = steps + 1 steps.
  """
  point = examples >> 1
  places = points[point][:, None] + np.arange(-steps, 1)
  # Places before a user's first event are other users', or none.
  users = events.users[np.maximum(places, 0)]
  there = (users == users[:, -1:]) & (places >= 0)
  ids = np.full((len(examples), 3, steps + 1), END, np.int64)
  ids[:, 0][there] = users[there]
  for feature, column in enumerate(events[1:3], start=1):
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
  per_user: int,
  min_history: int,
  key: np.uint64,
  points: np.ndarray,
) -> None:
  """Fills i64[p] in the order of the events.

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
        points[chosen] = place
        chosen += 1
        wanted -= 1
      left -= 1


@kernel
@no_type_check
def _draw(
  touched: np.ndarray,
  starts: np.ndarray,
  users: np.ndarray,
  points: np.ndarray,
  items: np.ndarray,
  key: np.uint64,
  out: np.ndarray,
) -> int:
  """Fills `out`. Returns the first point that has no item, or p."""
  count = len(items)
  for point in range(len(points)):
    mine = touched[starts[users[point]] : starts[users[point] + 1]]
    at, is_free = np.int64(0), False
    for tries in range(_TRIES + count):
      # A user may have touched almost all items. Then all of them are tried in
      # order, starting after the last one drawn.
      at = (at + 1) % count
      if tries < _TRIES:
        # Depends on the place in the log, not on the other points chosen.
        bits = hashed(key, points[point] * _TRIES + tries)
        at = np.int64(bits % np.uint64(count))
      # Users have about a hundred events, too few for a set to pay off.
      is_free = not np.any(mine == items[at])
      if is_free:
        break
    if not is_free:
      return point
    out[point] = at
  return len(points)
