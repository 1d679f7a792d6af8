"""Keeps as many rows as fit on the device, under an eviction policy.

A row that a batch misses takes an empty slot, or the slot of the row with the
lowest priority. A batch's own rows are never evicted for it. This is the design
of CacheEmbedding (arXiv 2208.05321), and with 'look_ahead' that of BagPipe
(2202.12429): coming batches are known, so the row whose next known use is
furthest is evicted first (Belady, 1966).

Only rows that changed on the device are moved back. Frozen rows do not change,
and are evicted only when no other row can be.

Slots are taken in this order: empty ones first, then rows that may change, then
frozen rows; within each kind the lowest priority, then the lowest slot. One i64
key holds all of this:

    bit 62: frozen | bits 31..61: priority, 0 = empty | bits 0..30: slot

A sorted list has all keys up to a limit. A row's key only grows while the row
stays, so a use rarely adds to the list. Outdated keys are dropped when they are
read. When no row of the list can be evicted, a pass over all slots adds the
lowest keys above the limit.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.errors import check_whole, choose
from slipstream_jax.hashing import kernel
from slipstream_jax.placement.base import (
  check_hot,
  NO_ROWS,
  Placement,
  Plan,
  plan_with,
)
from slipstream_jax.placement.evictions import Eviction, EVICTIONS, Uses
from slipstream_jax.types import HotRows, RowIds, Slots, StaleRows, Unique

# Slots and priorities are non-negative i32, 31 bits each. The sign is unused.
_FROZEN = 1 << 62
_SLOT = (1 << 31) - 1
_MOST = (1 << 63) - 1
_LISTED = 32  # about one of so many slots is in the list
_SAMPLE = 4096  # slots that tell which keys are low
_NONE = np.empty(0, bool)


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
  seen: np.ndarray
  """Scratch of `_next_uses`, i32[C]: the last step in which it saw the slot."""


class State(NamedTuple):
  """The planner's state. Its arrays are changed in place."""

  cache: Cache
  memory: Any
  """Memory of the eviction policy."""
  hot: HotRows | None
  low: Int[np.ndarray, ' low'] = NO_ROWS
  """The keys up to `limit`, and outdated ones, ascending, i64."""
  limit: int = -1
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
    reads_hot=policy.reads_hot,
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
  # Arrays of N find a row in constant time, for 8 bytes of host memory a row,
  # or 12 with counts. They are beside the slots, as a miss reads both.
  by_row = np.zeros((num_rows, 2 if policy.counts else 1), np.int32)
  counts = by_row[:, -1].view(np.float32)
  memory, priorities = policy.start(counts, hot, contents)
  cache = Cache(
    place_of=by_row[:, 0],
    latest_use=np.zeros(num_rows, np.int32),
    row_at=contents.copy(),
    priority=np.where(full, priorities, 0).astype(np.int32),
    dirty=full & changed,
    frozen=np.zeros(slots, bool),
    seen=np.full(slots, -1, np.int32),
  )
  cache.place_of[contents[full]] = 1 + np.flatnonzero(full)
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
  # host. Rows that thaw have lower keys, so the list is made anew.
  return state._replace(frozen=frozen, low=NO_ROWS, limit=-1)


def _plan(
  policy: Eviction, look_ahead: int, state: State, upcoming: Sequence[Unique]
) -> tuple[State, Plan]:
  # The plan must not depend on how many batches a caller passes.
  batch, *coming = upcoming[: 1 + look_ahead]
  cache, step = state.cache, state.step
  # Rows of this batch or of a later known one are evicted last.
  known = step
  for known, later in enumerate([batch, *coming], start=step):
    # Each batch is noted once, in order, so an entry ends as the last use.
    if known >= state.known:
      _note(cache, later.rows, known)
  renewed = policy.renew(state.memory, cache.priority, step)
  if renewed is not None:
    # Empty slots keep 0, below every row.
    np.copyto(cache.priority, renewed, where=cache.row_at >= 0)
    state = state._replace(low=NO_ROWS, limit=-1)
  uses, frozen = policy.used(state.memory, batch, step), _NONE
  if state.frozen is not None:
    assert state.hot is not None
    # For all rows of the batch: rows loaded after `_freeze` may be frozen, too.
    frozen = state.frozen.take(state.hot.places(batch.rows))
  slots, fresh = np.empty((2, len(batch.rows)), np.int64)
  _slots_of(cache, batch.rows, slots)
  # Hits are counted before the missing rows get slots.
  plan = plan_with(batch, slots)
  there = len(slots) - len(plan.load)
  # The batch's own slots cannot be taken.
  room = min(len(plan.load), len(cache.row_at) - there)
  some = max(len(cache.row_at) // _LISTED, 2 * room, 1)
  taken, low, limit = _take(state, slots, coming, room, some)
  evict, evict_slots = np.empty((2, len(taken)), np.int64)
  dirty = _replace(
    cache, batch.rows, plan.load, taken, uses, slots, evict, evict_slots
  )
  fresh = fresh[: _use(cache, slots, uses, frozen, limit, fresh)]
  # A stable sort merges two sorted parts.
  low = np.sort(np.concatenate([low, np.sort(fresh)]), kind='stable')
  if len(low) > 2 * some:
    low, limit = low[:some], int(low[some - 1])
  state = state._replace(
    low=low, limit=limit, step=step + 1, known=max(state.known, known + 1)
  )
  # Rows without a slot are loaded for this step only.
  return state, plan._replace(
    store=plan.load[len(taken) :],
    evict=evict[:dirty],
    evict_slots=evict_slots[:dirty],
  )


def _take(
  state: State, slots: Slots, coming: Sequence[Unique], room: int, some: int
) -> tuple[Int[np.ndarray, ' taken'], Int[np.ndarray, ' low'], int]:
  """Returns slots for `room` new rows, in the order of their eviction.

  It returns fewer slots if batches known before are no longer upcoming, as
  after the end of a schedule: their rows stay. Also returns the rest of the
  list and its limit. The list gets about `some` keys when it is used up.
  """
  cache, step, low, limit = state.cache, state.step, state.low, state.limit
  taken, count = np.empty(room, np.int64), 0
  for frozen in (False, True):
    count, read = _take_unused(cache, low, step, frozen, taken, count)
    low = low[read:]
    while count < room and (frozen or limit < _FROZEN):
      more = _lowest(cache, limit, some)
      if not len(more):
        break
      limit = int(more[-1])
      count, read = _take_unused(cache, more, step, frozen, taken, count)
      low = np.concatenate([low, more[read:]])
    if count < room and coming:
      # The batch's own rows are marked as seen, so that they stay. The mark is
      # the step's number, so no mark needs clearing.
      cache.seen[slots[slots >= 0]] = step
      # It marks the slots that it finds, so a row counts for the first coming
      # batch that uses it. Ties are broken as in the list: lowest slot first.
      groups = []
      for batch in coming:
        group = np.empty(len(batch.rows), np.int64)
        size = _next_uses(cache, batch.rows, step, frozen, group)
        groups.append(np.sort(group[:size]))
      latest = np.concatenate(groups[::-1])[: room - count]
      taken[count : count + len(latest)] = latest
      count += len(latest)
  return taken[:count], low, limit


def _lowest(cache: Cache, limit: int, some: int) -> Int[np.ndarray, ' low']:
  """Returns about `some` of the lowest keys above the limit, ascending.

  It returns none only if there are none.
  """
  keys = np.empty_like(cache.row_at)
  every = max(1, len(keys) // _SAMPLE)
  sample = np.sort(keys[: _keys(cache, every, limit, _MOST, keys)])
  most = sample[some // every] if some // every < len(sample) else _MOST
  return np.sort(keys[: _keys(cache, 1, limit, most, keys)])


@kernel
@no_type_check
def _key(cache: Cache, slot: int) -> int:
  """Returns the slot's current key."""
  # Widened first, as the shift by 31 bits overflows an i32.
  key = np.int64(cache.priority[slot]) << 31 | slot
  return key | np.int64(cache.frozen[slot]) << 62


@kernel
@no_type_check
def _keys(
  cache: Cache, every: int, limit: int, most: int, out: np.ndarray
) -> int:
  """Writes and counts the keys above the limit, up to `most`.

  It looks at one of `every` slots.
  """
  count = 0
  for slot in range(0, len(cache.row_at), every):
    out[count] = key = _key(cache, slot)
    count += (key > limit) & (key <= most)
  return count


@kernel
@no_type_check
def _slots_of(cache: Cache, rows: np.ndarray, out: np.ndarray) -> None:
  """Writes the slot of each row, i64[U]. -1 if it has none."""
  for u in range(len(rows)):
    out[u] = cache.place_of[rows[u]] - 1


@kernel
@no_type_check
def _note(cache: Cache, rows: np.ndarray, number: int) -> None:
  """Records that the rows are used by batch `number`, the last known one."""
  for row in rows:
    cache.latest_use[row] = number + 1


@kernel
@no_type_check
def _take_unused(
  cache: Cache,
  low: np.ndarray,
  step: int,
  frozen: bool,
  out: np.ndarray,
  count: int,
) -> tuple[int, int]:
  """Fills `out` from place `count` with slots whose rows no known batch uses.

  It reads the sorted keys `low` up to frozen rows, or to the end if it is to
  take `frozen` ones. Returns how many slots `out` has then, and the place in
  `low` from which it has what remains: used rows, and keys that were not read.
  """
  kept, read, last = 0, 0, -1
  while count < len(out) and read < len(low):
    key = low[read]
    if key >= _FROZEN and not frozen:
      break
    read += 1
    slot = key & _SLOT
    if key == last or key != _key(cache, slot):
      continue  # a copy, or outdated
    last = key
    row = cache.row_at[slot]
    if row >= 0 and cache.latest_use[row] > step:
      low[kept] = key
      kept += 1
      continue
    out[count] = slot
    count += 1
  for i in range(1, kept + 1):
    low[read - i] = low[kept - i]
  return count, read - kept


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
  load: np.ndarray,
  taken: np.ndarray,
  uses: Uses,
  slots: np.ndarray,
  evict: np.ndarray,
  evict_slots: np.ndarray,
) -> int:
  """Gives the slots taken to rows to load. Writes evicted rows and their slots.

  Writes and counts only rows that may have changed. The host's copies of all
  others are current.
  """
  counts, dirty, by_count = uses.counts, 0, len(uses.counts) > 0
  for i in range(len(taken)):
    slot = taken[i]
    old = cache.row_at[slot]
    if old >= 0:
      cache.place_of[old] = 0
      if by_count:
        counts[old] = _count(cache.priority[slot])
      evict[dirty], evict_slots[dirty] = old, slot
      dirty += cache.dirty[slot]
  for i in range(len(taken)):
    slot, u = taken[i], load[i]
    row, slots[u] = rows[u], slot
    cache.row_at[slot], cache.place_of[row] = row, slot + 1
    cache.dirty[slot] = False
    cache.priority[slot] = _priority(counts[row]) if by_count else 0
  if by_count:
    for i in range(len(taken), len(load)):
      counts[rows[load[i]]] += uses.weight
  return dirty


@kernel
@no_type_check
def _priority(count: np.float32) -> int:
  """Returns the priority by count, as in `evictions`."""
  return np.float32(count).view(np.int32) + 1


@kernel
@no_type_check
def _count(priority: int) -> np.float32:
  return np.int32(priority - 1).view(np.float32)


@kernel
@no_type_check
def _use(
  cache: Cache,
  slots: np.ndarray,
  uses: Uses,
  frozen: np.ndarray,
  limit: int,
  fresh: np.ndarray,
) -> int:
  """Marks the rows of a batch, i64[U], as used.

  Slots are -1 where there was no room. Rows that are not frozen become dirty.
  Writes and counts the keys that changed and are not above the limit.
  """
  count, by_count = 0, len(uses.counts) > 0
  for u in range(len(slots)):
    slot = slots[u]
    if slot < 0:
      continue
    old = cache.priority[slot]
    if by_count:
      new = _priority(_count(old) + uses.weight)
    else:
      new = np.int64(uses.priorities[u])
    key = new << 31 | slot
    if len(frozen):
      cache.frozen[slot] = frozen[u]
      key |= np.int64(frozen[u]) << 62
    # A row that changed before it froze stays dirty.
    cache.dirty[slot] |= key < _FROZEN
    cache.priority[slot] = new
    if key <= limit and new != old:
      fresh[count] = key
      count += 1
  return count
