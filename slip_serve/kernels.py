"""Kernels that find, cache and read rows. All of them release the GIL."""

from typing import Any

import numba
from numba.core import types
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)
# Of the C library, by name, so that compiled kernels can be cached.
_call_pread: Any = types.ExternalFunction(
  'pread', types.intp(types.intc, types.uintp, types.uintp, types.int64)
)
_call: Any = types.ExternalFunction('syscall', types.intp(*[types.intp] * 6))
WORK = 16
"""Numbers that `read` keeps for each read of a queue."""
_PATIENCE = 1 << 16  # interrupted waits in a row
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@_kernel
def unique(
  lookups: np.ndarray, scratch: np.ndarray, rows: np.ndarray, out: np.ndarray
) -> int:
  """Finds the unique rows of lookups, in the order of their first use.

  Args:
    lookups: i64[n], -1 is padding; others are at least 0.
    scratch: i32[m], m a power of two above n.
    rows: out, i64[n]. Its first U places are the unique rows.
    out: out, i32[n], the place of each lookup's row, -1 for padding.

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
  """Returns the set of the cache that a row may be in."""
  hashed = (np.uint64(row) * _GOLDEN) >> np.uint64(32)
  return np.int64((hashed * np.uint64(sets)) >> np.uint64(32))  # type: ignore[return-value]


@_kernel
def seat(
  rows: np.ndarray, tags: np.ndarray, used: np.ndarray, ways: int
) -> None:
  """Gives rows places in an empty cache, as if query 1 had used them.

  Args:
    rows: i64[n], unique. The first ones are replaced last.
    tags: as in `probe`, all -1.
    used: as in `probe`, all 0.
    ways: places that a row may be in.
  """
  sets = len(tags) // ways
  for i in range(len(rows)):
    place = _set_of(rows[i], sets) * ways
    end = place + ways
    while place < end and tags[place] >= 0:
      place += 1
    if place < end:
      tags[place], used[place] = rows[i], 1


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
  """Copies the records that are in the cache.

  Args:
    rows: i64[U].
    tags: i64[S * ways], the row in each place, -1 for none.
    used: i64[S * ways], the query that last used it, 0 for none.
    now: number of this query, from 1 on.
    ways: places that a row may be in.
    cached: u8[S * ways, record].
    out: out, u8[U, record].
    missing: out, i64[U], places in `rows` of rows that are not there.

  Returns:
    The number of missing rows.
  """
  count, sets = 0, len(tags) // ways
  # Two loops, because neither then branches on a value from memory, and many
  # cache misses are under way at once.
  for i in range(len(rows)):
    first, place = _set_of(rows[i], sets) * ways, -1
    for other in range(first, first + ways):
      place = other if tags[other] == rows[i] else place
    missing[i] = place
  for i in range(len(rows)):
    place = missing[i]
    if place < 0:
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
  """Puts records in the places of the least recently used ones.

  Another query may have put the same records there before.

  Args:
    rows: i64[U].
    missing: i64[m], places in `rows` of the records to put.
    tags: as in `probe`.
    used: as in `probe`. Places used by this query or a later one stay.
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
      if used[other] <= used[place]:  # of equal ones the last
        place = other
    here = False
    for other in range(first, first + ways):
      here = here or tags[other] == rows[i]
    if here or used[place] >= now:
      continue
    tags[place], used[place] = rows[i], now
    for k in range(records.shape[1]):
      cached[place, k] = records[i, k]


@_kernel
def _plan(
  file: int,
  rows: np.ndarray,
  at: np.ndarray,
  j: int,
  aligned: int,
  record: int,
  slots: np.ndarray,
  requests: np.ndarray,
) -> tuple[int, int]:
  """Makes a request per slot for the rows from place `j` of `at` on.

  A request, i64[11], is 8 numbers for the system (`struct iocb`), the bytes
  that were read, and the first and last place in `at`, exclusive.

  Returns:
    The number of requests, and the first place in `at` that has none.
  """
  count = 0
  while j < len(at) and count < len(slots):
    begin = rows[at[j]] * record
    first = begin // aligned * aligned
    last = -((-begin - record) // aligned) * aligned
    request = requests[count]
    request[0], request[1] = count, 0
    request[2] = np.int64(file) << 32  # beside the number of reading, 0
    request[3], request[4] = slots[count].ctypes.data, last - first
    request[5], request[6], request[7] = first, 0, 0
    request[8], request[9] = -1, j
    while j < len(at) and rows[at[j]] * record + record <= last:
      j += 1
    request[10] = j
    count += 1
  return count, j


@_kernel
def _run(
  file: int,
  queue: int,
  submit: int,
  wait: int,
  requests: np.ndarray,
  events: np.ndarray,
  pointers: np.ndarray,
) -> bool:
  """Runs requests, and sets the bytes that each read. False: the queue fails.

  Events i64[Q, 4] (`struct io_event`) and pointers i64[Q] are scratch.
  """
  sent, count = 0, len(requests)
  for k in range(count):
    pointers[k] = requests[k].ctypes.data
  while queue and sent < count:
    address = pointers[sent:].ctypes.data
    more = _call(submit, queue, count - sent, address, 0, 0)
    if more <= 0:
      break
    sent += more
  for request in requests[sent:]:  # reads that no queue took
    request[8] = _call_pread(file, request[3], request[4], request[5])
  left, tries = sent, 0
  while left > 0:
    done = _call(wait, queue, left, left, events.ctypes.data, 0)
    tries += 1
    if done < 0 and tries > _PATIENCE:  # not just interrupted by signals
      return False
    for k in range(done):
      requests[events[k, 0], 8] = events[k, 2]
    left -= max(done, 0)
  return True


@_kernel
def read(
  file: int,
  rows: np.ndarray,
  at: np.ndarray,
  aligned: int,
  queue: int,
  submit: int,
  wait: int,
  slots: np.ndarray,
  work: np.ndarray,
  out: np.ndarray,
) -> int:
  """Reads records of a file, and records of one block together.

  Args:
    file: descriptor.
    rows: i64[U].
    at: i64[m], places in `rows` of the rows to read, by ascending row.
    aligned: alignment of offsets and sizes in bytes. With a queue at least 512,
      because other reads would block.
    queue: a queue of Linux for Q reads, from `io_setup`. No read is under way.
      0: there is none, and reads follow each other.
    submit: the number of the system call `io_submit`.
    wait: the number of `io_getevents`.
    slots: u8[Q, bytes], each aligned, and with room for one read.
    work: i64[WORK * Q], scratch that the system writes to as well.
    out: out, u8[U, record].

  Returns:
    The bytes read, or -1 - j if row j of `at` could not be read. -1 - m if the
    queue fails: it must be destroyed before the slots are used again.
  """
  record, depth, total, j = out.shape[1], len(slots), 0, 0
  requests = work[: 11 * depth].reshape(depth, 11)
  events = work[11 * depth : 15 * depth].reshape(depth, 4)
  pointers = work[15 * depth :]
  while j < len(at):
    count, j = _plan(file, rows, at, j, aligned, record, slots, requests)
    planned = requests[:count]
    if not _run(file, queue, submit, wait, planned, events, pointers):
      return -1 - len(at)
    for k in range(count):
      request = planned[k]
      if request[8] != request[4]:
        return -1 - request[9]
      total += request[8]
      for n in range(request[9], request[10]):
        start = rows[at[n]] * record - request[5]
        for byte in range(record):
          out[at[n], byte] = slots[k, start + byte]
  return total
