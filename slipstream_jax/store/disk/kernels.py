"""Loops over records: copies in memory, and blocks of a file.

Records are bytes, so that one kernel serves every dtype. Files are read a block
at a time, and written as many as lie side by side, by `pread` and `pwrite` of
the C library, which are called without the GIL: as many reads are under way as
there are threads. This file stays out of jaxtyping's import hook, which numba
cannot compile through.
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
  """out[i] = what is from `start` on in record at[i].

  Args:
    records: [C, W], bytes or words.
    at: i64[n]; where it is below 0, out[i] stays.
    start: of a leaf in a record.
    out: [P, w], P >= n, as they are.
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
def fill(data: np.ndarray, records: np.ndarray, per: int, size: int) -> None:
  """Lays records u8[n, W] into blocks u8[b * size], `per` into each."""
  for i in range(len(records)):
    start = i // per * size + i % per * records.shape[1]
    for k in range(records.shape[1]):
      data[start + k] = records[i, k]


@_kernel
def read(
  fd: int,
  at: np.ndarray,
  per: int,
  out: np.ndarray,
  to: np.ndarray,
  block: np.ndarray,
  first: int,
) -> int:
  """Reads records, each block once for all in it that follow each other.

  Args:
    fd: of the file.
    at: i64[n], positions: the record p is number p % per of block p // per;
      best ascending, as a block is read again for others.
    per: records of a block.
    out: u8[m, W], gets the records.
    to: i64[n], where to put each.
    block: scratch, u8[bytes of a block].
    first: position in `at` to begin at.

  Returns:
    The position up to which all are read: n, or that of a record whose block
    cannot be read whole.
  """
  size, i = len(block), first
  while i < len(at):
    number = at[i] // per
    if _pread(fd, block.ctypes.data, size, number * size) != size:
      return i
    while i < len(at) and at[i] // per == number:
      start = at[i] % per * out.shape[1]
      for k in range(out.shape[1]):
        out[to[i], k] = block[start + k]
      i += 1
  return i


@_kernel
def write(
  fd: int, blocks: np.ndarray, size: int, data: np.ndarray, first: int
) -> int:
  """Writes blocks, those that follow each other at once.

  Args:
    fd: of the file.
    blocks: i64[b], their numbers.
    size: bytes of a block.
    data: u8[b * size].
    first: position in `blocks` to begin at.

  Returns:
    The position up to which all are written: b, or that of a run of blocks
    that cannot be written whole.
  """
  i = first
  while i < len(blocks):
    end = i + 1
    while end < len(blocks) and blocks[end] == blocks[i] + end - i:
      end += 1
    own = data[i * size :]
    many = (end - i) * size
    if _pwrite(fd, own.ctypes.data, many, blocks[i] * size) != many:
      return i
    i = end
  return i
