"""Rows in host memory: arrays of all of them, updated in place."""

from collections.abc import Iterator, Sequence

import numpy as np

from slipstream_jax.store import host_table
from slipstream_jax.store.base import FirstRows, pieces_of, Storage
from slipstream_jax.store.helpers import ALONE, Helpers
from slipstream_jax.types import RowBlock, RowIds


class MemoryStore:
  """All rows in arrays; see `RowStore`.

  Attributes:
    num_rows: N.
    row_bytes: what one row and its state take on the link.
    counts: None, as there is no disk.
  """

  def __init__(self, first: FirstRows) -> None:
    """Holds no row yet."""
    self._none = first.rows(np.empty(0, np.int64))
    self.num_rows = first.num_rows
    self.row_bytes = host_table.row_bytes(self._none)
    self._table = self._none

  @property
  def counts(self) -> None:
    """There is no disk."""

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Copies of some rows, padded with zeros to `size` rows."""
    return host_table.gather(self._table, rows, size, helpers)

  def scatter(
    self, rows: RowIds, block: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Writes the first U rows of a block."""
    host_table.scatter(self._table, rows, block, helpers)

  def prefetch(self, rows: RowIds) -> None:
    """All rows are here."""

  def flush(self) -> None:
    """Nothing is on its way."""

  def touched(self) -> Iterator[RowIds]:
    """All rows: nobody notes which were written."""
    return pieces_of(self.num_rows, self.row_bytes)

  def reset(self, first: FirstRows) -> None:
    """Makes all rows those before their first step."""
    self.drop()  # gives memory back before taking more
    self._table = first.block()

  def fill(self, table: RowBlock) -> None:
    """Takes these arrays over as its own."""
    self._table = table

  def like(self) -> RowBlock:
    """Its own arrays, for there may be no room for others."""
    if len(self._table.rows):
      return self._table
    rows, *state = (
      np.empty((self.num_rows, *leaf.shape[1:]), leaf.dtype)
      for leaf in (self._none.rows, *self._none.state)
    )
    return RowBlock(rows, tuple(state))

  def table(self) -> RowBlock:
    """Its own arrays."""
    return self._table

  def drop(self) -> None:
    """Lets go of the arrays."""
    self._table = self._none

  def close(self) -> None:
    """There is nothing to end."""


def _open(groups: Sequence[FirstRows]) -> tuple[MemoryStore, ...]:
  return tuple(map(MemoryStore, groups))


MEMORY = Storage('memory', _open)
"""All rows in host memory."""
