"""Rows in host memory: arrays of all rows, updated in place."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream_jax.store.base import (
  BeforeWrite,
  FirstRows,
  ignore_writes,
  Storage,
)
from slipstream_jax.store.host_table import row_bytes
from slipstream_jax.store.records import (
  as_bytes,
  as_words,
  layout_of,
  put,
  take,
)
from slipstream_jax.store.threads import ALONE, Helpers
from slipstream_jax.types import RowBlock, RowIds


class MemoryStore:
  """A store with all rows in arrays. See `RowStore`."""

  def __init__(self, first: FirstRows) -> None:
    """Makes an empty store."""
    self._none = first.rows(np.empty(0, np.int64))
    self.num_rows = first.num_rows
    self.row_bytes = row_bytes(self._none)
    self._layout = layout_of(self._none)
    self._set(self._none)
    self.before_write: BeforeWrite = ignore_writes

  @property
  def counts(self) -> None:
    """None, as there is no disk."""

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Returns copies of rows, padded with zeros to `size` rows."""
    block = self._layout.empty(size)
    self._copy(take, rows, block, helpers)
    for values in (block.rows, *block.state):
      values[len(rows) :] = 0
    return block

  def scatter(
    self, rows: RowIds, block: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Writes the first U rows of a block."""
    self.before_write(rows)
    self._copy(put, rows, block, helpers)

  def _copy(
    self, copy: Any, rows: RowIds, block: RowBlock, helpers: Helpers
  ) -> None:
    """Copies rows between the table and the first rows of a block."""
    leaves = (block.rows, *block.state)
    pairs = [
      (own, as_bytes(leaf).view(own.dtype))
      for own, leaf in zip(self._words, leaves, strict=True)
    ]

    def copy_part(part: slice) -> None:
      at = rows[part]
      for own, leaf in pairs:
        copy(own, at, leaf[part])

    helpers.run(copy_part, len(rows), len(rows) * self.row_bytes)

  def prefetch(self, rows: RowIds) -> None:
    """Does nothing, as all rows are in memory."""

  def reset(self, first: FirstRows) -> None:
    """Sets all rows to their first values."""
    self.drop()  # frees memory before allocating more
    self._set(first.block())

  def table(self) -> RowBlock:
    """Returns the store's own arrays."""
    return self._table

  def drop(self) -> None:
    """Frees the arrays."""
    self.before_write(None)
    self._set(self._none)

  def _set(self, table: RowBlock) -> None:
    self._table = table
    self._words = [
      as_words(as_bytes(leaf), as_bytes(leaf[:0]))[0]
      for leaf in (table.rows, *table.state)
    ]

  def close(self) -> None:
    """Does nothing, as there are no threads or files."""


def _open(groups: Sequence[FirstRows]) -> tuple[MemoryStore, ...]:
  return tuple(map(MemoryStore, groups))


MEMORY = Storage('memory', _open)
"""Keeps all rows in host memory."""
