"""Maps from a data set's ids to the rows of its tables, by hash or by count.

Both kinds are plain values made from the training part only, so that the
held-out part meets ids it has never seen, as a served model does. An id is
any i64 but `MISSING`, which stands for a missing one and gets a row as well.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, no_type_check

from jaxtyping import Int, Integer, UInt32
import numpy as np
import polars as pl

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel, mix
from slipstream_jax.tables import row_dtype
from slipstream_jax.types import Lookups

MISSING = -1
"""Stands for a missing id."""

Ids = Int[np.ndarray, ' _']
"""Ids of one feature; i64. A column of them has one per input."""


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

  def map(self, columns: Iterable[Ids]) -> Lookups:
    """Rows of ids, one column of ids per table; i32[n, F], local to tables."""
    dtype = row_dtype(self.table_rows)
    size = np.uint64(self.table_rows)
    mapped = [
      bucket(ids.astype(np.uint64), salt(table), size).astype(dtype)
      for table, ids in enumerate(columns)
    ]
    return np.stack(mapped, axis=1)


class Counted(NamedTuple):
  """A row per frequent id, the most frequent first; row 0 for all others."""

  ids: tuple[Ids, ...]
  """Per table, the ids of rows 1 to R - 1, in that order; i64[R - 1]."""

  @property
  def rows(self) -> tuple[int, ...]:
    """R of each table, with the row of unknown ids."""
    return tuple(len(ids) + 1 for ids in self.ids)

  def map(self, columns: Iterable[Ids]) -> Lookups:
    """Rows of ids, one column of ids per table; i32[n, F], local to tables."""
    pairs = zip(self.ids, columns, strict=True)
    return np.stack([_places(known, ids) for known, ids in pairs], axis=1)


Vocabulary = Hashed | Counted
"""Which row of its table stands for an id."""

Fit = Callable[[Iterable[Ids]], Vocabulary]
"""Columns of ids of the training part, one per table, to a vocabulary."""


def count(columns: Iterable[Ids], min_count: int = 1) -> Counted:
  """A vocabulary of the ids seen at least `min_count` times.

  Ids of one count are ordered by value. A missing id has a row of its own in
  every table, in the order of its count too, however rare it is.

  Args:
    columns: ids of the training part, one column per table.
    min_count: uses that earn an id a row; rarer ids share row 0.
  """
  return Counted(tuple(_by_count(ids, min_count) for ids in columns))


def fit_by(
  tables: int, *, min_count: int = 1, hash_rows: int | None = None
) -> Fit:
  """How a data set's arguments say to make its vocabulary.

  Args:
    tables: F, number of tables.
    min_count: uses in the training part that earn an id a row of its own.
    hash_rows: R of every table, for hashed ids; None counts ids instead.

  Returns:
    A function from the training part's columns of ids to the vocabulary.

  Raises:
    UserError: a number below 1, or both given.
  """
  for name, value in ('min_count', min_count), ('hash_rows', hash_rows):
    if value is not None and value < 1:
      raise UserError(
        f'{name} must be at least 1',
        got=value,
        where=f'config.data.{name}',
        mend='set it to 1 or more',
      )
  if hash_rows is not None and hash_rows >= 1 << 31:
    raise UserError(
      'hash_rows must be below 2**31',
      got=hash_rows,
      where='config.data.hash_rows',
      mend='hash to fewer rows',
    )
  if hash_rows is None:
    return lambda columns: count(columns, min_count)
  if min_count > 1:
    raise UserError(
      'hashed ids are not counted, so only one of min_count and hash_rows'
      ' may be set',
      got=f'min_count {min_count} and hash_rows {hash_rows}',
      where='config.data',
      mend='leave one of them out',
    )
  return lambda columns: Hashed(tables, hash_rows)


def _by_count(ids: Ids, min_count: int) -> Ids:
  distinct, counts = np.unique(np.append(ids, MISSING), return_counts=True)
  counts[distinct == MISSING] -= 1  # the one appended, to make it present
  kept = (counts >= min_count) | (distinct == MISSING)
  distinct, counts = distinct[kept], counts[kept]
  return distinct[rank_order(distinct, counts)]


def rank_order(
  ids: Int[np.ndarray, ' n'], counts: Integer[np.ndarray, ' n']
) -> Int[np.ndarray, ' n']:
  """Order of rows 1, 2, ...: the most frequent id first, ties by the id."""
  order = np.argsort(ids)
  keys = ~saturated(counts)[order]
  # Numpy sorts 16 bits at a time in linear time, and few counts need more.
  by_count = np.argsort(keys.astype(np.uint16), kind='stable')
  high = (keys >> np.uint32(16)).astype(np.uint16)[by_count]
  if len(high) and high.min() < high.max():
    by_count = by_count[np.argsort(high, kind='stable')]
  return order[by_count]


def saturated(counts: Integer[np.ndarray, ' n']) -> UInt32[np.ndarray, ' n']:
  """Counts as u32; larger ones stay at its end."""
  return np.minimum(counts, np.iinfo(np.uint32).max).astype(np.uint32)


def _places(known: Ids, ids: Ids) -> Int[np.ndarray, ' _']:
  """1 + place of each of `ids` in `known`, or 0; i32[len(ids)]."""
  # Three times as fast as a binary search once ids number in the millions.
  rows = np.arange(1, len(known) + 1, dtype=np.int32)
  return (
    pl.Series(ids)
    .replace_strict(known, rows, default=0, return_dtype=pl.Int32)
    .to_numpy()
  )


def salt(table: int) -> np.uint64:
  """What makes the hashes of a table's ids its own; tables count from 0."""
  return mix(np.array([table + 1], np.uint64))[0]


@kernel
@no_type_check
def bucket(ids: np.uint64, salt: np.uint64, buckets: np.uint64) -> np.uint64:
  """Bucket of an id, or of an array of them, in [0, buckets); all u64.

  For one salt, distinct ids never collide before the modulus.
  """
  return mix(ids ^ salt) % buckets
