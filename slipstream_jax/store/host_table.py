"""Tables in host memory: their first values, unique rows, weights of rows.

Kernels are for loops that numpy cannot do at memory speed. All release the GIL.
Except for those that fill tables, their cost does not depend on the size of a
table.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import math
from typing import NamedTuple, no_type_check, NoReturn, SupportsInt

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import first_slot, GOLDEN, kernel, mix
from slipstream_jax.initializers import (
  Constant,
  GivenRows,
  Uniform,
  VectorsById,
  write_rounded,
)
from slipstream_jax.store.base import FirstRows
from slipstream_jax.tables import Group, offsets, TableSet
from slipstream_jax.types import (
  HotRows,
  Inverse,
  Lookups,
  RowBlock,
  RowIds,
  Unique,
)

_FILLED_ROWS = 1 << 16  # rows filled at a time

Draw = Callable[[int, RowIds], Float[np.ndarray, '_U _D']]
"""Draws rows of a table, f32[U, D], from a seed and their numbers."""


class UntrainedRows(NamedTuple):
  """The values of all rows before their first step.

  A row's values depend only on the seed, the row's number and the sizes of the
  tables before its own.
  """

  tables: TableSet
  row_states: Sequence[Sequence[np.ndarray]]
  """Per group, the state of one row, one array per leaf."""
  seed: int
  draws: Mapping[str, Draw] = {}
  """By table, for those that a user's function initializes."""

  def first(self, group: int) -> FirstRows:
    """Returns the first rows of a group, for a store."""
    chosen = self.tables.groups[group]
    sizes = [self.tables.tables[name].rows for name in chosen.tables]
    ends = offsets(sizes).tolist()
    ranges = zip(chosen.tables, ends[:-1], ends[1:], strict=True)
    return FirstRows(
      chosen.num_rows,
      functools.partial(self.rows, group),
      functools.partial(self.block, group),
      chosen.owner,
      [(start, end) for name, start, end in ranges if name in self.draws],
    )

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
    """Fills `out` with some rows of a table. None: with all."""
    how = self.tables.tables[name].initializer
    if isinstance(how, Constant):
      out[:] = how.value
      return
    fill = functools.partial(self._fill_uniform, name)
    if isinstance(how, GivenRows):
      fill = functools.partial(self._fill_given, name, how)
    elif name in self.draws:
      fill = functools.partial(self._fill_drawn, name)
    for at in range(0, len(out), _FILLED_ROWS):
      part = out[at : at + _FILLED_ROWS]
      if rows is None:
        some = np.arange(at, at + len(part))
      else:
        some = rows[at : at + _FILLED_ROWS]
      fill(part, some)

  def _fill_uniform(self, name: str, out: np.ndarray, rows: RowIds) -> None:
    table = self.tables.tables[name]
    how, default = table.initializer, table.vocabulary_size**-0.5
    scale = how.scale if isinstance(how, Uniform) else default
    seed = np.random.SeedSequence(self.seed).generate_state(1, np.uint64)[0]
    first = np.uint64(_first_elements(self.tables)[name])
    if out.dtype == np.float32:
      _fill_rows(out, rows, first, seed, scale)
    else:  # half precision is rounded from f32
      exact = np.empty(out.shape, np.float32)
      _fill_rows(exact, rows, first, seed, scale)
      out[:] = exact

  def _fill_given(
    self, name: str, how: GivenRows, out: np.ndarray, rows: RowIds
  ) -> None:
    there = rows < len(how.array)
    if there.all():
      how.write(rows, out)
      return
    # The row of unknown ids, if the array has none for it.
    self._fill_uniform(name, out, rows)
    known = np.empty((int(there.sum()), out.shape[1]), out.dtype)
    how.write(rows[there], known)
    out[there] = known

  def _fill_drawn(self, name: str, out: np.ndarray, rows: RowIds) -> None:
    values = self.draws[name](self.seed, rows)
    write_rounded(values, out, f'Table {name!r}, initializer')


Vectors = tuple[Int[np.ndarray, ' _n'], np.ndarray]
"""Rows of a group, ascending, and the vectors that they start from, [n, D] of
the group's dtype."""


def vectors_of_rows(
  tables: TableSet, rows: RowIds, numbers: Int[np.ndarray, ' U']
) -> tuple[Vectors, ...]:
  """Returns per group the rows that start from a vector of their id.

  Args:
    tables: all tables.
    rows: global rows, ascending.
    numbers: of each row's vector, as in `Batch.fresh_vectors`.
  """
  tables_of_rows = np.searchsorted(tables.offsets, rows, side='right') - 1
  names, result = [*tables.tables], []
  parts = zip(tables.groups, tables.in_groups(rows), strict=True)
  for group, (at, own) in parts:
    at, own = at[numbers[at] >= 0], own[numbers[at] >= 0]
    vectors = np.empty((len(at), group.dim), group.dtype)
    for number in np.unique(tables_of_rows[at]):
      here = np.flatnonzero(tables_of_rows[at] == number)
      how = tables.tables[names[number]].initializer
      assert isinstance(how, VectorsById)
      part = np.empty((len(here), group.dim), group.dtype)
      write_rounded(how.vectors[numbers[at[here]]], part, how.where)
      vectors[here] = part
    order = np.argsort(own)
    result.append((own[order], vectors[order]))
  return tuple(result)


def _first_elements(tables: TableSet) -> dict[str, int]:
  """Returns the number of each table's first element, all tables end to end.

  It ignores groups, so that a table's first values do not depend on its
  optimizer.
  """
  elements = [t.rows * t.embedding_dim for t in tables.tables.values()]
  return dict(zip(tables.tables, offsets(elements).tolist(), strict=False))


@kernel
@no_type_check
def _fill_rows(
  out: np.ndarray,
  rows: np.ndarray,
  first: np.uint64,
  seed: np.uint64,
  scale: float,
) -> None:
  """Fills rows with values uniform in [-scale, scale), a hash of their place.

  Args:
    out: f32[n, D].
    rows: i64[n], numbers of the rows.
    first: number of the table's first element among those of all tables.
    seed: any 64 bits.
    scale: half the width of the interval.
  """
  unit = 1.0 / (1 << 23)  # 24 bits, the precision of f32, to [0, 2)
  for i in range(len(out)):
    row = out[i]
    place = first + np.uint64(rows[i] * len(row))
    for d in range(len(row)):
      bits = mix(seed + (place + np.uint64(d) + np.uint64(1)) * GOLDEN)
      row[d] = (np.float64(bits >> np.uint64(40)) * unit - 1.0) * scale


def _repeat(leaf: np.ndarray, times: int) -> np.ndarray:
  if not leaf.any():  # the system allocates no page for zeros yet
    return np.zeros((times, *leaf.shape), leaf.dtype)
  return np.full((times, *leaf.shape), leaf)


def unique_rows(
  lookups: Lookups, num_rows: int, hot: HotRows | None = None
) -> Unique:
  """Returns the unique rows of a batch's lookups and each lookup's place there.

  Args:
    lookups: global rows of an integer type. -1 is padding.
    num_rows: N, rows of all tables.
    hot: the hot rows, to mark which of the rows are hot.

  Raises:
    UserError: a lookup is not a row of any table.
  """
  flat = np.ascontiguousarray(lookups).reshape(1, -1)
  unique = _find(flat, None, None, num_rows, lookups.shape, hot)
  if isinstance(unique, int):
    _refuse(lookups, np.unravel_index(unique, lookups.shape), num_rows)
  return unique


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
  columns, shifts = (np.array(x) for x in (group.columns, group.shifts))
  unique = _find(flat, columns, shifts, group.num_rows, shape, hot)
  if isinstance(unique, int):
    example, column = divmod(unique, len(columns))
    _refuse(flat, (example, columns[column]), group.num_rows, shifts[column])
  return unique


def _find(
  lookups: np.ndarray,
  columns: np.ndarray | None,
  shifts: np.ndarray | None,
  num_rows: int,
  shape: tuple[int, ...],
  hot: HotRows | None,
) -> Unique | int:
  """Returns the unique rows, or the number of a lookup that is no row."""
  size = math.prod(shape)
  # Two to four places per lookup keep the hash table's probes short.
  scratch = np.empty(1 << max(4, (2 * size - 1).bit_length()), np.int32)
  rows, inverse = np.empty(size, np.int64), np.empty(shape, np.int32)
  counts, flat = np.empty(size, np.int32), inverse.reshape(-1)
  count = _find_unique(
    lookups, columns, shifts, num_rows, scratch, rows, flat, counts
  )
  if count < 0:
    return -1 - count
  rows = rows[:count]
  places = None if hot is None else hot.places(rows)
  return Unique(rows, inverse, counts[:count], places)


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


@kernel
@no_type_check
def _find_unique(
  lookups: np.ndarray,
  columns: np.ndarray | None,
  shifts: np.ndarray | None,
  num_rows: int,
  scratch: np.ndarray,
  rows: np.ndarray,
  inverse: np.ndarray,
  counts: np.ndarray,
) -> int:
  """Finds the unique rows of some columns, in the order of their first use.

  The hash table has only positions in `rows`, not the rows themselves. That
  takes a third of the processor's cache and half the time.

  Args:
    lookups: global rows, integer[n, K]. -1 is padding.
    columns: i64[k], the columns to read. None: all. None is known when this is
      compiled, and then takes a quarter less time.
    shifts: i64[k], what to subtract per column. None: nothing.
    num_rows: exclusive bound of the rows.
    scratch: i32[m], m a power of two above n * k.
    rows: out, i64[n * k], whose first U places receive the unique rows.
    inverse: out, i32[n * k], position in `rows`, -1 for padding.
    counts: out, i32[n * k], whose first U places receive the rows' lookups.

  Returns:
    U, the number of unique rows, or -1 - i if lookup i of n * k is no row.
  """
  scratch[:] = -1
  mask, flat = np.int64(len(scratch) - 1), lookups.reshape(-1)
  count, example, k = 0, 0, -1
  for i in range(len(inverse)):
    if columns is None:
      row = np.int64(flat[i])
    else:
      k += 1
      if k == len(columns):
        example, k = example + 1, 0
      row = np.int64(lookups[example, columns[k]])
    if row < 0:
      if row != -1:
        return -1 - i
      inverse[i] = -1
      continue
    if shifts is not None:
      row -= shifts[k]
    slot = first_slot(row, mask)
    u = scratch[slot]
    while u >= 0 and rows[u] != row:
      slot = (slot + 1) & mask
      u = scratch[slot]
    if u < 0:
      # Checked once per unique row instead of once per lookup.
      if row < 0 or row >= num_rows:
        return -1 - i
      scratch[slot] = u = count
      rows[count] = row
      count += 1
    inverse[i] = u
  # In a loop of its own: the first one then has more of the registers.
  counts[:count] = 0
  for u in inverse:
    if u >= 0:
      counts[u] += 1
  return count


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
  _mean_weights(flat, weights, np.zeros_like(out), out)
  return out


@kernel
@no_type_check
def _mean_weights(
  inverse: np.ndarray, weights: np.ndarray, sums: np.ndarray, out: np.ndarray
) -> None:
  """Computes out[u], the mean positive weight of the lookups of row u.

  Args:
    inverse: i32[n, K], places of the lookups of n examples. -1 is padding.
    weights: f32[n].
    sums: scratch, f32[P], zeros.
    out: f32[P], zeros. Rows without a lookup of positive weight become 1.
  """
  for i in range(len(weights)):
    if not weights[i] > 0:
      continue
    for k in range(inverse.shape[1]):
      place = inverse[i, k]
      if place >= 0:
        sums[place] += weights[i]
        out[place] += 1
  for u in range(len(out)):
    out[u] = sums[u] / out[u] if out[u] > 0 else 1


def row_bytes(table: RowBlock) -> int:
  """Returns the bytes that one row and its state take on the link."""
  leaves = (table.rows, *table.state)
  return sum(x.dtype.itemsize * math.prod(x.shape[1:]) for x in leaves)
