"""Taobao's user behaviour as sequences, the examples of TBSM.

The set is Alibaba Tianchi's "User Behavior Data from Taobao for
Recommendation": lines of user, item, category, behaviour and time, separated by
commas, without a header. As in TBSM (arXiv 2008.11922) and its released code,
an example is up to 20 events of a user, of any behaviour, and the item that
came next, or a random one. That code holds out users whose log ends late. Here
the test part is the last stretch of time, so no training example is later than
a test example.
"""

from collections.abc import Iterator
import functools
import os
import pathlib
from typing import NamedTuple

import numpy as np

from slipstream_jax.errors import check_seed, is_whole, UserError
from slipstream_jax.formats import lines, text
from slipstream_jax.formats.base import (
  BadLines,
  check_share,
  Chunk,
  Part,
  RawData,
  train_and_test,
)
from slipstream_jax.formats.lines import Column, Schema
from slipstream_jax.formats.sequences import (
  by_user,
  Catalogue,
  catalogue,
  choose_points,
  cut,
  draw_negatives,
  Events,
  Points,
  user_starts,
)
from slipstream_jax.tables import features_of

TABLES = ('user', 'item', 'category')
BEHAVIOURS = ('pv', 'cart', 'fav', 'buy')
# `lines` reads a word as a big-endian number.
_CODES = [int.from_bytes(name.encode()) for name in BEHAVIOURS]
_CHUNK = 1 << 15  # examples; 504 bytes each
_HINT = 'write it as in the published log'

_ID = Column(
  '',
  'an id must be a number below 2**32',
  _HINT,
  10,
  (1, 10),
  fits=lambda ids: ids < 1 << 32,
)
SCHEMA = Schema(
  (
    *(_ID._replace(name=name) for name in TABLES),
    Column(
      'behaviour',
      f'a behaviour must be one of {", ".join(BEHAVIOURS)}',
      _HINT,
      lines.WORD,
      (2, 4),
      fits=lambda words: np.isin(words, _CODES),
    ),
    Column(
      'time',
      'a time must be in seconds, 10 digits up to 2**31 - 1',
      _HINT,
      10,
      (10, 10),
      fits=lambda times: (times >= 10**9) & (times < 1 << 31),
    ),
  ),
  delimiter=b',',
)


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
    bad_lines: number of malformed lines that may be skipped. If the file is cut
      off, its last line is malformed, because a time must have 10 digits.
    seed: seed of the choice of points and of drawn items.

  Raises:
    UserError: a bad argument. Reading raises the errors of `lines.read`, and
      one if there are no points to train on or to test on.
  """
  bad = BadLines(bad_lines, 'taobao_raw')
  check_share(test_share, 'taobao_raw')
  check_seed(seed, 'taobao_raw, seed')
  numbers = {'steps': steps, 'per_user': per_user, 'min_history': min_history}
  for name, value in numbers.items():
    if not is_whole(value, 1):
      raise UserError(
        f'{name} of a sequence must be at least 1',
        got=value,
        where=f'taobao_raw, {name}',
        hint='set it to 1 or more',
      )

  # Cached, because both parts and the numbers of rows need all of it.
  @functools.cache
  def log() -> _Log:
    events = by_user(_read_events(path, bad))
    starts = user_starts(events)
    points = choose_points(
      starts, steps=steps, per_user=per_user, min_history=min_history, seed=seed
    )
    train, test, start = _split(events, points, test_share, path)

    def drawn(points: Points, before: int | None) -> tuple[Points, Catalogue]:
      known = catalogue(events, before)
      return points, draw_negatives(events, starts, points, known, seed)

    return _Log(events, (drawn(train, start), drawn(test, None)), start)

  def chunks(which: int) -> Iterator[tuple[Chunk, int]]:
    events, parts, _ = log()
    # Both parts read the whole file. Its bad lines count with the first part
    # only, also if a preparation resumes with the second.
    if which == 0:
      skipped[:] = [bad.count]
    return _chunks(events, *parts[which], steps, size)

  skipped: list[int] = []  # holds one count after the first part is read
  size = os.stat(path).st_size if os.path.exists(path) else 0
  return RawData(
    name=f'Taobao user behaviour, {pathlib.Path(path).name}',
    features=features_of(TABLES, steps + 1),
    dense_features=steps + 1,
    parts=tuple(
      # The file's size counts for the first part only.
      Part(
        f'{path}, {name}', size * (which == 0), functools.partial(chunks, which)
      )
      for which, name in enumerate(('train', 'test'))
    ),
    split=lambda examples, parts: train_and_test(examples, parts[1]),
    skipped=lambda: sum(skipped),
    settings={
      **numbers,
      'test_share': test_share,
      'seed': seed,
      # The journal checks only parts that are files, and these are not.
      'changed': text.changed(path),
    },
    format='taobao',
    counted=lambda: _before(log()),
  )


class _Log(NamedTuple):
  """The log, and its points to train and to test on."""

  events: Events
  """Events by user, then time."""
  parts: tuple[tuple[Points, Catalogue], tuple[Points, Catalogue]]
  """For training and for testing: points, and the item drawn for each."""
  start: int
  """Time of the first test point."""


def _read_events(
  path: str | os.PathLike[str], bad: BadLines
) -> list[np.ndarray]:
  """Returns the columns of `Events`, in the file's order."""
  joined = [np.empty(0, kind) for kind in ('u4', 'u4', 'u4', 'i4')]
  for _, fields in lines.read(path, SCHEMA, bad):
    *ids, _, times = fields.values
    for whole, column in zip(joined, (*ids, times), strict=True):
      # Grown in place, because joining parts at the end needs twice the memory.
      # No other reference is used, but numpy would count the loop's names.
      whole.resize(len(whole) + len(column), refcheck=False)
      whole[len(whole) - len(column) :] = column
  return joined


def _split(
  events: Events,
  points: Points,
  test_share: float,
  path: str | os.PathLike[str],
) -> tuple[Points, Points, int]:
  """Splits points by time. Returns early points, late points and that time.

  Raises:
    UserError: one side has no points.
  """
  times = events.times[points.candidates]  # a copy, sorted in place below
  points = points.take(np.argsort(times, kind='stable'))
  times.sort()
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
  early, late = np.arange(split), np.arange(split, count)
  return points.take(early), points.take(late), start


def _before(log: _Log) -> tuple[np.ndarray, ...]:
  """Returns ids of users, items and categories before the split."""
  early = log.events.times < log.start
  return tuple(ids[early].astype(np.int64) for ids in log.events[:3])


def _chunks(
  events: Events, points: Points, drawn: Catalogue, steps: int, size: int
) -> Iterator[tuple[Chunk, int]]:
  """Yields chunks of examples with the bytes read so far.

  Example 2 i is point i with its own candidate, 2 i + 1 with the drawn one.
  Dense features are the relative position of each step, 0 to 1 - 1/L, as in
  TBSM's code.
  """
  count, length = 2 * len(points.candidates), steps + 1
  places = np.arange(length, dtype=np.float32) / np.float32(length)
  for first in range(0, count, _CHUNK):
    examples = np.arange(first, min(first + _CHUNK, count))
    labels = (examples % 2 == 0).astype(np.float32)
    dense = np.tile(places, (len(examples), 1))
    chunk = Chunk(labels, dense, cut(events, points, drawn, steps, examples))
    yield chunk, size * (first + len(examples)) // count
