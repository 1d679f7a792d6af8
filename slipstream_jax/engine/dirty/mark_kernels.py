"""Compiled loops over marks, a bit per row.

The bit of a row is bit `row % 8` of byte `row // 8`.
"""

import numba
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)


@_kernel
def mark(bits: np.ndarray, rows: np.ndarray) -> None:
  """Sets the bits of rows, i64[U], in u8[ceil(N / 8)]."""
  for row in rows:
    bits[row >> 3] |= np.uint8(1 << (row & 7))


@_kernel
def mark_moving(
  bits: np.ndarray, rows: np.ndarray, hot: np.ndarray, still: np.ndarray
) -> None:
  """Sets the bits of those rows that are not frozen.

  Args:
    bits: as in `mark`.
    rows: i64[U].
    hot: integer[U], place of each row among the hot rows. H if it is cold.
    still: bool[H], which hot rows are frozen.
  """
  for u in range(len(rows)):
    place = hot[u]
    if place >= len(still) or not still[place]:
      bits[rows[u] >> 3] |= np.uint8(1 << (rows[u] & 7))


@_kernel
def count(bits: np.ndarray) -> int:
  """Counts the set bits."""
  total = 0
  for byte in bits:
    while byte:
      byte &= np.uint8(byte - np.uint8(1))
      total += 1
  return total


@_kernel
def rows_of(bits: np.ndarray, out: np.ndarray) -> None:
  """Writes the rows whose bits are set, ascending, to i64[`count(bits)`]."""
  at = 0
  for place in range(len(bits)):
    byte = bits[place]
    if byte:
      for bit in range(8):
        if byte & np.uint8(1 << bit):
          out[at] = 8 * place + bit
          at += 1


@_kernel
def next_rows(
  bits: np.ndarray, start: int, end: int, out: np.ndarray
) -> tuple[int, int]:
  """Finds the first rows in [start, end) whose bits are set, as many as fit.

  Args:
    bits: as in `mark`.
    start: first row.
    end: exclusive bound.
    out: i64[n], receives the rows, ascending.

  Returns:
    How many it found, and the row to continue from.
  """
  count, row = 0, start
  while row < end:
    if not row & 7 and bits[row >> 3] == 0:
      row += 8
      continue
    if bits[row >> 3] & np.uint8(1 << (row & 7)):
      if count == len(out):
        return count, row
      out[count] = row
      count += 1
    row += 1
  return count, end


@_kernel
def marked(bits: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
  """Writes for each row, i64[U], whether its bit is set, to bool[U]."""
  for u in range(len(rows)):
    out[u] = bits[rows[u] >> 3] & np.uint8(1 << (rows[u] & 7)) != 0
