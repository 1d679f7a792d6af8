"""Reads many records of a file at once, past the page cache.

On Linux one call hands the disk a whole queue of reads, and another waits for
them: no thread sleeps and wakes for each. Elsewhere, and where files cannot be
read past the page cache, threads read side by side.
"""

from concurrent import futures
import ctypes
import os
import pathlib
import platform
import sys
import threading
from typing import NamedTuple

import numpy as np

from slip_serve import kernels
from slip_serve.errors import ServeError
from slip_serve.layout import ALIGNMENT

DEPTH = 1024
"""Reads that are handed over at a time."""
_THREADS = 32
_PIECE = 1 << 20  # bytes that are read at a time where all are gone through
_READS = 16  # that are worth a thread of their own


class _Calls(NamedTuple):
  """Numbers of Linux's calls for queues of reads."""

  setup: int
  destroy: int
  submit: int
  wait: int


_CALLS = {
  'x86_64': _Calls(206, 207, 209, 208),
  'aarch64': _Calls(0, 1, 2, 4),
}


class _Queue(NamedTuple):
  """A queue of the system's, for one call at a time."""

  number: int
  slots: np.ndarray
  """As of `kernels.read_queued`, and so is `work`."""
  work: np.ndarray


class RecordFile:
  """Records of one file; threads may share it."""

  def __init__(
    self,
    path: pathlib.Path,
    record: int,
    depth: int = DEPTH,
    direct: bool = True,
  ) -> None:
    """Opens the file.

    Args:
      path: of it; its size is a multiple of `ALIGNMENT`.
      record: bytes of one.
      depth: reads that are under way at a time; by threads, at most 32.
      direct: whether to go round the page cache, where that can be.

    Raises:
      ServeError: it cannot be opened.
    """
    self._path, self._record = path, record
    try:
      self._file, self._aligned = _opened(path, direct)
    except OSError as error:
      raise ServeError(
        'rows need a file that can be read',
        got=error.strerror,
        where=str(path),
        hint='look whether it is there, and yours to read',
      ) from error
    self._depth, self._threads = depth, min(depth, _THREADS)
    self._local, self._lock = threading.local(), threading.Lock()
    self._pool: futures.ThreadPoolExecutor | None = None
    # What is not past the page cache would be read while it is handed over.
    self._queued = self._aligned > 1 and _has_queues()
    self._idle: list[_Queue] = []

  def read(self, rows: np.ndarray, at: np.ndarray, out: np.ndarray) -> int:
    """Reads some records.

    Args:
      rows: i64[U], each within the file.
      at: i64[m], places in `rows` of those to read, by rising row.
      out: u8[U, record]; those places get them.

    Returns:
      Bytes that were read.

    Raises:
      ServeError: the disk does not give them.
    """
    queue = self._taken()
    if queue is None:
      return self._by_threads(rows, at, out)
    calls = _CALLS[platform.machine()]
    numbers = queue.number, calls.submit, calls.wait
    how = self._aligned, *numbers, queue.slots, queue.work
    count = kernels.read_queued(self._file, rows, at, *how, out)
    if count == -1 - len(at):  # its reads may yet write to its slots
      _end(queue)
      self._queued = False
      return self._by_threads(rows, at, out)
    self._idle.append(queue)
    return self._checked(count, rows, at)

  def _taken(self) -> _Queue | None:
    """A queue that no other thread has; None where there is none."""
    if not self._queued:
      return None
    try:
      return self._idle.pop()
    except IndexError:
      size = -(-self._record // self._aligned) * self._aligned + self._aligned
      return _queue(self._depth, size)

  def scan(self, rows: np.ndarray, out: np.ndarray) -> None:
    """Reads many records, going through the file from its begin.

    Args:
      rows: i64[U], rising.
      out: u8[U, record], gets them.

    Raises:
      ServeError: the disk does not give them.
    """
    step = ALIGNMENT * max(1, _PIECE // (ALIGNMENT * self._record))  # rows
    buffer, at = _aligned(step * self._record), 0
    while at < len(rows):
      first = int(rows[at]) // step * step
      end = int(np.searchsorted(rows, first + step))
      some = rows[at:end] - first
      try:
        count = os.preadv(self._file, [buffer.data], first * self._record)
      except OSError:
        count = 0
      readable = count // self._record
      if some[-1] >= readable:
        bad = at + int(np.searchsorted(some, readable))
        self._checked(-1 - bad, rows, np.arange(len(rows)))
      records = buffer[: readable * self._record].reshape(readable, -1)
      np.take(records, some, axis=0, out=out[at:end], mode='clip')
      at = end

  def _by_threads(
    self, rows: np.ndarray, at: np.ndarray, out: np.ndarray
  ) -> int:
    parts = np.array_split(at, max(1, min(self._threads, len(at) // _READS)))
    if len(parts) == 1:
      return self._read_part(rows, at, out)
    with self._lock:
      if self._pool is None:
        self._pool = futures.ThreadPoolExecutor(
          self._threads, 'slip-serve-rows'
        )
    jobs = [self._pool.submit(self._read_part, rows, p, out) for p in parts]
    futures.wait(jobs)  # none may write to `out` when this is over
    return sum(job.result() for job in jobs)

  def _read_part(
    self, rows: np.ndarray, at: np.ndarray, out: np.ndarray
  ) -> int:
    buffer = getattr(self._local, 'buffer', None)
    if buffer is None:
      buffer = self._local.buffer = _aligned(self._record + 2 * ALIGNMENT)
    count = kernels.read(self._file, rows, at, self._aligned, buffer, out)
    return self._checked(count, rows, at)

  def _checked(self, count: int, rows: np.ndarray, at: np.ndarray) -> int:
    if count < 0:
      raise ServeError(
        'every row must be readable',
        got=f'none of row {int(rows[at[-1 - count]])}',
        where=str(self._path),
        hint='look whether its disk is there and whole',
      )
    return count

  def close(self) -> None:
    """Gives back files and threads, once nobody reads; may be called again."""
    if self._pool is not None:
      self._pool.shutdown()
    self._queued = False
    while self._idle:
      _end(self._idle.pop())
    if self._file >= 0:
      os.close(self._file)
    self._file = -1


def _opened(path: pathlib.Path, direct: bool) -> tuple[int, int]:
  """The file's descriptor, and what reads must be multiples of."""
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


def _queue(depth: int, size: int) -> _Queue | None:
  """A queue of so many reads of up to `size` bytes; None: there is no more."""
  number = ctypes.c_ulong(0)
  calls = _CALLS[platform.machine()]
  if _syscall(calls.setup, depth, ctypes.addressof(number)):
    return None
  slots = _aligned(depth * size).reshape(depth, size)
  return _Queue(number.value, slots, np.zeros(depth * kernels.WORK, np.int64))


def _end(queue: _Queue) -> None:
  """Waits for its reads, and gives it back."""
  _syscall(_CALLS[platform.machine()].destroy, queue.number)


def _syscall(number: int, *arguments: int) -> int:
  call = ctypes.CDLL(None).syscall
  call.restype = ctypes.c_long
  return int(call(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)))


def _aligned(nbytes: int) -> np.ndarray:
  """Memory u8[nbytes] that reads may go to."""
  memory = np.empty(nbytes + ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % ALIGNMENT
  return memory[start : start + nbytes]
