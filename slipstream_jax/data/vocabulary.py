"""Maps from a data set's ids to the rows of its tables, by hash or by count.

Both kinds are plain values made from the training part only, so that the
held-out part meets ids it has never seen, as a served model does. An id is
any i64 but `MISSING`, which stands for a missing one and gets a row as well.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxtyping import Int, Integer, UInt
import numpy as np
import polars as pl

from slipstream_jax.columns.ids import MISSING
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.hashing import bucket, salt
from slipstream_jax.tables import row_dtype
from slipstream_jax.types import Lookups

Ids = Int[np.ndarray, ' _']
"""Ids of one feature; i64. A column of them has one per example."""


class Hashed(NamedTuple):
  """Rows by hash: needs no pass over the data, lets ids share rows."""

  tables: int
  """F, number of tables."""
  table_rows: int
  """R, the same for every table."""

  @property
  def rows(self) -> tuple[int, ...]:
    """R of each table."""
    return (self.table_rows,) * self.tables

  def rows_of(self, table: int, ids: Ids) -> Int[np.ndarray, ' _']:
    """Rows of ids of one table, by its number; i32[n]."""
    size = np.uint64(self.table_rows)
    rows = bucket(ids.astype(np.uint64), salt(table), size)
    return rows.astype(row_dtype(self.table_rows))

  def map(self, columns: Iterable[Ids]) -> Lookups:
    """Rows of ids, one column of ids per table; i32[n, F], local to tables."""
    rows = [self.rows_of(*column) for column in enumerate(columns)]
    return np.stack(rows, axis=1)


class Counted(NamedTuple):
  """A row per frequent id, the most frequent first; row 0 for all others."""

  ids: tuple[Ids, ...]
  """Per table, the ids of rows 1 to R - 1, in that order; i64[R - 1]."""

  @property
  def rows(self) -> tuple[int, ...]:
    """R of each table, with the row of unknown ids."""
    return tuple(len(ids) + 1 for ids in self.ids)

  def rows_of(self, table: int, ids: Ids) -> Int[np.ndarray, ' _']:
    """Rows of ids of one table, by its number; i32[n]."""
    return _places(self.ids[table], ids)

  def map(self, columns: Iterable[Ids]) -> Lookups:
    """Rows of ids, one column of ids per table; i32[n, F], local to tables."""
    pairs = zip(self.ids, columns, strict=True)
    return np.stack([_places(known, ids) for known, ids in pairs], axis=1)


class RankedBuckets(NamedTuple):
  """Rows of hashed ids, the most frequent buckets first."""

  ranks: tuple[UInt[np.ndarray, ' buckets'], ...]
  """Row of each bucket of each table; 0 where training used none."""

  @property
  def rows(self) -> tuple[int, ...]:
    """R of each table, with the row of unknown ids."""
    return tuple(int(ranks.max(initial=0)) + 1 for ranks in self.ranks)

  def rows_of(self, table: int, ids: Ids) -> Ids:
    """Rows of ids of one table, by its number; i32[n]."""
    ranks = self.ranks[table]
    buckets = Hashed(len(self.ranks), len(ranks)).rows_of(table, ids)
    return ranks[buckets].astype(np.int32)

  def map(self, columns: Iterable[Ids]) -> Lookups:
    """Rows of ids, one column of ids per table; i32[n, F], local to tables."""
    rows = [self.rows_of(*column) for column in enumerate(columns)]
    return np.stack(rows, axis=1)


class Indexed:
  """A `Counted` in the order of ids, to be asked again and again."""

  def __init__(self, counted: Counted) -> None:
    """Sorts the ids: 16 bytes of each."""
    self.rows = counted.rows
    self._orders = [np.argsort(ids) for ids in counted.ids]
    pairs = zip(counted.ids, self._orders, strict=True)
    self._sorted = [ids[order] for ids, order in pairs]

  def rows_of(self, table: int, ids: Ids) -> Int[np.ndarray, ' _']:
    """Rows of ids of one table, by its number; i32[n]."""
    known, order = self._sorted[table], self._orders[table]
    if not len(known):
      return np.zeros(len(ids), np.int32)
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return np.where(known[at] == ids, order[at] + 1, 0).astype(np.int32)


Vocabulary = Hashed | Counted | RankedBuckets | Indexed
"""Which row of its table stands for an id."""

Fit = Callable[[Iterable[Ids]], Vocabulary]
"""Columns of ids of the training part, one per table, to a vocabulary."""


def count(
  columns: Iterable[Ids], min_count: int = 1, *, missing: bool = True
) -> Counted:
  """A vocabulary of the ids seen at least `min_count` times, as `ranked`.

  Args:
    columns: ids of the training part, one column per table.
    min_count: uses that earn an id a row; rarer ids share row 0.
    missing: ids may be missing, so every table has a row for that, however
      rare it is.
  """
  ids = []
  for column in columns:
    seen, counts = np.unique(column, return_counts=True)
    if missing and MISSING not in seen:
      seen, counts = np.append(seen, MISSING), np.append(counts, 0)
    ids.append(ranked(seen, counts, min_count)[0])
  return Counted(tuple(ids))


def ranked(
  ids: Ids, counts: Int[np.ndarray, ' _'], min_count: int = 1
) -> tuple[Ids, Int[np.ndarray, ' _']]:
  """Ids that earn a row and their counts, in the order of their rows.

  The rule of every vocabulary, packed or not: the most frequent id comes first,
  those of one count by value. `MISSING`, where it is among the ids, stays,
  however rare it is.

  Args:
    ids: each once, in any order.
    counts: uses of each in the training part.
    min_count: uses that earn an id a row.
  """
  kept = (counts >= min_count) | (ids == MISSING)
  ids, counts = ids[kept], counts[kept]
  # By value first: `by_count` keeps that order among equal counts, so it does
  # not matter in which one the ids were found.
  order = np.argsort(ids)
  order = order[by_count(counts[order])]
  return ids[order], counts[order]


def by_count(counts: Integer[np.ndarray, ' _']) -> Int[np.ndarray, ' _']:
  """Order that puts the largest counts first, and leaves equal ones as is.

  Counts from 2**32 on are equal.
  """
  # With all bits flipped, the largest count is the smallest key.
  keys = ~np.minimum(counts, np.iinfo(np.uint32).max).astype(np.uint32)
  # Numpy sorts 16 bits in linear time, if it is asked for a stable sort. The
  # lower half comes first: where the upper is equal, its order remains.
  order = np.argsort(keys.astype(np.uint16), kind='stable')
  high = (keys >> np.uint32(16)).astype(np.uint16)[order]
  if len(high) and high.min() < high.max():  # else it would change nothing
    order = order[np.argsort(high, kind='stable')]
  return order


def fit_by(
  tables: int,
  *,
  min_count: int = 1,
  hash_rows: int | None = None,
  missing: bool = True,
) -> Fit:
  """How a data set's arguments say to make its vocabulary.

  Args:
    tables: F, number of tables.
    min_count: uses in the training part that earn an id a row of its own.
    hash_rows: R of every table, for hashed ids; None counts ids instead.
    missing: ids may be missing.

  Returns:
    A function from the training part's columns of ids to the vocabulary.

  Raises:
    UserError: a number below 1, or both given.
  """
  for name, value in ('min_count', min_count), ('hash_rows', hash_rows):
    left_out = value is None and name == 'hash_rows'
    # True is a whole number to Python, and numpy makes no array of it.
    if not left_out and (isinstance(value, bool) or not is_whole(value, 1)):
      raise UserError(
        f'{name} must be at least 1',
        got=repr(value),
        where=f'vocabulary, {name}',
        hint='set it to 1 or more',
      )
  if hash_rows is not None and hash_rows >= 1 << 31:
    raise UserError(
      'hash_rows must be below 2**31',
      got=hash_rows,
      where='vocabulary, hash_rows',
      hint='hash to fewer rows',
    )
  if hash_rows is None:
    return lambda columns: count(columns, min_count, missing=missing)
  if min_count > 1:
    raise UserError(
      'hashed ids are not counted, so only one of min_count and hash_rows'
      ' may be set',
      got=f'min_count {min_count} and hash_rows {hash_rows}',
      where='vocabulary, hash_rows',
      hint='leave one of them out',
    )
  return lambda columns: Hashed(tables, hash_rows)


def _places(known: Ids, ids: Ids) -> Int[np.ndarray, ' _']:
  """1 + place of each of `ids` in `known`, or 0; i32[len(ids)]."""
  # Three times as fast as a binary search once ids number in the millions.
  rows = np.arange(1, len(known) + 1, dtype=np.int32)
  return (
    pl.Series(ids)
    .replace_strict(known, rows, default=0, return_dtype=pl.Int32)
    .to_numpy()
  )
