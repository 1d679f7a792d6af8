"""Host loops that numpy cannot do at memory speed; every one frees the GIL.

No kernel does work in proportion to the size of a table, but for the ones
that fill it. This file stays out of jaxtyping's import hook, which numba
cannot compile through.
"""

import numba
import numpy as np

from slipstream_jax.hashing import GOLDEN, mix

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

  An open-addressing hash table no larger than the batch needs, so the cost
  of a lookup does not depend on the number of rows of the tables. It holds
  places alone, for rows that are right there beside it: so it takes a third of
  the cache that it would take with rows in it, and half the time.

  Args:
    lookups: global rows, integer[n]; -1 is padding.
    num_rows: N; no row may reach it.
    scratch: i32[m], m a power of two above n.
    rows: out, i64[n]; its first U places receive the unique rows.
    inverse: out, i32[n]; position in `rows`, -1 for padding.

  Returns:
    U, the number of unique rows; or -1 - i if lookup i is out of bounds,
    which would write outside of the table later.
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
    place = _place_of(row, scratch, rows)
    if scratch[place] < 0:
      # Here, where each row comes by once, and not for every lookup.
      if row >= num_rows:
        return -1 - i
      scratch[place] = count
      rows[count] = row
      count += 1
    inverse[i] = scratch[place]
  return count


@_kernel
def _place_of(row: np.int64, scratch: np.ndarray, rows: np.ndarray) -> np.int64:
  """Where the hash table has this row, or would put it."""
  mask = np.int64(len(scratch) - 1)
  # The high half: the low bits of a product know the row's low bits alone.
  hashed = (np.uint64(row) * GOLDEN) >> np.uint64(32)
  place = np.int64(hashed) & mask
  while scratch[place] >= 0 and rows[scratch[place]] != row:
    place = (place + 1) & mask
  return place


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
  """`unique_rows` of some columns of the lookups, in rows of their group.

  A loop of its own, as all columns in one take a sixth less time than column
  by column.

  Args:
    lookups: global rows, integer[n, K]; -1 is padding.
    columns: i64[k], those to look at.
    shifts: i64[k], global row less row of the group, of each of them.
    num_rows: of the group; no row may reach it.
    scratch: as there, with m above n * k.
    rows: out, i64[n * k].
    inverse: out, i32[n * k].

  Returns:
    As there; i counts the n * k lookups.
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
      place = _place_of(row, scratch, rows)
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
  """out[u] = mean weight of the lookups of row u, of weights above 0.

  Args:
    inverse: i32[n, K], places of the lookups of n examples; -1 is padding.
    weights: f32[n].
    sums: scratch, f32[P], zeros.
    out: f32[P], zeros; rows that no example of weight looks up become 1.
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
  """table[rows[i]] = values[i] for unique rows.

  Nothing is read, so that the processor waits for no row: stores wait for
  theirs behind it, many at a time.

  Args:
    table: [N, K].
    rows: integer[U], unique.
    values: [P, K], P >= U; places past the last row are ignored.
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
    first: number of the element out[0, 0] among those of all tables, so that
      a row's values depend on nothing but the seed and its place.
    seed: any 64 bits.
    scale: half the width of the interval.
  """
  for i in range(len(out)):
    _fill_row(out[i], first + np.uint64(i * out.shape[1]), seed, scale)


@_kernel
def fill_uniform_rows(
  out: np.ndarray, firsts: np.ndarray, seed: np.uint64, scale: float
) -> None:
  """The same of rows anywhere; `firsts` is u64[n], of each its element 0."""
  for i in range(len(out)):
    _fill_row(out[i], firsts[i], seed, scale)


@_kernel
def _fill_row(
  row: np.ndarray, first: np.uint64, seed: np.uint64, scale: float
) -> None:
  unit = 1.0 / (1 << 23)  # 24 bits, as many as f32 has, to [0, 2)
  for d in range(len(row)):
    bits = mix(seed + (first + np.uint64(d) + np.uint64(1)) * GOLDEN)
    row[d] = (np.float64(bits >> np.uint64(40)) * unit - 1.0) * scale
