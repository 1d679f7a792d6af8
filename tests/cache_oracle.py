"""A cache in plain Python: sets, lists and sorting, no heap, no kernels."""

import numpy as np

HALF_LIFE = 1000


class Oracle:
  """Plans as `cached(capacity, eviction, look_ahead)` should."""

  def __init__(self, capacity, eviction, look_ahead, num_rows, hot):
    self.capacity = min(capacity, num_rows)
    self.eviction, self.look_ahead = eviction, look_ahead
    self.rank = {row: i for i, row in enumerate(hot)}
    first = list(hot)[: self.capacity]
    self.row_at = first + [None] * (self.capacity - len(first))
    self.dirty, self.frozen, self.step = set(), set(), 0
    self.count = {
      row: np.float32(1 - i / self.capacity) for i, row in enumerate(first)
    }
    self.last_use = {row: -1 - i for i, row in enumerate(first)}

  def priority(self, row):
    by_use = self.last_use[row]
    if self.eviction == 'lru':
      return by_use
    if self.eviction == 'static':
      hot = row in self.rank
      return hot, -self.rank[row] if hot else by_use
    return self.count.get(row, np.float32(0))

  def next_use(self, row, coming):
    uses = [i for i, batch in enumerate(coming) if row in batch]
    return uses[0] if uses else None

  def victim(self, batch, coming):
    """The slot whose row leaves: sorted by all that the policy says."""

    def order(slot):
      row = self.row_at[slot]
      use = self.next_use(row, coming)
      wanted = use is not None
      last = -use if wanted else self.priority(row)
      return row in self.frozen, wanted, last, slot

    free = [s for s in range(self.capacity) if self.row_at[s] not in batch]
    return min(free, key=order)

  def plan(self, window):
    """Slots, loads, stores and evicted rows of window[0]; distinct rows."""
    batch, *coming = window[: 1 + self.look_ahead]
    if self.eviction != 'look_ahead':
      coming = []
    slots = {row: slot for slot, row in enumerate(self.row_at) if row in batch}
    loads, stores, evicted = [], [], []
    for row in batch:
      if row in slots:
        continue
      loads.append(row)
      if len(slots) == self.capacity:
        stores.append(row)
        continue
      if None in self.row_at:
        slot = self.row_at.index(None)
      else:
        slot = self.victim(set(batch), coming)
        leaving = self.row_at[slot]
        if leaving in self.dirty:
          evicted.append((leaving, slot))
          self.dirty.discard(leaving)
      self.row_at[slot] = row
      slots[row] = slot
    self._use(batch, slots)
    return {
      'slots': [slots.get(row, -1) for row in batch],
      'load': loads,
      'store': stores,
      'evict': evicted,
    }

  def _use(self, batch, slots):
    now = np.float32(2 ** (self.step / HALF_LIFE))
    for row in batch:
      self.count[row] = self.count.get(row, np.float32(0)) + now
      self.last_use[row] = self.step
      if row in slots and row not in self.frozen:
        self.dirty.add(row)
    self.step += 1


def fewest_loads(batches, capacity, contents):
  """The least rows that any cache loads, batch by batch, by trying all."""
  caches = {frozenset(contents): 0}
  for batch in batches:
    rows, after = frozenset(batch), {}
    for cache, loads in caches.items():
      spare = sorted(cache - rows)
      room = capacity - len(rows)
      loads += len(rows - cache)
      for bits in range(1 << len(spare)):
        stay = [row for i, row in enumerate(spare) if bits >> i & 1]
        if len(stay) <= room:
          state = rows | frozenset(stay)
          after[state] = min(loads, after.get(state, loads))
    caches = after
  return min(caches.values())
