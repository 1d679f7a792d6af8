"""A sparse file of fixed records that ends with its process.

Records lie at their number times their stride, a power of two up to a block of
4 KiB, so that none crosses a block's end. What was never written takes no room
and is never read. As soon as it is open, the file has no name: however the
process ends, the system frees it. Nothing is ever synced, for the file is
scratch.
"""

from collections.abc import Callable, Iterator
from concurrent import futures
import errno
import os
import pathlib
import tempfile
import weakref

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.store.disk import kernels
from slipstream_jax.store.disk.records import Records

BLOCK = 4096
"""Bytes that are read and written at once, and what file systems count by."""
THREADS = 32
"""Reads or writes under way at a time: a disk alone serves many at once."""
_LEAST_ROWS = 16  # of a part: below, handing it over takes as long as reading

Rows = Int[np.ndarray, ' n']


class ScratchFile:
  """Records of N rows, of which it knows which were ever written.

  Attributes:
    num_rows: N.
    width: bytes of a record.
    stride: bytes from one to the next.
    block_bytes: that are read or written at once.
    fd: the file's descriptor.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    num_rows: int,
    width: int,
    threads: int = THREADS,
  ) -> None:
    """Opens a file in a folder, where nobody sees it.

    Raises:
      UserError: no file can be made there.
    """
    self.num_rows, self.width = num_rows, width
    self.stride = stride_of(width)
    self.block_bytes = max(BLOCK, self.stride)
    self._folder = pathlib.Path(folder)
    self.fd = _opened(self._folder)
    self._finish = weakref.finalize(self, os.close, self.fd)
    self._pool = futures.ThreadPoolExecutor(threads, 'slipstream-disk')
    self._threads = threads
    self._bits = np.zeros(-(-num_rows // 8), np.uint8)
    self.clear()

  def clear(self) -> None:
    """Forgets all records."""
    blocks = -(-self.num_rows * self.stride // self.block_bytes)
    os.ftruncate(self.fd, 0)
    self._bits[:] = 0
    os.ftruncate(self.fd, blocks * self.block_bytes)

  def has(self, rows: Rows) -> Bool[np.ndarray, ' n']:
    """Which of the rows were written."""
    out = np.empty(len(rows), bool)
    kernels.has(self._bits, rows, out)
    return out

  def written(self, start: int, stop: int) -> Rows:
    """The rows from `start` to `stop` that were written, ascending."""
    rows = np.arange(start, stop)
    return rows[self.has(rows)]

  def read(self, rows: Rows, out: Records) -> None:
    """Reads the records of rows, ascending, all of which were written.

    Raises:
      OSError: the disk's.
    """

    def work(part: slice) -> None:
      some, into, at = rows[part], out[part], 0
      block = _aligned(self.block_bytes)
      while at < len(some):
        at = kernels.read(self.fd, some, self.stride, into, block, at)
        if at < len(some):  # once more, by what says why it cannot
          self._read_slowly(some[at:], into[at:], block)
          at += self._of_one_block(some[at:])

    self._shared(work, rows)

  def write(self, rows: Rows, records: Records) -> None:
    """Writes the records of rows, ascending, each once.

    One call at a time; until it returns, they count as not written yet.

    Raises:
      OSError: the disk's; then any of them may be written, or not.
    """

    def work(part: slice) -> None:
      some, values, at = rows[part], records[part], 0
      block = _aligned(self.block_bytes)
      while at < len(some):
        at = kernels.write(
          self.fd, some, self.stride, values, block, self._bits, at
        )
        if at < len(some):
          self._write_slowly(some[at:], values[at:], block)
          at += self._of_one_block(some[at:])

    self._shared(work, rows)
    kernels.mark(self._bits, rows)

  def _read_slowly(
    self, rows: Rows, records: Records, block: np.ndarray
  ) -> None:
    """Reads the first block of some rows, or says why it cannot."""
    _, places = self._first_block(rows, block)
    for at, place in enumerate(places):
      records[at] = block[place : place + self.width]

  def _write_slowly(
    self, rows: Rows, records: Records, block: np.ndarray
  ) -> None:
    """Writes the first block of some rows, or says why it cannot."""
    start, places = self._first_block(rows, block)
    for at, place in enumerate(places):
      block[place : place + self.width] = records[at]
    _whole(self.fd, self._folder, start, block, os.pwritev)

  def _first_block(
    self, rows: Rows, block: np.ndarray
  ) -> tuple[int, list[int]]:
    """Reads it: where it begins, and in it the place of each of its records."""
    start = self._block_of(int(rows[0]))
    _whole(self.fd, self._folder, start, block, os.preadv)
    own = rows[: self._of_one_block(rows)]
    return start, (own * self.stride - start).tolist()

  def _block_of(self, row: int) -> int:
    """Where the block begins that the row's record is in."""
    return row * self.stride // self.block_bytes * self.block_bytes

  def _of_one_block(self, rows: Rows) -> int:
    """How many of the rows are in the block of the first."""
    most = rows[: self.block_bytes // self.stride]  # ascending, so no more
    blocks = most * self.stride // self.block_bytes
    return int(np.searchsorted(blocks, blocks[0], side='right'))

  def _shared(self, work: Callable[[slice], None], rows: Rows) -> None:
    """Does the work on all rows, by many threads; no two share a block."""
    parts = list(self._parts(rows))
    if len(parts) < 2:
      for part in parts:
        work(part)
      return
    done = [self._pool.submit(work, part) for part in parts]
    futures.wait(done)  # nobody reads or writes once this returns
    for future in done:
      future.result()

  def _parts(self, rows: Rows) -> Iterator[slice]:
    count = min(self._threads, -(-len(rows) // _LEAST_ROWS))
    start = 0
    for number in range(1, count + 1):
      end = len(rows) * number // count
      if end <= start:
        continue
      end = start + self._through_block(rows[start:], end - start)
      yield slice(start, end)
      start = end

  def _through_block(self, rows: Rows, count: int) -> int:
    """`count`, or as many more as end with the last one's block."""
    return count - 1 + self._of_one_block(rows[count - 1 :])

  def cool(self) -> None:
    """Drops what the system keeps of it in memory: to measure a disk."""
    os.fsync(self.fd)
    if hasattr(os, 'posix_fadvise'):
      os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

  def close(self) -> None:
    """Ends the threads and frees the file; may be called again."""
    self._pool.shutdown()
    self._finish()


class _Short(OSError):
  """A file is shorter than it was made."""


def stride_of(width: int) -> int:
  """Bytes from one record of a width to the next: no block's end is crossed."""
  if width > BLOCK:
    return -(-width // BLOCK) * BLOCK
  return 1 << max(0, width - 1).bit_length()


def _aligned(size: int) -> np.ndarray:
  """Bytes that begin where a block may be put without a copy."""
  memory = np.empty(size + BLOCK, np.uint8)
  start = -memory.ctypes.data % BLOCK
  return memory[start : start + size]


def _opened(folder: pathlib.Path) -> int:
  """The descriptor of a new file without a name."""
  try:
    fd, name = tempfile.mkstemp('.rows', 'slipstream-', folder)
    os.unlink(name)
  except OSError as error:
    raise UserError(
      'rows on a disk need a folder that files can be made in',
      got=f'{folder}: {error.strerror}',
      where='file, path',
      hint='name a folder of a disk with room for all rows',
    ) from error
  if hasattr(os, 'posix_fadvise'):  # what lies beside a row is not wanted
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
  return fd


def _whole(
  fd: int,
  folder: pathlib.Path,
  start: int,
  block: np.ndarray,
  call: Callable[..., int],
) -> None:
  """Reads or writes a whole block, however often the system gives a part.

  Raises:
    OSError: the disk's, with the folder's name.
  """
  done = 0
  try:
    while done < len(block):
      step = call(fd, [block[done:]], start + done)
      if not step:
        raise _Short(errno.EIO, 'a file that ends early')
      done += step
  except OSError as error:
    error.filename = str(folder)
    raise
