"""Whole blocks of a file that ends with its process.

As soon as it is open, the file has no name: however the process ends, the
system frees it. Nothing is ever synced, for the file is scratch. Where the file
system can, blocks go past what the system keeps of files in memory: that is not
counted, and would be filled with rows that are not asked for again.
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
from slipstream_jax.store.disk import kernels
from slipstream_jax.store.disk.records import Places, Records

BLOCK = 4096
"""Bytes that are read at once, and what file systems count by."""
THREADS = 32
"""Reads or writes under way at a time: a disk alone serves many at once."""
_LEAST = 16  # of a part: below, handing it over takes as long as reading

Positions = Int[np.ndarray, ' n']
"""Of records: the block times how many are in one, and the place in it."""


class BlockFile:
  """Blocks of some bytes each, of a file that is as long as what was written.

  Attributes:
    block_bytes: that are read or written at once.
    fd: the file's descriptor.
    bytes_read: so far, in whole blocks.
    bytes_written: likewise.
    direct: whether blocks go past what the system keeps in memory.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    block_bytes: int,
    threads: int = THREADS,
  ) -> None:
    """Opens a file in a folder, where nobody sees it.

    Raises:
      UserError: no file can be made there.
    """
    self.block_bytes = block_bytes
    self._folder = pathlib.Path(folder)
    self._buffered, self.fd = _opened(self._folder)
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
      at: where they are, ascending: blocks of several are read once.
      per: records of a block.
      out: gets them.
      to: i64[n], where to put each.

    Raises:
      OSError: the disk's.
    """

    def work(part: slice) -> None:
      some, into, done, width = at[part], to[part], 0, out.shape[1]
      block = aligned(self.block_bytes)
      while done < len(some):
        done = kernels.read(self.fd, some, per, out, into, block, done)
        if done < len(some):  # once more, by what says why it cannot
          self._whole(int(some[done]) // per, block, os.preadv)
          start = int(some[done]) % per * width
          out[into[done]] = block[start : start + width]
          done += 1

    self._shared(work, _parts(len(at), self._threads))
    blocks = int(np.count_nonzero(np.diff(at // per, prepend=-1)))
    with self._counting:  # others may read, too
      self.bytes_read += blocks * self.block_bytes

  def write(self, blocks: Positions, data: UInt8[np.ndarray, ' bytes']) -> None:
    """Writes whole blocks.

    Args:
      blocks: their numbers, ascending, each once.
      data: of all of them; `aligned`.

    Raises:
      OSError: the disk's; then any of them may be written, or not.
    """
    size = self.block_bytes

    def work(part: slice) -> None:
      at = part.start
      while at < part.stop:
        at = kernels.write(self.fd, blocks[: part.stop], size, data, at)
        if at < part.stop:
          own = data[at * size : (at + 1) * size]
          self._whole(int(blocks[at]), own, os.pwritev)
          at += 1

    # Blocks that follow each other are one write: they are not taken apart.
    starts = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    ends = np.append(starts, len(blocks))
    cuts = _parts(len(starts), self._threads, 1)
    parts = (slice(ends[p.start], ends[p.stop]) for p in cuts)
    self._shared(work, parts)
    self.bytes_written += len(data)

  def _whole(
    self, block: int, data: np.ndarray, call: Callable[..., int]
  ) -> None:
    """Reads or writes a block, however often the system gives a part.

    Raises:
      OSError: the disk's, with the folder's name.
    """
    done, start = 0, block * self.block_bytes
    try:
      while done < len(data):
        step = call(self._buffered, [data[done:]], start + done)
        if not step:
          raise _Short(errno.EIO, 'a file that ends early')
        done += step
    except OSError as error:
      error.filename = str(self._folder)
      raise

  def _shared(
    self, work: Callable[[slice], None], parts: Iterator[slice]
  ) -> None:
    """Does the work on all parts, by many threads."""
    first, *others = parts
    done = [self._pool.submit(work, part) for part in others]
    try:
      work(first)
    finally:
      futures.wait(done)  # nobody reads or writes once this returns
    for future in done:
      future.result()

  def cool(self) -> None:
    """Drops what the system keeps of it in memory: to measure a disk."""
    os.fsync(self._buffered)
    if hasattr(os, 'posix_fadvise'):
      os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_DONTNEED)

  def close(self) -> None:
    """Ends the threads and frees the file; may be called again."""
    self._pool.shutdown()
    self._finish()


def _close(fds: set[int]) -> None:
  for fd in fds:
    os.close(fd)


class _Short(OSError):
  """A file is shorter than it was made."""


def aligned(size: int) -> UInt8[np.ndarray, ' size']:
  """Bytes that begin where a block may be put without a copy."""
  memory = np.empty(size + BLOCK, np.uint8)
  start = -memory.ctypes.data % BLOCK
  return memory[start : start + size]


def _parts(count: int, threads: int, least: int = _LEAST) -> Iterator[slice]:
  """So many things in parts, one for each thread; at least one part."""
  many = max(1, min(threads, -(-count // least)))
  ends = [count * number // many for number in range(many + 1)]
  return (slice(*ends[i : i + 2]) for i in range(many))


def _opened(folder: pathlib.Path) -> tuple[int, int]:
  """Descriptors of a new file without a name: plain, and for whole blocks."""
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
  if hasattr(os, 'posix_fadvise'):  # what lies beside a row is not wanted
    os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_RANDOM)
  return plain, plain if direct is None else direct


def _direct(name: str) -> int | None:
  """A descriptor past the system's memory; None: there is no such way."""
  if not hasattr(os, 'O_DIRECT'):
    return None
  try:
    fd = os.open(name, os.O_RDWR | os.O_DIRECT)
  except OSError:
    return None
  try:  # some file systems refuse only what comes next
    os.pwrite(fd, aligned(BLOCK).data, 0)
  except OSError:
    os.close(fd)
    return None
  return fd
