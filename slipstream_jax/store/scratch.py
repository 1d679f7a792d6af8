"""Records of rows in a file that ends with its process.

Records are written where there is room, many at once. None crosses the end of a
block. Rows that were never written take no room and are never read.
"""

import os

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.store import block_kernels
from slipstream_jax.store.blocks import aligned, BLOCK, BlockFile, THREADS
from slipstream_jax.store.records import Places, Records
from slipstream_jax.store.space import Size, Space

Rows = Int[np.ndarray, ' n']


class ScratchFile:
  """Records of N rows, with an index of the rows that were written.

  Attributes:
    num_rows: N.
    width: bytes of a record.
    per: records per block.
    blocks: the file.
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
    self.per, block_bytes = shape_of(width)
    self.blocks = BlockFile(folder, block_bytes, threads)
    self.clear()

  def clear(self) -> None:
    """Forgets all records."""
    self._space = Space(self.num_rows, self.per)
    self.blocks.clear()

  def has(self, rows: Rows) -> Bool[np.ndarray, ' n']:
    """Returns which of the rows were written."""
    return self._space.has(rows)

  def read(self, rows: Rows, out: Records, to: Places | None = None) -> None:
    """Reads the records of unique rows, all of which were written.

    Another thread may write meanwhile. Of a row that it writes, either the old
    or the new record is read.

    Args:
      rows: in any order.
      out: u8[m, W], receives the records.
      to: i64[n], the place of each in `out`. None: in the order of the rows.

    Raises:
      OSError: the disk failed.
    """
    space = self._space
    to = np.arange(len(rows)) if to is None else to
    while len(rows):
      at = space.at(rows)
      order = np.argsort(at)
      self.blocks.read(at[order], self.per, out, to[order])
      # The old place of a record that moved meanwhile may have been
      # overwritten.
      again = space.at(rows) != at
      rows, to = rows[again], to[again]

  def write(self, rows: Rows, records: Records) -> None:
    """Writes the records of unique rows. Allows one call at a time.

    Raises:
      OSError: the disk failed. Any of the records may have been written.
    """
    step = self._space.size.spare * self.per
    for start in range(0, len(rows), step):
      part = slice(start, start + step)
      needed = -(-len(rows[part]) // self.per)
      while self._space.room < needed:
        self._clean()
      self._append(rows[part], records[part])

  def _append(self, rows: Rows, records: Records) -> None:
    """Writes records of no more rows than there is room for."""
    blocks = self._space.take(-(-len(rows) // self.per))
    data = aligned(len(blocks) * self.blocks.block_bytes)
    block_kernels.fill(data, records, self.per, self.blocks.block_bytes)
    try:
      self.blocks.write(blocks, data)
    except BaseException:
      self._space.give_back(blocks)
      raise
    self._space.put(rows, blocks)

  def _clean(self) -> None:
    """Moves records together to free blocks."""
    rows = self._space.crowded()
    step = self._space.size.spare * self.per
    for start in range(0, len(rows), step):
      some = rows[start : start + step]
      records = np.empty((len(some), self.width), np.uint8)
      self.read(some, records)
      self._append(some, records)

  def cool(self) -> None:
    """Drops the file from the system's page cache, to measure the disk."""
    self.blocks.cool()

  def close(self) -> None:
    """Ends the threads and frees the file. Idempotent."""
    self.blocks.close()


def shape_of(width: int) -> tuple[int, int]:
  """Returns how many records of `width` bytes fit a block, and its bytes."""
  if width > BLOCK:
    return 1, -(-width // BLOCK) * BLOCK
  return BLOCK // max(1, width), BLOCK


def file_bytes(num_rows: int, width: int) -> int:
  """Returns the largest size of a file of `num_rows` records in bytes."""
  per, block_bytes = shape_of(width)
  return Size(num_rows, per).most(num_rows) * block_bytes
