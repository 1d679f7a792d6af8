"""Where rows come from: memory, or a file on an SSD behind a cache of rows.

As in "Supporting massive DLRM inference through software defined memory"
(arXiv 2110.11489): popular rows lie in memory, one by one and not as pages, and
the others are read in one go per query, many reads at a time.
"""

from concurrent import futures
import os
import pathlib
import threading
from typing import NamedTuple, Protocol

import numpy as np

from slip_serve import kernels
from slip_serve.errors import ServeError
from slip_serve.layout import ALIGNMENT

_WAYS = 8  # places that a row may have in the cache
_READS = 16  # that are worth a thread of their own


class Counts(NamedTuple):
  """What rows were asked for so far."""

  rows: int = 0
  """Unique ones of each query."""
  hits: int = 0
  """Of those, from memory."""
  bytes_read: int = 0
  """From the disk."""


class Rows(Protocol):
  """Records of one file."""

  counts: Counts

  def read(self, rows: np.ndarray, out: np.ndarray) -> None:
    """Reads records.

    Args:
      rows: i64[U], each once, each within the file.
      out: u8[U, record], gets them.

    Raises:
      ServeError: the disk does not give them.
    """
    ...

  def close(self) -> None:
    """Gives back files and threads; may be called again."""
    ...


class MemoryRows:
  """All records in memory, or mapped into it."""

  def __init__(
    self, path: pathlib.Path, rows: int, record: int, mapped: bool = False
  ) -> None:
    """Reads the file; mapped, only what is used, page by page."""
    shape = (rows, record)
    self._records: np.ndarray
    if mapped:
      self._records = np.memmap(path, np.uint8, 'r', shape=shape)
    else:
      flat = np.fromfile(path, np.uint8, rows * record)
      self._records = flat.reshape(shape)
    self.counts = Counts()

  def read(self, rows: np.ndarray, out: np.ndarray) -> None:
    """As `Rows.read`."""
    # Not `raise`, which copies twice; rows were looked at before.
    self._records.take(rows, axis=0, out=out, mode='clip')
    asked = self.counts.rows + len(rows)
    self.counts = Counts(asked, asked, 0)

  def close(self) -> None:
    """As `Rows.close`."""
    self._records = np.empty((0, 0), np.uint8)


class DiskRows:
  """Records read from a file, those asked for lately kept in memory.

  Each record has 8 places in the cache, by a hash of its row; it takes that of
  the one that was not asked for the longest. The page cache is gone round where
  the file system allows it: it would keep 4096 bytes of each row.
  """

  def __init__(
    self,
    path: pathlib.Path,
    record: int,
    cache_rows: int,
    threads: int = 32,
    direct: bool = True,
  ) -> None:
    """Opens the file; the cache is empty.

    Args:
      path: of the file, whose size is a multiple of `ALIGNMENT`.
      record: bytes of one.
      cache_rows: records to keep, 0 or more; rounded down to a multiple of 8.
      threads: that read at a time.
      direct: whether to go round the page cache.

    Raises:
      ServeError: the file cannot be opened.
    """
    ways = min(_WAYS, max(cache_rows, 1))
    places = cache_rows // ways * ways
    self._ways = ways
    self._tags = np.full(places, -1, np.int64)
    self._used = np.zeros(places, np.int64)
    self._cached = np.empty((places, record), np.uint8)
    self._queries = 0
    self._threads, self._local = threads, threading.local()
    self._lock = threading.Lock()
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
    self._pool = futures.ThreadPoolExecutor(threads, 'slip-serve-rows')
    self.counts = Counts()

  def read(self, rows: np.ndarray, out: np.ndarray) -> None:
    """As `Rows.read`."""
    with self._lock:
      self._queries += 1
      missing = np.empty(len(rows), np.int64)
      cache = (self._tags, self._used, self._queries, self._ways, self._cached)
      if len(self._tags):
        count = kernels.probe(rows, *cache, out, missing)
        missing = missing[:count]
      else:
        missing = np.arange(len(rows))
      nbytes = self._fetch(rows, missing[np.argsort(rows[missing])], out)
      if len(self._tags):
        kernels.put(rows, missing, *cache, out)
      asked, hits, before = self.counts
      hits += len(rows) - len(missing)
      self.counts = Counts(asked + len(rows), hits, before + nbytes)

  def _fetch(self, rows: np.ndarray, at: np.ndarray, out: np.ndarray) -> int:
    """Reads the records at these places, and says how many bytes that were."""
    parts = np.array_split(at, max(1, min(self._threads, len(at) // _READS)))
    if len(parts) == 1:
      counts = [self._fetch_part(rows, at, out)]
    else:
      jobs = [
        self._pool.submit(self._fetch_part, rows, part, out) for part in parts
      ]
      counts = [job.result() for job in jobs]
    return sum(counts)

  def _fetch_part(
    self, rows: np.ndarray, at: np.ndarray, out: np.ndarray
  ) -> int:
    buffer = getattr(self._local, 'buffer', None)
    if buffer is None:
      buffer = self._local.buffer = _aligned(self._record + 2 * ALIGNMENT)
    count: int = kernels.read(self._file, rows, at, self._aligned, buffer, out)
    if count < 0:
      row = int(rows[at[-1 - count]])
      raise ServeError(
        'every row must be readable',
        got=f'none of row {row}',
        where=str(self._path),
        hint='look whether its disk is there and whole',
      )
    return count

  def close(self) -> None:
    """As `Rows.close`."""
    self._pool.shutdown()
    with self._lock:
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


def _aligned(nbytes: int) -> np.ndarray:
  """Memory u8[nbytes] that reads may go to."""
  memory = np.empty(nbytes + ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % ALIGNMENT
  return memory[start : start + nbytes]
