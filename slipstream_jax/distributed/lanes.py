"""Ownership of rows by devices, and placements over them.

A lane is the part of a group's rows that one device owns. With W lanes, row
b * W + i of a group is on lane (i + hash(b)) mod W and has number b there. So
no table of owners is needed, and neighbouring popular rows, such as the first
ones of each table, are on different devices. Where each of several hosts has
tables of its own, their rows are on its lanes in the same way.

A lane is planned as a group of its own: `over_lanes` calls a placement for each
lane, with the numbers that rows have there. It merges the results into one plan
of the group. Rows of a merged plan are ordered by lane. Slot s of lane w is
slot w * C + s of the group, where each lane has C slots.
"""

from collections.abc import Callable, Collection, Sequence
import functools
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Int
import numpy as np

from slipstream_jax.hashing import GOLDEN, kernel, mix
from slipstream_jax.placement import Placement, Plan
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.tables import Group
from slipstream_jax.types import HotRows, RowIds, StaleRows, Unique


class Lanes(NamedTuple):
  """Ownership of a group's rows by M lanes.

  Each of H hosts has M / H of them, neighbours. Rows of a table are on all
  lanes of one host, or of the only one.
  """

  num_rows: int
  """N, rows of the group."""
  total: int
  """M, which H divides."""
  hosts: int = 1
  """H."""
  tables: tuple[int, ...] = (0,)
  """First row of each table, ascending."""
  places: tuple[int, ...] = (0,)
  """The place of each table's first row. Those of a host are its L * M / H
  places, one host after another."""
  size: int = 0
  """L, the numbers on a lane. The last ones may be past the last row."""

  def owners(self, rows: RowIds) -> Int[np.ndarray, ' U']:
    """Returns the lane of each row, i64."""
    return self._each(_owners, rows)

  def numbers(self, rows: RowIds) -> Int[np.ndarray, ' U']:
    """Returns the number of each row on its lane, i64."""
    return self._each(_numbers, rows)

  def _each(self, kernel: Callable[..., None], rows: RowIds) -> np.ndarray:
    out = np.empty(len(rows), np.int64)
    kernel(rows, *_form(self), out)
    return out

  def rows_of(
    self, lane: int, numbers: Int[np.ndarray, ' u']
  ) -> Int[np.ndarray, ' u']:
    """Returns the rows with these numbers on a lane, i64, or N for none."""
    out = np.empty(len(numbers), np.int64)
    own, size, tables, places = _form(self)
    ends = _ends(self)
    _rows_of(lane, numbers, own, size, tables, places, ends, out)
    return out

  def bounds(self, rows: RowIds) -> Int[np.ndarray, ' W_and_1']:
    """Returns where each lane begins in rows that are ordered by lane."""
    out = np.empty(self.total + 1, np.int64)
    _bounds_of(rows, self.total, *_form(self), out)
    return out

  def places_by_lane(self, rows: RowIds) -> Int[np.ndarray, 'W H']:
    """Returns the places of each lane's rows, in their order, among all rows.

    Those of the lane with most rows decide the width. Padding is -1.
    """
    owner = self.owners(rows)
    counts = np.bincount(owner, minlength=self.total)
    places = np.full((self.total, counts.max()), -1)
    for lane, count in enumerate(counts):
      places[lane, :count] = np.flatnonzero(owner == lane)
    return places


def even_lanes(num_rows: int, lanes: int) -> Lanes:
  """Returns M lanes of one host for N rows."""
  return Lanes(num_rows, lanes, size=-(-num_rows // lanes))


def lanes_of(
  group: Group, lanes: int, hosts: Sequence[Collection[str]] = ()
) -> Lanes:
  """Returns the lanes of a group's rows.

  Args:
    group: whose rows they are.
    lanes: M.
    hosts: for each host, the features whose tables it has. Empty: there is one.
  """
  if len(hosts) <= 1:
    return even_lanes(group.num_rows, lanes)
  host_of = {name: i for i, features in enumerate(hosts) for name in features}
  ranges = dict(zip(group.ranges, group.features, strict=True))
  tables = sorted(ranges)
  of_hosts = np.array([host_of[ranges[one]] for one in tables])
  rows = np.array([end - start for start, end in tables])
  own = lanes // len(hosts)
  size = -(-int(np.bincount(of_hosts, rows).max()) // own)
  places = np.empty(len(tables), np.int64)
  for host in range(len(hosts)):
    mine = of_hosts == host
    before = np.cumsum(rows[mine]) - rows[mine]
    places[mine] = host * own * size + before
  first = tuple(start for start, _ in tables)
  at = tuple(places.tolist())
  return Lanes(group.num_rows, lanes, len(hosts), first, at, size)


@functools.lru_cache(maxsize=256)
def _form(lanes: Lanes) -> tuple[int, int, np.ndarray, np.ndarray]:
  """Returns what kernels need: lanes of a host, L, tables and their places."""
  tables, places = np.array(lanes.tables), np.array(lanes.places)
  return lanes.total // lanes.hosts, lanes.size, tables, places


@functools.lru_cache(maxsize=256)
def _ends(lanes: Lanes) -> np.ndarray:
  """Returns the place behind each table's last row."""
  rows = np.diff(np.append(lanes.tables, lanes.num_rows))
  return np.array(lanes.places) + rows


@kernel
@no_type_check
def _shift(block: int, lanes: int) -> int:
  return np.int64(mix((np.uint64(block) + np.uint64(1)) * GOLDEN) % lanes)


@kernel
@no_type_check
def _place(row: int, tables: np.ndarray, places: np.ndarray) -> int:
  low, high = 0, len(tables)
  while high - low > 1:
    middle = (low + high) // 2
    if tables[middle] <= row:
      low = middle
    else:
      high = middle
  return row - tables[low] + places[low]


@kernel
@no_type_check
def _owner(
  row: int, lanes: int, size: int, tables: np.ndarray, places: np.ndarray
) -> int:
  place = _place(row, tables, places)
  block = place // lanes
  own = (place - block * lanes + _shift(block, np.uint64(lanes))) % lanes
  return block // size * lanes + own


@kernel
@no_type_check
def _owners(
  rows: np.ndarray,
  lanes: int,
  size: int,
  tables: np.ndarray,
  places: np.ndarray,
  out: np.ndarray,
) -> None:
  for u in range(len(rows)):
    out[u] = _owner(rows[u], lanes, size, tables, places)


@kernel
@no_type_check
def _numbers(
  rows: np.ndarray,
  lanes: int,
  size: int,
  tables: np.ndarray,
  places: np.ndarray,
  out: np.ndarray,
) -> None:
  for u in range(len(rows)):
    out[u] = _place(rows[u], tables, places) // lanes % size


@kernel
@no_type_check
def _rows_of(
  lane: int,
  numbers: np.ndarray,
  lanes: int,
  size: int,
  tables: np.ndarray,
  places: np.ndarray,
  ends: np.ndarray,
  out: np.ndarray,
) -> None:
  for u in range(len(numbers)):
    block = lane // lanes * size + numbers[u]
    shift = _shift(block, np.uint64(lanes))
    place = block * lanes + (lane - shift) % lanes
    out[u] = tables[-1] + ends[-1] - places[-1]  # N
    for table in range(len(tables)):
      if places[table] <= place < ends[table]:
        out[u] = tables[table] + place - places[table]


def in_lanes(unique: Unique, lanes: Lanes) -> Unique:
  """Returns the unique rows ordered by lane, in their order within a lane."""
  order = np.empty(len(unique.rows), np.int64)
  places = np.empty(len(order) + 1, np.int32)
  places[-1] = -1  # which padding reads
  _by_owner(lanes.owners(unique.rows), lanes.total, order, places)
  hot = None if unique.hot is None else unique.hot[order]
  rows, inverse = unique.rows[order], places[unique.inverse]
  counts, numbers = unique.counts[order], lanes.numbers(rows)
  return Unique(rows, inverse, counts, hot, numbers)


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


@kernel
@no_type_check
def _bounds_of(
  rows: np.ndarray,
  count: int,
  lanes: int,
  size: int,
  tables: np.ndarray,
  places: np.ndarray,
  out: np.ndarray,
) -> None:
  # Only the rows that a binary search looks at are hashed.
  for lane in range(count + 1):
    low, high = 0, len(rows)
    while low < high:
      middle = (low + high) // 2
      if _owner(rows[middle], lanes, size, tables, places) < lane:
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
  owner: Int[np.ndarray, ' H'] | None
  """Lane of each hot row of the group."""
  places: Int[np.ndarray, ' H'] | None
  """Its place among the lane's hot rows, i32."""
  hot: tuple[HotRows | None, ...]
  """Per lane, its hot rows."""
  known: dict[int, tuple[Unique, list[Unique]]]
  """Upcoming batches, and their rows lane by lane."""


@functools.cache
def over_lanes(placement: Placement, lanes: Lanes) -> Placement:
  """Returns the placement that keeps a group's rows in lanes.

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
  hot: HotRows | None, lanes: Lanes
) -> tuple[HotRows | None, ...]:
  """Returns per lane its hot rows, in the group's order of them."""
  if hot is None:
    return (None,) * lanes.total
  owner, result = lanes.owners(hot.rows), []
  for lane in range(lanes.total):
    rows = lanes.numbers(hot.rows[owner == lane])
    place = np.full(lanes.size + 1, len(rows), np.int32)
    place[rows] = np.arange(len(rows))
    place[-1] = -1
    result.append(HotRows(rows, place))
  return tuple(result)


def _keeps(
  placement: Placement, lanes: Lanes, num_rows: int, hot: HotRows | None
) -> RowIds:
  kept = []
  for one in _hot_of_lanes(hot, lanes):
    numbers = placement.keeps(lanes.size, one)
    kept.append(np.arange(lanes.size) if numbers is None else numbers)
  slots = max(map(len, kept))
  result = np.full((lanes.total, slots), -1, np.int64)
  for lane, numbers in enumerate(kept):
    rows = lanes.rows_of(lane, np.maximum(numbers, 0))
    # The last numbers of a lane may be past the last row.
    there = (numbers >= 0) & (rows < num_rows)
    result[lane, : len(numbers)] = np.where(there, rows, -1)
  return result.reshape(-1)


def _start(
  placement: Placement,
  lanes: Lanes,
  num_rows: int,
  hot: HotRows | None,
  contents: RowIds | None,
) -> LanesState:
  hot_of, count = _hot_of_lanes(hot, lanes), lanes.total
  rows = _keeps(placement, lanes, num_rows, hot)
  parts: Sequence[RowIds | None] = [None] * count
  if contents is not None:
    rows = contents
    parts = [
      np.where(part < 0, -1, lanes.numbers(np.maximum(part, 0)))
      for part in contents.reshape(count, -1)
    ]
  states = [
    placement.start(lanes.size, one, part)
    for one, part in zip(hot_of, parts, strict=True)
  ]
  owner = places = None
  if hot is not None:
    owner = lanes.owners(hot.rows)
    places = np.empty(len(owner), np.int32)
    for lane in range(count):
      (mine,) = np.nonzero(owner == lane)
      places[mine] = np.arange(len(mine))
  slots = len(rows) // count
  if placement.copies_frozen or placement.swaps:
    slots = max(len(NO_ROWS if one is None else one.rows) for one in hot_of)
  return LanesState(states, slots, owner, places, hot_of, {})


def _freeze(
  placement: Placement, lanes: Lanes, state: LanesState, stale: StaleRows | None
) -> LanesState:
  masks: Sequence[StaleRows | None] = [None] * lanes.total
  if stale is not None:
    assert state.owner is not None  # only hot rows are frozen
    masks = [stale[state.owner == lane] for lane in range(lanes.total)]
  pairs = zip(state.states, masks, strict=True)
  return state._replace(states=[placement.freeze(*pair) for pair in pairs])


def _swap(placement: Placement, state: LanesState, here: bool) -> LanesState:
  states = [placement.swap(one, here) for one in state.states]
  return state._replace(states=states)


def _split(state: LanesState, batch: Unique, lanes: Lanes) -> list[Unique]:
  """Returns the batch's rows lane by lane, numbered as there."""
  if id(batch) in state.known:
    return state.known[id(batch)][1]
  assert batch.numbers is not None
  bounds, parts, hot = lanes.bounds(batch.rows), list[Unique](), None
  none = np.empty((0, 0), np.int32)
  if batch.hot is not None and state.places is not None:
    hot = np.empty(len(batch.hot), np.int32)
    counts = np.array([len(one.rows) for one in state.hot if one is not None])
    _hot_of_own_lane(batch.hot, bounds, state.places, counts, hot)
  for lane in range(lanes.total):
    part = slice(bounds[lane], bounds[lane + 1])
    own = None if hot is None else hot[part]
    parts.append(Unique(batch.numbers[part], none, batch.counts[part], own))
  state.known[id(batch)] = batch, parts
  return parts


@kernel
@no_type_check
def _hot_of_own_lane(
  hot: np.ndarray,
  bounds: np.ndarray,
  places: np.ndarray,
  counts: np.ndarray,
  out: np.ndarray,
) -> None:
  for lane in range(len(counts)):
    for u in range(bounds[lane], bounds[lane + 1]):
      out[u] = places[hot[u]] if hot[u] < len(places) else counts[lane]


def _plan(
  placement: Placement,
  lanes: Lanes,
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
  merged = _merged(plans, batch, state.slots, lanes)
  return state._replace(states=states), merged


def _merged(
  plans: Sequence[Plan], batch: Unique, slots: int, lanes: Lanes
) -> Plan:
  """Returns the plan of a group from those of its lanes."""
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
    joined([lanes.rows_of(i, p.evict) for i, p in enumerate(plans)]),
    joined([slot(i, p.evict_slots) for i, p in enumerate(plans)]),
    lanes=ends,
  )
