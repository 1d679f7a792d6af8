"""Row store that saves old values before writes, for a running snapshot."""

from collections.abc import Iterator
import contextlib
import threading

import numpy as np

from slipstream_jax.engine.dirty.budget import Budget
from slipstream_jax.engine.dirty.draining import Drain
from slipstream_jax.store.base import FirstRows, RowStore, TierCounts
from slipstream_jax.store.helpers import ALONE, Helpers
from slipstream_jax.store.memory import MemoryStore
from slipstream_jax.types import RowBlock, RowIds

_PIECE_BYTES = 1 << 19
_MOST_ON_DISK = 1 << 16
"""Most bytes read at a time from a store that threads cannot share, as steps
wait."""


class CopyOnWriteStore:
  """A `RowStore` that saves rows for a drain before they are written."""

  def __init__(self, store: RowStore) -> None:
    """Takes the store over."""
    self._store = store
    self._drain: Drain | None = None
    self.num_rows, self.row_bytes = store.num_rows, store.row_bytes
    # Two threads may use different rows of an array at a time.
    self._in_memory = isinstance(store, MemoryStore)
    self._lock = threading.Lock()

  @property
  def counts(self) -> TierCounts | None:
    """The disk counters of the store, or None without a disk."""
    return self._store.counts

  def drain(self, bits: np.ndarray, budget: Budget) -> Drain:
    """Starts a snapshot of these rows with their current values.

    Args:
      bits: the marked rows, u8[ceil(N / 8)], taken over.
      budget: bounds the saved values.
    """
    self._wait()
    nbytes = _PIECE_BYTES if self._in_memory else _MOST_ON_DISK
    piece = max(1, nbytes // max(self.row_bytes, 1))
    self._drain = Drain(
      bits, self.num_rows, self.row_bytes, self._gather_locked, budget, piece
    )
    return self._drain

  def _gather_locked(self, rows: RowIds) -> RowBlock:
    with self._lock:
      return self._store.gather(rows, len(rows))

  def _wait(self) -> None:
    if self._drain is not None:
      self._drain.wait()
    self._drain = None

  @contextlib.contextmanager
  def _alone(self) -> Iterator[None]:
    """Keeps the draining thread from reading, if the store requires it."""
    if self._in_memory or self._drain is None or self._drain.done:
      yield
      return
    with self._lock:
      yield

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Returns copies of rows, padded with zeros to `size` rows."""
    with self._alone():
      return self._store.gather(rows, size, helpers)

  def scatter(
    self, rows: RowIds, block: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Writes the first U rows of a block, after saving rows for the drain."""
    if self._drain is not None:
      self._drain.before_write(rows)
    with self._alone():
      self._store.scatter(rows, block, helpers)

  def prefetch(self, rows: RowIds) -> None:
    """Announces rows that will be gathered soon."""
    self._store.prefetch(rows)

  def flush(self) -> None:
    """Waits until all rows have reached the disk."""
    with self._alone():
      self._store.flush()

  def touched(self) -> Iterator[RowIds]:
    """Yields the rows that may differ from their first values, ascending."""
    return self._store.touched()

  def reset(self, first: FirstRows) -> None:
    """Sets all rows to their first values."""
    self._wait()
    self._store.reset(first)

  def fill(self, table: RowBlock) -> None:
    """Replaces all rows by those of a host table."""
    self._wait()
    self._store.fill(table)

  def like(self) -> RowBlock:
    """Returns host arrays of all rows, to be passed to `fill`."""
    self._wait()  # they may be the store's own
    return self._store.like()

  def table(self) -> RowBlock:
    """Returns all rows, read-only."""
    with self._alone():
      return self._store.table()

  def drop(self) -> None:
    """Frees the memory and disk of the rows."""
    self._wait()
    self._store.drop()

  def close(self) -> None:
    """Ends threads and frees files."""
    self._wait()
    self._store.close()
