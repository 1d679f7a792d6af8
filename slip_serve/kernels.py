"""Loops of serving that numpy has no word for; every one frees the GIL."""

from typing import Any

import numba
from numba.core import types
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)
# By name, so that what is compiled can be kept: of the C library.
_call_pread: Any = types.ExternalFunction(
  'pread', types.intp(types.intc, types.uintp, types.uintp, types.int64)
)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@_kernel
def unique(
  lookups: np.ndarray, scratch: np.ndarray, rows: np.ndarray, out: np.ndarray
) -> int:
  """The unique rows of some lookups, in the order of their first use.

  Args:
    lookups: i64[n], -1 is padding; others are at least 0.
    scratch: i32[m], m a power of two above n.
    rows: out, i64[n]; its first U places get the unique rows.
    out: out, i32[n], of each lookup the place of its row; -1 of padding.

  Returns:
    U.
  """
  scratch[:] = -1
  mask = np.int64(len(scratch) - 1)
  count = 0
  for i in range(len(lookups)):
    row = lookups[i]
    if row < 0:
      out[i] = -1
      continue
    place = np.int64((np.uint64(row) * _GOLDEN) >> np.uint64(32)) & mask
    while scratch[place] >= 0 and rows[scratch[place]] != row:
      place = (place + 1) & mask
    if scratch[place] < 0:
      scratch[place] = count
      rows[count] = row
      count += 1
    out[i] = scratch[place]
  return count


@_kernel
def _set_of(row: int, sets: int) -> int:
  """Which set of the cache a row may be in."""
  hashed = (np.uint64(row) * _GOLDEN) >> np.uint64(32)
  return np.int64((hashed * np.uint64(sets)) >> np.uint64(32))  # type: ignore[return-value]


@_kernel
def probe(
  rows: np.ndarray,
  tags: np.ndarray,
  used: np.ndarray,
  now: int,
  ways: int,
  cached: np.ndarray,
  out: np.ndarray,
  missing: np.ndarray,
) -> int:
  """Copies the records that a cache has.

  Args:
    rows: i64[U].
    tags: i64[S * ways], the row in each place; -1: none.
    used: i64[S * ways], when it was last asked for; 0: never.
    now: number of this query, from 1 on.
    ways: places that a row may be in.
    cached: u8[S * ways, record].
    out: out, u8[U, record].
    missing: out, i64[U], places in `rows` of those that it has not.

  Returns:
    How many are missing.
  """
  count, sets = 0, len(tags) // ways
  for i in range(len(rows)):
    place = _set_of(rows[i], sets) * ways
    end = place + ways
    while place < end and tags[place] != rows[i]:
      place += 1
    if place == end:
      missing[count] = i
      count += 1
    else:
      used[place] = now
      for k in range(out.shape[1]):
        out[i, k] = cached[place, k]
  return count


@_kernel
def put(
  rows: np.ndarray,
  missing: np.ndarray,
  tags: np.ndarray,
  used: np.ndarray,
  now: int,
  ways: int,
  cached: np.ndarray,
  records: np.ndarray,
) -> None:
  """Puts records in the place of those asked for least lately.

  Args:
    rows: i64[U].
    missing: i64[m], places in it of those to put.
    tags: as of `probe`, and so are all others.
    used: what this query has used stays.
    now: number of this query.
    ways: places that a row may be in.
    cached: u8[S * ways, record].
    records: u8[U, record], of all rows.
  """
  sets = len(tags) // ways
  for j in range(len(missing)):
    i = missing[j]
    first = _set_of(rows[i], sets) * ways
    place = first
    for other in range(first + 1, first + ways):
      if used[other] < used[place]:
        place = other
    if used[place] == now:
      continue
    tags[place], used[place] = rows[i], now
    for k in range(records.shape[1]):
      cached[place, k] = records[i, k]


@_kernel
def read(
  file: int,
  rows: np.ndarray,
  at: np.ndarray,
  aligned: int,
  buffer: np.ndarray,
  out: np.ndarray,
) -> int:
  """Reads records of a file, those that lie in one block at once.

  Args:
    file: descriptor.
    rows: i64[U].
    at: i64[m], places in `rows` of those to read, by rising row.
    aligned: bytes that offsets and sizes are multiples of; 1: any.
    buffer: u8, at an address that is such a multiple; at least a record and
      twice that.
    out: out, u8[U, record].

  Returns:
    Bytes read; or -1 - j if the j-th could not be.
  """
  record, total = out.shape[1], 0
  first = last = -1  # what of the file is in the buffer
  for j in range(len(at)):
    i = at[j]
    begin = rows[i] * record
    if begin < first or begin + record > last:
      first = begin // aligned * aligned
      last = -((-begin - record) // aligned) * aligned
      length = last - first
      count: int = _call_pread(file, buffer.ctypes.data, length, first)
      if count != length:
        return -1 - j
      total += length
    for k in range(record):
      out[i, k] = buffer[begin - first + k]
  return total
