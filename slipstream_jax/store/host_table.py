"""Tables in host memory: their first values, gather, scatter, unique rows.

A host table is a `RowBlock` of all N rows. It is updated in place, as it is too
large to copy.
"""

from collections.abc import Iterator, Sequence
import functools
import math
from typing import NamedTuple, NoReturn, SupportsInt

from jaxtyping import Float
import ml_dtypes  # noqa: F401  so that numpy knows bfloat16
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.store import kernels
from slipstream_jax.store.base import FirstRows
from slipstream_jax.tables import Constant, Group, offsets, TableSet, Uniform
from slipstream_jax.types import (
  HotRows,
  Inverse,
  Lookups,
  RowBlock,
  RowIds,
  Unique,
)


class Untrained(NamedTuple):
  """The values of all rows before their first step.

  A row's values depend only on the seed, the row's number and the sizes of the
  tables before its own.
  """

  tables: TableSet
  row_states: Sequence[Sequence[np.ndarray]]
  """Per group, the state of one row, one array per leaf."""
  seed: int

  def first(self, group: int) -> FirstRows:
    """Returns the first rows of a group, for a store."""
    return FirstRows(
      self.tables.groups[group].num_rows,
      functools.partial(self.rows, group),
      functools.partial(self.block, group),
      self.tables.groups[group].owner,
    )

  def blocks(self) -> Iterator[RowBlock]:
    """Yields a new host table [N, ...] of each group."""
    return map(self.block, range(len(self.tables.groups)))

  def block(self, group: int) -> RowBlock:
    """Returns all rows of a group in its dtype, with their state."""
    chosen = self.tables.groups[group]
    rows = np.empty((chosen.num_rows, chosen.dim), chosen.dtype)
    start = 0
    for name in chosen.tables:
      size = self.tables.tables[name].rows
      self._fill(name, rows[start : start + size])
      start += size
    return self._with_state(group, rows)

  def rows(self, group: int, rows: RowIds) -> RowBlock:
    """Returns some rows of a group, numbered within it, as in `block`."""
    chosen = self.tables.groups[group]
    out = np.empty((len(rows), chosen.dim), chosen.dtype)
    sizes = [self.tables.tables[name].rows for name in chosen.tables]
    starts = offsets(sizes)
    table = np.searchsorted(starts, rows, side='right') - 1
    for number, name in enumerate(chosen.tables):
      at = np.flatnonzero(table == number)
      if len(at):
        part = np.empty((len(at), chosen.dim), chosen.dtype)
        self._fill(name, part, rows[at] - starts[number])
        out[at] = part
    return self._with_state(group, out)

  def _with_state(self, group: int, rows: np.ndarray) -> RowBlock:
    leaves = self.row_states[group]
    return RowBlock(rows, tuple(_repeat(leaf, len(rows)) for leaf in leaves))

  def _fill(
    self, name: str, out: np.ndarray, rows: RowIds | None = None
  ) -> None:
    """Fills `out` with the given rows of a table, or with all of them."""
    table = self.tables.tables[name]
    match table.initializer or Uniform(table.vocabulary_size**-0.5):
      case Uniform(scale):
        words = np.random.SeedSequence(self.seed).generate_state(1, np.uint64)
        first = _first_elements(self.tables)[name]
        _fill_uniform(out, first, np.uint64(words[0]), scale, rows)
      case Constant(value):
        out[:] = value


def _first_elements(tables: TableSet) -> dict[str, int]:
  """Returns the number of each table's first element, all tables end to end.

  It ignores groups, so that a table's first values do not depend on its
  optimizer.
  """
  elements = [t.rows * t.embedding_dim for t in tables.tables.values()]
  return dict(zip(tables.tables, offsets(elements).tolist(), strict=False))


# rows computed in f32 at a time before rounding to half precision
_FILLED_ROWS = 1 << 16


def _fill_uniform(
  out: np.ndarray,
  first: int,
  salt: np.uint64,
  scale: float,
  rows: RowIds | None,
) -> None:
  dim = out.shape[1]
  is_f32 = out.dtype == np.float32
  step = max(1, len(out)) if is_f32 else _FILLED_ROWS
  for at in range(0, len(out), step):
    part = out[at : at + step]
    exact = part if is_f32 else np.empty(part.shape, np.float32)
    if rows is None:
      kernels.fill_uniform(exact, np.uint64(first + at * dim), salt, scale)
    else:
      some = rows[at : at + len(part)].astype(np.uint64)
      firsts = np.uint64(first) + some * np.uint64(dim)
      kernels.fill_uniform_rows(exact, firsts, salt, scale)
    if not is_f32:
      part[:] = exact


def _repeat(leaf: np.ndarray, times: int) -> np.ndarray:
  if not leaf.any():
    # the system allocates no page yet
    return np.zeros((times, *leaf.shape), leaf.dtype)
  return np.full((times, *leaf.shape), leaf)


def unique_rows(
  lookups: Lookups, num_rows: int, hot: HotRows | None = None
) -> Unique:
  """Returns the unique rows of a batch's lookups and each lookup's place there.

  Args:
    lookups: global rows of an integer type. -1 is padding. `admit` has checked
      the batches that train. Here only values that would write out of bounds or
      look like padding are refused.
    num_rows: N, rows of all tables.
    hot: the hot rows, to mark which of the rows are hot.

  Raises:
    UserError: a lookup is not a row of any table.
  """
  arrays = _allocate(lookups.size)
  flat = np.ascontiguousarray(lookups).reshape(-1)
  count = kernels.unique_rows(flat, num_rows, *arrays)
  if count < 0:
    _refuse(lookups, np.unravel_index(-1 - count, lookups.shape), num_rows)
  return _to_unique(arrays, count, lookups.shape, hot)


def unique_rows_of(
  lookups: Lookups, group: Group, hot: HotRows | None = None
) -> Unique:
  """Returns the unique rows of one group, and its lookups [B, K_g].

  Args:
    lookups: as in `unique_rows`, of all groups.
    group: selects the columns.
    hot: the group's hot rows, numbered within it.

  Raises:
    UserError: a lookup is not a row of the group's tables.
  """
  flat = np.ascontiguousarray(lookups).reshape(len(lookups), -1)
  shape = len(flat), len(group.columns)
  if shape == flat.shape:  # a single group has global numbers
    return unique_rows(flat, group.num_rows, hot)
  arrays = _allocate(math.prod(shape))
  columns, shifts = (np.array(x) for x in (group.columns, group.shifts))
  count = kernels.unique_rows_of(flat, columns, shifts, group.num_rows, *arrays)
  if count < 0:
    example, column = divmod(-1 - count, len(columns))
    _refuse(flat, (example, columns[column]), group.num_rows, shifts[column])
  return _to_unique(arrays, count, shape, hot)


def _allocate(size: int) -> tuple[np.ndarray, ...]:
  """Returns the arrays that the kernels fill: scratch, rows, inverse."""
  # Two to four places per lookup keep the hash table's probes short.
  scratch = 1 << max(4, (2 * size - 1).bit_length())
  sizes = (scratch, np.int32), (size, np.int64), (size, np.int32)
  return tuple(np.empty(*one) for one in sizes)


def _to_unique(
  arrays: tuple[np.ndarray, ...],
  count: int,
  shape: tuple[int, ...],
  hot: HotRows | None,
) -> Unique:
  *_, rows, inverse = arrays
  rows = rows[:count]
  hot_index = None if hot is None else hot.places(rows)
  return Unique(rows, inverse.reshape(shape), hot_index)


def _refuse(
  lookups: np.ndarray,
  at: Sequence[SupportsInt],
  num_rows: int,
  first: int = 0,
) -> NoReturn:
  raise UserError(
    f'lookups must be global rows in [{first}, {first + num_rows}) or -1',
    got=int(lookups[tuple(int(i) for i in at)]),
    where=f'Batch.lookups{[int(i) for i in at]}',
    hint='make them with TableSet.lookups(ids)',
  )


def row_weights(
  inverse: Inverse, weights: Float[np.ndarray, ' B'], size: int
) -> Float[np.ndarray, ' P']:
  """Returns for each unique row the mean weight of the examples that use it.

  Args:
    inverse: of the batch's lookups.
    weights: weights of the examples in the loss. Examples of weight 0 count as
      absent.
    size: P, at least the number of unique rows. Rows without an example of
      positive weight get 1.
  """
  out = np.zeros(size, np.float32)
  # Without weights other than 0 and 1 all means are 1.
  if ((weights == 1) | (weights == 0)).all():
    out[:] = 1
    return out
  flat = inverse.reshape(len(weights), math.prod(inverse.shape[1:]))
  kernels.mean_weights(flat, weights, np.zeros_like(out), out)
  return out


def row_bytes(table: RowBlock) -> int:
  """Returns the bytes that one row and its state take on the link."""
  leaves = (table.rows, *table.state)
  return sum(x.dtype.itemsize * math.prod(x.shape[1:]) for x in leaves)
