"""A row store that a checkpoint is drained from while steps write to it."""

from collections.abc import Iterator
import contextlib
import threading

import numpy as np

from slipstream_jax.store.base import FirstRows, RowStore, TierCounts
from slipstream_jax.store.helpers import ALONE, Helpers
from slipstream_jax.store.memory import MemoryStore
from slipstream_jax.stream.dirty.budget import Budget
from slipstream_jax.stream.dirty.draining import Drain
from slipstream_jax.types import RowBlock, RowIds

_PIECE_BYTES = 1 << 19
_MOST_ON_DISK = 1 << 16
"""Of a store that one thread at a time can use: so long a step may wait."""


class Claimed:
  """A row store, as `RowStore` says; what a drain has to take is saved first.

  Attributes:
    num_rows: N.
    row_bytes: what one row and its state take on the link.
    counts: of the store.
  """

  def __init__(self, store: RowStore) -> None:
    """Takes the store over."""
    self._store = store
    self._drain: Drain | None = None
    self.num_rows, self.row_bytes = store.num_rows, store.row_bytes
    # Of an array, two threads may use different rows at a time.
    self._in_memory = isinstance(store, MemoryStore)
    self._lock = threading.Lock()

  @property
  def counts(self) -> TierCounts | None:
    """What it did with its disk so far; None: it has none."""
    return self._store.counts

  def drain(self, bits: np.ndarray, budget: Budget) -> Drain:
    """Begins to drain these rows, with the values that they have now.

    Args:
      bits: which rows, u8[ceil(N / 8)]; taken over.
      budget: of what is saved of them.
    """
    self._wait()
    nbytes = _PIECE_BYTES if self._in_memory else _MOST_ON_DISK
    piece = max(1, nbytes // max(self.row_bytes, 1))
    self._drain = Drain(
      bits, self.num_rows, self.row_bytes, self._taken, budget, piece
    )
    return self._drain

  def _taken(self, rows: RowIds) -> RowBlock:
    with self._lock:
      return self._store.gather(rows, len(rows))

  def _wait(self) -> None:
    if self._drain is not None:
      self._drain.wait()
    self._drain = None

  @contextlib.contextmanager
  def _alone(self) -> Iterator[None]:
    """No other thread reads meanwhile, where that would matter."""
    if self._in_memory or self._drain is None or self._drain.done:
      yield
      return
    with self._lock:
      yield

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Copies of some rows, padded with zeros to `size` rows."""
    with self._alone():
      return self._store.gather(rows, size, helpers)

  def scatter(
    self, rows: RowIds, block: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Writes the first U rows of a block; saves what is still to be drained."""
    if self._drain is not None:
      self._drain.before_write(rows)
    with self._alone():
      self._store.scatter(rows, block, helpers)

  def prefetch(self, rows: RowIds) -> None:
    """Says that these rows are gathered soon."""
    self._store.prefetch(rows)

  def flush(self) -> None:
    """Waits until nothing is on its way to a disk."""
    with self._alone():
      self._store.flush()

  def touched(self) -> Iterator[RowIds]:
    """Rows that may differ from their first values, ascending, in pieces."""
    return self._store.touched()

  def reset(self, first: FirstRows) -> None:
    """Makes all rows those before their first step."""
    self._wait()
    self._store.reset(first)

  def fill(self, table: RowBlock) -> None:
    """Replaces all rows by those of a host table."""
    self._wait()
    self._store.fill(table)

  def like(self) -> RowBlock:
    """Host arrays of all rows, to be written and given to `fill`."""
    self._wait()  # they may be the store's own
    return self._store.like()

  def table(self) -> RowBlock:
    """All rows, not to be written."""
    with self._alone():
      return self._store.table()

  def drop(self) -> None:
    """Gives back what the rows take."""
    self._wait()
    self._store.drop()

  def close(self) -> None:
    """Ends threads and gives back files."""
    self._wait()
    self._store.close()
