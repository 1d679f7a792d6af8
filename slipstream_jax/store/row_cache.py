"""A cache of rows in host memory, planned by the placement `cached` with LRU.

The device's planner assumes that a step changes every row of its batch. Here
the owner marks the rows that were written. Only those go to the disk on
eviction.
"""

from typing import NamedTuple

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.placement.cached import cached
from slipstream_jax.types import Positions, RowIds, Slots, Unique


class Allocation(NamedTuple):
  """The slots that a cache assigned to some rows, and the rows it evicted."""

  slots: Slots
  """The slot of each row, i64[U]. -1 if there was no room."""
  new: Positions
  """Positions of the rows that have a slot now and had none before."""
  evict: RowIds
  """The evicted rows that were written in the cache."""
  evict_slots: Slots
  """The slots that still hold the evicted rows."""


class RowCache:
  """Index of which of N rows are in C slots, and which of them were written.

  Attributes:
    row_at: i64[C], the row in each slot. -1 = empty.
    dirty: bool[C], whether the slot's row was written.
  """

  row_at: Int[np.ndarray, ' C']
  dirty: Bool[np.ndarray, ' C']

  def __init__(self, num_rows: int, capacity: int) -> None:
    """Makes a cache with empty slots. Without slots it takes no memory."""
    self._is_empty = not capacity
    self._placement = cached(max(capacity, 1), 'lru')
    rows = num_rows if capacity else 0
    self._state = self._placement.start(rows, None, None)
    cache = self._state.cache
    self.row_at, self.dirty = cache.row_at, cache.dirty
    self._place_of = cache.place_of

  def slots_of(self, rows: RowIds) -> Slots:
    """Returns the slot of each row, i64[U]. -1 if it has none."""
    if self._is_empty:
      return np.full(len(rows), -1)
    return self._place_of.take(rows).astype(np.int64) - 1

  def take(self, rows: RowIds) -> Allocation:
    """Assigns a slot to each row while there are any, and marks it as used.

    Args:
      rows: i64[U], unique. None of them is evicted for another.
    """
    before = self.slots_of(rows)
    if self._is_empty:
      return Allocation(before, NO_ROWS, NO_ROWS, NO_ROWS)
    there = before[before >= 0]
    dirty = self.dirty[there]
    inverse = np.arange(len(rows), dtype=np.int32)
    state, plan = self._placement.plan(self._state, [Unique(rows, inverse)])
    self._state = state
    new = np.flatnonzero((before < 0) & (plan.slots >= 0))
    self.dirty[there], self.dirty[plan.slots[new]] = dirty, False
    return Allocation(plan.slots, new, plan.evict, plan.evict_slots)
