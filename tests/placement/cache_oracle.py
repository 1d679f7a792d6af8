"""A cache of rows in plain Python, one row and one slot at a time."""

import math

import numpy as np

HALF_LIFE = 1000


def in_float32(x):
  """Rounds to the 24 bits of a float32, of any exponent."""
  mantissa, exponent = math.frexp(x)
  return math.ldexp(round(math.ldexp(mantissa, 24)), exponent - 24)


class Oracle:
  """Keeps `rows`, a list with the row of each slot or None, by the rules.

  It plans like `cached`, but looks through all slots for each row that leaves.
  """

  def __init__(self, capacity, eviction, num_rows, hot=None, contents=None):
    self.eviction, self.hot = eviction, hot or []
    size = min(capacity, num_rows)
    first = self.hot[:size] if contents is None else contents
    self.rows = [*first, *[None] * (size - len(first))]
    self.dirty = set() if contents is None else {r for r in contents if r >= 0}
    self.rows = [None if row == -1 else row for row in self.rows]
    self.frozen, self.step = set(), 0
    self.last_use, self.count = {}, {}
    for slot, row in enumerate(self.rows):
      if row is not None:
        self.last_use[row] = -1 - slot
        self.count[row] = float(np.float32(2 - slot / size))

  def freeze(self, stale):
    chosen = [] if stale is None else zip(self.hot, stale, strict=True)
    self.frozen = {row for row, still in chosen if still}

  def priority(self, row):
    """What leaves first is least."""
    if self.eviction == 'static':
      if row in self.hot:
        return (1, -self.hot.index(row))
      return (0, self.last_use[row])
    if self.eviction == 'lru':
      return self.last_use[row]
    return self.count[row]

  def order(self, slot, coming):
    row = self.rows[slot]
    if row is None:
      return (0, slot)
    uses = [i for i, batch in enumerate(coming) if row in batch]
    if uses and self.eviction == 'look_ahead':
      return (1, 1, -uses[0], slot)
    return (1, 0, self.priority(row), slot)

  def plan(self, batch, coming=()):
    """Slots, positions to load and store, evicted rows and their slots."""
    before = list(self.rows)
    order = {slot: self.order(slot, coming) for slot in range(len(before))}
    free = [s for s in order if before[s] is None or before[s] not in batch]
    free.sort(key=order.get)
    misses = [i for i, row in enumerate(batch) if row not in before]
    evicted = []
    for i, slot in zip(misses, free, strict=False):
      if before[slot] in self.dirty:
        evicted.append((before[slot], slot))
      self.dirty.discard(before[slot])
      self.rows[slot] = batch[i]
    slots = [self.rows.index(r) if r in self.rows else -1 for r in batch]
    self.use(batch, slots)
    store = [i for i, slot in enumerate(slots) if slot < 0]
    return slots, misses, store, evicted

  def use(self, batch, slots):
    periods, rest = divmod(self.step, 60 * HALF_LIFE)
    worth = float(np.float32(2 ** (rest / HALF_LIFE))) * 2.0 ** (60 * periods)
    for row, slot in zip(batch, slots, strict=True):
      self.last_use[row] = self.step
      self.count[row] = in_float32(self.count.get(row, 0.0) + worth)
      if slot >= 0 and row not in self.frozen:
        self.dirty.add(row)
    self.step += 1


def fewest_loads(batches, capacity):
  """The least loads of any cache that holds each batch whole: all are tried."""
  best = {frozenset(): 0}
  for batch in map(frozenset, batches):
    after = {}
    for held, loads in best.items():
      loads += len(batch - held)
      for kept in subsets(sorted(held - batch), capacity - len(batch)):
        now = batch | kept
        after[now] = min(loads, after.get(now, loads))
    best = after
  return min(best.values())


def subsets(rows, most):
  for bits in range(1 << len(rows)):
    if bits.bit_count() <= most:
      yield frozenset(r for i, r in enumerate(rows) if bits >> i & 1)
