"""Tables of a packed data set: the row of each raw id.

Rows are numbered by how often their ids occur in the training part, the most
frequent first, or as a given vocabulary says. Row 0 is for all ids without a
row. Raw ids are read twice, in pieces: to count those of the training part, and
to write the rows of all. Memory grows with the unique ids, not with the
examples: 26 to 51 bytes per id, and 16 more while they are sorted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import pathlib
from typing import NamedTuple, no_type_check

from jaxtyping import UInt32
import numpy as np

from slipstream_jax.columns.ids import Ids
from slipstream_jax.files import sync
from slipstream_jax.formats.base import END, MISSING
from slipstream_jax.hashing import (
  bucket,
  find,
  grown,
  insert,
  kernel,
  new_pairs,
  salt,
  slot_of,
)
from slipstream_jax.packed.columns import Column
from slipstream_jax.packed.layout import TableColumns
from slipstream_jax.vocabulary.counted import by_count, ranked, Vocabulary

PIECE = 1 << 20
"""Ids in memory at a time."""
_SMALLEST = 1 << 12  # initial capacity of a hash table

Tick = Callable[[int], None]
"""Called with the number of ids done. May raise to stop the work."""


class RawColumn(NamedTuple):
  """A file of one feature's raw ids, i64."""

  path: pathlib.Path
  examples: int
  """n."""
  length: int
  """L, ids per example."""

  def pieces(self, first: int, end: int) -> Iterator[Ids]:
    """Yields the ids of examples [first, end), at most `PIECE` at a time."""
    at, last = first * self.length, end * self.length
    with self.path.open('rb') as file:
      file.seek(8 * at)
      while at < last:
        # Read and not mapped, because mapped pages count as memory in use.
        piece = np.fromfile(file, '<i8', min(PIECE, last - at))
        at += len(piece)
        yield piece


class RankedRows(NamedTuple):
  """Rows of one table."""

  frequency: UInt32[np.ndarray, ' R']
  """Lookups of each row in the training part."""
  vocabulary: np.ndarray
  """Maps new ids; see `TableColumns`."""
  map: Callable[[Ids, UInt32[np.ndarray, ' _']], int]
  """Fills the rows of a piece of ids. Returns how many are 0."""
  shared: np.ndarray | None = None
  """Rows of the last ids, as in `TableColumns`."""

  @property
  def columns(self) -> tuple[np.ndarray | None, ...]:
    """Returns the values of `TableColumns`."""
    return self.frequency, self.vocabulary, self.shared


def rank_counted(
  pieces: Iterable[Ids], min_count: int, tick: Tick
) -> RankedRows:
  """Ranks ids seen at least `min_count` times, as `vocabulary.count` does.

  `pieces` are all ids of the table in the training part.
  """
  table, totals = np.zeros((_SMALLEST, 2), np.int64), np.zeros(3, np.int64)
  for piece in pieces:
    done = _count_ids(piece, 0, table, totals)
    while done < len(piece):  # the table is too full
      table = grown(table)
      done = _count_ids(piece, done, table, totals)
    tick(len(piece))
  # Rare ids are dropped before `ranked` copies and sorts the others. Free
  # places count 0 and are dropped too.
  kept = table[:, 1] >= min_count
  # Missing ids are counted separately, because they always get a row.
  ids = np.append(table[kept, 0], MISSING)
  counts = np.append(table[kept, 1], totals[1])
  del table, kept  # frees memory for the second table, from ids to rows
  ids, counts = ranked(ids, counts)
  counts = _saturated(counts)
  unknown = int(totals[2]) - int(counts.sum(dtype=np.int64))
  # Row 0 is for unknown ids, so an id's row is its rank + 1. `END` gets R,
  # the value for padding.
  rows, size = new_pairs(len(ids) + 1), len(ids) + 1
  insert(rows, ids, np.arange(1, size))
  insert(rows, np.array([END]), np.array([size]))
  return RankedRows(
    np.append(_saturated(np.array([unknown])), counts),
    ids,
    lambda piece, out: find(rows, piece, out)[0],
  )


def rank_hashed(
  pieces: Iterable[Ids], table: int, hash_rows: int, tick: Tick
) -> RankedRows:
  """Ranks the buckets of `vocabulary.Hashed` that the training part uses.

  `pieces` are all ids of the table in the training part. Its number, from 0,
  decides the hash.
  """
  counts, key = np.zeros(hash_rows, np.uint32), salt(table)
  for piece in pieces:
    _count_buckets(piece, key, counts)
    tick(len(piece))
  # Unused buckets map to row 0, as unknown ids do, so no row stays untrained.
  used = np.flatnonzero(counts)
  used = used[by_count(counts[used])]
  frequency = np.append(np.uint32(0), counts[used])
  # The array is reused for the buckets' rows, because it may have 160 MB.
  counts[used] = np.arange(1, len(used) + 1)
  ranks, end = counts, len(frequency)
  return RankedRows(
    frequency,
    ranks,
    lambda piece, out: _find_bucket_rows(piece, key, ranks, end, out),
  )


def rank_given(
  pieces: Iterable[Ids], words: Vocabulary, tick: Tick
) -> RankedRows:
  """Takes the rows of a vocabulary, whose ids are integers.

  `pieces` are all ids of the table in the training part.
  """
  counts = np.zeros(words.size, np.int64)
  for piece in pieces:
    np.add.at(counts, words.rows(piece[piece != END]), 1)
    tick(len(piece))

  def mapped(piece: Ids, rows: UInt32[np.ndarray, ' _']) -> int:
    rows[:] = words.rows(piece)
    padding = piece == END
    rows[padding] = words.size
    return int(np.count_nonzero(rows == 0))

  return RankedRows(_saturated(counts), words.known, mapped, words.shared)


def write(
  folder: pathlib.Path,
  raw: Sequence[RawColumn],
  table: RankedRows,
  columns: TableColumns,
  lookups: Sequence[Column],
  tick: Tick,
) -> dict[str, int]:
  """Writes a table's columns and syncs them to the disk.

  Args:
    folder: folder of the data set.
    raw: ids of each feature of the table.
    table: its rows.
    columns: forms of the table's own columns.
    lookups: form of the lookups of each feature.
    tick: called with the number of ids written.

  Returns:
    Facts for the manifest: 'rows' (R), 'unknown' (lookups of row 0) and
    'lookups' (all, without padding), both of all splits.
  """
  for form, values in zip(columns, table.columns, strict=True):
    if form is None or values is None:
      continue
    with (folder / form.file).open('wb') as file:
      file.write(values.astype(form.stored).data)
  # u32 for every table, so that kernels are compiled once. Files have the
  # smallest type that fits.
  unknown, real, out = 0, 0, np.empty(PIECE, np.uint32)
  for column, form in zip(raw, lookups, strict=True):
    with (folder / form.file).open('wb') as file:
      for piece in column.pieces(0, column.examples):
        unknown += table.map(piece, out[: len(piece)])
        real += int(np.count_nonzero(piece != END))
        file.write(out[: len(piece)].astype(form.stored).data)
        tick(len(piece))
  for form in (*columns, *lookups):
    if form is not None:
      sync(folder / form.file)
  return {'rows': len(table.frequency), 'unknown': unknown, 'lookups': real}


def _saturated(counts: np.ndarray) -> UInt32[np.ndarray, ' _']:
  return np.minimum(counts, np.iinfo(np.uint32).max).astype(np.uint32)


@kernel
@no_type_check
def _count_ids(
  ids: np.ndarray, first: int, table: np.ndarray, totals: np.ndarray
) -> int:
  """Adds i64 ids, from place `first` on, to their counts in the table.

  Args:
    ids: i64[n]. `END` is not counted.
    first: place to start at.
    table: i64[slots, 2], pairs of ids and counts.
    totals: i64[3], in and out: unique ids in the table, ids that were
      `MISSING`, and all ids counted.

  Returns:
    n, or the place of the first id for which the table is too full.
  """
  most = len(table) * 5 // 8
  for i in range(first, len(ids)):
    if ids[i] == END:
      continue
    if ids[i] == MISSING:  # often the most frequent id, so it is not looked up
      totals[1] += 1
    else:
      slot = slot_of(table, ids[i])
      if table[slot, 1] == 0:
        if totals[0] == most:  # this id is counted in the next call
          return i
        table[slot, 0] = ids[i]
        totals[0] += 1
      table[slot, 1] += 1
    totals[2] += 1
  return len(ids)


@kernel
@no_type_check
def _count_buckets(
  ids: np.ndarray, salt: np.uint64, counts: np.ndarray
) -> None:
  """Adds i64 ids but `END` to the u32 counts of their buckets."""
  buckets = np.uint64(len(counts))
  for i in range(len(ids)):
    if ids[i] != END:
      counts[bucket(np.uint64(ids[i]), salt, buckets)] += 1


@kernel
@no_type_check
def _find_bucket_rows(
  ids: np.ndarray,
  salt: np.uint64,
  ranks: np.ndarray,
  end: int,
  rows: np.ndarray,
) -> int:
  """Fills u32 rows of i64[n] ids, `end` for `END`. Returns how many are 0."""
  buckets, unknown = np.uint64(len(ranks)), 0
  for i in range(len(ids)):
    if ids[i] == END:
      rows[i] = end
      continue
    rows[i] = ranks[bucket(np.uint64(ids[i]), salt, buckets)]
    unknown += rows[i] == 0
  return unknown
