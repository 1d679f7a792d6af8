"""Rows in memory as far as they were written; others are worked out.

For who looks at a checkpoint: it has the rows that took a step, and of a large
table these may be few. So what is loaded takes as much memory as was trained,
and no time for what was not.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from slipstream_jax.store.base import (
  BeforeWrite,
  FirstRows,
  ignore_writes,
  pieces_of,
  Storage,
)
from slipstream_jax.store.host_table import row_bytes
from slipstream_jax.store.threads import ALONE, Helpers
from slipstream_jax.types import RowBlock, RowIds


class WrittenRows:
  """Rows that were written, in the order of that; see `RowStore`.

  Attributes:
    num_rows: N.
    row_bytes: what one row and its state take on the link.
    counts: None: there is no disk.
  """

  counts = None

  def __init__(self, first: FirstRows) -> None:
    """Holds no row yet."""
    self._none = first.rows(np.empty(0, np.int64))
    self.num_rows, self.row_bytes = first.num_rows, row_bytes(self._none)
    self.before_write: BeforeWrite = ignore_writes
    self._kind = np.int32 if self.num_rows < 1 << 31 else np.int64
    self.reset(first)

  def reset(self, first: FirstRows) -> None:
    """Makes all rows those before their first step."""
    self.drop()  # gives memory back before taking more
    self._first = first
    # Of both, the system gives pages as they are written.
    self._places = np.zeros(self.num_rows, self._kind)
    rows, *state = (
      np.empty((self.num_rows, *leaf.shape[1:]), leaf.dtype)
      for leaf in _leaves(self._none)
    )
    self._table = RowBlock(rows, tuple(state))

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Copies of some rows, padded with zeros to `size` rows."""
    del helpers
    at = self._places[rows]
    written = at > 0
    first = self._first.rows(rows[~written])
    leaves = []
    for own, others in zip(_leaves(self._table), _leaves(first), strict=True):
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
    self._places[new] = self._count + 1 + np.arange(len(new))
    self._count += len(new)
    at = self._places[rows] - 1
    for own, leaf in zip(_leaves(self._table), _leaves(block), strict=True):
      own[at] = leaf[: len(rows)]

  def prefetch(self, rows: RowIds) -> None:
    """What there is is here."""

  def touched(self) -> Iterator[RowIds]:
    """Rows that were written."""
    for rows in pieces_of(self.num_rows, self.row_bytes):
      yield rows[self._places[rows] > 0]

  def table(self) -> RowBlock:
    """All rows."""
    return self.gather(np.arange(self.num_rows), self.num_rows)

  def drop(self) -> None:
    """Lets go of the arrays."""
    self.before_write(None)
    self._table, self._places = self._none, np.empty(0, self._kind)
    self._count = 0

  def close(self) -> None:
    """There is nothing to end."""


def _leaves(block: RowBlock) -> tuple[np.ndarray, ...]:
  return block.rows, *block.state


def _open(groups: Sequence[FirstRows]) -> tuple[WrittenRows, ...]:
  return tuple(map(WrittenRows, groups))


WRITTEN = Storage('written', _open)
"""Rows that were written in memory, others not at all."""
