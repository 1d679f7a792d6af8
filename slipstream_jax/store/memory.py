"""Rows in host memory: arrays of all rows, updated in place."""

from collections.abc import Sequence

import numpy as np

from slipstream_jax.store.base import (
  BeforeWrite,
  FirstRows,
  ignore_writes,
  Storage,
)
from slipstream_jax.store.host_table import row_bytes
from slipstream_jax.store.records import as_bytes, as_words, put
from slipstream_jax.store.threads import ALONE, Helpers
from slipstream_jax.types import RowBlock, RowIds


class MemoryStore:
  """A store with all rows in arrays. See `RowStore`."""

  def __init__(self, first: FirstRows) -> None:
    """Makes an empty store."""
    self._none = first.rows(np.empty(0, np.int64))
    self.num_rows = first.num_rows
    self.row_bytes = row_bytes(self._none)
    self._table = self._none
    self.before_write: BeforeWrite = ignore_writes

  @property
  def counts(self) -> None:
    """None, as there is no disk."""

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Returns copies of rows, padded with zeros to `size` rows."""
    leaves = self._table.rows, *self._table.state
    out = [np.empty((size, *x.shape[1:]), x.dtype) for x in leaves]

    def copy(part: slice) -> None:
      for leaf, values in zip(leaves, out, strict=True):
        # 'clip' writes directly to `out`, as the rows are within bounds.
        into = values[: len(rows)][part]
        np.take(leaf, rows[part], axis=0, out=into, mode='clip')

    helpers.run(copy, len(rows), len(rows) * self.row_bytes)
    for values in out:
      values[len(rows) :] = 0
    return RowBlock(out[0], tuple(out[1:]))

  def scatter(
    self, rows: RowIds, block: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Writes the first U rows of a block."""
    self.before_write(rows)
    leaves = self._table.rows, *self._table.state
    pairs = [
      as_words(as_bytes(leaf), as_bytes(values))
      for leaf, values in zip(leaves, (block.rows, *block.state), strict=True)
    ]

    def copy(part: slice) -> None:
      for leaf, values in pairs:
        put(leaf, rows[part], values[part])

    helpers.run(copy, len(rows), len(rows) * self.row_bytes)

  def prefetch(self, rows: RowIds) -> None:
    """Does nothing, as all rows are in memory."""

  def reset(self, first: FirstRows) -> None:
    """Sets all rows to their first values."""
    self.drop()  # frees memory before allocating more
    self._table = first.block()

  def table(self) -> RowBlock:
    """Returns the store's own arrays."""
    return self._table

  def drop(self) -> None:
    """Frees the arrays."""
    self.before_write(None)
    self._table = self._none

  def close(self) -> None:
    """Does nothing, as there are no threads or files."""


def _open(groups: Sequence[FirstRows]) -> tuple[MemoryStore, ...]:
  return tuple(map(MemoryStore, groups))


MEMORY = Storage('memory', _open)
"""Keeps all rows in host memory."""
