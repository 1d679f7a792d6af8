"""Keeps as many rows as fit on the device, under an eviction policy.

A row that a batch misses takes an empty slot, or the slot of the row with the
lowest priority. A batch's own rows are never evicted for it. This is the design
of CacheEmbedding (arXiv 2208.05321), and with 'look_ahead' that of BagPipe
(2202.12429): coming batches are known, so the row whose next known use is
furthest is evicted first (Belady, 1966).

Only rows that changed on the device are moved back. Frozen rows do not change.
They are evicted like all others, so freezing never costs a load.

Slots are taken in this order: empty ones first, then the lowest priority, then
the lowest slot. One i64 key holds all of this:

    bits 31..61: priority, 0 = empty | bits 0..30: slot

A sorted list has the keys up to a limit of all rows that no known batch uses.
Each use of a row adds its new key. Outdated keys, and those of rows that a
known batch uses, are dropped when they are read, as a later use adds the row
again. When no row of the list can be evicted, a pass over all slots adds the
lowest keys above the limit.

If a known batch uses every row that could be evicted, the known batches are
read from the last one backwards. A row's next use is in a batch if its use
before that one is over. So a plan takes time for few batches, however many are
known.
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
from slipstream_jax.types import HotRows, RowIds, StaleRows, Unique

# Slots and priorities are non-negative i32, 31 bits each. The sign is unused.
_SLOT = (1 << 31) - 1
_MOST = (1 << 63) - 1
_LISTED = 32  # about one of so many slots is in the list
_SAMPLE = 4096  # slots that tell which keys are low
_AHEAD = 64  # keys whose rows are read together
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


class State(NamedTuple):
  """The planner's state. Its arrays are changed in place."""

  cache: Cache
  memory: Any
  """Memory of the eviction policy."""
  hot: HotRows | None
  low: Int[np.ndarray, ' low'] = NO_ROWS
  """The keys up to `limit` of all rows that no known batch uses, and others,
  ascending, i64."""
  limit: int = -1
  frozen: Bool[np.ndarray, ' H_and_1'] | None = None
  """Frozen hot rows, with a final False for all cold rows. None: no row is
  frozen."""
  step: int = 0
  """Number of the next batch."""
  known: int = 0
  """How many batches were planned or upcoming so far."""
  earlier: tuple[Int[np.ndarray, ' U'], ...] | None = None
  """Per batch from the next to the last known one, `Cache.latest_use` of its
  rows before the batch. None: no eviction has needed them yet."""


def cached(
  capacity: int, eviction: str | Eviction = 'look_ahead', look_ahead: int = 16
) -> Placement:
  """Returns a placement that caches rows on the device, hot rows first.

  Args:
    capacity: C, rows that the device keeps, of which at most N are used. Rows
      of a batch beyond it are loaded for the step and stored after it.
    eviction: a key of `EVICTIONS`, or a policy.
    look_ahead: batches beyond the next that the eviction `look_ahead` knows.
      Other evictions ignore it.

  Raises:
    UserError: an argument is out of range, or there is no such eviction.
  """
  hint = 'set it to that or more'
  check_whole(capacity, 1, 'cached, capacity', hint)
  check_whole(look_ahead, 0, 'cached, look_ahead', hint)
  policy = eviction
  if not isinstance(policy, Eviction):
    policy = choose(EVICTIONS, policy, 'cached, eviction')
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
  full = contents >= 0
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
  )
  cache.place_of[contents[full]] = 1 + np.flatnonzero(full)
  return State(cache, memory, hot)


def _freeze(state: State, stale: StaleRows | None) -> State:
  # `dirty` stays: rows that changed before they froze must still reach the
  # host.
  if stale is None:
    return state._replace(frozen=None)
  hot = check_hot(state.hot, 'only hot rows can be frozen')
  return state._replace(frozen=hot.with_cold(stale, False))


def _plan(
  policy: Eviction, look_ahead: int, state: State, upcoming: Sequence[Unique]
) -> tuple[State, Plan]:
  # The plan must not depend on how many batches a caller passes.
  batch, *coming = upcoming[: 1 + look_ahead]
  cache, step = state.cache, state.step
  # Rows of this batch or of a later known one are evicted last. Each batch is
  # noted once, in order, so an entry ends as the last use.
  state = _note(state, [batch, *coming][state.known - step :], state.known)
  renewed = policy.renew(state.memory, cache.priority, step)
  if renewed is not None:
    # Empty slots keep 0, below every row.
    np.copyto(cache.priority, renewed, where=cache.row_at >= 0)
    state = state._replace(low=NO_ROWS, limit=-1)
  uses, frozen = policy.used(state.memory, batch, step), _NONE
  if state.frozen is not None:
    assert state.hot is not None
    frozen = state.frozen.take(state.hot.places(batch.rows))
  rows = batch.rows
  slots, fresh, evict, evict_slots = np.empty((4, len(rows)), np.int64)
  _slots_of(cache, rows, slots)
  # Hits are counted before the missing rows get slots.
  plan = plan_with(batch, slots)
  # The batch's own slots cannot be taken.
  room = min(len(plan.load), len(cache.row_at) - len(rows) + len(plan.load))
  some = max(len(cache.row_at) // _LISTED, 2 * room, 1)
  taken, state = _take(state, [batch, *coming], room, some)
  dirty = _replace(
    cache, rows, plan.load, taken, uses, slots, evict, evict_slots
  )
  limit = state.limit
  fresh = fresh[: _use(cache, slots, uses, frozen, limit, fresh)]
  # A stable sort merges two sorted parts.
  low = np.sort(np.concatenate([state.low, np.sort(fresh)]), kind='stable')
  if len(low) > 2 * some:
    low = low[: _unused(cache, step + 1, low)]
  if len(low) > 2 * some:
    low, limit = low[:some], int(low[some - 1])
  state = state._replace(
    low=low,
    limit=limit,
    step=step + 1,
    earlier=state.earlier and state.earlier[1:],
  )
  # Rows without a slot are loaded for this step only.
  return state, plan._replace(
    store=plan.load[len(taken) :],
    evict=evict[:dirty],
    evict_slots=evict_slots[:dirty],
  )


def _note(state: State, batches: Sequence[Unique], number: int) -> State:
  """Records that the batches, from this number on, use their rows."""
  earlier = []
  for at, batch in enumerate(batches, start=number):
    size = 0 if state.earlier is None else len(batch.rows)
    earlier.append(np.empty(size, np.int32))
    _set_latest(state.cache, batch.rows, at + 1, earlier[-1])
  if state.earlier is not None:
    state = state._replace(earlier=(*state.earlier, *earlier))
  return state._replace(known=number + len(batches))


def _note_earlier(state: State, known: Sequence[Unique]) -> State:
  """Returns the state with `earlier` of the known batches, noted from now on.

  Most runs need it never or in each step.
  """
  if state.earlier is not None:
    return state
  for batch in known:
    _set_latest(state.cache, batch.rows, 0, np.empty(0, np.int32))
  return _note(state._replace(earlier=()), known, state.step)


def _take(
  state: State, known: Sequence[Unique], room: int, some: int
) -> tuple[Int[np.ndarray, ' taken'], State]:
  """Returns slots for `room` new rows, in the order of their eviction.

  It returns fewer slots if batches known before are no longer upcoming, as
  after the end of a schedule: their rows stay. Also returns the state with the
  rest of the list, which gets about `some` keys when it is used up.
  """
  cache, step, low, limit = state.cache, state.step, state.low, state.limit
  taken = np.empty(room, np.int64)
  count, read = _take_unused(cache, low, step, taken, 0)
  low = low[read:]
  while count < room and limit < _MOST:
    more, limit = _lowest(cache, step, limit, some)
    count, read = _take_unused(cache, more, step, taken, count)
    low = np.append(low, more[read:])
  if count < room and len(known) > 1:
    state = _note_earlier(state, known)
    latest = _latest(state, known, room - count)
    taken[count : count + len(latest)] = latest
    count += len(latest)
  return taken[:count], state._replace(low=low, limit=limit)


def _latest(
  state: State, known: Sequence[Unique], room: int
) -> Int[np.ndarray, ' latest']:
  """Returns up to `room` slots whose next use is the latest, that one first."""
  assert state.earlier is not None
  groups, count = [NO_ROWS], 0
  pairs = [*zip(known, state.earlier, strict=False)]
  for batch, earlier in pairs[:0:-1]:
    if count >= room:
      break
    group = np.empty(len(batch.rows), np.int64)
    size = _next_uses(state.cache, batch.rows, earlier, state.step, group)
    # Ties are broken as in the list: lowest slot first.
    groups.append(np.sort(group[:size]))
    count += size
  return np.concatenate(groups)[:room]


def _lowest(
  cache: Cache, step: int, limit: int, some: int
) -> tuple[Int[np.ndarray, ' low'], int]:
  """Returns about `some` of the lowest keys above the limit, and a new limit.

  They are keys of slots whose rows no known batch uses, ascending.
  """
  keys = np.empty(len(cache.row_at), np.int64)
  every = max(1, len(keys) // _SAMPLE)
  sample = keys[: _keys(cache, step, every, limit, _MOST, keys)]
  # Past the sample's end, all keys are listed.
  at, most = some // every, _MOST
  if at < len(sample):
    most = int(np.partition(sample, at)[at])
  return np.sort(keys[: _keys(cache, step, 1, limit, most, keys)]), most


@kernel
@no_type_check
def _key(cache: Cache, slot: int) -> int:
  """Returns the slot's current key."""
  # Widened first, as the shift by 31 bits overflows an i32.
  return np.int64(cache.priority[slot]) << 31 | slot


@kernel
@no_type_check
def _keys(
  cache: Cache, step: int, every: int, limit: int, most: int, out: np.ndarray
) -> int:
  """Writes and counts keys above the limit, up to `most`.

  They are those of rows that no known batch uses. It looks at one of `every`
  slots.
  """
  count = 0
  for slot in range(0, len(cache.row_at), every):
    out[count] = key = _key(cache, slot)
    count += (key > limit) & (key <= most)
  return _unused(cache, step, out[:count])


@kernel
@no_type_check
def _unused(cache: Cache, step: int, keys: np.ndarray) -> int:
  """Keeps and counts the keys of rows that no batch known at `step` uses."""
  count = 0
  for key in keys:
    row = cache.row_at[key & _SLOT]
    keys[count] = key
    count += (row < 0) | (cache.latest_use[max(row, 0)] <= step)
  return count


@kernel
@no_type_check
def _slots_of(cache: Cache, rows: np.ndarray, out: np.ndarray) -> None:
  """Writes the slot of each row, i64[U]. -1 if it has none."""
  for u in range(len(rows)):
    out[u] = cache.place_of[rows[u]] - 1


@kernel
@no_type_check
def _set_latest(
  cache: Cache, rows: np.ndarray, latest: int, earlier: np.ndarray
) -> None:
  """Sets the `latest_use` of rows, i64[U].

  Writes the entries before to `earlier`, i32[U], unless it is empty.
  """
  # Writes alone take half the time.
  if len(earlier) == 0:
    for row in rows:
      cache.latest_use[row] = latest
    return
  for u in range(len(rows)):
    earlier[u] = cache.latest_use[rows[u]]
    cache.latest_use[rows[u]] = latest


@kernel
@no_type_check
def _take_unused(
  cache: Cache,
  low: np.ndarray,
  step: int,
  out: np.ndarray,
  count: int,
) -> tuple[int, int]:
  """Fills `out` from place `count` with slots whose rows no known batch uses.

  It reads the sorted keys `low`. Returns how many slots `out` has then, and how
  many keys it has read.
  """
  read, last = 0, -1
  rows, latest = np.empty(_AHEAD, np.int64), np.empty(_AHEAD, np.int64)
  while count < len(out) and read < len(low):
    keys = low[read : read + _AHEAD]
    # A branch on what is not in the processor's cache would wait for it.
    for i in range(len(keys)):
      rows[i] = cache.row_at[keys[i] & _SLOT]
    for i in range(len(keys)):
      latest[i] = cache.latest_use[max(rows[i], 0)]
    for i in range(len(keys)):
      key = keys[i]
      if count == len(out):
        return count, read
      read += 1
      if key == last or key != _key(cache, key & _SLOT):
        continue  # a copy, or outdated
      last = key
      if rows[i] < 0 or latest[i] <= step:
        out[count] = key & _SLOT
        count += 1
  return count, read


@kernel
@no_type_check
def _next_uses(
  cache: Cache,
  rows: np.ndarray,
  earlier: np.ndarray,
  step: int,
  out: np.ndarray,
) -> int:
  """Writes the slots of the rows whose next use is in this batch.

  It counts them. A row is not in the planned batch or in one between both if
  its use before was `earlier` than the step.
  """
  count = kept = 0
  for u in range(len(rows)):
    out[count] = rows[u]
    count += earlier[u] <= step
  for i in range(count):
    out[i] = cache.place_of[out[i]] - 1
  for i in range(count):
    slot = out[i]
    if slot >= 0:
      out[kept] = slot
      kept += 1
  return kept


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
  Writes and counts the keys that are not above the limit.
  """
  count, by_count = 0, len(uses.counts) > 0
  for u in range(len(slots)):
    slot = slots[u]
    if slot < 0:
      continue
    if by_count:
      new = _priority(_count(cache.priority[slot]) + uses.weight)
    else:
      new = np.int64(uses.priorities[u])
    key = new << 31 | slot
    # A row that changed before it froze stays dirty.
    cache.dirty[slot] |= len(frozen) == 0 or not frozen[u]
    cache.priority[slot] = new
    fresh[count] = key
    count += key <= limit
  return count
