"""Taobao's user behaviour as series, the inputs of TBSM.

As in TBSM (arXiv 2008.11922) and its released code: up to 20 events of a user,
of any behaviour, and the item that came next, or one that did not. Unlike that
code, which sets users aside whose log ends late, the test part is the end of
the time covered: that is what a model in use meets, and no input to train on
is later than one to test on.
"""

from collections.abc import Iterator
import functools
import os
import pathlib
from typing import NamedTuple

from jaxtyping import Bool, Int
import numpy as np
import polars as pl

from slipstream_jax.data import vocabulary
from slipstream_jax.data.base import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.raw.sequences import (
  by_user,
  catalogue,
  choose_points,
  draw_negatives,
  Events,
  Points,
  user_starts,
)
from slipstream_jax.raw.series_batches import FEATURES, Series, SeriesBatches
from slipstream_jax.raw.taobao_log import read_events
from slipstream_jax.tables import Table

_PIECE = 1 << 22  # events whose ids become rows at a time


def taobao_text(
  path: str | os.PathLike[str],
  *,
  steps: int = 20,
  per_user: int = 10,
  min_history: int = 10,
  test_share: float = 0.2,
  min_count: int = 1,
  hash_rows: int | None = None,
  bad_lines: int = 0,
  seed: int = 0,
  shuffle_seed: int | None = None,
) -> Dataset:
  """A data set of Taobao's raw log, held in memory; L is steps + 1.

  The test part is the points from some time on, and the vocabularies are of
  the events before it. Half of the inputs are drawn: to train on from the
  items known by then, to test on from all.

  Args:
    path: the file, plain or gzip.
    steps: most events of a history.
    per_user: most points of a user; each gives two inputs.
    min_history: earlier events that a point needs.
    test_share: share of the points to hold out, the latest ones.
    min_count: events before the split that earn an id a row of its own.
    hash_rows: R of every table, for hashed ids; None counts ids instead.
    bad_lines: lines that break the format and may be skipped.
    seed: of the choice of points and of drawn items.
    shuffle_seed: seed of the order of training inputs; None is that of time.

  Raises:
    UserError: a bad argument, a file that cannot be read, or a bad line.
  """
  # Looks at the two; but counting by it would take 24 bytes more per event.
  vocabulary.fit_by(len(FEATURES), min_count=min_count, hash_rows=hash_rows)
  log = read_log(
    path,
    steps=steps,
    per_user=per_user,
    min_history=min_history,
    test_share=test_share,
    bad_lines=bad_lines,
    seed=seed,
  )
  events, start = log.events, log.start
  words: vocabulary.Vocabulary
  if hash_rows is None:
    words = _count(events, events.times < start, min_count)
  else:
    words = vocabulary.Hashed(len(FEATURES), hash_rows)
  rows = _rows(words, events)
  early, late = (
    Series(rows, points, _rows(words, negatives)[1:], steps)
    for points, negatives in log.parts
  )
  table_rows = tuple(words.rows)
  return Dataset(
    name=f'{pathlib.Path(path).name}, {len(events.users):,} events of'
    f' {log.users:,} users'
    + f' (bad lines skipped: {log.skipped})' * (log.skipped > 0)
    + f', candidates before time {start} to train, after to test',
    tables=tuple(
      Table(name, size, 'none', length=steps + 1)
      for name, size in zip(FEATURES, table_rows, strict=True)
    ),
    dense_features=steps + 1,
    train=functools.partial(
      SeriesBatches, early, table_rows, shuffle_seed=shuffle_seed
    ),
    test=functools.partial(
      SeriesBatches,
      late,
      table_rows,
      epochs=1,
      pad_remainder=True,
    ),
    train_inputs=2 * len(log.parts[0][0].candidates),
    base_rate=0.5,
  )


class Log(NamedTuple):
  """The raw log, and the points of it to train and to test on."""

  events: Events
  """By user, then time."""
  users: int
  parts: tuple[tuple[Points, Events], tuple[Points, Events]]
  """To train and to test on: points, and what was drawn against them."""
  start: int
  """Time of the first point to test on."""
  skipped: int
  """Bad lines."""


def read_log(
  path: str | os.PathLike[str],
  *,
  steps: int,
  per_user: int,
  min_history: int,
  test_share: float,
  bad_lines: int,
  seed: int,
) -> Log:
  """Reads the log and chooses its points; see `taobao_text`.

  Raises:
    UserError: a bad argument, a file that cannot be read, or a bad line.
  """
  columns, skipped = read_events(path, bad_lines)
  events = by_user(columns)
  starts = user_starts(events)
  points = choose_points(
    starts, steps=steps, per_user=per_user, min_history=min_history, seed=seed
  )
  train, test, start = _split(events, points, test_share, path)
  # Before ids become rows: both at once would be the most that is ever held.
  early = train, _drawn(events, starts, train, start, seed)
  late = test, _drawn(events, starts, test, None, seed)
  return Log(events, len(starts) - 1, (early, late), start, skipped)


def _drawn(
  events: Events,
  starts: Int[np.ndarray, ' u_and_1'],
  points: Points,
  before: int | None,
  seed: int,
) -> Events:
  """Items to set against the points' own, of those known by then."""
  known = catalogue(events, before)
  drawn = draw_negatives(events, starts, points.candidates, known.items, seed)
  none = np.zeros(len(drawn), np.uint32)
  return Events(
    none, known.items[drawn], known.categories[drawn], none.view(np.int32)
  )


def _split(
  events: Events,
  points: Points,
  test_share: float,
  path: str | os.PathLike[str],
) -> tuple[Points, Points, int]:
  """Points before some time, points from it on, and that time."""
  if not 0 < test_share < 1:
    raise UserError(
      'test_share must be between 0 and 1, both excluded',
      got=test_share,
      where='config.data.test_share',
      mend='hold out a part of the points',
    )
  times = events.times[points.candidates]
  points = points.take(np.argsort(times, kind='stable'))
  times.sort()
  count = len(times)
  start = int(times[count - max(1, round(count * test_share))]) if count else 0
  # Not by number: points of one second would stand on both sides.
  split = int(np.searchsorted(times, start))
  if not 0 < split < count:
    raise UserError(
      'there must be points to train on and, later, points to test on',
      got=f'{split} and {count - split}',
      where=str(path),
      mend='lower config.data.min_history, or give a longer log',
    )
  early, late = np.arange(split), np.arange(split, count)
  return points.take(early), points.take(late), start


def _count(
  events: Events, early: Bool[np.ndarray, ' n'], min_count: int
) -> vocabulary.Counted:
  """A row per id that is frequent among the early events; none is missing."""
  kept = []
  for column in events[:3]:
    found = pl.Series('id', column[early]).value_counts()
    found = found.filter(pl.col('count') >= min_count)
    found = found.sort('count', 'id', descending=[True, False])
    kept.append(found['id'].cast(pl.Int64).to_numpy())
  return vocabulary.Counted(tuple(kept))


def _columns(events: Events, piece: slice) -> Iterator[vocabulary.Ids]:
  """Ids of users, items and categories of a piece, one column at a time."""
  for column in events[:3]:
    yield column[piece].astype(np.int64)


def _rows(
  words: vocabulary.Vocabulary, events: Events
) -> Int[np.ndarray, '3 n']:
  """Local rows of the events' ids."""
  out = np.empty((3, len(events.users)), np.int32)
  for start in range(0, len(events.users), _PIECE):
    piece = slice(start, start + _PIECE)
    out[:, piece] = words.map(_columns(events, piece)).T
  return out
