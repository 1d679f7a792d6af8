"""Whole blocks of a file that ends with its process.

The file is unlinked once open, so the system frees it however the process ends.
It is scratch, so it is never synced. Where the file system supports O_DIRECT,
blocks bypass the page cache, which would count as memory outside the budget and
fill with rows that are not read again.
"""

from collections.abc import Callable, Iterator
from concurrent import futures
import errno
import os
import pathlib
import tempfile
import threading
import weakref

from jaxtyping import Int, UInt8
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.store import block_kernels
from slipstream_jax.store.records import Places, Records

BLOCK = 4096
"""Bytes per read, the block size of most file systems."""
THREADS = 32
"""Concurrent reads or writes: one disk serves many at once."""
_LEAST = 16  # smallest part worth handing to a thread

Positions = Int[np.ndarray, ' n']
"""Positions of records: block times records per block, plus place in it."""


class BlockFile:
  """A file of blocks of equal size, as long as its last written block needs.

  Attributes:
    block_bytes: size of a block.
    fd: the file descriptor.
    bytes_read: so far, in whole blocks.
    bytes_written: so far, in whole blocks.
    direct: whether blocks bypass the page cache.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    block_bytes: int,
    threads: int = THREADS,
  ) -> None:
    """Opens an unnamed file in a folder.

    Raises:
      UserError: no file can be made there.
    """
    self.block_bytes = block_bytes
    self._folder = pathlib.Path(folder)
    self._buffered, self.fd = _open_files(self._folder)
    self.direct = self.fd != self._buffered
    fds = {self.fd, self._buffered}
    self._finish = weakref.finalize(self, _close, fds)
    self._pool = futures.ThreadPoolExecutor(threads, 'slipstream-disk')
    self._threads = threads
    self.bytes_read = self.bytes_written = 0
    self._counting = threading.Lock()

  def clear(self) -> None:
    """Forgets all blocks."""
    os.ftruncate(self._buffered, 0)

  def read(self, at: Positions, per: int, out: Records, to: Places) -> None:
    """Reads records that were written.

    Args:
      at: their positions, ascending. A block with several is read once.
      per: records per block.
      out: receives the records.
      to: i64[n], the place of each in `out`.

    Raises:
      OSError: the disk failed.
    """

    def work(part: slice) -> None:
      some, into, done, width = at[part], to[part], 0, out.shape[1]
      block = aligned(self.block_bytes)
      while done < len(some):
        done = block_kernels.read(self.fd, some, per, out, into, block, done)
        if done < len(some):  # retries with a call that reports the error
          self._transfer_block(int(some[done]) // per, block, os.preadv)
          start = int(some[done]) % per * width
          out[into[done]] = block[start : start + width]
          done += 1

    self._run_parts(work, _parts(len(at), self._threads))
    blocks = int(np.count_nonzero(np.diff(at // per, prepend=-1)))
    with self._counting:  # other threads may read, too
      self.bytes_read += blocks * self.block_bytes

  def write(self, blocks: Positions, data: UInt8[np.ndarray, ' bytes']) -> None:
    """Writes whole blocks.

    Args:
      blocks: their numbers, ascending and unique.
      data: the bytes of all blocks, `aligned`.

    Raises:
      OSError: the disk failed. Any of the blocks may have been written.
    """
    size = self.block_bytes

    def work(part: slice) -> None:
      at = part.start
      while at < part.stop:
        at = block_kernels.write(self.fd, blocks[: part.stop], size, data, at)
        if at < part.stop:
          own = data[at * size : (at + 1) * size]
          self._transfer_block(int(blocks[at]), own, os.pwritev)
          at += 1

    # Adjacent blocks are one write and stay in one part.
    starts = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    ends = np.append(starts, len(blocks))
    cuts = _parts(len(starts), self._threads, 1)
    parts = (slice(ends[p.start], ends[p.stop]) for p in cuts)
    self._run_parts(work, parts)
    self.bytes_written += len(data)

  def _transfer_block(
    self, block: int, data: np.ndarray, call: Callable[..., int]
  ) -> None:
    """Reads or writes a block, repeating calls that transfer a part of it.

    Raises:
      OSError: the disk failed. The error has the folder's name.
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

  def _run_parts(
    self, work: Callable[[slice], None], parts: Iterator[slice]
  ) -> None:
    """Runs the work on all parts, in several threads."""
    first, *others = parts
    done = [self._pool.submit(work, part) for part in others]
    try:
      work(first)
    finally:
      futures.wait(done)  # no thread reads or writes after this returns
    for future in done:
      future.result()

  def cool(self) -> None:
    """Drops the file from the system's page cache, to measure the disk."""
    os.fsync(self._buffered)
    if hasattr(os, 'posix_fadvise'):
      os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_DONTNEED)

  def close(self) -> None:
    """Ends the threads and frees the file. Idempotent."""
    self._pool.shutdown()
    self._finish()


def _close(fds: set[int]) -> None:
  for fd in fds:
    os.close(fd)


class _ShortFileError(OSError):
  """Raised where a file ends before a block that was written."""


def aligned(size: int) -> UInt8[np.ndarray, ' size']:
  """Returns uninitialized memory with the alignment that O_DIRECT needs."""
  memory = np.empty(size + BLOCK, np.uint8)
  start = -memory.ctypes.data % BLOCK
  return memory[start : start + size]


def _parts(count: int, threads: int, least: int = _LEAST) -> Iterator[slice]:
  """Yields slices that split `count` items among threads, at least one."""
  many = max(1, min(threads, -(-count // least)))
  ends = [count * number // many for number in range(many + 1)]
  return (slice(*ends[i : i + 2]) for i in range(many))


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
