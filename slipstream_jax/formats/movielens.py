"""MovieLens' ratings, from the files that GroupLens publishes.

Reads `u.data` of ml-100k (tabs), `ratings.dat` of ml-1m and ml-10m (`::`) and
`ratings.csv` of ml-20m, ml-25m, ml-32m and ml-latest (commas and a header).
Lines hold user, item, rating in stars and time in seconds. Each is an example.
"""

from collections.abc import Iterator
import itertools
import numbers
import os
import pathlib
from typing import NamedTuple

from jaxtyping import Float, Int, UInt8, UInt32
import numpy as np
import polars as pl

from slipstream_jax.errors import check_whole, choose, UserError
from slipstream_jax.formats import lines, text
from slipstream_jax.formats.base import (
  BadLines,
  Chunk,
  END,
  Part,
  RawData,
  Split,
  split_at_end,
  Splits,
)
from slipstream_jax.formats.lines import Column, Schema
from slipstream_jax.tables import Feature

HEADER = b'userId,movieId,rating,timestamp'
"""First line of a ratings.csv."""
MOST_STARS = 5
_CHUNK = 1 << 15  # examples
_YEAR_1995 = 788_918_400  # of the first rating, in seconds since 1970

# Half-stars by their spellings, such as 4, 4.0 and 4.5. `lines` reads a word as
# a big-endian number.
_HALVES = {
  int.from_bytes(word.encode()): halves
  for halves in range(1, 2 * MOST_STARS + 1)
  for word in (f'{halves / 2:.1f}', f'{halves / 2:g}')
}
_CODES = np.array(sorted(_HALVES))
_STARS = np.array([_HALVES[code] for code in _CODES.tolist()], np.uint8)

_COLUMNS = (
  lines.ID._replace(name='user'),
  lines.ID._replace(name='item'),
  Column(
    'rating',
    f'a rating must be stars from 0.5 to {MOST_STARS} in halves',
    lines.ID.hint,
    lines.WORD,
    (1, 3),
    fits=lambda words: np.isin(words, _CODES),
  ),
  # A time that is cut off is too early, so no line that is cut off passes.
  Column(
    'time',
    'a time must be in seconds since 1970, from 1995 on',
    lines.ID.hint,
    10,
    (9, 10),
    fits=lambda times: (times >= _YEAR_1995) & (times < 1 << 32),
  ),
)


CSV = Schema(
  _COLUMNS,
  b',',
  HEADER,
  "give a ratings.csv, ratings.dat or u.data as GroupLens' has it",
)
DAT = Schema(_COLUMNS, b'::')
DATA = Schema(_COLUMNS, b'\t')


_PARTS = 'train', 'validation', 'test'
SPLITS = 'time', 'last', 'random'
"""Ways to hold ratings out; see `movielens_raw`."""


class _Log(NamedTuple):
  """All ratings in time order. Ties keep the file's order."""

  users: UInt32[np.ndarray, ' n']
  items: UInt32[np.ndarray, ' n']
  halves: UInt8[np.ndarray, ' n']
  """Half-stars, 1 to 10."""
  places: UInt32[np.ndarray, ' n']
  """Position of each rating in the order of (user, time)."""
  by_user: UInt32[np.ndarray, ' n']
  """Items in that order."""
  of_user: UInt32[np.ndarray, ' n']
  """Number of earlier ratings by the same user."""
  of_item: UInt32[np.ndarray, ' n']
  """Number of earlier ratings of the same item."""
  times: UInt32[np.ndarray, ' n']
  """Seconds since 1970, in the order of (user, time)."""


def movielens_raw(
  path: str | os.PathLike[str],
  *,
  threshold: float | None = 4.0,
  history: int = 0,
  steps: int = 0,
  split: str = 'time',
  test_share: float = 0.2,
  bad_lines: int = 0,
) -> RawData:
  """Returns a file of MovieLens' ratings as a raw data set.

  The first line tells which of the three formats it has. Features are `user`,
  `item` and optionally `history`: the items that the user rated before, in
  their order, in the item's table. The two dense features are log1p of the
  number of earlier ratings by the user, and of the item. With another split
  than 'time' they count the ratings to train on.

  With `steps` examples are sequences instead, for SASRec and HSTU: the only
  feature is `item`, the items that the user rated before and then the rated
  one. Short ones are padded at the front. More dense features have the age of
  each step in seconds: how long before the example's rating it was.

  The whole file is read into memory: 17 bytes per rating, and some 30 more
  while ratings are sorted by time.

  Args:
    path: the file, plain or gzip. It is not read yet.
    threshold: stars from which a rating is a click. None: the label is stars /
      5.
    history: most items of a history, the latest ones. 0 leaves it out.
    steps: most earlier items of a sequence, the latest ones. 0: no sequences.
    split: which ratings are held out. 'time': the latest ones of all. 'last':
      each user's last one is to test on, and the one before is the validation
      part. 'random': `test_share` of each user's, drawn at random, rounded
      down, and as many for the validation part.
    test_share: share of the ratings to test on. 'last' does not use it.
    bad_lines: number of malformed lines that may be skipped.

  Raises:
    UserError: a bad argument, or no such file. Reading raises the errors of
      `lines.read`.
  """
  bad = BadLines(bad_lines, 'movielens_raw')
  path = pathlib.Path(path)
  good = isinstance(threshold, numbers.Real) and 0.5 <= threshold <= MOST_STARS
  if threshold is not None and not good:
    raise UserError(
      f'threshold must be stars, from 0.5 to {MOST_STARS}, or None',
      got=repr(threshold),
      where='movielens_raw, threshold',
      hint='set it to 4.0 for clicks, or to None for ratings',
    )
  hint = 'set it to the most items of a history, or to 0 for none'
  check_whole(history, 0, 'movielens_raw, history', hint)
  check_whole(steps, 0, 'movielens_raw, steps', 'or to 0 for no sequences')
  if steps and history:
    raise UserError(
      'sequences have the history in them',
      got=f'history={history} beside steps={steps}',
      where='movielens_raw, history',
      hint='leave one of them out',
    )
  choose(dict.fromkeys(SPLITS), split, 'movielens_raw, split')
  features = {'user': Feature('user'), 'item': Feature('item')}
  if history:
    features['history'] = Feature('item', 'mean', history)
  if steps:
    features = {'item': Feature('item', 'none', steps + 1)}
  size = text.size(path)

  def chunks() -> Iterator[tuple[Chunk, int]]:
    log = _read(path, bad)
    count = len(log.users)
    order, counts = _arranged(log, split, test_share)
    for first in range(0, count, _CHUNK):
      end = min(first + _CHUNK, count)
      some = order[first:end]
      ids, ages = (
        _sequences(log, some, steps) if steps else _bags(log, some, history)
      )
      chunk = _chunk(log.halves[some], threshold, counts[some], ids, ages)
      yield chunk, size * end // count

  return RawData(
    name=f'MovieLens, {path.name}',
    features=features,
    dense_features=2 + (steps + 1 if steps else 0),
    parts=(Part(str(path), size, chunks),),
    split=_split(path, bad, split, test_share),
    bad=bad,
    settings={
      'threshold': threshold,
      'history': history,
      'steps': steps,
      'split': split,
      'test_share': test_share,
    },
    format='movielens',
    label_dtype='float32' if threshold is None else 'uint8',
  )


def _split(
  path: pathlib.Path, bad: BadLines, split: str, test_share: float
) -> Split:
  """Returns the ranges of the parts, for which the file is read again."""
  at_end = split_at_end(test_share, 'movielens_raw')
  if split == 'time':
    return at_end

  def of_parts(examples: int, parts: tuple[int, ...]) -> Splits:
    del examples, parts
    sizes = np.bincount(_parts(_read(path, bad), split, test_share))
    ends = [0, *np.cumsum(sizes).tolist()]
    spans = zip(_PARTS, itertools.pairwise(ends), strict=False)
    return {name: span for name, span in spans if span[0] < span[1]}

  return of_parts


def _read(path: pathlib.Path, bad: BadLines) -> _Log:
  line = text.first_line(path)
  schema = DAT if b'::' in line else DATA if b'\t' in line else CSV

  def pick(fields: np.ndarray) -> list[np.ndarray]:
    return [*fields[:2], _STARS[np.searchsorted(_CODES, fields[2])], fields[3]]

  dtypes = ('u4', 'u4', 'u1', 'u4')
  columns = lines.read_columns(path, schema, bad, dtypes, pick)
  times = columns.pop()
  order = np.argsort(times, kind='stable')
  users, items, halves, times = (x[order] for x in (*columns, times))
  del order, columns
  # Ratings are in time order, and a stable sort by user keeps it.
  order = np.argsort(users, kind='stable')
  places = np.empty(len(users), np.uint32)
  places[order] = np.arange(len(users), dtype=np.uint32)
  earlier = _earlier(users), _earlier(items)
  by_user = items[order]
  return _Log(users, items, halves, places, by_user, *earlier, times[order])


def _arranged(
  log: _Log, split: str, test_share: float
) -> tuple[Int[np.ndarray, ' n'], UInt32[np.ndarray, 'n 2']]:
  """Returns the order of the ratings, and counts of their users and items."""
  if split == 'time':
    counts = np.stack([log.of_user, log.of_item], axis=1)
    return np.arange(len(counts)), counts
  parts = _parts(log, split, test_share)
  trained = (pl.col('part') == 0).sum()
  both = [_over(ids, trained, part=parts) for ids in (log.users, log.items)]
  return np.argsort(parts, kind='stable'), np.stack(both, axis=1)


def _parts(log: _Log, split: str, test_share: float) -> UInt8[np.ndarray, ' n']:
  """Returns the place in `_PARTS` of the part that each rating is in."""
  count = _over(log.users, pl.len())
  if split == 'last':
    place, held = count - 1 - log.of_user, np.ones_like(count)
  else:
    order = np.random.default_rng(0).permutation(len(log.users))
    place = np.empty_like(count)
    place[order] = _earlier(log.users[order])
    held = np.floor(test_share * count).astype(np.uint32)
  # The first places are to test on, and as many more to validate.
  return (place < held).astype(np.uint8) + (place < 2 * held)


def _over(
  ids: UInt32[np.ndarray, ' n'], value: pl.Expr, **columns: np.ndarray
) -> UInt32[np.ndarray, ' n']:
  """Computes a value of the rows of each id."""
  frame = pl.DataFrame({'id': ids, **columns})
  one = value.cast(pl.UInt32).over('id')
  return frame.select(one.alias('value')).to_series().to_numpy()


def _earlier(ids: UInt32[np.ndarray, ' n']) -> UInt32[np.ndarray, ' n']:
  """Counts how often each id came before."""
  return _over(ids, pl.int_range(pl.len()))


def _bags(
  log: _Log, some: Int[np.ndarray, ' n'], history: int
) -> tuple[Int[np.ndarray, 'n K'], Float[np.ndarray, 'n 0']]:
  """Returns users, items and histories of ratings. They have no ages."""
  users = log.users[some]
  ids = np.full((len(users), 2 + history), END, np.int64)
  ids[:, 0], ids[:, 1] = users, log.items[some]
  if history:
    known = np.minimum(log.of_user[some].astype(np.int64), history)[:, None]
    steps = np.arange(history)
    there = steps < known
    places = log.places[some].astype(np.int64)[:, None] - known + steps
    ids[:, 2:][there] = log.by_user[places[there]]
  return ids, np.empty((len(users), 0), np.float32)


def _sequences(
  log: _Log, some: Int[np.ndarray, ' n'], steps: int
) -> tuple[Int[np.ndarray, 'n L'], Float[np.ndarray, 'n L']]:
  """Returns the items of sequences, the rated one last, and their ages."""
  places = log.places[some].astype(np.int64)[:, None] + np.arange(-steps, 1)
  there = np.arange(-steps, 1) >= -log.of_user[some].astype(np.int64)[:, None]
  ids = np.full(there.shape, END, np.int64)
  ids[there] = log.by_user[places[there]]
  times = log.times[places * there].astype(np.int64)
  ages = np.where(there, times[:, -1:] - times, 0)
  return ids, ages.astype(np.float32)


def _chunk(
  halves: UInt8[np.ndarray, ' n'],
  threshold: float | None,
  counts: UInt32[np.ndarray, 'n 2'],
  ids: Int[np.ndarray, 'n K'],
  ages: Float[np.ndarray, 'n _'],
) -> Chunk:
  """Adds labels and dense features to the ids of some ratings."""
  stars = halves.astype(np.float32)
  if threshold is None:
    labels = stars / np.float32(2 * MOST_STARS)
  else:
    labels = (stars >= 2 * threshold).astype(np.float32)
  dense = np.log1p(counts.astype(np.float32))
  return Chunk(labels, np.concatenate([dense, ages], axis=1), ids)
