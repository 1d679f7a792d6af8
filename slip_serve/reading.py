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


class RecordFile:
  """Records of one file; one call at a time."""

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
    self._threads = min(depth, _THREADS)
    self._local, self._pool = threading.local(), None
    # What is not past the page cache would be read while it is handed over.
    self._queue = _queue(depth) if self._aligned > 1 else 0
    if self._queue:
      size = -(-record // self._aligned) * self._aligned + self._aligned
      self._slots = _aligned(depth * size).reshape(depth, size)
      self._work = np.zeros(depth * kernels.WORK, np.int64)

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
    if self._queue:
      calls = _CALLS[platform.machine()]
      queue = self._queue, calls.submit, calls.wait, self._slots, self._work
      count = kernels.read_queued(
        self._file, rows, at, self._aligned, *queue, out
      )
      if count != -1 - len(at):
        return self._checked(count, rows, at)
      self._end_queue()
    return self._by_threads(rows, at, out)

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
    if self._pool is None:
      self._pool = futures.ThreadPoolExecutor(self._threads, 'slip-serve-rows')
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
    """Gives back files and threads; may be called again."""
    if self._pool is not None:
      self._pool.shutdown()
    self._end_queue()
    if self._file >= 0:
      os.close(self._file)
    self._file = -1

  def _end_queue(self) -> None:
    """Waits for its reads, if there is one, and gives it back."""
    if self._queue:
      _syscall(_CALLS[platform.machine()].destroy, self._queue)
    self._queue = 0


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


def _queue(depth: int) -> int:
  """A queue of so many reads; 0 where the system gives none."""
  calls = _CALLS.get(platform.machine())
  if calls is None or sys.platform != 'linux' or sys.maxsize < 1 << 32:
    return 0
  queue = ctypes.c_ulong(0)
  failed = _syscall(calls.setup, depth, ctypes.addressof(queue))
  return 0 if failed else queue.value


def _syscall(number: int, *arguments: int) -> int:
  call = ctypes.CDLL(None).syscall
  call.restype = ctypes.c_long
  return int(call(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)))


def _aligned(nbytes: int) -> np.ndarray:
  """Memory u8[nbytes] that reads may go to."""
  memory = np.empty(nbytes + ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % ALIGNMENT
  return memory[start : start + nbytes]
