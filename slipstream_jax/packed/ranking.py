"""Tables of a packed data set: which row stands for which raw id.

Rows are numbered by how often their ids occur in the training part, the most
frequent first, so that a row's number is its rank; row 0 is for all ids that
have no row. The raw ids of a table's features are read, in pieces, twice: to
count those of the training part, and to write the rows of all. Memory grows
with the ids that are counted, not with the examples: 26 to 51 bytes per unique
id, and 16 more while they are put in order.
"""

from collections.abc import Callable, Iterator, Sequence
import pathlib
from typing import NamedTuple

from jaxtyping import Int, UInt32
import numpy as np

from slipstream_jax.data.vocabulary import by_count, Ids, ranked
from slipstream_jax.files import sync
from slipstream_jax.formats.base import END, MISSING
from slipstream_jax.hashing import find, grown, insert, new_pairs, salt
from slipstream_jax.packed import kernels
from slipstream_jax.packed.columns import Column
from slipstream_jax.packed.layout import TableColumns

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
  examples: int
  """n."""
  length: int
  """L, ids per example."""

  def pieces(self, first: int, end: int) -> Iterator[Ids]:
    """Ids of the examples [first, end) in pieces of at most `PIECE`."""
    at, last = first * self.length, end * self.length
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
  vocabulary: np.ndarray
  """From which new ids can be mapped: as in `TableColumns`."""
  map: MapIds


class Written(NamedTuple):
  """What was written of one table."""

  rows: int
  """R."""
  unknown: int
  """Lookups of row 0, in all splits."""
  lookups: int
  """Of all splits, without the ends of lists."""


def rank_counted(
  columns: Sequence[RawColumn],
  train: tuple[int, int],
  min_count: int,
  tick: Tick,
) -> Ranked:
  """Rows of the ids seen `min_count` times or more, as in `vocabulary.count`.

  Args:
    columns: ids of each feature of the table.
    train: first example of the training part, and the one after its last.
    min_count: uses in the training part that earn an id a row.
    tick: hears of ids counted.
  """
  table, totals = _count(columns, train, tick)
  # What is rare goes first, which `ranked` would do as well: the ids left are
  # copied and sorted, and they may be few. Free places count 0, and go, too.
  kept = table[:, 1] >= min_count
  # Missing ones are counted beside the table, as they keep a row in any case.
  ids = np.append(table[kept, 0], MISSING)
  counts = np.append(table[kept, 1], totals[1])
  del table, kept  # before there is a second table, from ids to rows
  ids, counts = ranked(ids, counts)
  counts = _saturated(counts)
  unknown = int(totals[2]) - int(counts.sum(dtype=np.int64))
  # Row 0 is for unknown ids. `END` gets R, one past the last row, which readers
  # take for padding.
  rows, size = new_pairs(len(ids) + 1), len(ids) + 1
  insert(rows, ids, np.arange(1, size))
  insert(rows, np.array([END]), np.array([size]))
  return Ranked(
    np.append(_saturated(np.array([unknown])), counts),
    ids,
    lambda piece, out: find(rows, piece, out)[0],
  )


def rank_hashed(
  columns: Sequence[RawColumn],
  train: tuple[int, int],
  table: int,
  hash_rows: int,
  tick: Tick,
) -> Ranked:
  """Rows of the buckets of `vocabulary.Hashed` that the training part uses.

  Args:
    columns: ids of each feature of the table.
    train: first example of the training part, and the one after its last.
    table: the table's number, from 0, on which the hash depends.
    hash_rows: buckets.
    tick: hears of ids counted.
  """
  counts, key = np.zeros(hash_rows, np.uint32), salt(table)
  for piece in (p for column in columns for p in column.pieces(*train)):
    kernels.count_buckets(piece, key, counts)
    tick(len(piece))
  # Buckets that training never used get no row, and map to row 0 as unknown
  # ids do: a table is no longer than what it has learnt.
  used = np.flatnonzero(counts)
  used = used[by_count(counts[used])]
  frequency = np.append(np.uint32(0), counts[used])
  # From here on the rows of the buckets: a second array may be 160 MB.
  counts[used] = np.arange(1, len(used) + 1)
  ranks, end = counts, len(frequency)
  return Ranked(
    frequency,
    ranks,
    lambda piece, out: kernels.find_bucket_rows(piece, key, ranks, end, out),
  )


def write(
  folder: pathlib.Path,
  raw: Sequence[RawColumn],
  table: Ranked,
  columns: TableColumns,
  lookups: Sequence[Column],
  tick: Tick,
) -> Written:
  """Writes a table's columns; they are on the disk when it returns.

  Args:
    folder: of the data set.
    raw: ids of each feature of the table.
    table: its rows.
    columns: forms of the table's own columns.
    lookups: form of the lookups of each feature.
    tick: hears of ids written.

  Raises:
    OSError: there is no room for them.
  """
  for form, values in (
    (columns.frequency, table.frequency),
    (columns.vocabulary, table.vocabulary),
  ):
    with (folder / form.file).open('wb') as file:
      file.write(values.astype(form.stored).data)
  # u32 for any table, so that kernels are compiled once; stored as narrow as
  # the table allows.
  unknown, real, out = 0, 0, np.empty(PIECE, np.uint32)
  for column, form in zip(raw, lookups, strict=True):
    with (folder / form.file).open('wb') as file:
      for piece in column.pieces(0, column.examples):
        unknown += table.map(piece, out[: len(piece)])
        real += int(np.count_nonzero(piece != END))
        file.write(out[: len(piece)].astype(form.stored).data)
        tick(len(piece))
  for form in (columns.frequency, columns.vocabulary, *lookups):
    sync(folder / form.file)
  return Written(len(table.frequency), unknown, real)


def _count(
  columns: Sequence[RawColumn], train: tuple[int, int], tick: Tick
) -> tuple[Int[np.ndarray, 'capacity 2'], Int[np.ndarray, '3']]:
  """A table of ids and counts, and the totals of `kernels.count_ids`."""
  table, totals = np.zeros((_SMALLEST, 2), np.int64), np.zeros(3, np.int64)
  for piece in (p for column in columns for p in column.pieces(*train)):
    done = kernels.count_ids(piece, 0, table, totals)
    while done < len(piece):  # the table is too full
      table = grown(table)
      done = kernels.count_ids(piece, done, table, totals)
    tick(len(piece))
  return table, totals


def _saturated(counts: np.ndarray) -> UInt32[np.ndarray, ' _']:
  return np.minimum(counts, np.iinfo(np.uint32).max).astype(np.uint32)
