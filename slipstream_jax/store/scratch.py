"""Records of rows in a file that ends with its process.

Records are written where there is room, many at once. None crosses the end of a
block. Rows that were never written take no room and are never read.

The file is unlinked once open, so the system frees it however the process ends.
It is scratch, so it is never synced. Where the file system supports O_DIRECT,
blocks bypass the page cache, which would count as memory outside the budget and
fill with rows that are not read again.
"""

from collections.abc import Callable
from concurrent import futures
import errno
import os
import pathlib
import tempfile
import threading
from typing import Any, no_type_check
import weakref

from jaxtyping import Bool, Int, UInt8
from numba import types
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.store.records import Places, Records
from slipstream_jax.store.space import most_blocks, Space, spare_blocks
from slipstream_jax.store.threads import run_parts, slices_of

BLOCK = 4096
"""Bytes per read, the block size of most file systems."""
THREADS = 32
"""Concurrent reads or writes: one disk serves many at once."""
_LEAST = 16  # fewest records worth handing to a thread

# The C library's calls, which need no GIL, so every thread has a read under
# way. By name rather than by address, so that compiled code can be cached.
_signature = types.intp(types.int32, types.uintp, types.uintp, types.int64)
_pread: Any = types.ExternalFunction('pread', _signature)
_pwrite: Any = types.ExternalFunction('pwrite', _signature)

Rows = Int[np.ndarray, ' n']


class ScratchFile:
  """Records of N rows, with an index of the rows that were written.

  Attributes:
    num_rows: N.
    width: bytes of a record.
    per: records per block.
    block_bytes: size of a block.
    fd: the file descriptor.
    bytes_read: so far, in whole blocks.
    bytes_written: so far, in whole blocks.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    num_rows: int,
    width: int,
    threads: int = THREADS,
  ) -> None:
    """Opens an unnamed file in a folder.

    Raises:
      UserError: no file can be made there.
    """
    self.num_rows, self.width = num_rows, width
    self.per, self.block_bytes = shape_of(width)
    self._folder = pathlib.Path(folder)
    self._buffered, self.fd = _open_files(self._folder)
    self._finish = weakref.finalize(self, _close, {self.fd, self._buffered})
    self._pool = futures.ThreadPoolExecutor(threads, 'slipstream-disk')
    self._threads = threads
    self.bytes_read = self.bytes_written = 0
    self._counting = threading.Lock()
    self.clear()

  def clear(self) -> None:
    """Forgets all records."""
    self._space = Space(self.num_rows, self.per)
    os.ftruncate(self._buffered, 0)

  def has(self, rows: Rows) -> Bool[np.ndarray, ' n']:
    """Returns which of the rows were written."""
    return self._space.has(rows)

  def read(self, rows: Rows, out: Records, to: Places | None = None) -> None:
    """Reads the records of unique rows, all of which were written.

    Another thread may write meanwhile. Of a row that it writes, either the old
    or the new record is read. They are put to places of `out`, or else in the
    order of the rows.

    Raises:
      OSError: the disk failed.
    """
    space = self._space
    to = np.arange(len(rows)) if to is None else to
    while len(rows):
      at = space.at(rows)
      order = np.argsort(at)
      self._read_at(at[order], out, to[order])
      # The old place of a record that moved meanwhile may have been
      # overwritten.
      again = space.at(rows) != at
      rows, to = rows[again], to[again]

  def _read_at(self, at: Places, out: Records, to: Places) -> None:
    """Reads the records at ascending positions."""

    def work(part: slice) -> None:
      some, into, done = at[part], to[part], 0
      block = aligned(self.block_bytes)
      while done < len(some):
        done = read_records(self.fd, some, self.per, out, into, block, done)
        if done < len(some):  # retries with a call that reports the error
          number, place = divmod(int(some[done]), self.per)
          self._transfer_block(number, block, os.preadv)
          start = place * self.width
          out[into[done]] = block[start : start + self.width]
          done += 1

    many = max(1, min(self._threads, -(-len(at) // _LEAST)))
    run_parts(self._pool, work, slices_of(len(at), many))
    blocks = int(np.count_nonzero(np.diff(at // self.per, prepend=-1)))
    with self._counting:  # other threads may read, too
      self.bytes_read += blocks * self.block_bytes

  def write(self, rows: Rows, records: Records) -> None:
    """Writes the records of unique rows. Allows one call at a time.

    Raises:
      OSError: the disk failed. Any of the records may have been written.
    """
    step = self._space.spare * self.per
    for start in range(0, len(rows), step):
      part = slice(start, start + step)
      needed = -(-len(rows[part]) // self.per)
      while self._space.room < needed:
        self._clean()
      self._append(rows[part], records[part])

  def _clean(self) -> None:
    """Moves records together to free blocks."""
    rows = self._space.crowded()
    step = self._space.spare * self.per
    for start in range(0, len(rows), step):
      some = rows[start : start + step]
      records = np.empty((len(some), self.width), np.uint8)
      self.read(some, records)
      self._append(some, records)

  def _append(self, rows: Rows, records: Records) -> None:
    """Writes records of no more rows than there is room for."""
    blocks = self._space.take(-(-len(rows) // self.per))
    data = aligned(len(blocks) * self.block_bytes)
    _fill(data, records, self.per, self.block_bytes)
    try:
      self._write_blocks(blocks, data)
    except BaseException:
      self._space.give_back(blocks)
      raise
    self._space.put(rows, blocks)

  def _write_blocks(
    self, blocks: Places, data: UInt8[np.ndarray, ' bytes']
  ) -> None:
    """Writes blocks of ascending numbers, whose bytes are `aligned`."""
    size = self.block_bytes

    def work(part: slice) -> None:
      at = part.start
      while at < part.stop:
        at = write_blocks(self.fd, blocks[: part.stop], size, data, at)
        if at < part.stop:
          own = data[at * size : (at + 1) * size]
          self._transfer_block(int(blocks[at]), own, os.pwritev)
          at += 1

    # Adjacent blocks are one write and stay in one part.
    starts = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    ends = np.append(starts, len(blocks))
    cuts = slices_of(len(starts), max(1, min(self._threads, len(starts))))
    parts = [slice(ends[p.start], ends[p.stop]) for p in cuts]
    run_parts(self._pool, work, parts)
    self.bytes_written += len(data)

  def _transfer_block(
    self, block: int, data: np.ndarray, call: Callable[..., int]
  ) -> None:
    """Reads or writes a block, repeating calls that transfer a part of it.

    Errors get the folder's name.
    """
    done, start = 0, block * self.block_bytes
    try:
      while done < len(data):
        step = call(self._buffered, [data[done:]], start + done)
        if not step:
          raise _ShortFileError(errno.EIO, 'a file that ends early')
        done += step
    except OSError as error:
      error.filename = str(self._folder)
      raise

  def cool(self) -> None:
    """Drops the file from the system's page cache, to measure the disk."""
    os.fsync(self._buffered)
    if hasattr(os, 'posix_fadvise'):
      os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_DONTNEED)

  def close(self) -> None:
    """Ends the threads and frees the file. Idempotent."""
    self._pool.shutdown()
    self._finish()


class _ShortFileError(OSError):
  """Raised where a file ends before a block that was written."""


def shape_of(width: int) -> tuple[int, int]:
  """Returns how many records of `width` bytes fit a block, and its bytes."""
  if width > BLOCK:
    return 1, -(-width // BLOCK) * BLOCK
  return BLOCK // max(1, width), BLOCK


def file_bytes(num_rows: int, width: int) -> int:
  """Returns the largest size of a file of `num_rows` records in bytes."""
  per, block_bytes = shape_of(width)
  spare = spare_blocks(num_rows, per)
  return most_blocks(num_rows, per, spare) * block_bytes


def aligned(size: int) -> UInt8[np.ndarray, ' size']:
  """Returns uninitialized memory with the alignment that O_DIRECT needs."""
  memory = np.empty(size + BLOCK, np.uint8)
  start = -memory.ctypes.data % BLOCK
  return memory[start : start + size]


def _open_files(folder: pathlib.Path) -> tuple[int, int]:
  """Returns two descriptors of a new unnamed file: buffered and direct."""
  try:
    plain, name = tempfile.mkstemp('.rows', 'slipstream-', folder)
    try:
      direct = _direct(name)
    finally:
      os.unlink(name)
  except OSError as error:
    raise UserError(
      'rows on a disk need a folder that files can be made in',
      got=f'{folder}: {error.strerror}',
      where='file, path',
      hint='name a folder of a disk with room for all rows',
    ) from error
  # disables read-ahead, as neighbouring blocks are rarely needed
  if hasattr(os, 'posix_fadvise'):
    os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_RANDOM)
  return plain, plain if direct is None else direct


def _direct(name: str) -> int | None:
  """Returns a descriptor that bypasses the page cache, or None."""
  if not hasattr(os, 'O_DIRECT'):
    return None
  try:
    fd = os.open(name, os.O_RDWR | os.O_DIRECT)
  except OSError:
    return None
  try:  # some file systems fail only at the first write
    os.pwrite(fd, aligned(BLOCK).data, 0)
  except OSError:
    os.close(fd)
    return None
  return fd


def _close(fds: set[int]) -> None:
  for fd in fds:
    os.close(fd)


@kernel
@no_type_check
def _fill(data: np.ndarray, records: np.ndarray, per: int, size: int) -> None:
  """Lays records u8[n, W] into blocks u8[b * size], `per` into each."""
  for i in range(len(records)):
    start = i // per * size + i % per * records.shape[1]
    for k in range(records.shape[1]):
      data[start + k] = records[i, k]


@kernel
@no_type_check
def read_records(
  fd: int,
  at: np.ndarray,
  per: int,
  out: np.ndarray,
  to: np.ndarray,
  block: np.ndarray,
  first: int,
) -> int:
  """Reads records, with one read for adjacent positions in the same block.

  Args:
    fd: the file descriptor.
    at: i64[n], positions: record p is number p % per of block p // per.
    per: records per block.
    out: u8[m, W], receives the records.
    to: i64[n], the place of each record in `out`.
    block: scratch, u8[bytes of a block].
    first: index in `at` to begin at.

  Returns:
    The position up to which all records are read: n, or that of a record whose
    block could not be read whole.
  """
  size, i = len(block), first
  while i < len(at):
    number = at[i] // per
    if _pread(fd, block.ctypes.data, size, number * size) != size:
      return i
    while i < len(at) and at[i] // per == number:
      start = at[i] % per * out.shape[1]
      for k in range(out.shape[1]):
        out[to[i], k] = block[start + k]
      i += 1
  return i


@kernel
@no_type_check
def write_blocks(
  fd: int, blocks: np.ndarray, size: int, data: np.ndarray, first: int
) -> int:
  """Writes blocks i64[b] of `size` bytes, adjacent ones with one call.

  Begins at position `first` of the blocks.

  Returns:
    The position up to which all blocks are written: b, or the start of a run of
    adjacent blocks that could not be written whole.
  """
  i = first
  while i < len(blocks):
    end = i + 1
    while end < len(blocks) and blocks[end] == blocks[i] + end - i:
      end += 1
    own = data[i * size :]
    many = (end - i) * size
    if _pwrite(fd, own.ctypes.data, many, blocks[i] * size) != many:
      return i
    i = end
  return i
