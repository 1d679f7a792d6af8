"""Slots of a device cache, and the heap that orders their eviction.

Empty slots come first, then rows that may change, then frozen rows. Within each
kind the lowest priority comes first, then the lowest slot. One i64 key holds
all of this, so the heap compares and moves single numbers:

    bit 62: frozen | bits 31..61: priority, 0 = empty | bits 0..30: slot

A row's key only grows while the row stays, so a use does not touch the heap. An
outdated entry is corrected when it reaches the top, which keeps the order
exact. Rows that must stay are dropped from the heap when they reach the top,
and return at the last known batch that uses them. So the cost of a step does
not depend on the number of slots.
"""

from typing import NamedTuple

import numba
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)

# Slots and priorities are non-negative i32, 31 bits each. The sign is unused.
_FROZEN = 1 << 62
_SLOT = (1 << 31) - 1


class Cache(NamedTuple):
  """The rows in C slots, of N rows. The arrays are changed in place."""

  place_of: np.ndarray
  """Slot of each row plus 1, i32[N], or 0. The system allocates no memory for
  rows that are never used."""
  latest_use: np.ndarray
  """Number of the last known batch that uses each row plus 1, i32[N], or 0."""
  row_at: np.ndarray
  """Row in each slot, i64[C]. -1 = empty."""
  priority: np.ndarray
  """Priority of the row in each slot, i32[C], at least 1. 0 = empty."""
  dirty: np.ndarray
  """Whether the row may have changed since it was loaded, bool[C]."""
  frozen: np.ndarray
  """Whether the row is frozen, bool[C]."""
  in_heap: np.ndarray
  """Whether the slot has an entry in the heap, bool[C]."""
  heap: np.ndarray
  """i64[C + 1]: the number of entries, then the entries as a binary heap."""
  seen: np.ndarray
  """Scratch of `next_uses`, i32[C]: the last step in which it saw the slot."""


@_kernel
def _key(cache: Cache, slot: int) -> int:
  """Returns the slot's current key."""
  frozen = _FROZEN if cache.frozen[slot] else 0
  # Widened first, as the shift by 31 bits overflows an i32.
  return int(frozen | np.int64(cache.priority[slot]) << 31 | slot)


@_kernel
def _sift_down(heap: np.ndarray, at: int) -> None:
  """Moves the entry at `at` down until no child is smaller."""
  # Entry 0 is the size, as a tuple's numbers are immutable. Entries count from
  # 1, and the children of `at` are 2 at and 2 at + 1.
  size, key = heap[0], heap[at]
  child = 2 * at
  while child <= size:
    if child < size and heap[child + 1] < heap[child]:
      child += 1
    if heap[child] >= key:
      break
    heap[at] = heap[child]
    at, child = child, 2 * child
  heap[at] = key


@_kernel
def _push(heap: np.ndarray, key: int) -> None:
  heap[0] += 1
  at = heap[0]
  while at > 1 and heap[at >> 1] > key:
    heap[at] = heap[at >> 1]
    at >>= 1
  heap[at] = key


@_kernel
def _drop_top(heap: np.ndarray) -> None:
  size = heap[0]
  heap[0] = size - 1
  heap[1] = heap[size]
  if size > 2:
    _sift_down(heap, 1)


@_kernel
def rebuild(cache: Cache) -> None:
  """Puts all slots into the heap: at the start, and after keys may fall."""
  size = len(cache.row_at)
  cache.heap[0] = size
  for slot in range(size):
    cache.in_heap[slot] = True
    cache.heap[1 + slot] = _key(cache, slot)
  # Bottom-up construction is linear in the slots.
  for at in range(size // 2, 0, -1):
    _sift_down(cache.heap, at)


@_kernel
def note(cache: Cache, rows: np.ndarray, number: int) -> None:
  """Records that the rows are used by batch `number`, the last known one."""
  for row in rows:
    cache.latest_use[row] = number + 1


@_kernel
def slots_of(cache: Cache, rows: np.ndarray, out: np.ndarray) -> None:
  """Writes the slot of each row, i64[U], to `out`. -1 if it has none."""
  for u in range(len(rows)):
    out[u] = cache.place_of[rows[u]] - 1


@_kernel
def add_use(
  counts: np.ndarray, rows: np.ndarray, use: np.float32, out: np.ndarray
) -> None:
  """Adds `use` to the counts f32[N] of unique rows. Writes sums to f32[U]."""
  for u in range(len(rows)):
    count = counts[rows[u]] + use
    counts[rows[u]] = count
    out[u] = count


@_kernel
def take_unused(
  cache: Cache, step: int, frozen: bool, out: np.ndarray, count: int
) -> int:
  """Takes slots whose rows no known batch uses, in the heap's order.

  These slots leave the heap, as do those of used rows that it meets.

  Args:
    cache: changed in place.
    step: number of the batch. Rows that it or a later batch uses stay.
    frozen: whether to take frozen rows. If so, no others may be left.
    out: i64[n], filled from place `count` on.
    count: how many slots `out` already has.

  Returns:
    The new count: n, or fewer if no more can be taken.
  """
  heap = cache.heap
  while count < len(out) and heap[0] > 0:
    key = heap[1]
    if key >= _FROZEN and not frozen:
      break  # all remaining entries are frozen
    slot = key & _SLOT
    current = _key(cache, slot)
    if key < current:  # the row was used since, so its key rose
      heap[1] = current
      _sift_down(heap, 1)
      continue
    _drop_top(heap)
    cache.in_heap[slot] = False
    row = cache.row_at[slot]
    # A used row stays out of the heap until `use` at its last known batch.
    if row < 0 or cache.latest_use[row] <= step:
      out[count] = slot
      count += 1
  return count


@_kernel
def next_uses(
  cache: Cache, rows: np.ndarray, step: int, frozen: bool, out: np.ndarray
) -> int:
  """Finds the slots of rows whose next use is in this batch.

  Call it for the coming batches, the next one first.

  Args:
    cache: slots whose `seen` equals `step` are skipped. Found ones are marked.
    rows: i64[U], of one batch.
    step: number of the batch that is being planned.
    frozen: whether to look for frozen rows, or for the others.
    out: i64[>= U], receives the slots.

  Returns:
    How many it found.
  """
  count = 0
  for row in rows:
    slot = cache.place_of[row] - 1
    if slot < 0 or cache.seen[slot] == step or cache.frozen[slot] != frozen:
      continue
    cache.seen[slot] = step
    out[count] = slot
    count += 1
  return count


@_kernel
def replace(
  cache: Cache,
  rows: np.ndarray,
  slots: np.ndarray,
  evict: np.ndarray,
  evict_slots: np.ndarray,
) -> int:
  """Assigns `slots` to `rows` and lists the dirty rows evicted from them.

  Args:
    cache: changed in place.
    rows: i64[n], not in the cache.
    slots: i64[n], unique.
    evict: out, i64[n], whose first E places receive the dirty rows.
    evict_slots: out, i64[n], receives their slots.

  Returns:
    E, how many were dirty.
  """
  count = 0
  for i in range(len(rows)):
    slot = slots[i]
    old = cache.row_at[slot]
    if old >= 0:
      cache.place_of[old] = 0
      # The host's copies of clean rows are current, so they are just dropped.
      if cache.dirty[slot]:
        evict[count], evict_slots[count] = old, slot
        count += 1
    cache.row_at[slot] = rows[i]
    cache.place_of[rows[i]] = slot + 1
    cache.dirty[slot] = False
  return count


@_kernel
def use(
  cache: Cache,
  rows: np.ndarray,
  slots: np.ndarray,
  priorities: np.ndarray,
  frozen: np.ndarray,
  step: int,
) -> None:
  """Marks the rows of a batch as used by its step.

  Args:
    cache: changed in place.
    rows: i64[U].
    slots: i64[U], of these rows. -1 if there was no room.
    priorities: i32[U], new priorities of the rows.
    frozen: bool[U], whether they are frozen. All others become dirty.
    step: number of the batch.
  """
  for u in range(len(rows)):
    slot = slots[u]
    if slot < 0:
      continue
    # A heap entry keeps its old, lower key until it reaches the top.
    cache.priority[slot] = priorities[u]
    cache.frozen[slot] = frozen[u]
    # A row that changed before it froze stays dirty.
    cache.dirty[slot] |= not frozen[u]
    # A row that a later known batch uses returns to the heap then.
    if not cache.in_heap[slot] and cache.latest_use[rows[u]] <= step + 1:
      cache.in_heap[slot] = True
      _push(cache.heap, _key(cache, slot))
