"""Compiled loops over lookups and rows, which numpy cannot do at memory speed.

All kernels release the GIL. Except for those that fill tables, their cost does
not depend on the size of a table.
"""

import numba
import numpy as np

from slipstream_jax.hashing import GOLDEN, mix, place_slot

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)


@_kernel
def unique_rows(
  lookups: np.ndarray,
  num_rows: int,
  scratch: np.ndarray,
  rows: np.ndarray,
  inverse: np.ndarray,
) -> int:
  """Finds the unique rows of `lookups`, in the order of their first use.

  The open-addressing hash table is sized by the batch, so the cost of a lookup
  does not depend on the size of the tables. It holds only positions in `rows`,
  not the rows themselves. That takes a third of the processor's cache and half
  the time.

  Args:
    lookups: global rows, integer[n]. -1 is padding.
    num_rows: N, the exclusive bound of rows.
    scratch: i32[m], m a power of two above n.
    rows: out, i64[n], whose first U places receive the unique rows.
    inverse: out, i32[n], position in `rows`, -1 for padding.

  Returns:
    U, the number of unique rows, or -1 - i if lookup i is out of bounds.
  """
  scratch[:] = -1
  count = 0
  for i in range(len(lookups)):
    row = np.int64(lookups[i])
    if row < 0:
      if row != -1:
        return -1 - i
      inverse[i] = -1
      continue
    place = place_slot(scratch, rows, row)
    if scratch[place] < 0:
      # Checked once per unique row instead of once per lookup.
      if row >= num_rows:
        return -1 - i
      scratch[place] = count
      rows[count] = row
      count += 1
    inverse[i] = scratch[place]
  return count


@_kernel
def unique_rows_of(
  lookups: np.ndarray,
  columns: np.ndarray,
  shifts: np.ndarray,
  num_rows: int,
  scratch: np.ndarray,
  rows: np.ndarray,
  inverse: np.ndarray,
) -> int:
  """Finds the unique rows of some columns, numbered within their group.

  One loop over all columns takes a sixth less time than a loop per column.

  Args:
    lookups: global rows, integer[n, K]. -1 is padding.
    columns: i64[k], the columns to read.
    shifts: i64[k], global row minus row of the group, per column.
    num_rows: rows of the group, the exclusive bound.
    scratch: i32[m], m a power of two above n * k.
    rows: out, i64[n * k].
    inverse: out, i32[n * k].

  Returns:
    As `unique_rows`, where i counts the n * k lookups.
  """
  scratch[:] = -1
  count = i = 0
  for example in range(len(lookups)):
    for k in range(len(columns)):
      row = np.int64(lookups[example, columns[k]])
      if row < 0:
        if row != -1:
          return -1 - i
        inverse[i] = -1
        i += 1
        continue
      row -= shifts[k]
      if row < 0:
        return -1 - i
      place = place_slot(scratch, rows, row)
      if scratch[place] < 0:
        if row >= num_rows:
          return -1 - i
        scratch[place] = count
        rows[count] = row
        count += 1
      inverse[i] = scratch[place]
      i += 1
  return count


@_kernel
def mean_weights(
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


@_kernel
def scatter(table: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
  """Sets table[rows[i]] = values[i] for unique rows.

  It reads nothing from the table, so the processor never waits for a row: many
  stores are under way at a time.

  Args:
    table: [N, K].
    rows: integer[U], unique.
    values: [P, K], P >= U. Only the first U are written.
  """
  for i in range(len(rows)):
    row = rows[i]
    for k in range(table.shape[1]):
      table[row, k] = values[i, k]


@_kernel
def fill_uniform(
  out: np.ndarray, first: np.uint64, seed: np.uint64, scale: float
) -> None:
  """Fills rows with values uniform in [-scale, scale), a hash of their place.

  Args:
    out: f32[R, D].
    first: number of the element out[0, 0] among those of all tables, so that a
      row's values depend only on the seed and its place.
    seed: any 64 bits.
    scale: half the width of the interval.
  """
  for i in range(len(out)):
    _fill_row(out[i], first + np.uint64(i * out.shape[1]), seed, scale)


@_kernel
def fill_uniform_rows(
  out: np.ndarray, firsts: np.ndarray, seed: np.uint64, scale: float
) -> None:
  """Fills rows of any places. `firsts`, u64[n], numbers their element 0."""
  for i in range(len(out)):
    _fill_row(out[i], firsts[i], seed, scale)


@_kernel
def _fill_row(
  row: np.ndarray, first: np.uint64, seed: np.uint64, scale: float
) -> None:
  unit = 1.0 / (1 << 23)  # 24 bits, the precision of f32, to [0, 2)
  for d in range(len(row)):
    bits = mix(seed + (first + np.uint64(d) + np.uint64(1)) * GOLDEN)
    row[d] = (np.float64(bits >> np.uint64(40)) * unit - 1.0) * scale
