"""Tables of a packed data set: which row stands for which raw id.

Rows are numbered by how often their ids occur in the training part, the most
frequent first, so that a row's number is its rank; row 0 is for all ids that
have no row. One feature's raw ids are read, in pieces, twice: to count those of
the training part, and to write the rows of all. Memory grows with the ids that
are counted, not with the inputs: 26 to 51 bytes per distinct id, and 16 more
while they are put in order.
"""

from collections.abc import Callable, Iterator
import pathlib
from typing import NamedTuple

from jaxtyping import Int, UInt32
import numpy as np

from slipstream_jax.data.vocabulary import Ids, salt
from slipstream_jax.packed import id_kernels
from slipstream_jax.packed.columns import Column, smallest_uint
from slipstream_jax.raw.base import END, MISSING

PIECE = 1 << 20
"""Ids held in memory at a time."""
_SMALLEST = 1 << 12  # places of a table of ids to begin with

MapIds = Callable[[Ids, UInt32[np.ndarray, ' _']], int]
"""Fills the rows of a piece of ids; returns how many are 0."""
Tick = Callable[[int], None]
"""Hears of ids dealt with; may raise, to stop the work."""


class RawColumn(NamedTuple):
  """One feature's raw ids, i64, in a file."""

  path: pathlib.Path
  inputs: int
  """n."""
  series: int | None
  """L, ids per input; None is one."""

  def pieces(self, first: int, end: int) -> Iterator[Ids]:
    """Ids of the inputs [first, end) in pieces of at most `PIECE`."""
    per_input = self.series or 1
    at, last = first * per_input, end * per_input
    with self.path.open('rb') as file:
      file.seek(8 * at)
      while at < last:
        # Read, not mapped: mapped pages would count as memory in use.
        piece = np.fromfile(file, '<i8', min(PIECE, last - at))
        at += len(piece)
        yield piece


class Ranked(NamedTuple):
  """Rows of one table."""

  frequency: UInt32[np.ndarray, ' R']
  """Accesses of each row in the training part."""
  vocabulary: tuple[str, np.ndarray]
  """Name and values of the column from which new ids can be mapped: the ids of
  rows 1 to R - 1, i64, or the row of each bucket."""
  map: MapIds


class Written(NamedTuple):
  """What was written of one table."""

  columns: tuple[Column, ...]
  rows: int
  """R."""
  unknown: int
  """Lookups of row 0, in all splits."""
  lookups: int
  """Of all splits, without the ends of lists."""


def rank_counted(
  column: RawColumn,
  name: str,
  train: tuple[int, int],
  min_count: int,
  tick: Tick,
) -> Ranked:
  """Rows of the ids seen `min_count` times or more; ties go by the id.

  A missing id has a row of its own, however rare, as in `vocabulary.count`.

  Args:
    column: the feature's ids.
    name: the table's.
    train: first input of the training part, and the one after its last.
    min_count: uses in the training part that earn an id a row.
    tick: hears of ids counted.
  """
  table, totals = _count(column, train, tick)
  kept = table[:, 1] >= min_count
  ids = np.append(table[kept, 0], MISSING)
  counts = np.append(table[kept, 1], totals[1])
  del table, kept
  order = np.argsort(ids)
  order = order[_by_count(counts[order])]
  ids, counts = ids[order], _saturated(counts[order])
  del order
  unknown = int(totals[2]) - int(counts.sum(dtype=np.int64))
  rows = np.zeros((_capacity(len(ids)), 2), np.int64)
  id_kernels.number_ids(ids, rows)
  missing, end = 1 + int(np.flatnonzero(ids == MISSING)[0]), len(ids) + 1
  return Ranked(
    np.append(_saturated(np.array([unknown])), counts),
    (f'vocabulary_{name}', ids),
    lambda piece, out: id_kernels.find_rows(piece, rows, missing, end, out),
  )


def rank_hashed(
  column: RawColumn,
  name: str,
  table: int,
  train: tuple[int, int],
  hash_rows: int,
  tick: Tick,
) -> Ranked:
  """Rows of the buckets of `vocabulary.Hashed` that the training part uses.

  Args:
    column: the feature's ids.
    name: the table's.
    table: its number, from 0, on which the hash depends.
    train: first input of the training part, and the one after its last.
    hash_rows: buckets.
    tick: hears of ids counted.
  """
  counts, key = np.zeros(hash_rows, np.uint32), salt(table)
  for piece in column.pieces(*train):
    id_kernels.count_buckets(piece, key, counts)
    tick(len(piece))
  used = np.flatnonzero(counts)
  used = used[_by_count(counts[used])]
  frequency = np.append(np.uint32(0), counts[used])
  counts[used] = np.arange(1, len(used) + 1)  # now the rows of the buckets
  ranks, end = counts, len(frequency)
  return Ranked(
    frequency,
    (f'rank_{name}', ranks.astype(smallest_uint(len(used)))),
    lambda piece, out: id_kernels.find_bucket_rows(piece, key, ranks, end, out),
  )


def write(
  folder: pathlib.Path,
  name: str,
  column: RawColumn,
  ranked: Ranked,
  tick: Tick,
) -> Written:
  """Writes a table's columns: rows of all inputs, frequency, vocabulary.

  Raises:
    OSError: there is no room for them.
  """
  rows = len(ranked.frequency)
  shape = (column.inputs,) + ((column.series,) if column.series else ())
  lookups = Column(name, smallest_uint(rows), shape)
  word, known = ranked.vocabulary
  columns = [lookups]
  for title, values in (f'frequency_{name}', ranked.frequency), (word, known):
    columns.append(Column(title, values.dtype.name, values.shape))
    with (folder / columns[-1].file).open('wb') as file:
      file.write(values.astype(values.dtype.newbyteorder('<')).data)
  unknown, real, out = 0, 0, np.empty(PIECE, np.uint32)
  with (folder / lookups.file).open('wb') as file:
    for piece in column.pieces(0, column.inputs):
      unknown += ranked.map(piece, out[: len(piece)])
      real += int(np.count_nonzero(piece != END))
      file.write(
        out[: len(piece)].astype(f'<{np.dtype(lookups.dtype).str[1:]}').data
      )
      tick(len(piece))
  return Written(tuple(columns), rows, unknown, real)


def _count(
  column: RawColumn, train: tuple[int, int], tick: Tick
) -> tuple[Int[np.ndarray, 'capacity 2'], Int[np.ndarray, '3']]:
  table, totals = np.zeros((_SMALLEST, 2), np.int64), np.zeros(3, np.int64)
  for piece in column.pieces(*train):
    done = 0
    while (done := id_kernels.count_ids(piece, done, table, totals)) < len(
      piece
    ):
      larger = np.zeros((2 * len(table), 2), np.int64)
      id_kernels.grow(table, larger)
      table = larger
    tick(len(piece))
  return table, totals


def _by_count(counts: np.ndarray) -> Int[np.ndarray, ' _']:
  """Order that puts the largest counts first, and leaves equal ones as is."""
  keys = ~_saturated(counts)
  # Numpy sorts 16 bits at a time in linear time, and few counts need more.
  order = np.argsort(keys.astype(np.uint16), kind='stable')
  high = (keys >> np.uint32(16)).astype(np.uint16)[order]
  if len(high) and high.min() < high.max():
    order = order[np.argsort(high, kind='stable')]
  return order


def _saturated(counts: np.ndarray) -> UInt32[np.ndarray, ' _']:
  return np.minimum(counts, np.iinfo(np.uint32).max).astype(np.uint32)


def _capacity(ids: int) -> int:
  return max(_SMALLEST, 1 << (ids * 3 // 2).bit_length())
