"""Loops over records: copies in memory, and blocks of a file.

Records are bytes, so that one kernel serves every dtype. Files are read and
written a block at a time, by `pread` and `pwrite` of the C library, which are
called without the GIL: as many reads are under way as there are threads. This
file stays out of jaxtyping's import hook, which numba cannot compile through.
"""

from typing import Any

import numba
from numba import types
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)

# By name and not by address, so that what is compiled can be kept on disk.
_signature = types.intp(types.int32, types.uintp, types.uintp, types.int64)
_pread: Any = types.ExternalFunction('pread', _signature)
_pwrite: Any = types.ExternalFunction('pwrite', _signature)


@_kernel
def take(
  records: np.ndarray, at: np.ndarray, start: int, out: np.ndarray
) -> None:
  """out[i] = the bytes from `start` on of record at[i].

  Args:
    records: u8[C, W].
    at: i64[n]; where it is below 0, out[i] stays.
    start: of a leaf in a record.
    out: u8[P, w], P >= n.
  """
  for i in range(len(at)):
    record = at[i]
    if record >= 0:
      for k in range(out.shape[1]):
        out[i, k] = records[record, start + k]


@_kernel
def put(
  records: np.ndarray, at: np.ndarray, start: int, values: np.ndarray
) -> None:
  """The inverse: record at[i] gets values[i]; none where that is below 0."""
  for i in range(len(at)):
    record = at[i]
    if record >= 0:
      for k in range(values.shape[1]):
        records[record, start + k] = values[i, k]


@_kernel
def has(bits: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
  """out[i] = bit rows[i] of the u8[N / 8]."""
  for i in range(len(rows)):
    row = rows[i]
    out[i] = (bits[row >> 3] >> np.uint8(row & 7)) & 1


@_kernel
def mark(bits: np.ndarray, rows: np.ndarray) -> None:
  """Sets the bits of some rows; for one thread at a time."""
  for row in rows:
    bits[row >> 3] |= np.uint8(1 << (row & 7))


@_kernel
def read(
  fd: int,
  rows: np.ndarray,
  stride: int,
  out: np.ndarray,
  block: np.ndarray,
  first: int,
) -> int:
  """Reads records, each block once for all rows in it that follow each other.

  Args:
    fd: of the file; record r lies at r * stride.
    rows: i64[n]; best ascending, as a block is read again for others.
    stride: bytes from one record to the next; divides the block, or is it.
    out: u8[n, W], gets the records; W is at most the stride.
    block: scratch, u8[bytes of a block].
    first: position in `rows` to begin at.

  Returns:
    The position up to which all are read: n, or that of a row whose block
    cannot be read whole.
  """
  size = len(block)
  i = first
  while i < len(rows):
    start = rows[i] * stride // size * size
    if _pread(fd, block.ctypes.data, size, start) != size:
      return i
    while i < len(rows):
      at = rows[i] * stride - start
      if not 0 <= at < size:
        break
      for k in range(out.shape[1]):
        out[i, k] = block[at + k]
      i += 1
  return i


@_kernel
def write(
  fd: int,
  rows: np.ndarray,
  stride: int,
  records: np.ndarray,
  block: np.ndarray,
  bits: np.ndarray,
  first: int,
) -> int:
  """Writes records in whole blocks, in which all others stay as they are.

  A block is read before, unless none of its records was ever written.

  Args:
    fd: of the file.
    rows: i64[n], ascending, each once; no other thread writes to their blocks.
    stride: as of `read`.
    records: u8[n, W].
    block: scratch, u8[bytes of a block].
    bits: u8[N / 8], the records that were written before.
    first: position in `rows` to begin at, the first of its block.

  Returns:
    The position up to which all are written: n, or that of the first row of a
    block that cannot be read or written whole.
  """
  size = len(block)
  i = first
  while i < len(rows):
    start = rows[i] * stride // size * size
    if _is_used(bits, start // stride, size // stride):
      if _pread(fd, block.ctypes.data, size, start) != size:
        return i
    else:
      block[:] = 0
    begin = i
    while i < len(rows):
      at = rows[i] * stride - start
      if not 0 <= at < size:
        break
      for k in range(records.shape[1]):
        block[at + k] = records[i, k]
      i += 1
    if _pwrite(fd, block.ctypes.data, size, start) != size:
      return begin
  return i


@_kernel
def _is_used(bits: np.ndarray, row: int, count: int) -> bool:
  """Whether one of so many records from `row` on was written."""
  last = min(row + count, 8 * len(bits))
  while row < last:
    if not row & 7 and last - row >= 8:
      if bits[row >> 3]:
        return True
      row += 8
    else:
      if (bits[row >> 3] >> np.uint8(row & 7)) & 1:
        return True
      row += 1
  return False
