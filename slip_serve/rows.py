"""Rows of tables, from memory or from a file on an SSD behind a cache of rows.

As in "Supporting massive DLRM inference through software defined memory"
(arXiv 2110.11489): popular rows are in memory, one by one and not as pages, and
the others are read at once for each query, many reads at a time.
"""

from collections.abc import Iterator, Sequence
import pathlib
import threading
from typing import Literal, NamedTuple, Protocol

import numpy as np

from slip_serve import kernels
from slip_serve.layout import Group, Layout
from slip_serve.queries import Query
from slip_serve.reading import DEPTH, RecordFile
from slipstream_jax.files import Path

Memory = Literal['dram', 'mmap', 'ssd']
_WAYS = 8  # places that a row may have in the cache
_AT_ONCE = 1 << 16  # records that are read before they are put there


class Part(NamedTuple):
  """Some examples of a query, padded to the size of a program."""

  real: int
  """Examples that are no padding."""
  size: int
  """B, the size of the program."""
  blocks: tuple[np.ndarray, ...]
  """Unique rows of each group, f32[B * K_g, D], then zeros."""
  inverses: tuple[np.ndarray, ...]
  """Place in them of each of the group's lookups, i32[B, K_g]; -1: padding."""
  dense: np.ndarray
  """Dense features f32[B, I]."""
  weights: np.ndarray | None
  """Weights of the lookups f32[B, K], if they have some."""


class Stats(NamedTuple):
  """Counts of all queries so far."""

  examples: int
  lookups: int
  """Without padding."""
  unique_rows: int
  """Unique rows of each part of a query."""
  hit_rate: float | None
  """Share of the unique rows that was in memory. None before the first."""
  bytes_per_lookup: float
  """Bytes read from the disk."""


class Fetcher:
  """Finds the rows of queries. Threads may share one."""

  def __init__(
    self,
    folder: Path,
    layout: Layout,
    firsts: np.ndarray,
    memory: Memory,
    cache: float,
    depth: int,
    direct: bool,
  ) -> None:
    """Opens the files of rows. The other arguments are those of `Scorer`.

    Args:
      folder: the folder of the export.
      layout: its layout.
      firsts: as in `QueryMaker`.
      memory: where rows are.
      cache: rows to keep in memory.
      depth: reads under way at a time.
      direct: whether to bypass the page cache.
    """
    self._layout, self._firsts = layout, firsts
    self._lock = threading.Lock()
    self._examples = self._lookups = 0
    self._rows: list[Rows] = []
    for group in layout.groups:
      record, path = layout.record(group), pathlib.Path(folder) / group.file
      if memory != 'ssd':
        mapped = memory == 'mmap'
        self._rows.append(MemoryRows(path, group.rows, record, mapped))
      else:
        kept = round(cache * group.rows if cache <= 1 else cache)
        kept = min(kept, group.rows)
        popular = _popular(folder, group) if kept else None
        self._rows.append(DiskRows(path, record, kept, depth, direct, popular))

  def parts(self, query: Query, sizes: Sequence[int]) -> Iterator[Part]:
    """Yields the query in parts of these sizes, ascending; at least one."""
    count, first = len(query.rows), 0
    while first < count or not first:
      left = count - first
      size = next((size for size in sizes if size >= left), sizes[-1])
      yield self._part(query, first, size)
      first += size

  def _part(self, query: Query, first: int, size: int) -> Part:
    some = slice(first, first + size)
    given, weights = query.rows[some], query.weights
    lookups = np.full((size, self._layout.columns), -1, np.int64)
    np.copyto(lookups[: len(given)], given + self._firsts, where=given >= 0)
    pairs = [
      self._rows_of(number, lookups) for number in range(len(self._rows))
    ]
    blocks, inverses = zip(*pairs, strict=True)
    with self._lock:
      self._examples += len(given)
      self._lookups += int((given >= 0).sum())
    return Part(
      len(given),
      size,
      blocks,
      inverses,
      _padded(query.dense[some], size),
      None if weights is None else _padded(weights[some], size),
    )

  def _rows_of(
    self, number: int, lookups: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns block and inverse of a group, as in `Part`."""
    layout = self._layout
    group = layout.groups[number]
    own = lookups
    if len(group.columns) < layout.columns:
      own = lookups[:, np.array(group.columns, np.int64)]
    flat = np.ascontiguousarray(own).ravel()
    rows = np.empty(len(flat), np.int64)
    inverse = np.empty(len(flat), np.int32)
    scratch = np.empty(1 << (2 * len(flat)).bit_length(), np.int32)
    unique = rows[: kernels.unique(flat, scratch, rows, inverse)]
    block = np.zeros((len(flat), group.dim), np.float32)
    if layout.codec == 'float32':  # read directly into the block
      records = block[: len(unique)].view(np.uint8)
    else:
      records = np.empty((len(unique), layout.record(group)), np.uint8)
    self._rows[number].read(unique, records)
    decode(layout.codec, records, block[: len(unique)])
    return block, inverse.reshape(own.shape)

  @property
  def stats(self) -> Stats:
    """Counts of all queries so far."""
    counts = zip(*(rows.counts for rows in self._rows), strict=True)
    asked, hits, nbytes = map(sum, counts)
    return Stats(
      self._examples,
      self._lookups,
      asked,
      hits / asked if asked else None,
      nbytes / max(self._lookups, 1),
    )

  def close(self) -> None:
    """Releases files and threads; idempotent."""
    for rows in self._rows:
      rows.close()


def decode(codec: str, records: np.ndarray, out: np.ndarray) -> None:
  """Writes records u8[U, record] to rows f32[U, D]; float32 is in place."""
  if codec == 'float16':
    np.copyto(out, records.view('<f2'))
  elif codec == 'int8':
    scales = np.ascontiguousarray(records[:, :8]).view('<f4')
    np.multiply(records[:, 8:], scales[:, :1], out=out)
    out += scales[:, 1:]


def _popular(folder: Path, group: Group) -> np.ndarray | None:
  """Returns the rows that the export calls popular, the most popular first."""
  if not group.popular:
    return None
  rows = np.fromfile(pathlib.Path(folder) / group.popular, '<i8')
  # Checksums may have been skipped: rows must be unique and within the file.
  first = np.unique(rows, return_index=True)[1]
  rows = rows[np.sort(first)]
  return rows[(rows >= 0) & (rows < group.rows)].astype(np.int64)


def _padded(values: np.ndarray, size: int) -> np.ndarray:
  short = size - len(values)
  return np.pad(values, [(0, short), (0, 0)]) if short else values


class Counts(NamedTuple):
  """Counts of the rows that were read."""

  rows: int = 0
  """Unique rows of each query."""
  hits: int = 0
  """Rows that were in memory."""
  bytes_read: int = 0
  """Bytes read from the disk."""


class Rows(Protocol):
  """The records of one file."""

  counts: Counts

  def read(self, rows: np.ndarray, out: np.ndarray) -> None:
    """Reads records.

    Args:
      rows: i64[U], unique rows of the file.
      out: u8[U, record], is filled with their records.

    Raises:
      ServeError: the disk cannot be read.
    """
    ...

  def close(self) -> None:
    """Releases files and threads; idempotent."""
    ...


class MemoryRows:
  """All records in memory, or mapped into it."""

  def __init__(
    self, path: pathlib.Path, rows: int, record: int, mapped: bool = False
  ) -> None:
    """Reads the file. If `mapped`, pages are read when they are used."""
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
    """Reads records, as `Rows.read`."""
    # Not the mode `raise`, which copies twice. Rows were checked before.
    self._records.take(rows, axis=0, out=out, mode='clip')
    with self._lock:
      asked = self.counts.rows + len(rows)
      self.counts = Counts(asked, asked, 0)

  def close(self) -> None:
    """Releases the memory, as `Rows.close`."""
    self._records = np.empty((0, 0), np.uint8)


class DiskRows:
  """Records that are read from a file. The latest ones are kept in memory.

  A record has 8 places in the cache, by a hash of its row. It replaces the one
  that was used the longest ago. The page cache is bypassed if the file system
  allows it, because it would keep 4096 bytes for each row.
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
    """Opens the file and reads popular rows.

    Args:
      path: the file. Its size is a multiple of `ALIGNMENT`.
      record: bytes of a record.
      cache_rows: records to keep, rounded down to a multiple of 8.
      depth: reads under way at a time.
      direct: whether to bypass the page cache.
      popular: unique rows i64[n], the most popular first, to fill the cache
        with. None: it begins empty.

    Raises:
      ServeError: the file cannot be opened or read.
    """
    ways = min(_WAYS, max(cache_rows, 1))
    places = cache_rows // ways * ways
    self._ways = ways
    self._tags = np.full(places, -1, np.int64)
    self._used = np.zeros(places, np.int64)
    self._cached = np.empty((places, record), np.uint8)
    self._queries = 1  # number 1 stands for the first contents
    self._reading, self._changing = 0, threading.Condition()
    self._file = RecordFile(path, record, depth, direct)
    self.counts = Counts()
    if popular is not None and places:
      try:
        self._fill(popular)
      except BaseException:
        self.close()
        raise

  def _fill(self, popular: np.ndarray) -> None:
    kernels.seat(popular, self._tags, self._used, self._ways)
    places = np.flatnonzero(self._tags >= 0)
    places = places[np.argsort(self._tags[places])]
    # In pieces, because records are copied once more to their places.
    for some in np.array_split(places, 1 + len(places) // _AT_ONCE):
      records = np.empty((len(some), self._cached.shape[1]), np.uint8)
      self._file.scan(self._tags[some], records)
      self._cached[some] = records

  def read(self, rows: np.ndarray, out: np.ndarray) -> None:
    """Reads records, as `Rows.read`."""
    kept = self._tags, self._used
    with self._changing:
      self._queries += 1
      self._reading += 1
      now = self._queries
      missing = np.arange(len(rows))
      if len(self._tags):
        cache = *kept, now, self._ways, self._cached
        missing = missing[: kernels.probe(rows, *cache, out, missing)]
    try:  # meanwhile other threads may search the cache, and read
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
    """Closes the file once no thread reads, as `Rows.close`."""
    with self._changing:
      self._changing.wait_for(lambda: not self._reading)
      self._file.close()
