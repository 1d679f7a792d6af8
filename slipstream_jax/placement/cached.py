"""As many rows as fit stay on the device; which ones leave is a policy.

A row that a batch misses takes an empty slot, or that of the row that the
policy ranks lowest; a batch's own rows never leave. What CacheEmbedding does
(arXiv 2208.05321), and with 'look_ahead' BagPipe (2202.12429): the batches to
come are known, so the row whose next use is furthest leaves first (Belady,
1966), as far as one can see.

Only rows that changed on the device are moved back. Frozen rows do not, and
leave only when no other row can.
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
  """What the planner knows; its arrays are changed in place."""

  cache: kernels.Cache
  memory: Any
  """The policy's own."""
  hot: HotRows | None
  frozen: Bool[np.ndarray, ' H_and_1'] | None = None
  """Hot rows that stand still, and False for all cold ones; None: no row."""
  step: int = 0
  """Number of the batch that comes next."""
  known: int = 0
  """Batches that were planned or upcoming so far."""


def cached(
  capacity: int, eviction: str = 'look_ahead', look_ahead: int = 16
) -> Placement:
  """A cache of rows on the device, at first the most popular ones.

  Args:
    capacity: C, rows that the device keeps; at most N of them are used. What
      a batch needs beyond it is loaded for its step and stored after it.
    eviction: which row leaves first, a key of `EVICTIONS`.
    look_ahead: batches that `look_ahead` knows beyond the next; the others
      need none.

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
    needs_hot=True,  # to start with; only 'static' cannot do without
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
  # Contents that are given were trained on, and nobody knows which of them
  # changed since they were loaded: all must reach the host when they leave.
  changed = contents is not None
  if contents is None:
    contents = _keeps(capacity, num_rows, hot)
  slots, full = len(contents), contents >= 0
  memory, priorities = policy.start(num_rows, hot, contents)
  # Arrays of N find a row without a search: 8 bytes a row of host memory buy
  # a cost per step that no table's size adds to.
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
    hot = check_hot(state.hot, 'only hot rows can stand still')
    frozen = hot.with_cold(stale, False)
    # -1, empty, is the place of padding, which finds the last entry.
    cache.frozen[:] = frozen.take(hot.places(cache.row_at))
  # `dirty` stays: what changed before it froze has yet to reach the host. Rows
  # that thaw rank lower than before, which the heap cannot find out by itself.
  kernels.rebuild(cache)
  return state._replace(frozen=frozen)


def _plan(
  policy: Eviction, look_ahead: int, state: State, upcoming: Sequence[Unique]
) -> tuple[State, Plan]:
  """Plans a batch in four steps.

  1. Note in `latest_use` which rows the batches use that were not upcoming
     before: no row of this batch or a known later one leaves before others.
  2. Renew all priorities, where the policy wants that.
  3. Find room for the missing rows, and say what leaves for it (`_move`).
  4. Give the batch's rows the priorities of rows just used.
  """
  # A caller may know more batches; the plan must not depend on how many.
  batch, *coming = upcoming[: 1 + look_ahead]
  cache, step = state.cache, state.step
  known = step
  for known, uses in enumerate([batch, *coming], start=step):
    # Each batch is noted once, when it is first seen. They come in order, so
    # what a row's entry ends up with is the last of them.
    if known >= state.known:
      kernels.note(cache, uses.rows, known)
  renewed = policy.renew(state.memory, cache.row_at, step)
  if renewed is not None:
    # Empty slots keep 0, below every row. The heap is made anew, as it only
    # finds out by itself about priorities that rose.
    np.copyto(cache.priority, renewed, where=cache.row_at >= 0)
    kernels.rebuild(cache)
  plan = _move(cache, batch, coming, step)
  if state.frozen is None:
    frozen = np.zeros(len(batch.rows), bool)
  else:
    assert batch.hot is not None
    # Of all the batch's rows: `_freeze` knew only those then in the cache, and
    # one loaded since may stand still, too.
    frozen = state.frozen.take(batch.hot)
  priorities = policy.used(state.memory, batch, step)
  kernels.use(cache, batch.rows, plan.slots, priorities, frozen, step)
  known = max(state.known, known + 1)
  return state._replace(step=step + 1, known=known), plan


def _move(
  cache: kernels.Cache, batch: Unique, coming: Sequence[Unique], step: int
) -> Plan:
  """The plan, carried out in the cache."""
  slots = np.empty(len(batch.rows), np.int64)
  kernels.slots_of(cache, batch.rows, slots)
  # Hits are counted before the step: rows that come now are none.
  plan = plan_with(batch, slots)
  there = len(slots) - len(plan.load)
  # Rows of the batch that are there stay: only the other slots can be taken.
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
  """Slots for `room` new rows, in the order in which their rows leave.

  First go rows that no known batch uses, by priority; then those whose next
  use is the latest (Belady). Frozen rows leave only after all others. There are
  fewer slots where batches known before are no longer upcoming, as after a
  schedule has ended: their rows stay.
  """
  taken, count = np.empty(room, np.int64), 0
  for frozen in (False, True):
    count = kernels.take_unused(cache, step, frozen, taken, count)
    if count < room and coming:
      # This batch's own rows count as found already, for they must not go. As
      # a mark is the step's number, none has to be cleared before the next.
      cache.seen[slots[slots >= 0]] = step
      latest = _latest(cache, coming, step, frozen)[: room - count]
      taken[count : count + len(latest)] = latest
      count += len(latest)
  return taken[:count]


def _latest(
  cache: kernels.Cache, coming: Sequence[Unique], step: int, frozen: bool
) -> Int[np.ndarray, ' taken']:
  """Slots of the rows that known batches use, the latest next use first.

  `next_uses` marks what it finds, so that a row counts for the first of the
  batches to come that uses it, which is the one that it must be back for.
  """
  groups = []
  for batch in coming:
    group = np.empty(len(batch.rows), np.int64)
    count = kernels.next_uses(cache, batch.rows, step, frozen, group)
    # Equals leave as they do from the heap: the lowest slot first.
    groups.append(np.sort(group[:count]))
  return np.concatenate(groups[::-1])
