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
from slipstream_jax.hashing import first_slot, GOLDEN, kernel, mix, prefetch
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
_AHEAD = 4  # examples whose lookups are read into the cache

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
      [(start, end) for name, start, end in ranges if name in self.draws],
      dict(zip(chosen.tables, sizes, strict=True)),
      lambda rows: np.searchsorted(ends, rows, side='right') - 1,
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
  """Returns the unique rows of lookups of one table, and each lookup's place.

  Args:
    lookups: rows of an integer type. -1 is padding.
    num_rows: N, rows of the table.
    hot: the hot rows, to mark which of the rows are hot.

  Raises:
    UserError: a lookup is not a row of the table.
  """
  flat = np.ascontiguousarray(lookups).reshape(1, -1)
  whole = np.array([[0, 0, flat.size, 0, num_rows, 0]])
  unique = _find(flat, whole, lookups.shape, hot)
  if isinstance(unique, int):
    _refuse(lookups, np.unravel_index(unique, lookups.shape), 0, num_rows)
  return unique


def unique_rows_of(
  lookups: Lookups, group: Group, hot: HotRows | None = None
) -> Unique:
  """Returns the unique rows of one group, and its lookups [B, K_g].

  Args:
    lookups: global rows of all groups, of an integer type. -1 is padding.
    group: selects the columns.
    hot: the group's hot rows, numbered within it.

  Raises:
    UserError: a lookup is not a row of its feature's table.
  """
  flat = np.ascontiguousarray(lookups).reshape(len(lookups), -1)
  runs = _runs(group)
  unique = _find(flat, runs, (len(flat), len(group.columns)), hot)
  if isinstance(unique, int):
    example, at = divmod(unique, len(group.columns))
    run = runs[(runs[:, 1] <= at) & (at < runs[:, 1] + runs[:, 2])][0]
    first, end = (run[3:5] + run[5]).tolist()
    _refuse(flat, (example, group.columns[at]), first, end)
  return unique


@functools.cache
def _runs(group: Group) -> Int[np.ndarray, 'F 6']:
  """Returns the features of a group by table, as `_find_unique` reads them."""
  features = zip(group.spans, group.ranges, strict=True)
  runs = [
    (group.columns[start], start, end - start, *rows, group.shifts[start])
    for (start, end), rows in sorted(features, key=lambda pair: pair[1][0])
  ]
  return np.array(runs)


def _find(
  lookups: np.ndarray,
  runs: Int[np.ndarray, 'F 6'],
  shape: tuple[int, ...],
  hot: HotRows | None,
) -> Unique | int:
  """Returns the unique rows, or the number of a lookup that is no row."""
  size = math.prod(shape)
  of_tables: dict[int, int] = {}
  for first, length in runs[:, [3, 2]].tolist():
    of_tables[first] = of_tables.get(first, 0) + length * len(lookups)
  # Two to four places per lookup keep the hash table's probes short.
  most = max(of_tables.values())
  scratch = np.full(1 << max(4, (2 * most - 1).bit_length()), -1, np.int32)
  rows, inverse = np.empty(size, np.int64), np.empty(shape, np.int32)
  counts = np.empty(size, np.int32)
  flat = inverse.reshape(len(lookups), -1)
  count = _find_unique(lookups, runs, scratch, rows, flat, counts)
  if count < 0:
    return -1 - count
  rows = rows[:count]
  places = None if hot is None else hot.places(rows)
  return Unique(rows, inverse, counts[:count], places)


def _refuse(
  lookups: np.ndarray, at: Sequence[SupportsInt], first: int, end: int
) -> NoReturn:
  raise UserError(
    f'lookups must be global rows in [{first}, {end}) or -1',
    got=int(lookups[tuple(int(i) for i in at)]),
    where=f'Batch.lookups{[int(i) for i in at]}',
    hint='make them with TableSet.lookups(ids)',
  )


@kernel
@no_type_check
def _find_unique(
  lookups: np.ndarray,
  runs: np.ndarray,
  scratch: np.ndarray,
  rows: np.ndarray,
  inverse: np.ndarray,
  counts: np.ndarray,
) -> int:
  """Finds unique rows, table by table, each table's in order of first use.

  What one table needs fits the processor's caches. Lookups are read example by
  example, also where several features share a table.

  Args:
    lookups: global rows, integer[n, K]. -1 is padding.
    runs: i64[F, 6], features, those of a table one after another: first column
      in `lookups` and in `inverse`, columns, range of the table's rows in the
      group, and what to subtract from a global row.
    scratch: i32[m], filled with -1. m is a power of two above the lookups of
      any table.
    rows: out, i64[n * K_g], whose first U places receive the unique rows.
    inverse: out, i32[n, K_g], position in `rows`, -1 for padding.
    counts: out, i32[n * K_g], whose first U places receive the rows' lookups.

  Returns:
    U, the number of unique rows, or -1 - i if lookup i of n * K_g is no row.
  """
  count = start = 0
  while start < len(runs) and count >= 0:
    end = start + 1
    while end < len(runs) and runs[end, 3] == runs[start, 3]:
      end += 1
    own = runs[start:end]
    # The table is as large as its lookups need, so that it stays in the cache.
    size = np.int64(2)
    while size < 2 * len(lookups) * own[:, 2].sum():
      size *= 2
    # A slot for each row of the table leaves nothing to compare.
    if own[0, 4] - own[0, 3] <= size:
      count = _find_in_table(
        lookups, own, scratch, None, rows, inverse, counts, count
      )
    else:
      count = _find_in_table(
        lookups, own, scratch, size - 1, rows, inverse, counts, count
      )
    start = end
  return count


@kernel
@no_type_check
def _find_in_table(
  lookups: np.ndarray,
  runs: np.ndarray,
  scratch: np.ndarray,
  mask: np.int64 | None,
  rows: np.ndarray,
  inverse: np.ndarray,
  counts: np.ndarray,
  base: int,
) -> int:
  """Finds a table's unique rows, and returns as `_find_unique`.

  The hash table has only positions in `rows`, not the rows themselves. That
  takes a third of the processor's cache and half the time. Positions below
  `base` are of earlier tables, whose slots count as free.
  """
  count = base
  first, end, shift = runs[0, 3], runs[0, 4], runs[0, 5]
  width, columns = lookups.shape[1], inverse.shape[1]
  flat, places = lookups.reshape(-1), inverse.reshape(-1)
  ahead = flat.ctypes.data + flat.itemsize * _AHEAD * width
  ahead_there = places.ctypes.data + 4 * _AHEAD * columns
  # A single column is read in one loop, which takes half the time.
  single = len(runs) == 1 and runs[0, 2] == 1
  by_column = np.uint64(width if single else 1)
  by_place = np.uint64(columns if single else 1)
  for example in range(1 if single else len(lookups)):
    for run in range(len(runs)):
      begin = example * width + runs[run, 0]
      there = example * columns + runs[run, 1]
      for line in range(0, runs[run, 2], 16):
        prefetch(ahead + flat.itemsize * (begin + line))
        prefetch(ahead_there + 4 * (there + line))
      # Unsigned, so that no index is taken from the end.
      at, to = np.uint64(begin) - by_column, np.uint64(there) - by_place
      for _ in range(len(lookups) if single else runs[run, 2]):
        at, to = at + by_column, to + by_place
        row = np.int64(flat[at])
        if row < 0 and row == -1:
          places[to] = -1
          continue
        row -= shift
        if row < first or row >= end:
          return -1 - np.int64(to)
        if mask is None:
          slot = np.uint64(row - first)
          u = np.int64(scratch[slot])
        else:
          slot = first_slot(row, mask)
          u = np.int64(scratch[np.uint64(slot)])
          while u >= base and rows[np.uint64(u)] != row:
            slot = (slot + 1) & mask
            u = np.int64(scratch[np.uint64(slot)])
        if u < base:
          u = count
          scratch[np.uint64(slot)], rows[np.uint64(u)] = u, row
          counts[np.uint64(u)] = 0
          count += 1
        places[to] = u
        counts[np.uint64(u)] += 1
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
