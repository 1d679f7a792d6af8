"""A cache of rows in host memory, planned as the device's: `cached`, by LRU.

The device's planner takes every row of a batch as changed by its step. Here
the owner says which were written: only those have to leave for the disk.
"""

from typing import NamedTuple

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.placement.cached import cached
from slipstream_jax.types import Positions, RowIds, Slots, Unique


class Taken(NamedTuple):
  """What a cache gave some rows."""

  slots: Slots
  """Of each row, i64[U]; -1: there was no room."""
  new: Positions
  """Of the rows that have a slot from here on, and had none."""
  evict: RowIds
  """Rows that were written in the cache, and lost their slots to these."""
  evict_slots: Slots
  """Where they still lie."""


class RowCache:
  """Which of N rows are in C slots, and which were written there.

  Attributes:
    row_at: i64[C], the row in each slot; -1 = empty.
    dirty: bool[C], whether it was written there.
  """

  row_at: Int[np.ndarray, ' C']
  dirty: Bool[np.ndarray, ' C']

  def __init__(self, num_rows: int, capacity: int) -> None:
    """All slots are empty."""
    self._placement = cached(capacity, 'lru')
    self._state = self._placement.start(num_rows, None, None)
    cache = self._state.cache
    self.row_at, self.dirty = cache.row_at, cache.dirty
    self._place_of = cache.place_of

  def slots_of(self, rows: RowIds) -> Slots:
    """Slot of each row, i64[U]; -1 if it has none."""
    return self._place_of.take(rows).astype(np.int64) - 1

  def take(self, rows: RowIds) -> Taken:
    """Gives each row a slot, as long as there are any, and marks it as used.

    Args:
      rows: i64[U], each once; none of them leaves for another.
    """
    before = self.slots_of(rows)
    there = before[before >= 0]
    dirty = self.dirty[there]
    inverse = np.arange(len(rows), dtype=np.int32)
    state, plan = self._placement.plan(self._state, [Unique(rows, inverse)])
    self._state = state
    new = np.flatnonzero((before < 0) & (plan.slots >= 0))
    self.dirty[there], self.dirty[plan.slots[new]] = dirty, False
    return Taken(plan.slots, new, plan.evict, plan.evict_slots)
