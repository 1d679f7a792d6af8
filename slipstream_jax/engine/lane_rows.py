"""Rows of a group whose lanes are on several devices.

A step's block is one array over all lanes. Each device has the rows of its
lane, padded to the size of the largest. The programs are those of `apply`, run
on all devices at once.

Of several processes, each has on its host the rows of its own lanes alone. If
these are not all, what is done between steps with the rows of all must be done
by all processes in the same order.
"""

from collections.abc import Callable, Iterator
import itertools
import operator
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import Int
import numpy as np

from slipstream_jax.distributed.lanes import Lanes
from slipstream_jax.engine import apply, mesh
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.device_rows import DeviceRows, Indices
from slipstream_jax.engine.group_rows import GroupRows, lanes_of, Piece
from slipstream_jax.engine.mesh import Devices, Packed, SPLIT, WHOLE
from slipstream_jax.engine.own_rows import own_bits
from slipstream_jax.placement import bucket, Placement, Plan
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store.base import FirstRows, pieces_of, RowStore, set_rows
from slipstream_jax.types import (
  HotRows,
  Positions,
  ReassignedRows,
  RowBlock,
  RowIds,
  Slots,
)

Bounds = Int[np.ndarray, ' W_and_1']
_GO_ON = 1  # what a process says that reads another piece of all rows


def _starts(values: np.ndarray, bounds: Bounds) -> np.ndarray:
  """Returns each lane's number for every value of the lane."""
  return np.repeat(values[: len(bounds) - 1], np.diff(bounds))


def _most(bounds: Bounds) -> int:
  return bucket(int(np.diff(bounds).max()))


def block_places(lanes: Bounds, size: int) -> Int[np.ndarray, ' U']:
  """Returns the place of each of a plan's rows in a block of this size."""
  starts = np.arange(len(lanes)) * (size // (len(lanes) - 1)) - lanes
  return np.arange(lanes[-1]) + _starts(starts, lanes)


class LaneDeviceRows(DeviceRows):
  """Rows on several devices. Slot s of lane w is slot w * C + s of all."""

  def __init__(
    self, block: RowBlock, rows: RowIds, devices: Devices, copies: bool
  ) -> None:
    """Takes over block and rows. See `DeviceRows`."""
    super().__init__(block, rows, copies)
    self.devices = devices

  def gather(self, slots: Slots) -> RowBlock:
    """Returns the rows at these slots on each device, padded."""
    padded = apply.pad_slots(slots, self.size)
    rows: RowBlock = self.devices.run(
      mesh.gather,
      self.block,
      self.devices.whole(padded),
      whole=(1,),
      results=WHOLE,
    )
    return rows

  def own_slots(self, slots: Slots, bounds: Bounds, size: int) -> np.ndarray:
    """Returns the slots of each lane's rows as its device numbers them."""
    slots_of_lane = self.size // self.devices.lanes
    first = _starts(np.arange(len(bounds)) * slots_of_lane, bounds)
    own = np.where(slots < 0, -1, slots - first)
    return apply.pad_lanes(own, bounds, slots_of_lane, size)

  def evicted(self, slots: Slots) -> tuple[RowBlock, Bounds]:
    """Returns the rows at slots, each on its device, and where lanes begin."""
    slots_of_lane = self.size // self.devices.lanes
    ends = np.arange(self.devices.lanes + 1)
    bounds = np.searchsorted(slots // slots_of_lane, ends)
    at = self.own_slots(slots, bounds, _most(bounds))
    run = self.devices.run
    rows = run(apply.gather_slots, self.block, self.devices.split(at))
    return rows, bounds

  def write_back(self, store: RowStore) -> None:
    """Updates the host's rows with those of this process's devices."""
    assert self.rows is not None
    if self.copies:
      return
    slots = self.size // self.devices.lanes
    for lane, block in mesh.shards(self.block) if slots else ():
      rows = self.rows[lane * slots : (lane + 1) * slots]
      full = np.flatnonzero(rows >= 0)
      own: RowBlock = jax.tree.map(lambda leaf, at=full: leaf[at], block)
      store.scatter(rows[full], own)

  def marked(self, bits: np.ndarray) -> Iterator[tuple[RowIds, Slots]]:
    """Yields marked rows that are not on the host. See `DeviceRows`."""
    if self.devices.has_all:  # else `write_back` has brought them there
      yield from super().marked(bits)

  def write(self, plan: Plan, block: RowBlock) -> RowBlock | None:
    """Writes those of the step's rows that have slots. See `DeviceRows`."""
    assert plan.lanes is not None
    loaded, (slots, positions) = self.loaded or (None, (None, None))
    assert loaded is plan
    self.loaded, run = None, self.devices.run
    stored = block if len(plan.store) else None
    some = 0 < len(plan.store) < len(plan.rows)
    at: Any = positions if plan.store is plan.load else None
    if some and at is None:
      bounds = lanes_of(plan.store, plan.lanes)
      own = plan.store - _starts(plan.lanes, bounds)
      size = len(block.rows) // self.devices.lanes
      at = self.devices.split(apply.pad_lanes(own, bounds, size, _most(bounds)))
    if not self._takes(plan):
      return run(apply.gather_slots, block, at) if some else stored
    arguments: Any = self.block, slots, block
    if some:
      arguments += (at,)
      self.block, stored = run(apply.write_and_take, *arguments, donate=(0,))
    else:
      self.block = run(apply.write_slots, *arguments, donate=(0,))
    self.moved_in(plan)
    return stored


class LaneRows(GroupRows):
  """All rows of a group, where the device's rows are on several devices."""

  def __init__(
    self,
    devices: Devices,
    lanes: Lanes,
    placement: Placement,
    host: RowStore,
    first: FirstRows,
    hot: HotRows | None,
    count: Callable[[Counters], None],
  ) -> None:
    """Sets all rows to their first values. See `GroupRows`."""
    self.devices, self.lanes, self._on_host = devices, lanes, False
    super().__init__(placement, host, first, hot, count)

  def _on_device(
    self, block: RowBlock, rows: RowIds | None, copies: bool = False
  ) -> DeviceRows:
    assert rows is not None
    return LaneDeviceRows(block, rows, self.devices, copies)

  def _copy_of(self, rows: RowIds, size: int) -> RowBlock:
    slots = size // self.devices.lanes
    block: RowBlock = self.devices.joined(
      [
        self.host.gather(rows[lane * slots : (lane + 1) * slots], slots)
        for lane in self.devices.own
      ]
    )
    return block

  def _hot_slots(self) -> RowIds:
    places = self.lanes.places_by_lane(self._hot_rows).reshape(-1)
    return np.where(places < 0, -1, self._hot_rows[places])

  def _zeros(self, size: int) -> RowBlock:
    split = NamedSharding(self.devices.mesh, SPLIT)
    return apply.zeros(size, self.none, split)

  def _put(self, tree: Any) -> Any:
    return self.devices.whole(tree)

  def _write(self, block: RowBlock, at: jax.Array, new: RowBlock) -> RowBlock:
    arguments: Any = block, at, new
    written: RowBlock = self.devices.run(
      mesh.write, *arguments, donate=(0,), whole=(1, 2)
    )
    return written

  def load(
    self,
    plan: Plan,
    reassigned: ReassignedRows = NO_ROWS,
    on_host: bool = False,
  ) -> RowBlock:
    """Returns the plan's rows on their devices. See `GroupRows.load`.

    Rows of a plan without lanes, outside of training, come to each device.
    """
    if plan.lanes is None:
      return self._look_up(plan)
    self.write_backs.settle(last=False, helpers=self.helpers)
    if len(plan.evict):
      assert isinstance(self.kept, LaneDeviceRows)
      evicted = self.kept.evicted(plan.evict_slots)
      self.write_backs.evicted(plan.evict, *evicted)
    forwarded = self.write_backs.forwarded(plan, reassigned)
    block, indices = self._combine(plan, plan.lanes, forwarded, reassigned)
    self.kept.loaded = plan, indices
    if len(reassigned):
      there = np.isin(plan.rows, reassigned)
      there[plan.load] = False
      at = np.flatnonzero(there)
      places = block_places(plan.lanes, len(block.rows))
      block = self._with_first(block, places[at], plan.rows[at])
    return block

  def _combine(
    self,
    plan: Plan,
    lanes: Bounds,
    forwarded: tuple[RowBlock, Positions] | None,
    reassigned: ReassignedRows,
  ) -> tuple[RowBlock, Indices]:
    """Returns a plan's rows on their devices, and arrays for `kept.write`."""
    kept, split, run = self.kept, self.devices.split, self.devices.run
    assert isinstance(kept, LaneDeviceRows)
    room, bounds, slots, positions = _most(lanes), lanes, None, None
    if kept.size:
      slots = kept.own_slots(plan.slots, lanes, room)
      if not len(plan.load):
        at = split(slots)
        return run(apply.gather_slots, kept.block, at), (at, None)
      bounds = lanes_of(plan.load, lanes)
      own = plan.load - _starts(lanes, bounds)
      positions = apply.pad_lanes(own, bounds, room, _most(bounds))
      room = _most(bounds)
    loaded, source, held = plan.rows[plan.load], None, None
    if forwarded is not None:
      held, at = forwarded
      some = np.searchsorted(np.flatnonzero(at < 0), bounds)
      size, rows = _most(some), len(held.rows) // self.devices.lanes
      source = np.concatenate(
        [
          apply.sources(at[start:end], size, rows, room)
          for start, end in itertools.pairwise(bounds)
        ]
      )
      loaded, bounds, room = loaded[at < 0], some, size
    block = self.devices.joined(
      [
        self._gather(loaded[bounds[i] : bounds[i + 1]], room, reassigned)
        for i in self.devices.own
      ]
    )
    if not kept.size:
      if held is not None:
        block = run(apply.join, block, held, split(source))
      return block, (None, None)
    indices = self.devices.packed((slots, positions, source))
    joined = () if held is None else (held,)
    result = run(_assemble, kept.block, indices, block, *joined)
    return result[0], result[1:]

  def store(
    self,
    plan: Plan,
    block: RowBlock,
    reassigned: ReassignedRows = NO_ROWS,
    on_host: bool = False,
  ) -> None:
    """Stores the step's rows. See `GroupRows.store`."""
    self._on_host = False
    super().store(plan, block, reassigned, on_host)

  def write_back(self) -> None:
    """Updates the host's rows with those of this process's devices."""
    if not self._on_host or self.devices.has_all:
      super().write_back()
    self._on_host = True

  def settle(self) -> None:
    """Ends write-backs. A host that has not all rows then has its own."""
    if self.devices.has_all:
      super().settle()
    else:
      self.write_back()

  def own_bits(self, bits: np.ndarray) -> np.ndarray:
    """Returns those marks of rows that this process has."""
    if self.devices.alone:
      return bits
    return own_bits(bits, self.lanes, self.devices.first)

  def _of_all(self, rows: RowIds) -> RowBlock:
    """Returns rows of all hosts in their order, padded, on each device."""
    lanes = self.devices.lanes
    owner = self.lanes.owners(rows)
    order = np.argsort(owner, kind='stable')
    bounds = np.searchsorted(owner[order], np.arange(lanes + 1))
    room = _most(bounds)
    own = [
      self.host.gather(rows[order[bounds[i] : bounds[i + 1]]], room)
      for i in self.devices.own
    ]
    places = np.full(bucket(len(rows)), lanes * room)
    places[order] = block_places(bounds, lanes * room)
    arguments = self.devices.joined(own), self.devices.whole(places)
    block: RowBlock = self.devices.run(
      mesh.in_order, *arguments, whole=(1,), results=WHOLE
    )
    return block

  def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
    """Yields copies of rows. See `GroupRows.pieces`.

    Of processes that have not all rows, all ask for them in the same order, or
    others `answer` the first.
    """
    if self.devices.has_all:
      yield from super().pieces(start, stop)
      return
    self.settle()
    end = self.num_rows if stop is None else stop
    for rows in pieces_of(end - start, self.row_bytes):
      self.devices.agreed(_GO_ON)
      block = to_host(mesh.on_first(self._of_all(start + rows)))
      some = operator.itemgetter(slice(len(rows)))
      yield start + rows, jax.tree.map(some, block)

  def answer(self, start: int, stop: int) -> bool:
    """Sends rows to the first process, which reads `pieces` as long as it can.

    Returns:
      Whether it has read all of them.
    """
    self.settle()
    if self.devices.has_all:
      return True
    for rows in pieces_of(stop - start, self.row_bytes):
      if _GO_ON not in self.devices.agreed(0):
        return False
      self._of_all(start + rows)
    return True

  def read_back(self) -> RowBlock:
    """Returns all N rows with their state on each host. See `GroupRows`."""
    if self.devices.has_all:
      return super().read_back()
    blocks = [block for _, block in self.pieces()]
    whole: RowBlock = jax.tree.map(lambda *some: np.concatenate(some), *blocks)
    return whole

  def _look_up(self, plan: Plan) -> RowBlock:
    """Returns rows outside of training, in the plan's order."""
    self.settle()
    if not self.devices.has_all:
      return self._of_all(plan.rows)
    block = self.host.gather(plan.rows, bucket(len(plan.rows)))
    at = np.flatnonzero(plan.slots >= 0)
    if len(at):
      kept = to_host(mesh.on_first(self.kept.gather(plan.slots[at])))
      set_rows(block, at, jax.tree.map(lambda leaf: leaf[: len(at)], kept))
    everywhere: RowBlock = self.devices.whole(block)
    return everywhere


def _assemble(
  kept: RowBlock,
  indices: Packed,
  loaded: RowBlock,
  held: RowBlock | None = None,
) -> tuple[RowBlock, jax.Array, jax.Array]:
  slots, positions, source = indices.unpacked()
  joined = None if held is None else (held, source)
  return apply.assemble(kept, slots, loaded, positions, joined)
