"""Keeps as many rows as fit on the device, under an eviction policy.

A row that a batch misses takes an empty slot, or the slot of the row with the
lowest priority. A batch's own rows are never evicted for it. This is the design
of CacheEmbedding (arXiv 2208.05321), and with 'look_ahead' that of BagPipe
(2202.12429): coming batches are known, so the row whose next known use is
furthest is evicted first (Belady, 1966).

Only rows that changed on the device are moved back. Frozen rows do not change,
and are evicted only when no other row can be.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.errors import check_whole, choose
from slipstream_jax.placement import cache_kernels as kernels
from slipstream_jax.placement.base import (
  check_hot,
  Placement,
  Plan,
  plan_with,
)
from slipstream_jax.placement.evictions import Eviction, EVICTIONS
from slipstream_jax.types import HotRows, RowIds, Slots, StaleRows, Unique


class State(NamedTuple):
  """The planner's state. Its arrays are changed in place."""

  cache: kernels.Cache
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
  cache = kernels.Cache(
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
  kernels.rebuild(cache)
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
  kernels.rebuild(cache)
  return state._replace(frozen=frozen)


def _plan(
  policy: Eviction, look_ahead: int, state: State, upcoming: Sequence[Unique]
) -> tuple[State, Plan]:
  """Plans a batch in four steps.

  1. Notes in `latest_use` the rows of newly known batches. Rows of this batch
  or of a later known one are evicted last.
  2. Renews all priorities, if the policy asks for it.
  3. Finds room for the missing rows and lists the evicted ones (`_move`).
  4. Assigns new priorities to the batch's rows.
  """
  # The plan must not depend on how many batches a caller passes.
  batch, *coming = upcoming[: 1 + look_ahead]
  cache, step = state.cache, state.step
  known = step
  for known, uses in enumerate([batch, *coming], start=step):
    # Each batch is noted once, in order, so an entry ends as the last use.
    if known >= state.known:
      kernels.note(cache, uses.rows, known)
  renewed = policy.renew(state.memory, cache.row_at, step)
  if renewed is not None:
    # Empty slots keep 0, below every row. The heap is rebuilt, as it can only
    # correct keys that rose.
    np.copyto(cache.priority, renewed, where=cache.row_at >= 0)
    kernels.rebuild(cache)
  plan = _move(cache, batch, coming, step)
  if state.frozen is None:
    frozen = np.zeros(len(batch.rows), bool)
  else:
    assert batch.hot is not None
    # For all rows of the batch: rows loaded after `_freeze` may be frozen, too.
    frozen = state.frozen.take(batch.hot)
  priorities = policy.used(state.memory, batch, step)
  kernels.use(cache, batch.rows, plan.slots, priorities, frozen, step)
  known = max(state.known, known + 1)
  return state._replace(step=step + 1, known=known), plan


def _move(
  cache: kernels.Cache, batch: Unique, coming: Sequence[Unique], step: int
) -> Plan:
  """Assigns slots to the missing rows in the cache. Returns the plan."""
  slots = np.empty(len(batch.rows), np.int64)
  kernels.slots_of(cache, batch.rows, slots)
  # Hits are counted before the missing rows get slots.
  plan = plan_with(batch, slots)
  there = len(slots) - len(plan.load)
  # The batch's own slots cannot be taken.
  room = min(len(plan.load), len(cache.row_at) - there)
  taken = _take(cache, slots, coming, step, room)
  room = len(taken)
  placed = plan.load[:room]  # the others are loaded for this step only
  evict, evict_slots = np.empty((2, room), np.int64)
  dirty = kernels.replace(cache, batch.rows[placed], taken, evict, evict_slots)
  slots[placed] = taken
  return plan._replace(
    slots=slots,
    store=plan.load[room:],
    evict=evict[:dirty],
    evict_slots=evict_slots[:dirty],
  )


def _take(
  cache: kernels.Cache,
  slots: Slots,
  coming: Sequence[Unique],
  step: int,
  room: int,
) -> Int[np.ndarray, ' taken']:
  """Returns slots for `room` new rows, in the order of their eviction.

  Rows that no known batch uses come first, by priority, then those whose next
  use is the latest (Belady). Frozen rows come after all others. It returns
  fewer slots if batches known before are no longer upcoming, as after the end
  of a schedule: their rows stay.
  """
  taken, count = np.empty(room, np.int64), 0
  for frozen in (False, True):
    count = kernels.take_unused(cache, step, frozen, taken, count)
    if count < room and coming:
      # The batch's own rows are marked as seen, so that they stay. The mark is
      # the step's number, so no mark needs clearing.
      cache.seen[slots[slots >= 0]] = step
      latest = _latest(cache, coming, step, frozen)[: room - count]
      taken[count : count + len(latest)] = latest
      count += len(latest)
  return taken[:count]


def _latest(
  cache: kernels.Cache, coming: Sequence[Unique], step: int, frozen: bool
) -> Int[np.ndarray, ' taken']:
  """Returns slots of rows that known batches use, the latest next use first.

  `next_uses` marks the slots that it finds, so that a row counts for the first
  coming batch that uses it.
  """
  groups = []
  for batch in coming:
    group = np.empty(len(batch.rows), np.int64)
    count = kernels.next_uses(cache, batch.rows, step, frozen, group)
    # Ties are broken as in the heap: the lowest slot first.
    groups.append(np.sort(group[:count]))
  return np.concatenate(groups[::-1])
