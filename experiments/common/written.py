"""A row store that keeps only the rows that were written.

Programs that look at a checkpoint use it. A checkpoint has the rows that took a
step, and of a large table these may be few. Loading takes as much memory as
they need, and no time for the others, whose first values are computed on use.
"""

from collections.abc import Sequence

import numpy as np

from slipstream_jax.store.base import (
  BeforeWrite,
  FirstRows,
  ignore_writes,
  Storage,
)
from slipstream_jax.store.host_table import row_bytes
from slipstream_jax.store.threads import ALONE, Helpers
from slipstream_jax.types import RowBlock, RowIds


class WrittenRows:
  """Holds the written rows in the order of their first write. See `RowStore`.

  Attributes:
    num_rows: N.
    row_bytes: bytes that one row and its state take on the link.
    written: number of rows that were written.
  counts: None, as there is no disk.
  """

  counts = None

  def __init__(self, first: FirstRows) -> None:
    """Makes a store in which no row was written."""
    self.before_write: BeforeWrite = ignore_writes
    self.reset(first)

  def reset(self, first: FirstRows) -> None:
    """Sets all rows to their first values."""
    self.before_write(None)
    none = first.rows(np.empty(0, np.int64))
    self.num_rows, self.row_bytes = first.num_rows, row_bytes(none)
    self._first, self.written = first, 0
    # The system gives a page of these arrays once it is written to.
    places = np.int32 if self.num_rows < 1 << 31 else np.int64
    self._places = np.zeros(self.num_rows, places)
    self._leaves = [
      np.empty((self.num_rows, *leaf.shape[1:]), leaf.dtype)
      for leaf in (none.rows, *none.state)
    ]

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Returns copies of rows, padded with zeros to `size` rows."""
    del helpers
    at = self._places[rows]
    written = at > 0
    first = self._first.rows(rows[~written])
    leaves = []
    for own, others in zip(
      self._leaves, (first.rows, *first.state), strict=True
    ):
      out = np.zeros((size, *own.shape[1:]), own.dtype)
      out[: len(rows)][written] = own[at[written] - 1]
      out[: len(rows)][~written] = others
      leaves.append(out)
    return RowBlock(leaves[0], tuple(leaves[1:]))

  def scatter(
    self, rows: RowIds, block: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Writes the first U rows of a block."""
    del helpers
    self.before_write(rows)
    new = rows[self._places[rows] == 0]
    self._places[new] = self.written + 1 + np.arange(len(new))
    self.written += len(new)
    at = self._places[rows] - 1
    for own, leaf in zip(self._leaves, (block.rows, *block.state), strict=True):
      own[at] = leaf[: len(rows)]

  def prefetch(self, rows: RowIds) -> None:
    """Does nothing, as there is no disk."""

  def table(self) -> RowBlock:
    """Returns all rows."""
    return self.gather(np.arange(self.num_rows), self.num_rows)

  def drop(self) -> None:
    """Frees the memory of the rows."""
    self.reset(self._first)

  def close(self) -> None:
    """Does nothing, as there are no threads or files."""


def _open(groups: Sequence[FirstRows]) -> tuple[WrittenRows, ...]:
  return tuple(map(WrittenRows, groups))


WRITTEN = Storage('written', _open)
"""Keeps written rows in memory and computes the others."""
