"""Embedding tables as pure data: names, sizes, offsets, initialisers.

Tables of one dim share a global row space, `row = offset[table] + local id`,
so that everything below this file handles one long array of rows.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import math
import numbers
from typing import get_args, Literal, NamedTuple

import numpy as np

from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.types import Array, Lookups

Pooling = Literal['sum', 'mean', 'none']
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


class Uniform(NamedTuple):
  """Initialiser: each element is uniform in [-scale, scale)."""

  scale: float


class Constant(NamedTuple):
  """Initialiser: each element is `value`."""

  value: float


Initializer = Uniform | Constant

ROW_DTYPES = ('float32', 'bfloat16', 'float16')


class Table(NamedTuple):
  """One embedding table."""

  name: str
  """Unique within its set."""
  rows: int
  """R, at least 1."""
  pooling: Pooling = 'sum'
  """How a multi-hot feature's rows become one embedding; with 'none' they do
  not: the lookups are a sequence, and the model sees each step's row."""
  init: Initializer | None = None
  """None stands for Uniform(1/sqrt(R)), as DLRM does (arXiv 1906.00091)."""
  length: int = 1
  """L, steps of a sequence, padding included. Other features do not need it."""


@dataclasses.dataclass(frozen=True)
class TableSet:
  """Tables of one dim that share a global row space; one per feature.

  Attributes:
    tables: the tables, in the order of the batch's features; kept as a
      tuple. If one is of sequences, all must be, and of one length.
    dim: D, length of a row.
    dtype: of the rows wherever they are kept. Steps compute new rows in f32;
      half precision is then rounded up or down by chance.

  Raises:
    UserError: no table, two of one name, a size that is no whole number from
      1 on, another dtype, or a pooling or initialiser that there is not.
  """

  tables: Sequence[Table]
  dim: int
  dtype: str = 'float32'

  def __post_init__(self) -> None:
    # A list would do but for its hash, by which recipes are told apart.
    object.__setattr__(self, 'tables', tuple(self.tables))
    for table in self:
      _check_table(table)
    _check_sequence(self.tables)
    names = [table.name for table in self.tables]
    if not names or len(set(names)) < len(names):
      raise UserError(
        'a table set needs tables of unique names',
        got=names,
        where='TableSet.tables',
        hint='name every table once',
      )
    _check_size(self.dim, 'dim')
    if self.dtype not in ROW_DTYPES:
      raise UserError(
        f'the dtype of rows must be one of {", ".join(ROW_DTYPES)}',
        got=repr(self.dtype),
        where='TableSet.dtype',
        hint='pick one of them',
      )

  def __iter__(self) -> Iterator[Table]:
    return iter(self.tables)

  def __len__(self) -> int:
    return len(self.tables)

  @functools.cached_property
  def offsets(self) -> np.ndarray:
    """First global row of each table, and N at the end: i64[F + 1]."""
    return offsets([table.rows for table in self.tables])

  @property
  def num_rows(self) -> int:
    """N, rows of all tables together."""
    return int(self.offsets[-1])

  @property
  def poolings(self) -> tuple[Pooling, ...]:
    """Pooling of each feature."""
    return tuple(table.pooling for table in self.tables)

  @property
  def sequence_length(self) -> int | None:
    """L, where every example is a sequence; else None."""
    first = self.tables[0]
    return first.length if first.pooling == 'none' else None

  def lookups(self, ids: Array) -> Lookups:
    """Local ids [B, F] or [B, F, L] to global rows; -1 (padding) stays.

    Raises:
      UserError: an id outside its table or that is no whole number, or
        another number of features.
    """
    return global_rows(ids, [table.rows for table in self.tables])


def tables_of(
  names: Sequence[str], rows: Sequence[int], sequence_length: int | None = None
) -> tuple[Table, ...]:
  """Tables of a data set; of sequences if they have a `sequence_length`, L."""
  if sequence_length is None:
    return tuple(map(Table, names, rows))
  return tuple(
    Table(name, count, 'none', length=sequence_length)
    for name, count in zip(names, rows, strict=True)
  )


def offsets(rows: Sequence[int]) -> np.ndarray:
  """First global row of each table of `rows[t]` rows; N last: i64[F + 1]."""
  return np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])


def row_dtype(num_rows: int) -> type[np.integer]:
  """Smallest of i32 and i64 that numbers `num_rows` rows."""
  return np.int32 if num_rows <= np.iinfo(np.int32).max else np.int64


def global_rows(ids: Array, rows: Sequence[int]) -> Lookups:
  """Local ids [B, F] or [B, F, L] of tables of `rows[t]` rows to global rows.

  Raises:
    UserError: an id outside its table or that is no whole number, or another
      number of features.
  """
  ids = as_array(ids, 'lookups')
  if ids.ndim not in (2, 3) or ids.shape[1] != len(rows):
    raise UserError(
      f'ids must be [B, {len(rows)}] or [B, {len(rows)}, L]',
      got=ids.shape,
      where='lookups',
      hint='give one column of ids per table',
    )
  check_integers(ids, 'lookups')
  shape = (1, len(rows)) + (1,) * (ids.ndim - 2)
  bad = (ids < -1) | (ids >= np.reshape(rows, shape))
  if bad.any():
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    raise UserError(
      f'ids of table {at[1]} must be in [0, {rows[at[1]]}) or -1',
      got=int(ids[at]),
      where=f'lookups{list(at)}',
      hint='map unknown ids to a row of the table first',
    )
  starts = offsets(rows)
  # By all rows and not by the largest id: batches of one type, or a step would
  # be compiled for each.
  dtype = row_dtype(int(starts[-1]))
  first = starts[:-1].astype(dtype).reshape(shape)
  return np.where(ids < 0, dtype(-1), ids.astype(dtype) + first)


def as_array(values: Array, where: str) -> np.ndarray:
  """Any array, or lists nested evenly, as numpy's.

  Raises:
    UserError: lists that are not even, or values that are masked.
  """
  # `np.asarray` would drop the mask, and train on what lies beneath it.
  if isinstance(values, np.ma.MaskedArray):
    raise UserError(
      'values must not be masked',
      got='a masked array',
      where=where,
      hint='fill what is missing, e.g. values.filled(0)',
    )
  try:
    return np.asarray(values)
  except (TypeError, ValueError) as error:
    raise UserError(
      'values must be an array, or lists that make one',
      got=str(error),
      where=where,
      hint='give rows of equal length',
    ) from error


def check_integers(lookups: np.ndarray, where: str) -> None:
  """Looks at the type of lookups: there is no row 0.5, nor NaN or True.

  Raises:
    UserError: it is of another type.
  """
  if lookups.dtype.kind not in 'iu':
    raise UserError(
      'lookups must be of an integer type',
      got=lookups.dtype,
      where=where,
      hint='number the rows of each table from 0 on',
    )


def _check_table(table: Table) -> None:
  _check_size(table.rows, table.name)
  if table.pooling not in POOLINGS:
    raise UserError(
      f'pooling must be one of {", ".join(POOLINGS)}',
      got=repr(table.pooling),
      where=f'Table {table.name}, pooling',
      hint="pick one of them; the model may pool the rows of 'none' itself",
    )
  match table.init:
    case None:
      return
    case Uniform(number) | Constant(number):
      good = isinstance(number, numbers.Real) and math.isfinite(number)
    case _:
      good = False
  if not good:
    raise UserError(
      'an initialiser must be Uniform(scale), Constant(value) or None, with a'
      ' finite number',
      got=repr(table.init),
      where=f'Table {table.name}, init',
      hint='leave it out for Uniform(1/sqrt(rows))',
    )


def _check_size(size: object, where: str) -> None:
  if not is_whole(size, 1):
    raise UserError(
      'a size must be a whole number of at least 1',
      got=repr(size),
      where=f'TableSet, {where}',
      hint='count the rows of that table again',
    )


def _check_sequence(tables: Sequence[Table]) -> None:
  lengths = {t.length for t in tables if t.pooling == 'none'}
  uneven = len(lengths) > 1 or any(t.pooling != 'none' for t in tables)
  if lengths and (uneven or not is_whole(min(lengths), 1)):
    raise UserError(
      "if one table has pooling 'none', all must, with one length above 0",
      got=[(t.name, t.pooling, t.length) for t in tables],
      where='TableSet.tables',
      hint='pool all tables or none, and pad their lists to one length',
    )
