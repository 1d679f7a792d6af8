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
import threading
from typing import NamedTuple

import numpy as np

from slip_serve import kernels
from slip_serve.errors import ServeError
from slip_serve.layout import ALIGNMENT

DEPTH = 1024
"""Reads that are submitted at a time."""
_THREADS = 32
_PIECE = 1 << 20  # bytes that a scan reads at a time
_READS = 16  # that are worth a thread of their own


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
  """Arguments of `kernels.read`. One thread at a time may use them."""

  number: int
  """Of the system's queue. 0: there is none."""
  submit: int
  wait: int
  slots: np.ndarray
  work: np.ndarray


class RecordFile:
  """The records of one file. Threads may share it."""

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
    self._path, self._record = path, record
    try:
      self._file, self._aligned = _opened(path, direct)
    except OSError as error:
      raise ServeError(
        'rows need a file that can be read',
        got=error.strerror,
        where=str(path),
        hint='check that it exists, and that you may read it',
      ) from error
    # One read has all blocks of a record, wherever in a block it begins.
    self._most = (-(-record // self._aligned) + 1) * self._aligned
    self._depth, self._threads = depth, min(depth, _THREADS)
    self._local, self._lock = threading.local(), threading.Lock()
    self._pool: futures.ThreadPoolExecutor | None = None
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
    queue = self._taken()
    if queue is None:
      return self._by_threads(rows, at, out)
    count = kernels.read(self._file, rows, at, self._aligned, *queue, out)
    if count == -1 - len(at):  # its reads may yet write to its slots
      _end(queue)
      self._queued = False
      return self._by_threads(rows, at, out)
    self._idle.append(queue)
    return self._checked(count, rows, at)

  def _taken(self) -> _Queue | None:
    """Returns a queue that no other thread uses, or None."""
    if not self._queued:
      return None
    try:
      return self._idle.pop()
    except IndexError:
      number, calls = ctypes.c_ulong(0), _CALLS[platform.machine()]
      if _syscall(calls.setup, self._depth, ctypes.addressof(number)):
        return None
      numbers = number.value, calls.submit, calls.wait
      return _queue(self._depth, self._most, *numbers)

  def scan(self, rows: np.ndarray, out: np.ndarray) -> None:
    """Reads many records in one pass over the file.

    Args:
      rows: i64[U], ascending.
      out: u8[U, record], is filled with their records.

    Raises:
      ServeError: the disk cannot be read.
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
    if not hasattr(self._local, 'queue'):
      self._local.queue = _queue(1, self._most)
    queue: _Queue = self._local.queue
    count = kernels.read(self._file, rows, at, self._aligned, *queue, out)
    return self._checked(count, rows, at)

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
    if self._pool is not None:
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


def _queue(
  depth: int, most: int, number: int = 0, submit: int = 0, wait: int = 0
) -> _Queue:
  """Returns a queue with memory for `depth` reads of up to `most` bytes."""
  slots = _aligned(depth * most).reshape(depth, most)
  work = np.zeros(depth * kernels.WORK, np.int64)
  return _Queue(number, submit, wait, slots, work)


def _end(queue: _Queue) -> None:
  """Waits for the queue's reads, and releases it."""
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
