"""Reads many records of a file at once, past the page cache.

On Linux one call submits a whole queue of reads, and another waits for them, so
no thread sleeps and wakes for each. On other systems, and if the page cache
cannot be bypassed, threads read in parallel.
"""

from concurrent import futures
import ctypes
import os
import pathlib
import platform
import sys
from typing import Any, NamedTuple

import numba
from numba.core import types
import numpy as np

from slip_serve.errors import ServeError
from slip_serve.layout import ALIGNMENT

DEPTH = 1024
"""Reads that are submitted at a time."""
_THREADS = 32
_PIECE = 1 << 20  # bytes that a scan reads at a time
_READS = 16  # that are worth a thread of their own
_SLOTS = 128  # reads that a thread does in a row
_PATIENCE = 1 << 16  # interrupted waits in a row

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)
# Of the C library, by name, so that compiled kernels can be cached.
_call_pread: Any = types.ExternalFunction(
  'pread', types.intp(types.intc, types.uintp, types.uintp, types.int64)
)
_call: Any = types.ExternalFunction('syscall', types.intp(*[types.intp] * 6))


class _Calls(NamedTuple):
  """Numbers of Linux's system calls for queues of reads."""

  setup: int
  destroy: int
  submit: int
  wait: int


_CALLS = {
  'x86_64': _Calls(206, 207, 209, 208),
  'aarch64': _Calls(0, 1, 2, 4),
}


class _Queue(NamedTuple):
  """Memory for Q reads. One thread at a time may use it."""

  number: int
  """Of Linux's queue, from `io_setup`. 0: there is none."""
  submit: int
  """Number of the system call `io_submit`."""
  wait: int
  """Number of the system call `io_getevents`."""
  slots: np.ndarray
  """u8[Q, bytes], each aligned, and with room for one read."""
  requests: np.ndarray
  """i64[Q, 10]: 8 numbers for the system (`struct iocb`), the bytes that were
  read, and the end of the request's places in `at`."""


class RecordFile:
  """The records of one file. Threads may share it.

  Attributes:
    record: bytes of a record.
  """

  def __init__(
    self,
    path: pathlib.Path,
    record: int,
    depth: int = DEPTH,
    direct: bool = True,
  ) -> None:
    """Opens the file.

    Args:
      path: the file. Its size is a multiple of `ALIGNMENT`.
      record: bytes of a record.
      depth: reads under way at a time. Threads have at most 32.
      direct: whether to bypass the page cache, if possible.

    Raises:
      ServeError: the file cannot be opened.
    """
    self.record, self._path, self._depth = record, path, depth
    try:
      self._file, self._aligned = _opened(path, direct)
    except OSError as error:
      raise ServeError(
        'rows need a file that can be read',
        got=error.strerror,
        where=str(path),
        hint='check that it exists, and that you may read it',
      ) from error
    # It starts its threads when they are needed.
    self._pool = futures.ThreadPoolExecutor(
      min(depth, _THREADS), 'slip-serve-rows'
    )
    # Reads through the page cache would block when they are submitted.
    self._queued = self._aligned > 1 and _has_queues()
    self._idle: list[_Queue] = []

  def read(self, rows: np.ndarray, at: np.ndarray, out: np.ndarray) -> int:
    """Reads some records.

    Args:
      rows: i64[U], rows of the file.
      at: i64[m], places in `rows` of the rows to read, by ascending row.
      out: u8[U, record], is filled at these places.

    Returns:
      The bytes read from the disk.

    Raises:
      ServeError: the disk cannot be read.
    """
    queue = self._take()
    count = min(self._depth, _THREADS, len(at) // _READS)
    if queue.number or count < 2:
      return self._read(rows, at, out, queue)
    self._idle.append(queue)
    parts = np.array_split(at, count)
    jobs = [self._pool.submit(self._read, rows, part, out) for part in parts]
    futures.wait(jobs)  # none may write to `out` when this is over
    return sum(job.result() for job in jobs)

  def _read(
    self,
    rows: np.ndarray,
    at: np.ndarray,
    out: np.ndarray,
    queue: _Queue | None = None,
  ) -> int:
    if queue is None:
      queue = self._take()
    count = _read(self._file, rows, at, self._aligned, *queue, out)
    if count == -1 - len(at):  # its reads may yet write to its slots
      _end(queue)
      self._queued = False
      return self._read(rows, at, out)
    self._idle.append(queue)
    return self._checked(count, rows, at)

  def _take(self) -> _Queue:
    """Returns memory for reads, with a queue of the system if it gives one."""
    try:
      queue = self._idle.pop()
      if queue.number or not self._queued:
        return queue
    except IndexError:  # other threads use all of them
      pass
    numbers, depth = (0, 0, 0), _SLOTS
    if self._queued:
      number, calls = ctypes.c_ulong(0), _CALLS[platform.machine()]
      if not _syscall(calls.setup, self._depth, ctypes.addressof(number)):
        numbers, depth = (number.value, calls.submit, calls.wait), self._depth
    # One read has all blocks of a record, wherever in a block it begins.
    most = (-(-self.record // self._aligned) + 1) * self._aligned
    slots = _aligned(depth * most).reshape(depth, most)
    return _Queue(*numbers, slots, np.zeros((depth, 10), np.int64))

  def scan(self, rows: np.ndarray, out: np.ndarray) -> None:
    """Reads many records in one pass over the file.

    Args:
      rows: i64[U], ascending.
      out: u8[U, record], is filled with their records.

    Raises:
      ServeError: the disk cannot be read.
    """
    step = ALIGNMENT * max(1, _PIECE // (ALIGNMENT * self.record))  # rows
    buffer, at = _aligned(step * self.record), 0
    while at < len(rows):
      first = int(rows[at]) // step * step
      end = int(np.searchsorted(rows, first + step))
      some = rows[at:end] - first
      try:
        count = os.preadv(self._file, [buffer.data], first * self.record)
      except OSError:
        count = 0
      readable = count // self.record
      if some[-1] >= readable:
        bad = at + int(np.searchsorted(some, readable))
        self._checked(-1 - bad, rows, np.arange(len(rows)))
      records = buffer[: readable * self.record].reshape(readable, -1)
      np.take(records, some, axis=0, out=out[at:end], mode='clip')
      at = end

  def _checked(self, count: int, rows: np.ndarray, at: np.ndarray) -> int:
    if count < 0:
      raise ServeError(
        'every row must be readable',
        got=f'none of row {int(rows[at[-1 - count]])}',
        where=str(self._path),
        hint='check that its disk is mounted and has no errors',
      )
    return count

  def close(self) -> None:
    """Releases files and threads, if no thread reads. Idempotent."""
    self._pool.shutdown()
    self._queued = False
    while self._idle:
      _end(self._idle.pop())
    if self._file >= 0:
      os.close(self._file)
    self._file = -1


def _opened(path: pathlib.Path, direct: bool) -> tuple[int, int]:
  """Returns the file's descriptor, and the alignment of its reads."""
  if direct and hasattr(os, 'O_DIRECT'):
    for aligned in 512, ALIGNMENT:
      file = -1
      try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        if os.preadv(file, [_aligned(aligned).data], 0) == aligned:
          return file, aligned
      except FileNotFoundError:
        raise
      except OSError:  # the file system, or the disk, has no such reads
        pass
      if file >= 0:
        os.close(file)
  file = os.open(path, os.O_RDONLY)
  if hasattr(os, 'posix_fadvise'):  # no reading ahead
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
  return file, 1


def _has_queues() -> bool:
  known = platform.machine() in _CALLS and sys.maxsize > 1 << 32
  return known and sys.platform == 'linux'


def _end(queue: _Queue) -> None:
  """Waits for the queue's reads, and releases it."""
  if queue.number:
    _syscall(_CALLS[platform.machine()].destroy, queue.number)


def _syscall(number: int, *arguments: int) -> int:
  call = ctypes.CDLL(None).syscall
  call.restype = ctypes.c_long
  return int(call(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)))


def _aligned(nbytes: int) -> np.ndarray:
  """Returns aligned memory u8[nbytes], as direct reads need it."""
  memory = np.empty(nbytes + ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % ALIGNMENT
  return memory[start : start + nbytes]


@_kernel
def _run(
  file: int,
  number: int,
  submit: int,
  wait: int,
  requests: np.ndarray,
  count: int,
) -> bool:
  """Runs the first `count` requests. Returns False if the queue fails."""
  sent = 0
  pointers = np.empty(count, np.int64)
  events = np.empty((count, 4), np.int64)  # `struct io_event`
  for k in range(count):
    pointers[k] = requests.ctypes.data + k * requests.strides[0]
  while number and sent < count:
    more = _call(
      submit, number, count - sent, pointers.ctypes.data + 8 * sent, 0, 0
    )
    if more <= 0:
      break
    sent += more
  for k in range(sent, count):  # reads that no queue took
    requests[k, 8] = _call_pread(
      file, requests[k, 3], requests[k, 4], requests[k, 5]
    )
  tries = 0
  while sent > 0:
    done = _call(wait, number, sent, sent, events.ctypes.data, 0)
    tries += 1
    if done < 0 and tries > _PATIENCE:  # not just interrupted by signals
      return False
    for k in range(done):
      requests[events[k, 0], 8] = events[k, 2]
    sent -= max(done, 0)
  return True


@_kernel
def _read(
  file: int,
  rows: np.ndarray,
  at: np.ndarray,
  aligned: int,
  number: int,
  submit: int,
  wait: int,
  slots: np.ndarray,
  requests: np.ndarray,
  out: np.ndarray,
) -> int:
  """Reads records of a file, and records of one block together.

  Args:
    file: descriptor.
    rows: as in `RecordFile.read`, like `at` and `out`.
    at: i64[m].
    aligned: alignment of offsets and sizes in bytes. With a queue at least 512,
      because other reads would block.
    number: as in `_Queue`, like all others. No read of the queue is under way.
    submit: a system call.
    wait: a system call.
    slots: u8[Q, bytes].
    requests: i64[Q, 10].
    out: u8[U, record].

  Returns:
    The bytes read, or -1 - j if row j of `at` could not be read. -1 - m if the
    queue fails: it must be destroyed before the slots are used again.
  """
  record, total, j = out.shape[1], 0, 0
  while j < len(at):
    n, count = j, 0
    while j < len(at) and count < len(slots):
      begin = rows[at[j]] * record
      first = begin // aligned * aligned
      last = -((-begin - record) // aligned) * aligned
      requests[count, 0] = count
      requests[count, 2] = np.int64(file) << 32  # beside 0, which is to read
      requests[count, 3] = slots.ctypes.data + count * slots.shape[1]
      requests[count, 4], requests[count, 5] = last - first, first
      while j < len(at) and rows[at[j]] * record + record <= last:
        j += 1
      requests[count, 8], requests[count, 9] = -1, j
      count += 1
    if not _run(file, number, submit, wait, requests, count):
      return -1 - len(at)
    for k in range(count):
      if requests[k, 8] != requests[k, 4]:
        return -1 - n
      total += requests[k, 8]
      while n < requests[k, 9]:
        start = rows[at[n]] * record - requests[k, 5]
        for byte in range(record):
          out[at[n], byte] = slots[k, start + byte]
        n += 1
  return total
