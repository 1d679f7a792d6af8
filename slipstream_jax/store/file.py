"""Rows on a disk, each read when it is gathered.

A table takes disk space only, except for 4 bytes of memory per row as an index.
"""

from collections.abc import Iterator, Sequence
import functools
import os

import numpy as np

from slipstream_jax.store import whole
from slipstream_jax.store.base import (
  BeforeWrite,
  FirstRows,
  ignore_writes,
  PIECE_BYTES,
  Storage,
  TierCounts,
)
from slipstream_jax.store.helpers import ALONE, Helpers
from slipstream_jax.store.records import layout_of
from slipstream_jax.store.scratch import ScratchFile
from slipstream_jax.store.whole import records_of
from slipstream_jax.types import RowBlock, RowIds


class FileStore:
  """A store with all rows on a disk, in `file`. See `RowStore`."""

  def __init__(self, first: FirstRows, folder: str | os.PathLike[str]) -> None:
    """Opens an unnamed file in the folder.

    Raises:
      UserError: no file can be made there.
    """
    self._layout = layout_of(first.rows(np.empty(0, np.int64)))
    self.num_rows, self.row_bytes = first.num_rows, self._layout.width
    self._first, self._counts = first, TierCounts()
    self.before_write: BeforeWrite = ignore_writes
    self.file = ScratchFile(folder, self.num_rows, self.row_bytes)

  @property
  def counts(self) -> TierCounts:
    """The disk counters."""
    blocks = self.file.blocks
    return self._counts._replace(
      bytes_read=blocks.bytes_read, bytes_written=blocks.bytes_written
    )

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Returns copies of rows, padded with zeros to `size` rows."""
    out, old = self._layout.empty(size), self._counts
    written = int(self.file.has(rows).sum())
    self._counts = old._replace(
      gathered=old.gathered + len(rows),
      missed=old.missed + written,
      first=old.first + len(rows) - written,
    )
    records = records_of(self.file, self._layout, self._first, rows)
    self._layout.take(records, np.arange(len(rows)), out, helpers)
    for leaf in (out.rows, *out.state):
      leaf[len(rows) :] = 0
    return out

  def scatter(
    self, rows: RowIds, block: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Writes the first U rows of a block."""
    self.before_write(rows)
    records = np.empty((len(rows), self.row_bytes), np.uint8)
    self._layout.put(records, np.arange(len(rows)), block, helpers)
    self.file.write(rows, records)
    written = self._counts.written + len(rows)
    self._counts = self._counts._replace(written=written)

  def prefetch(self, rows: RowIds) -> None:
    """Does nothing, as there is no cache."""

  def flush(self) -> None:
    """Does nothing, as `scatter` returns after writing."""

  def touched(self) -> Iterator[RowIds]:
    """Yields the rows that were written, ascending, in pieces."""
    step = max(1, PIECE_BYTES // self.row_bytes)
    for start in range(0, self.num_rows, step):
      rows = self.file.written(start, min(start + step, self.num_rows))
      if len(rows):
        yield rows

  def reset(self, first: FirstRows) -> None:
    """Sets all rows to their first values."""
    self.drop()
    self._first = first

  def fill(self, table: RowBlock) -> None:
    """Writes all rows."""
    self.before_write(None)
    whole.fill(self, table)

  def like(self) -> RowBlock:
    """Returns new arrays for all rows."""
    return self._layout.empty(self.num_rows)

  def table(self) -> RowBlock:
    """Returns all rows in new arrays."""
    return whole.table_of(self, self._layout)

  def drop(self) -> None:
    """Empties the file."""
    self.before_write(None)
    self.file.clear()

  def close(self) -> None:
    """Frees the file."""
    self.before_write(None)
    self.file.close()


def _open(
  path: str | os.PathLike[str], groups: Sequence[FirstRows]
) -> tuple[FileStore, ...]:
  return tuple(FileStore(first, path) for first in groups)


def file(path: str | os.PathLike[str]) -> Storage:
  """Keeps all rows on a disk.

  Args:
    path: a folder on that disk. Each group has an unnamed file there that ends
      with the process.
  """
  return Storage('file', functools.partial(_open, path))
