"""Where rows come from: memory, or a file on an SSD behind a cache of rows.

As in "Supporting massive DLRM inference through software defined memory"
(arXiv 2110.11489): popular rows lie in memory, one by one and not as pages, and
the others are read in one go per query, many reads at a time.
"""

import pathlib
import threading
from typing import NamedTuple, Protocol

import numpy as np

from slip_serve import kernels
from slip_serve.reading import DEPTH, RecordFile

_WAYS = 8  # places that a row may have in the cache
_AT_ONCE = 1 << 16  # records that are read before they are put there


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
    self._lock = threading.Lock()

  def read(self, rows: np.ndarray, out: np.ndarray) -> None:
    """As `Rows.read`."""
    # Not `raise`, which copies twice; rows were looked at before.
    self._records.take(rows, axis=0, out=out, mode='clip')
    with self._lock:
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
    depth: int = DEPTH,
    direct: bool = True,
    popular: np.ndarray | None = None,
  ) -> None:
    """Opens the file, and reads what is popular.

    Args:
      path: of the file, whose size is a multiple of `ALIGNMENT`.
      record: bytes of one.
      cache_rows: records to keep, 0 or more; rounded down to a multiple of 8.
      depth: reads under way at a time.
      direct: whether to go round the page cache.
      popular: rows i64[n], each once, that the cache begins with as far as it
        has places, the most popular first; None: it begins empty.

    Raises:
      ServeError: the file cannot be opened or read.
    """
    ways = min(_WAYS, max(cache_rows, 1))
    places = cache_rows // ways * ways
    self._ways = ways
    self._tags = np.full(places, -1, np.int64)
    self._used = np.zeros(places, np.int64)
    self._cached = np.empty((places, record), np.uint8)
    self._queries = 1  # before it, what the cache begins with
    self._reading, self._changing = 0, threading.Condition()
    self._file = RecordFile(path, record, depth, direct)
    self.counts = Counts()
    if popular is not None and places:
      try:
        self._begin_with(popular)
      except BaseException:
        self.close()
        raise

  def _begin_with(self, popular: np.ndarray) -> None:
    kernels.seat(popular, self._tags, self._used, self._ways)
    places = np.flatnonzero(self._tags >= 0)
    places = places[np.argsort(self._tags[places])]
    # Some at a time, as they are copied once more to where they belong.
    for some in np.array_split(places, 1 + len(places) // _AT_ONCE):
      records = np.empty((len(some), self._cached.shape[1]), np.uint8)
      self._file.scan(self._tags[some], records)
      self._cached[some] = records

  def read(self, rows: np.ndarray, out: np.ndarray) -> None:
    """As `Rows.read`."""
    kept = self._tags, self._used
    with self._changing:
      self._queries += 1
      self._reading += 1
      now = self._queries
      missing = np.arange(len(rows))
      if len(self._tags):
        cache = *kept, now, self._ways, self._cached
        missing = missing[: kernels.probe(rows, *cache, out, missing)]
    try:  # others may look for their rows meanwhile, and read them
      nbytes = self._file.read(rows, missing[np.argsort(rows[missing])], out)
      with self._changing:
        if len(self._tags):
          kernels.put(rows, missing, *kept, now, self._ways, self._cached, out)
        asked, hits, before = self.counts
        hits += len(rows) - len(missing)
        self.counts = Counts(asked + len(rows), hits, before + nbytes)
    finally:
      with self._changing:
        self._reading -= 1
        self._changing.notify_all()

  def close(self) -> None:
    """As `Rows.close`; waits for who is reading."""
    with self._changing:
      self._changing.wait_for(lambda: not self._reading)
      self._file.close()
