"""Keeps as many rows as fit on the device, under an eviction policy.

A row that a batch misses takes an empty slot, or the slot of the row with the
lowest priority. A batch's own rows are never evicted for it. This is the design
of CacheEmbedding (arXiv 2208.05321), and with 'look_ahead' that of BagPipe
(2202.12429): coming batches are known, so the row whose next known use is
furthest is evicted first (Belady, 1966).

Only rows that changed on the device are moved back. Frozen rows do not change,
and are evicted only when no other row can be.

A heap orders the slots: empty ones first, then rows that may change, then
frozen rows; within each kind the lowest priority, then the lowest slot. One i64
key holds all of this, so the heap compares and moves single numbers:

    bit 62: frozen | bits 31..61: priority, 0 = empty | bits 0..30: slot

A row's key only grows while the row stays, so a use does not touch the heap. An
outdated entry is corrected when it reaches the top, which keeps the order
exact. Rows that must stay are dropped from the heap when they reach the top,
and return at the last known batch that uses them.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.errors import check_whole, choose
from slipstream_jax.hashing import kernel
from slipstream_jax.placement.base import check_hot, Placement, Plan, plan_with
from slipstream_jax.placement.evictions import Eviction, EVICTIONS
from slipstream_jax.types import HotRows, RowIds, Slots, StaleRows, Unique

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
  """Scratch of `_next_uses`, i32[C]: the last step in which it saw the slot."""


class State(NamedTuple):
  """The planner's state. Its arrays are changed in place."""

  cache: Cache
  memory: Any
  """Memory of the eviction policy."""
  hot: HotRows | None
  frozen: Bool[np.ndarray, ' H_and_1'] | None = None
  """Frozen hot rows, with a final False for all cold rows. None: no row is
  frozen."""
  step: int = 0
  """Number of the next batch."""
  known: int = 0
  """How many batches were planned or upcoming so far."""


def cached(
  capacity: int, eviction: str = 'look_ahead', look_ahead: int = 16
) -> Placement:
  """Returns a placement that caches rows on the device, hot rows first.

  Args:
    capacity: C, rows that the device keeps, of which at most N are used. Rows
      of a batch beyond it are loaded for the step and stored after it.
    eviction: a key of `EVICTIONS`.
    look_ahead: batches beyond the next that the eviction `look_ahead` knows.
      Other evictions ignore it.

  Raises:
    UserError: an argument is out of range, or there is no such eviction.
  """
  hint = 'set it to that or more'
  check_whole(capacity, 1, 'cached, capacity', hint)
  check_whole(look_ahead, 0, 'cached, look_ahead', hint)
  policy = choose(EVICTIONS, eviction, 'cached, eviction')
  ahead = look_ahead if policy.looks_ahead else 0
  return Placement(
    name='cached',
    keeps=functools.partial(_keeps, capacity),
    start=functools.partial(_start, capacity, policy),
    plan=functools.partial(_plan, policy, ahead),
    freeze=_freeze,
    look_ahead=ahead,
    needs_hot=True,  # to start with, and always for 'static'
    capacity=capacity,
  )


def _keeps(capacity: int, num_rows: int, hot: HotRows | None) -> RowIds:
  contents = np.full(min(capacity, num_rows), -1, np.int64)
  if hot is not None:
    popular = hot.rows[: len(contents)]
    contents[: len(popular)] = popular
  return contents


def _start(
  capacity: int,
  policy: Eviction,
  num_rows: int,
  hot: HotRows | None,
  contents: RowIds | None,
) -> State:
  # Given contents were trained, and which of them changed is unknown: all must
  # be written back when evicted.
  changed = contents is not None
  if contents is None:
    contents = _keeps(capacity, num_rows, hot)
  slots, full = len(contents), contents >= 0
  memory, priorities = policy.start(num_rows, hot, contents)
  # Arrays of N find a row in constant time, for 8 bytes of host memory a row.
  cache = Cache(
    place_of=np.zeros(num_rows, np.int32),
    latest_use=np.zeros(num_rows, np.int32),
    row_at=contents.copy(),
    priority=np.where(full, priorities, 0).astype(np.int32),
    dirty=full & changed,
    frozen=np.zeros(slots, bool),
    in_heap=np.ones(slots, bool),
    heap=np.empty(slots + 1, np.int64),
    seen=np.full(slots, -1, np.int32),
  )
  cache.place_of[contents[full]] = 1 + np.flatnonzero(full)
  _rebuild(cache)
  return State(cache, memory, hot)


def _freeze(state: State, stale: StaleRows | None) -> State:
  cache, frozen = state.cache, None
  if stale is None:
    cache.frozen[:] = False
  else:
    hot = check_hot(state.hot, 'only hot rows can be frozen')
    frozen = hot.with_cold(stale, False)
    # -1, an empty slot, reads the last entry, False.
    cache.frozen[:] = frozen.take(hot.places(cache.row_at))
  # `dirty` stays: rows that changed before they froze must still reach the
  # host. Rows that thaw have lower keys, which requires a new heap.
  _rebuild(cache)
  return state._replace(frozen=frozen)


def _plan(
  policy: Eviction, look_ahead: int, state: State, upcoming: Sequence[Unique]
) -> tuple[State, Plan]:
  # The plan must not depend on how many batches a caller passes.
  batch, *coming = upcoming[: 1 + look_ahead]
  cache, step = state.cache, state.step
  # Rows of this batch or of a later known one are evicted last.
  known = step
  for known, uses in enumerate([batch, *coming], start=step):
    # Each batch is noted once, in order, so an entry ends as the last use.
    if known >= state.known:
      _note(cache, uses.rows, known)
  renewed = policy.renew(state.memory, cache.row_at, step)
  if renewed is not None:
    # Empty slots keep 0, below every row. The heap is rebuilt, as it can only
    # correct keys that rose.
    np.copyto(cache.priority, renewed, where=cache.row_at >= 0)
    _rebuild(cache)
  plan = _move(cache, batch, coming, step)
  if state.frozen is None:
    frozen = np.zeros(len(batch.rows), bool)
  else:
    assert batch.hot is not None
    # For all rows of the batch: rows loaded after `_freeze` may be frozen, too.
    frozen = state.frozen.take(batch.hot)
  priorities = policy.used(state.memory, batch, step)
  _use(cache, batch.rows, plan.slots, priorities, frozen, step)
  known = max(state.known, known + 1)
  return state._replace(step=step + 1, known=known), plan


def _move(
  cache: Cache, batch: Unique, coming: Sequence[Unique], step: int
) -> Plan:
  """Assigns slots to the missing rows in the cache. Returns the plan."""
  slots = np.empty(len(batch.rows), np.int64)
  _slots_of(cache, batch.rows, slots)
  # Hits are counted before the missing rows get slots.
  plan = plan_with(batch, slots)
  there = len(slots) - len(plan.load)
  # The batch's own slots cannot be taken.
  room = min(len(plan.load), len(cache.row_at) - there)
  taken = _take(cache, slots, coming, step, room)
  room = len(taken)
  placed = plan.load[:room]  # the others are loaded for this step only
  evict, evict_slots = np.empty((2, room), np.int64)
  dirty = _replace(cache, batch.rows[placed], taken, evict, evict_slots)
  slots[placed] = taken
  return plan._replace(
    slots=slots,
    store=plan.load[room:],
    evict=evict[:dirty],
    evict_slots=evict_slots[:dirty],
  )


def _take(
  cache: Cache, slots: Slots, coming: Sequence[Unique], step: int, room: int
) -> Int[np.ndarray, ' taken']:
  """Returns slots for `room` new rows, in the order of their eviction.

  It returns fewer slots if batches known before are no longer upcoming, as
  after the end of a schedule: their rows stay.
  """
  taken = np.empty(0, np.int64)
  for frozen in (False, True):
    unused = np.empty(room - len(taken), np.int64)
    count = _take_unused(cache, step, frozen, unused)
    taken = np.concatenate([taken, unused[:count]])
    if len(taken) < room and coming:
      # The batch's own rows are marked as seen, so that they stay. The mark is
      # the step's number, so no mark needs clearing.
      cache.seen[slots[slots >= 0]] = step
      # It marks the slots that it finds, so a row counts for the first coming
      # batch that uses it. Ties are broken as in the heap: lowest slot first.
      groups = []
      for batch in coming:
        group = np.empty(len(batch.rows), np.int64)
        count = _next_uses(cache, batch.rows, step, frozen, group)
        groups.append(np.sort(group[:count]))
      latest = np.concatenate(groups[::-1])[: room - len(taken)]
      taken = np.concatenate([taken, latest])
  return taken


@kernel
@no_type_check
def _key(cache: Cache, slot: int) -> int:
  """Returns the slot's current key."""
  frozen = _FROZEN if cache.frozen[slot] else 0
  # Widened first, as the shift by 31 bits overflows an i32.
  return int(frozen | np.int64(cache.priority[slot]) << 31 | slot)


@kernel
@no_type_check
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


@kernel
@no_type_check
def _push(heap: np.ndarray, key: int) -> None:
  heap[0] += 1
  at = heap[0]
  while at > 1 and heap[at >> 1] > key:
    heap[at] = heap[at >> 1]
    at >>= 1
  heap[at] = key


@kernel
@no_type_check
def _drop_top(heap: np.ndarray) -> None:
  size = heap[0]
  heap[0] = size - 1
  heap[1] = heap[size]
  if size > 2:
    _sift_down(heap, 1)


@kernel
@no_type_check
def _rebuild(cache: Cache) -> None:
  """Puts all slots into the heap: at the start, and after keys may fall."""
  size = len(cache.row_at)
  cache.heap[0] = size
  for slot in range(size):
    cache.in_heap[slot] = True
    cache.heap[1 + slot] = _key(cache, slot)
  # Bottom-up construction is linear in the slots.
  for at in range(size // 2, 0, -1):
    _sift_down(cache.heap, at)


@kernel
@no_type_check
def _note(cache: Cache, rows: np.ndarray, number: int) -> None:
  """Records that the rows are used by batch `number`, the last known one."""
  for row in rows:
    cache.latest_use[row] = number + 1


@kernel
@no_type_check
def _slots_of(cache: Cache, rows: np.ndarray, out: np.ndarray) -> None:
  """Writes the slot of each row, i64[U]. -1 if it has none."""
  for u in range(len(rows)):
    out[u] = cache.place_of[rows[u]] - 1


@kernel
@no_type_check
def _take_unused(cache: Cache, step: int, frozen: bool, out: np.ndarray) -> int:
  """Fills `out` with slots whose rows no known batch uses, in heap order.

  These slots leave the heap, as do those of used rows that it meets. If it is
  to take `frozen` rows, no others may be left. Returns how many it found.
  """
  heap, count = cache.heap, 0
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
    # A used row stays out of the heap until `_use` at its last known batch.
    if row < 0 or cache.latest_use[row] <= step:
      out[count] = slot
      count += 1
  return count


@kernel
@no_type_check
def _next_uses(
  cache: Cache, rows: np.ndarray, step: int, frozen: bool, out: np.ndarray
) -> int:
  """Writes the slots of frozen or other rows whose next use is in this batch.

  Call it for the coming batches, the next one first. It skips slots whose
  `seen` is the number of the step, marks those that it finds, and counts them.
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


@kernel
@no_type_check
def _replace(
  cache: Cache,
  rows: np.ndarray,
  slots: np.ndarray,
  evict: np.ndarray,
  evict_slots: np.ndarray,
) -> int:
  """Assigns `slots` to `rows`, i64[n]. Writes evicted rows and their slots.

  Writes and counts only rows that may have changed. The host's copies of all
  others are current.
  """
  count = 0
  for i in range(len(rows)):
    slot = slots[i]
    old = cache.row_at[slot]
    if old >= 0:
      cache.place_of[old] = 0
      if cache.dirty[slot]:
        evict[count], evict_slots[count] = old, slot
        count += 1
    cache.row_at[slot] = rows[i]
    cache.place_of[rows[i]] = slot + 1
    cache.dirty[slot] = False
  return count


@kernel
@no_type_check
def _use(
  cache: Cache,
  rows: np.ndarray,
  slots: np.ndarray,
  priorities: np.ndarray,
  frozen: np.ndarray,
  step: int,
) -> None:
  """Marks the rows of a batch, i64[U], as used by its step.

  Slots are -1 where there was no room. Rows that are not frozen become dirty.
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
