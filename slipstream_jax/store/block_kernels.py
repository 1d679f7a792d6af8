"""Compiled loops over records: copies in memory, reads and writes of blocks.

Records are bytes, so that one kernel serves every dtype. Files are read one
block at a time. Adjacent blocks are written together. `pread` and `pwrite` of
the C library are called without the GIL, so every thread has a read under way.
"""

from typing import Any

import numba
from numba import types
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)

# By name rather than by address, so that the compiled code can be cached.
_signature = types.intp(types.int32, types.uintp, types.uintp, types.int64)
_pread: Any = types.ExternalFunction('pread', _signature)
_pwrite: Any = types.ExternalFunction('pwrite', _signature)


@_kernel
def take(
  records: np.ndarray, at: np.ndarray, start: int, out: np.ndarray
) -> None:
  """Copies one leaf of record at[i] to out[i].

  Args:
    records: [C, W], bytes or words.
    at: i64[n]. Where it is below 0, out[i] is not written.
    start: the leaf's offset in a record.
    out: [P, w], P >= n, in the unit of `records`.
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
  """Copies values[i] to one leaf of record at[i]. Skips at[i] below 0."""
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
  """Reads records, with one read for adjacent positions in the same block.

  Args:
    fd: the file descriptor.
    at: i64[n], positions: record p is number p % per of block p // per. Best
      ascending, as an unsorted order reads blocks repeatedly.
    per: records per block.
    out: u8[m, W], receives the records.
    to: i64[n], the place of each record in `out`.
    block: scratch, u8[bytes of a block].
    first: position in `at` to begin at.

  Returns:
    The position up to which all records are read: n, or that of a record whose
    block could not be read whole.
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
  """Writes blocks, adjacent ones with one call.

  Args:
    fd: the file descriptor.
    blocks: i64[b], the blocks' numbers.
    size: bytes of a block.
    data: u8[b * size].
    first: position in `blocks` to begin at.

  Returns:
    The position up to which all blocks are written: b, or the start of a run of
    adjacent blocks that could not be written whole.
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
