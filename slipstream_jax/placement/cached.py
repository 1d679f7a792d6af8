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

The lowest keys are in a sorted list. It has all keys up to a limit, so a use
that makes a key larger than the limit does not touch it. Outdated entries are
dropped when they are read. A pass over all slots fills the list when it has no
more rows to evict.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.errors import check_whole, choose
from slipstream_jax.hashing import kernel
from slipstream_jax.placement.base import check_hot, NO_ROWS, Placement, Plan, plan_with
from slipstream_jax.placement.evictions import Eviction, EVICTIONS, Priorities
from slipstream_jax.types import HotRows, RowIds, Slots, StaleRows, Unique

# Slots and priorities are non-negative i32, 31 bits each. The sign is unused.
_FROZEN = 1 << 62
_SLOT = _PRIORITY = (1 << 31) - 1
_SHARE = 32  # of the slots are listed
_SAMPLE = 4096


class Cache(NamedTuple):
  """The rows in C slots, of N rows. The arrays are changed in place."""

  place_of: np.ndarray
  """Slot of each row plus 1, i32[N], or 0. The system allocates no memory for
  rows that are never used."""
  latest_use: np.ndarray
  """Number of the last known batch that uses each row plus 1, i32[N], or 0."""
  row_at: np.ndarray
  """Row in each slot, i64[C]. -1 = empty."""
  key: np.ndarray
  """Key of each slot, i64[C], see above."""
  dirty: np.ndarray
  """Whether the row may have changed since it was loaded, bool[C]."""
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
    key=_keys(contents, priorities),
    dirty=full & changed,
    seen=np.full(slots, -1, np.int32),
  )
  cache.place_of[contents[full]] = 1 + np.flatnonzero(full)
  return State(cache, memory, hot)


def _keys(contents: RowIds, priorities: Priorities) -> Int[np.ndarray, ' C']:
  """Returns the keys of slots, i64[C], none of them frozen."""
  of_rows = np.where(contents >= 0, priorities, np.int64(0))
  return of_rows << 31 | np.arange(len(contents))


def _freeze(state: State, stale: StaleRows | None) -> State:
  cache, frozen = state.cache, None
  cache.key[:] &= ~_FROZEN
  if stale is not None:
    hot = check_hot(state.hot, 'only hot rows can be frozen')
    frozen = hot.with_cold(stale, False)
    # -1, an empty slot, reads the last entry, False.
    cache.key[:] |= frozen.take(hot.places(cache.row_at)) * _FROZEN
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
  for known, uses in enumerate([batch, *coming], start=step):
    # Each batch is noted once, in order, so an entry ends as the last use.
    if known >= state.known:
      _note(cache, uses.rows, known)
  renewed = policy.renew(state.memory, step)
  if renewed is not None:
    priorities = renewed((cache.key >> 31 & _PRIORITY).astype(np.int32))
    cache.key[:] = cache.key & _FROZEN | _keys(cache.row_at, priorities)
    state = state._replace(low=NO_ROWS, limit=-1)
  counts = state.memory if policy.counts else None
  still = None
  if state.frozen is not None:
    assert batch.hot is not None
    # For all rows of the batch: rows loaded after `_freeze` may be frozen, too.
    still = state.frozen.take(batch.hot)
  used = policy.used(state.memory, batch, step)
  slots, fresh = np.empty((2, len(batch.rows)), np.int64)
  count = _use(
    cache, batch.rows, used, counts, still, state.limit, slots, fresh
  )
  # Hits are counted before the missing rows get slots.
  plan = plan_with(batch, slots)
  there = len(slots) - len(plan.load)
  # The batch's own slots cannot be taken.
  room = min(len(plan.load), len(cache.row_at) - there)
  some = max(len(cache.key) // _SHARE, 2 * room, 1)
  state, taken = _take(state, slots, coming, room, some)
  evict = np.empty((2, len(taken)), np.int64)
  dirty, more = _replace(
    cache, batch.rows, plan.load, taken, used, counts, still, state.limit, slots, fresh[count:], evict
  )
  low = np.sort(np.concatenate([state.low, fresh[: count + more]]))
  limit = state.limit
  if len(low) > 2 * some:
    low, limit = low[:some], int(low[some - 1])
  state = state._replace(
    low=low, limit=limit, step=step + 1, known=max(state.known, known + 1)
  )
  # Rows without a slot are loaded for this step only.
  return state, plan._replace(
    store=plan.load[len(taken) :],
    evict=evict[0, :dirty],
    evict_slots=evict[1, :dirty],
  )


def _take(
  state: State,
  slots: Slots,
  coming: Sequence[Unique],
  room: int,
  some: int,
) -> tuple[State, Int[np.ndarray, ' taken']]:
  """Takes slots for `room` new rows, in the order of their eviction.

  It takes fewer slots if batches known before are no longer upcoming, as after
  the end of a schedule: their rows stay.
  """
  cache, step, low, limit = state.cache, state.step, state.low, state.limit
  taken, count = np.empty(room, np.int64), 0
  for frozen in (False, True):
    count, read = _take_unused(cache, low, step, frozen, taken, count)
    low = low[read:]
    while count < room and (frozen or limit < _FROZEN):
      more = _lowest(cache.key, limit, some)
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
        found = _next_uses(cache, batch.rows, step, frozen, group)
        groups.append(np.sort(group[:found]))
      latest = np.concatenate(groups[::-1])[: room - count]
      taken[count : count + len(latest)] = latest
      count += len(latest)
  return state._replace(low=low, limit=limit), taken[:count]


def _lowest(
  keys: Int[np.ndarray, ' C'], limit: int, some: int
) -> Int[np.ndarray, ' low']:
  """Returns the lowest keys above the limit, ascending, about `some` of them.

  It returns none only if there are none.
  """
  every = max(1, len(keys) // _SAMPLE)
  sample = keys[::every]
  sample = np.sort(sample[sample > limit])
  if some // every < len(sample):
    keys = keys[keys <= sample[some // every]]
  return np.sort(keys[keys > limit])


@kernel
@no_type_check
def _note(cache: Cache, rows: np.ndarray, number: int) -> None:
  """Records that the rows are used by batch `number`, the last known one."""
  latest_use = cache.latest_use
  for row in rows:
    latest_use[row] = number + 1


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
  keys, row_at, latest_use = cache.key, cache.row_at, cache.latest_use
  kept, read, last = 0, 0, -1
  while count < len(out) and read < len(low):
    key = low[read]
    if key >= _FROZEN and not frozen:
      break
    read += 1
    slot = key & _SLOT
    if key == last or key != keys[slot]:
      continue  # a copy, or outdated
    last = key
    row = row_at[slot]
    if row >= 0 and latest_use[row] > step:
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
    if slot < 0 or cache.seen[slot] == step:
      continue
    if (cache.key[slot] >= _FROZEN) != frozen:
      continue
    cache.seen[slot] = step
    out[count] = slot
    count += 1
  return count


@kernel
@no_type_check
def _priority(count: np.float32) -> int:
  """Does what `by_count` does."""
  return np.float32(count).view(np.int32) + 1


@kernel
@no_type_check
def _count(key: int) -> np.float32:
  """Returns the count of a key whose priority is one."""
  return np.int32((key >> 31 & _PRIORITY) - 1).view(np.float32)


@kernel
@no_type_check
def _use(
  cache: Cache,
  rows: np.ndarray,
  used: np.ndarray,
  counts: np.ndarray | None,
  frozen: np.ndarray | None,
  limit: int,
  slots: np.ndarray,
  fresh: np.ndarray,
) -> int:
  """Writes the slot of each row of a batch, or -1, and marks the rows as used.

  Writes keys that are new and not above the limit, and returns their number.
  """
  place_of, keys, dirty = cache.place_of, cache.key, cache.dirty
  # A loop without branches waits for many rows of a large table at once.
  for u in range(len(rows)):
    slots[u] = place_of[rows[u]] - 1
  count = 0
  for u in range(len(rows)):
    slot = slots[u]
    if slot < 0:
      continue
    old = keys[slot]
    if counts is None:
      priority = used[u]
    else:
      priority = _priority(_count(old) + used[0])
    # Widened first, as the shift by 31 bits overflows an i32.
    key = np.int64(priority) << 31 | slot
    if frozen is not None:
      key |= np.int64(frozen[u]) << 62
    # A row that changed before it froze stays dirty.
    dirty[slot] |= key < _FROZEN
    keys[slot] = key
    fresh[count] = key
    count += key <= limit and key != old
  return count


@kernel
@no_type_check
def _replace(
  cache: Cache,
  rows: np.ndarray,
  load: np.ndarray,
  taken: np.ndarray,
  used: np.ndarray,
  counts: np.ndarray | None,
  frozen: np.ndarray | None,
  limit: int,
  slots: np.ndarray,
  fresh: np.ndarray,
  evict: np.ndarray,
) -> tuple[int, int]:
  """Gives the slots taken to rows to load. Writes evicted rows and their slots.

  Writes and counts only rows that may have changed. The host's copies of all
  others are current. Writes and counts new keys as `_use` does.
  """
  place_of, keys, dirty = cache.place_of, cache.key, cache.dirty
  row_at = cache.row_at
  # Loops without branches, as in `_use`.
  for i in range(len(taken)):
    if counts is None:
      priority = np.int64(used[load[i]])
    else:
      priority = np.int64(_priority(counts[rows[load[i]]] + used[0]))
    fresh[i] = priority << 31 | taken[i]
  evicted = count = 0
  for i in range(len(taken)):
    slot = taken[i]
    old = row_at[slot]
    if old >= 0:
      place_of[old] = 0
      if counts is not None:
        counts[old] = _count(keys[slot])
      evict[0, evicted], evict[1, evicted] = old, slot
      evicted += dirty[slot]
  for i in range(len(taken)):
    slot, u, key = taken[i], load[i], fresh[i]
    if frozen is not None:
      key |= np.int64(frozen[u]) << 62
    row_at[slot], place_of[rows[u]], slots[u] = rows[u], slot + 1, slot
    keys[slot], dirty[slot] = key, key < _FROZEN
    fresh[count] = key
    count += key <= limit
  if counts is not None:
    for i in range(len(taken), len(load)):
      counts[rows[load[i]]] += used[0]
  return evicted, count
