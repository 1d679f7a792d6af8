"""Ownership of rows by devices, and placements over them.

A lane is the part of a group's rows that one device owns. With W lanes, row
b * W + i of a group is on lane (i + hash(b)) mod W and has number b there. So
no table of owners is needed, and neighbouring popular rows, such as the first
ones of each table, are on different devices.

A lane is planned as a group of its own: `over_lanes` calls a placement for each
lane, with the numbers that rows have there. It merges the results into one plan
of the group. Rows of a merged plan are ordered by lane. Slot s of lane w is
slot w * C + s of the group, where each lane has C slots.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Int
import numpy as np

from slipstream_jax.hashing import GOLDEN, kernel, mix
from slipstream_jax.placement import Placement, Plan
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.types import HotRows, RowIds, StaleRows, Unique


def lane_rows(num_rows: int, lanes: int) -> int:
  """Returns L, the numbers on a lane. The last may be past the last row."""
  return -(-num_rows // lanes)


def owners(rows: RowIds, lanes: int) -> Int[np.ndarray, ' U']:
  """Returns the lane of each row of a group, i64."""
  out = np.empty(len(rows), np.int64)
  _owners(rows, lanes, out)
  return out


def rows_of(
  lane: int, numbers: Int[np.ndarray, ' u'], lanes: int
) -> Int[np.ndarray, ' u']:
  """Returns the group's rows with these numbers on a lane, i64."""
  out = np.empty(len(numbers), np.int64)
  _rows_of(lane, numbers, lanes, out)
  return out


@kernel
@no_type_check
def _shift(block: int, lanes: int) -> int:
  return np.int64(mix((np.uint64(block) + np.uint64(1)) * GOLDEN) % lanes)


@kernel
@no_type_check
def _owner(row: int, lanes: int) -> int:
  block = row // lanes
  return (row - block * lanes + _shift(block, np.uint64(lanes))) % lanes


@kernel
@no_type_check
def _owners(rows: np.ndarray, lanes: int, out: np.ndarray) -> None:
  for u in range(len(rows)):
    out[u] = _owner(rows[u], lanes)


@kernel
@no_type_check
def _rows_of(
  lane: int, numbers: np.ndarray, lanes: int, out: np.ndarray
) -> None:
  for u in range(len(numbers)):
    shift = _shift(numbers[u], np.uint64(lanes))
    out[u] = numbers[u] * lanes + (lane - shift) % lanes


def places_by_lane(rows: RowIds, lanes: int) -> Int[np.ndarray, 'W H']:
  """Returns the places of each lane's rows, in their order, among all rows.

  Those of the lane with most rows decide the width. Padding is -1.
  """
  owner = owners(rows, lanes)
  counts = np.bincount(owner, minlength=lanes)
  places = np.full((lanes, counts.max()), -1)
  for lane, count in enumerate(counts):
    places[lane, :count] = np.flatnonzero(owner == lane)
  return places


def in_lanes(unique: Unique, lanes: int) -> Unique:
  """Returns the unique rows ordered by lane, in their order within a lane."""
  order = np.empty(len(unique.rows), np.int64)
  places = np.empty(len(order) + 1, np.int32)
  places[-1] = -1  # which padding reads
  _by_owner(owners(unique.rows, lanes), lanes, order, places)
  hot = None if unique.hot is None else unique.hot[order]
  return Unique(
    unique.rows[order], places[unique.inverse], unique.counts[order], hot
  )


@kernel
@no_type_check
def _by_owner(
  owner: np.ndarray, lanes: int, order: np.ndarray, places: np.ndarray
) -> None:
  """Sorts positions by owner, stable, and finds the place of each position."""
  starts = np.zeros(lanes + 1, np.int64)
  for u in range(len(owner)):
    starts[owner[u] + 1] += 1
  for lane in range(lanes):
    starts[lane + 1] += starts[lane]
  for u in range(len(owner)):
    place = starts[owner[u]]
    order[place] = u
    places[u] = place
    starts[owner[u]] = place + 1


def bounds_of(rows: RowIds, lanes: int) -> Int[np.ndarray, ' W_and_1']:
  """Returns where each lane begins in rows that are ordered by lane."""
  out = np.empty(lanes + 1, np.int64)
  _bounds_of(rows, lanes, out)
  return out


@kernel
@no_type_check
def _bounds_of(rows: np.ndarray, lanes: int, out: np.ndarray) -> None:
  # Only the rows that a binary search looks at are hashed.
  for lane in range(lanes + 1):
    low, high = 0, len(rows)
    while low < high:
      middle = (low + high) // 2
      if _owner(rows[middle], lanes) < lane:
        low = middle + 1
      else:
        high = middle
    out[lane] = low


class LanesState(NamedTuple):
  """The planner's state of a group whose rows are on several lanes."""

  states: list[Any]
  """Per lane, the state of the placement."""
  slots: int
  """C, slots of each lane. Rows may come to them later: copies of frozen ones,
  or hot rows of a placement that swaps them."""
  places: list[Int[np.ndarray, ' H_and_1']] | None
  """Per lane, the place among its hot rows of each hot row of the group. That
  of all others is the number of its hot rows."""
  hot: tuple[HotRows | None, ...]
  """Per lane, its hot rows."""
  known: dict[int, tuple[Unique, list[Unique]]]
  """Upcoming batches, and their rows lane by lane."""


@functools.cache
def over_lanes(placement: Placement, lanes: int) -> Placement:
  """Returns the placement that keeps rows on `lanes` devices.

  Each lane is a group to the given placement, whose capacity is per device.
  """
  return placement._replace(
    keeps=functools.partial(_keeps, placement, lanes),
    start=functools.partial(_start, placement, lanes),
    plan=functools.partial(_plan, placement, lanes),
    freeze=functools.partial(_freeze, placement, lanes),
    swap=functools.partial(_swap, placement),
  )


def _hot_of_lanes(
  hot: HotRows | None, num_rows: int, lanes: int
) -> tuple[HotRows | None, ...]:
  """Returns per lane its hot rows, in the group's order of them."""
  if hot is None:
    return (None,) * lanes
  owner, result = owners(hot.rows, lanes), []
  for lane in range(lanes):
    rows = hot.rows[owner == lane] // lanes
    place = np.full(lane_rows(num_rows, lanes) + 1, len(rows), np.int32)
    place[rows] = np.arange(len(rows))
    place[-1] = -1
    result.append(HotRows(rows, place))
  return tuple(result)


def _keeps(
  placement: Placement, lanes: int, num_rows: int, hot: HotRows | None
) -> RowIds:
  own, kept = lane_rows(num_rows, lanes), []
  for one in _hot_of_lanes(hot, num_rows, lanes):
    numbers = placement.keeps(own, one)
    kept.append(np.arange(own) if numbers is None else numbers)
  slots = max(map(len, kept))
  result = np.full((lanes, slots), -1, np.int64)
  for lane, numbers in enumerate(kept):
    rows = rows_of(lane, np.maximum(numbers, 0), lanes)
    # The last number of a lane may be past the last row.
    there = (numbers >= 0) & (rows < num_rows)
    result[lane, : len(numbers)] = np.where(there, rows, -1)
  return result.reshape(-1)


def _start(
  placement: Placement,
  lanes: int,
  num_rows: int,
  hot: HotRows | None,
  contents: RowIds | None,
) -> LanesState:
  own, hot_of = (
    lane_rows(num_rows, lanes),
    _hot_of_lanes(hot, num_rows, lanes),
  )
  rows = _keeps(placement, lanes, num_rows, hot)
  parts: Sequence[RowIds | None] = [None] * lanes
  if contents is not None:
    rows = contents
    parts = [
      np.where(part < 0, -1, part // lanes)
      for part in contents.reshape(lanes, -1)
    ]
  states = [
    placement.start(own, one, part)
    for one, part in zip(hot_of, parts, strict=True)
  ]
  places = None
  if hot is not None:
    owner, places = owners(hot.rows, lanes), []
    for lane in range(lanes):
      mine = owner == lane
      place = np.full(len(owner) + 1, mine.sum(), np.int32)
      place[:-1][mine] = np.arange(mine.sum())
      places.append(place)
  slots = len(rows) // lanes
  if placement.copies_frozen or placement.swaps:
    slots = max(len(NO_ROWS if one is None else one.rows) for one in hot_of)
  return LanesState(states, slots, places, hot_of, {})


def _freeze(
  placement: Placement, lanes: int, state: LanesState, stale: StaleRows | None
) -> LanesState:
  masks: Sequence[StaleRows | None] = [None] * lanes
  if stale is not None:
    assert state.places is not None  # only hot rows are frozen
    masks = [stale[place[:-1] < place[-1]] for place in state.places]
  pairs = zip(state.states, masks, strict=True)
  return state._replace(states=[placement.freeze(*pair) for pair in pairs])


def _swap(placement: Placement, state: LanesState, here: bool) -> LanesState:
  states = [placement.swap(one, here) for one in state.states]
  return state._replace(states=states)


def _split(state: LanesState, batch: Unique, lanes: int) -> list[Unique]:
  """Returns the batch's rows lane by lane, numbered as there."""
  if id(batch) in state.known:
    return state.known[id(batch)][1]
  bounds, parts = bounds_of(batch.rows, lanes), []
  numbers = batch.rows // lanes
  for lane in range(lanes):
    part = slice(bounds[lane], bounds[lane + 1])
    hot = None
    if batch.hot is not None and state.places is not None:
      hot = state.places[lane][batch.hot[part]]
    none = np.empty((0, 0), np.int32)
    parts.append(Unique(numbers[part], none, batch.counts[part], hot))
  state.known[id(batch)] = batch, parts
  return parts


def _plan(
  placement: Placement,
  lanes: int,
  state: LanesState,
  upcoming: Sequence[Unique],
) -> tuple[LanesState, Plan]:
  batch = upcoming[0]
  split = [_split(state, one, lanes) for one in upcoming]
  states, plans = [], []
  for lane, own in enumerate(state.states):
    new, plan = placement.plan(own, [parts[lane] for parts in split])
    states.append(new)
    plans.append(plan)
  del state.known[id(batch)]
  return state._replace(states=states), _merged(plans, batch, state.slots)


def _merged(plans: Sequence[Plan], batch: Unique, slots: int) -> Plan:
  """Returns the plan of a group from those of its lanes."""
  lanes = len(plans)
  ends = np.cumsum([0, *(len(plan.rows) for plan in plans)])

  def slot(lane: int, own: np.ndarray) -> np.ndarray:
    return np.where(own < 0, -1, own + lane * slots)

  def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts)

  load = joined([p.load + ends[i] for i, p in enumerate(plans)])
  # Most placements store what they load, which the device uses.
  same = all(plan.store is plan.load for plan in plans)
  return Plan(
    batch.rows,
    batch.inverse,
    joined([slot(i, p.slots) for i, p in enumerate(plans)]),
    load,
    load if same else joined([p.store + ends[i] for i, p in enumerate(plans)]),
    batch.hot,
    sum(plan.lookups for plan in plans),
    sum(plan.hits for plan in plans),
    joined([rows_of(i, p.evict, lanes) for i, p in enumerate(plans)]),
    joined([slot(i, p.evict_slots) for i, p in enumerate(plans)]),
    lanes=ends,
  )
