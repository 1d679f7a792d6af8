"""Rows of tables, from memory or from a file on an SSD behind a cache of rows.

As in "Supporting massive DLRM inference through software defined memory"
(arXiv 2110.11489): popular rows are in memory, one by one and not as pages, and
the others are read at once for each query, many reads at a time.
"""

from collections.abc import Callable, Sequence
import pathlib
import threading
from typing import Literal

import numba
import numpy as np

from slip_serve.layout import Group
from slip_serve.reading import RecordFile
from slipstream_jax.files import Path
from slipstream_jax.hashing import GOLDEN, place_slot

Memory = Literal['dram', 'mmap', 'ssd']
BOOKKEEPING = 16
"""Bytes of a cached record beside it: its key, and when it was used last."""
_WAYS = 8  # places that a row may have in the cache
_AT_ONCE = 1 << 16  # records that are read before they are put there

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)


class MemoryRows:
  """All records of a file in memory, or mapped into it."""

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

  def read(self, rows: np.ndarray, out: np.ndarray) -> tuple[int, int]:
    """Reads records, as `DiskRows.read`."""
    # Not the mode `raise`, which copies twice. Rows were checked before.
    self._records.take(rows, axis=0, out=out, mode='clip')
    return len(rows), 0

  def close(self) -> None:
    """Releases the memory. Idempotent."""
    self._records = np.empty((0, 0), np.uint8)


class RecordCache:
  """The records that were asked for last, by key. One thread may use it.

  A record has 8 places, by a hash of its key. It replaces the one that was used
  the longest ago.

  Attributes:
    record: bytes of a record.
  """

  def __init__(self, places: int, record: int) -> None:
    """Makes an empty cache of records of so many bytes.

    The number of places is rounded down to a multiple of 8.
    """
    self._queries = 1  # number 1 is the first contents
    self._ways = ways = min(_WAYS, max(places, 1))
    places = places // ways * ways
    self._tags = np.full(places, -1, np.int64)
    self._used = np.zeros(places, np.int64)
    self._records = np.empty((places, record), np.uint8)
    self.record = record

  def __len__(self) -> int:
    return len(self._tags)

  def find(
    self, keys: np.ndarray, at: np.ndarray, out: np.ndarray
  ) -> tuple[int, np.ndarray]:
    """Copies the records that are here.

    Args:
      keys: i64[n], at least 0.
      at: i64[m], places in `keys` of those to look for.
      out: u8[n, record], is filled at these places.

    Returns:
      The number of this query, for `put`, and the places of the others.
    """
    self._queries += 1
    missing = at.copy()
    if len(self) and len(at):
      cache = self._tags, self._used, self._queries, self._ways, self._records
      missing = missing[: probe(keys, *cache, out, missing)]
    return self._queries, missing

  def put(
    self, query: int, keys: np.ndarray, at: np.ndarray, records: np.ndarray
  ) -> None:
    """Puts some records u8[n, record] that a query did not find."""
    if len(self) and len(at):
      cache = self._tags, self._used, query, self._ways, self._records
      put(keys, at, *cache, records)

  def fill(
    self, keys: np.ndarray, read: Callable[[np.ndarray, np.ndarray], None]
  ) -> None:
    """Fills an empty cache with records, the first keys last to be replaced.

    Args:
      keys: i64[n], unique.
      read: reads records of ascending keys into u8[m, record].
    """
    seat(keys, self._tags, self._used, self._ways)
    places = np.flatnonzero(self._tags >= 0)
    places = places[np.argsort(self._tags[places])]
    # In pieces, because records are copied once more to their places.
    for some in np.array_split(places, 1 + len(places) // _AT_ONCE):
      records = np.empty((len(some), self.record), np.uint8)
      read(self._tags[some], records)
      self._records[some] = records


class DiskRows:
  """Records that are read from a file. The latest ones are kept in memory.

  The page cache is bypassed if the file system allows it, because it would keep
  4096 bytes for each row.
  """

  def __init__(
    self,
    file: RecordFile,
    cache_rows: int,
    popular: np.ndarray | None = None,
    pinned: Sequence[tuple[int, int]] = (),
  ) -> None:
    """Takes over a file and reads pinned and popular rows.

    Args:
      file: the records.
      cache_rows: records to keep beside the pinned ones, rounded down to a
        multiple of 8.
      popular: unique rows i64[n], the most popular first, to fill the cache
        with. None: it begins empty.
      pinned: ranges [first, end) of rows that are always in memory, ascending
        and apart.

    Raises:
      ServeError: the file cannot be read.
    """
    self._file = file
    self._reading, self._changing = 0, threading.Condition()
    try:
      self._cache = RecordCache(cache_rows, file.record)
      self._ranges = np.array(pinned, np.int64).reshape(-1, 2)
      rows = [np.arange(*one) for one in pinned]
      self._pinned = np.empty((sum(map(len, rows)), file.record), np.uint8)
      if rows:
        file.scan(np.concatenate(rows), self._pinned)
      if popular is not None and len(self._cache):
        kept = np.zeros(len(popular), bool)
        for first, end in pinned:
          kept |= (popular >= first) & (popular < end)
        self._cache.fill(popular[~kept], file.scan)
    except BaseException:
      self.close()
      raise

  def read(self, rows: np.ndarray, out: np.ndarray) -> tuple[int, int]:
    """Reads records.

    Args:
      rows: i64[U], unique rows of the file.
      out: u8[U, record], is filled with their records.

    Returns:
      The number of rows that were in memory, and the bytes read from the disk.

    Raises:
      ServeError: the disk cannot be read.
    """
    at = np.arange(len(rows))
    if len(self._pinned):
      at = at[: copy_pinned(rows, self._ranges, self._pinned, out, at)]
    with self._changing:
      self._reading += 1
      query, missing = self._cache.find(rows, at, out)
    try:  # meanwhile other threads may search the cache, and read
      nbytes = self._file.read(rows, missing[np.argsort(rows[missing])], out)
      with self._changing:
        self._cache.put(query, rows, missing, out)
    finally:
      with self._changing:
        self._reading -= 1
        self._changing.notify_all()
    return len(rows) - len(missing), nbytes

  def close(self) -> None:
    """Closes the file once no thread reads. Idempotent."""
    with self._changing:
      self._changing.wait_for(lambda: not self._reading)
      self._file.close()


def popular_rows(folder: Path, group: Group) -> np.ndarray | None:
  """Returns the rows that the export calls popular, the most popular first."""
  if not group.popular:
    return None
  rows = np.fromfile(pathlib.Path(folder) / group.popular, '<i8')
  # Checksums may have been skipped: rows must be unique and within the file.
  first = np.unique(rows, return_index=True)[1]
  rows = rows[np.sort(first)]
  return rows[(rows >= 0) & (rows < group.rows)].astype(np.int64)


def decode(codec: str, records: np.ndarray, out: np.ndarray) -> None:
  """Decodes records u8[U, record] to rows f32[U, D].

  In float32 the records are the memory of the rows already.
  """
  if codec == 'float16':
    np.copyto(out, records.view('<f2'))
  elif codec == 'int8':
    scales = np.ascontiguousarray(records[:, :8]).view('<f4')
    np.multiply(records[:, 8:], scales[:, :1], out=out)
    out += scales[:, 1:]


def unique(lookups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Finds the unique rows of lookups, in the order of their first use.

  Args:
    lookups: i64[n], at least 0, or -1 for padding.

  Returns:
    The rows i64[U], and the place of each lookup's row i32[n], -1 for padding.
  """
  rows = np.empty(len(lookups), np.int64)
  inverse = np.empty(len(lookups), np.int32)
  scratch = np.full(1 << (2 * len(lookups)).bit_length(), -1, np.int32)
  return rows[: _unique(lookups, scratch, rows, inverse)], inverse


@_kernel
def _unique(
  lookups: np.ndarray, scratch: np.ndarray, rows: np.ndarray, out: np.ndarray
) -> int:
  count = 0
  for i in range(len(lookups)):
    out[i] = -1
    if lookups[i] >= 0:
      slot = place_slot(scratch, rows, lookups[i])
      if scratch[slot] < 0:
        scratch[slot], rows[count] = count, lookups[i]
        count += 1
      out[i] = scratch[slot]
  return count


@_kernel
def _set_of(row: int, sets: int) -> int:
  """Returns the set of the cache that a row may be in."""
  hashed = (np.uint64(row) * GOLDEN) >> np.uint64(32)
  return np.int64((hashed * np.uint64(sets)) >> np.uint64(32))  # type: ignore[return-value]


@_kernel
def seat(
  rows: np.ndarray, tags: np.ndarray, used: np.ndarray, ways: int
) -> None:
  """Gives unique rows places in an empty cache, as if query 1 had used them.

  The first rows are replaced last. Arguments are those of `probe`.
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
def copy_pinned(
  rows: np.ndarray,
  ranges: np.ndarray,
  pinned: np.ndarray,
  out: np.ndarray,
  missing: np.ndarray,
) -> int:
  """Copies the records of pinned rows.

  Args:
    rows: i64[U].
    ranges: i64[n, 2], ranges [first, end) of rows, ascending.
    pinned: u8[P, record], the records of these, end to end.
    out: out, u8[U, record].
    missing: out, i64[U], places in `rows` of the others.

  Returns:
    The number of others.
  """
  count = 0
  for i in range(len(rows)):
    before, place = 0, -1
    for n in range(len(ranges)):
      if ranges[n, 0] <= rows[i] < ranges[n, 1]:
        place = before + rows[i] - ranges[n, 0]
      before += ranges[n, 1] - ranges[n, 0]
    if place < 0:
      missing[count] = i
      count += 1
    else:
      for k in range(out.shape[1]):
        out[i, k] = pinned[place, k]
  return count


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
    missing: in and out, i64[m], places in `rows` of rows to look for, and then
      of those that are not there.

  Returns:
    The number of missing rows.
  """
  count, sets = 0, len(tags) // ways
  # Two loops, because neither then branches on a value from memory, and many
  # cache misses are under way at once.
  places = np.empty(len(missing), np.int64)
  for j in range(len(missing)):
    row = rows[missing[j]]
    first, place = _set_of(row, sets) * ways, -1
    for other in range(first, first + ways):
      place = other if tags[other] == row else place
    places[j] = place
  for j in range(len(missing)):
    i, place = missing[j], places[j]
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
  """Puts the missing records in the places of the least recently used ones.

  Places used by this query or a later one stay. Another query may have put the
  same records there before. Arguments are those of `probe`, and all records
  u8[U, record].
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
