"""Rows of one group of tables: on the host, on the device, and in transfer.

The step sees the same padded block under every placement. So one compiled
program trains them all, and placement changes no number.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import operator
from typing import Any, NamedTuple

import jax
from jax.profiler import TraceAnnotation
from jaxtyping import Int, Shaped
import numpy as np

from slipstream_jax.engine import apply
from slipstream_jax.engine.buffers import (
  handing_over,
  start_to_host,
  to_device,
  to_host,
  to_step,
)
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.device_rows import DeviceRows, Indices
from slipstream_jax.engine.dirty import DirtyRows
from slipstream_jax.engine.mesh import shards
from slipstream_jax.placement import bucket, Placement, Plan
from slipstream_jax.placement.base import link, NO_ROWS
from slipstream_jax.store.base import FirstRows, pieces_of, RowStore, set_rows
from slipstream_jax.store.host_table import Vectors
from slipstream_jax.store.memory import MemoryStore
from slipstream_jax.store.threads import ALONE, Helpers
from slipstream_jax.types import (
  HotRows,
  Positions,
  ReassignedRows,
  RowBlock,
  RowIds,
  StaleRows,
)

EARLY_BYTES = 1 << 20
"""Rows in memory that are gathered before their step, at least."""
Piece = tuple[RowIds, RowBlock]
"""Some unique rows and their values."""
Lanes = Int[np.ndarray, ' W_and_1'] | None
"""Where the rows of each device begin. None: one device has all of them."""


def lanes_of(
  positions: Positions, lanes: Int[np.ndarray, ' W_and_1']
) -> Int[np.ndarray, ' W_and_1']:
  """Returns where each lane begins in positions that are ordered by lane."""
  lane = np.searchsorted(lanes, positions, side='right') - 1
  return np.searchsorted(lane, np.arange(len(lanes)))


def _in_lane(at: Positions, before: Plan) -> Positions:
  """Returns places among the rows a plan stores as their device has them."""
  if before.lanes is None:
    return at
  starts = lanes_of(before.store, before.lanes)
  lane = np.searchsorted(starts, at, side='right') - 1
  return np.where(at < 0, -1, at - starts[lane])


def _by_lane(
  rows: RowIds, block: RowBlock, lanes: Lanes
) -> Iterator[tuple[RowIds, RowBlock]]:
  """Yields the rows of each lane that this process has, and their values."""
  if lanes is None:
    yield rows, to_host(block)
    return
  for lane, part in shards(block):
    yield rows[lanes[lane] : lanes[lane + 1]], part


class WriteBackQueue:
  """Queue of rows for the host, in order, and the block of the last of them.

  Rows that a step stores are copied while the next step runs. They are in the
  host's store before the step after that gathers anything. The next step that
  moves rows may need them earlier, and takes them from that block (forwarding).

  Attributes:
    changes: how often rows of the host may have changed.
  """

  def __init__(self, store: RowStore) -> None:
    """Makes an empty queue for this store."""
    self._store = store
    self._rows = collections.deque[tuple[RowIds, RowBlock, Lanes]]()
    self._last: tuple[Plan, RowBlock] | None = None
    self._under_way = False  # whether the block is of the last step
    self.changes = 0

  def evicted(self, rows: RowIds, block: RowBlock, lanes: Lanes = None) -> None:
    """Queues evicted rows, none of which is in the next batch.

    If several devices have them, `lanes` has where the rows of each begin.
    """
    start_to_host(block)
    self._rows.append((rows, block, lanes))

  def stored(self, plan: Plan, block: RowBlock | None) -> None:
    """Queues the rows `plan.store` of a step, padded. None: there are none."""
    self._under_way = block is not None
    if plan.moves:  # else no row of the block has changed
      self._last = None
      self.changes += 1
    if block is not None:
      self._last = plan, block
      lanes = plan.lanes
      if lanes is not None:
        lanes = lanes_of(plan.store, lanes)
      self.evicted(plan.rows.take(plan.store), block, lanes)

  def settle(self, *, last: bool, helpers: Helpers = ALONE) -> None:
    """Writes queued rows to the store.

    Those of the last step are written only if `last`, which waits for the step.
    """
    held = None
    if self._last is not None and self._under_way and not last:
      held = self._last[1]
    while self._rows and self._rows[0][1] is not held:
      rows, block, lanes = self._rows[0]
      for some, values in _by_lane(rows, block, lanes):
        with TraceAnnotation('scatter'):
          self._store.scatter(some, values, helpers)
      self._rows.popleft()  # only now, so that an interrupted write is repeated
    if last:  # the store may change them now, so they must not be forwarded
      self._last = None
      self.changes += 1

  @property
  def settled(self) -> bool:
    """Whether the host has all rows but those that are forwarded."""
    last = None if self._last is None else self._last[1]
    return all(block is last for _, block, _ in self._rows)

  def forwarded(
    self, plan: Plan, reassigned: ReassignedRows
  ) -> tuple[RowBlock, Positions] | None:
    """Returns the rows to take from an earlier step, or None if there are none.

    They are the block of the rows that it stored, padded, on the device, and
    the place there of each row to load, or -1 if it comes from the host, as
    reassigned rows do.
    """
    if self._last is None or not len(plan.load):
      return None
    before, block = self._last
    forward = plan.forward
    # The planner linked the plans, unless other batches came in between.
    if forward is None or forward.before is not before.rows:
      forward = link(before, plan).forward
      assert forward is not None
    at = _in_lane(forward.at, before)
    if len(reassigned):
      at = np.where(np.isin(plan.rows[plan.load], reassigned), -1, at)
    return block, at


class _Early(NamedTuple):
  """Rows that are gathered before their step, while others run."""

  plan: Plan
  """Plan of the step."""
  since: tuple[WriteBackQueue, int]
  """The queue then, and its `changes`. They tell if the rows may be old."""
  block: futures.Future[RowBlock]
  """Rows on the device, padded."""


class GroupRows:
  """All rows of a group and their row state. Each row has one current place.

  Attributes:
    placement: which rows stay on the device between steps.
    num_rows: N, rows of the group.
    row_bytes: bytes that one row and its state take on the link.
    none: an empty block of the group's dtypes and shapes.
    first: first values of the rows, also of rows that are reassigned.
    host: keeps the rows that the device does not.
    kept: the rows that the device keeps.
    write_backs: rows on their way from the device to the host.
    hot: its rows that can be watched and pinned, if hot rows were chosen.
    frozen: which hot rows are frozen. None: none is.
    helpers: threads that copy a step's rows.
    vectors: reassigned rows of the loaded step that start from a vector of
      their id.
    dirty: which rows changed, and since when.
  """

  kept: DeviceRows

  def __init__(
    self,
    placement: Placement,
    host: RowStore,
    first: FirstRows,
    hot: HotRows | None,
    count: Callable[[Counters], None],
  ) -> None:
    """Sets all rows to their first values.

    `count` is called with what is moved outside of steps.

    Raises:
      UserError: the placement needs hot rows.
    """
    self.placement, self.host, self.hot = placement, host, hot
    self.num_rows, self.row_bytes = first.num_rows, host.row_bytes
    self.none = first.rows(NO_ROWS)
    self.helpers, self._count = ALONE, count
    self.vectors: Vectors | None = None
    self._hot_rows = NO_ROWS if hot is None else hot.rows
    self._early: _Early | None = None
    self._thread = futures.ThreadPoolExecutor(1, 'slipstream-gather')
    self.reset(first)

  def choose_hot(self, hot: HotRows, placement: Placement) -> None:
    """Chooses hot rows where there are none yet, and perhaps a placement."""
    self.hot, self._hot_rows = hot, hot.rows
    if placement != self.placement:
      self.placement = placement
      self.write_back()
      keeps = self._free_device()
      assert keeps is not None  # one that keeps all rows needs no hot ones
      self._keep_some(keeps)

  def reset(self, first: FirstRows, pieces: Iterable[Piece] = ()) -> None:
    """Sets all rows to their first values, or to those of the pieces.

    Later pieces replace earlier ones.
    """
    self.dirty = DirtyRows(self.num_rows)
    for start, end in first.drawn:
      for rows in pieces_of(end - start, max(self.row_bytes, 1)):
        self.dirty.add(start + rows)
    self.first = first
    keeps = self._free_device()
    # Rows for the device are set in host memory first.
    store: RowStore = MemoryStore(first) if keeps is None else self.host
    store.reset(first)
    for rows, block in pieces:
      self.dirty.add(rows)
      store.scatter(rows, block)
    if keeps is None:
      self.host.drop()
      self.kept = self._on_device(self._put(store.table()), None)
      self._count_loads(self.num_rows, self.row_bytes)
    else:
      self._keep_some(keeps)

  def _free_device(self) -> RowIds | None:
    """Drops the device's rows. Returns the row that each slot is to keep."""
    self.forget_early()
    self.frozen: StaleRows | None = None
    # Frees memory before more is allocated.
    self.kept = self._on_device(self.none, NO_ROWS)
    self.write_backs = WriteBackQueue(self.host)
    return self.placement.keeps(self.num_rows, self.hot)

  def _keep_some(self, keeps: RowIds) -> None:
    if len(keeps):
      # Empty slots get the values of row 0, which are never read.
      block = self._copy_of(np.maximum(keeps, 0), len(keeps))
      # A copy, as `write` changes it and `keeps` may be the hot rows' own.
      self.kept = self._on_device(block, keeps.copy())
    self._count_loads(int((keeps >= 0).sum()), self.row_bytes)

  def _copy_of(self, rows: RowIds, size: int) -> RowBlock:
    """Copies rows of the host to the device, padded with zeros to `size`."""
    on_device: RowBlock = self._put(self.host.gather(rows, size))
    return on_device

  def _on_device(
    self, block: RowBlock, rows: RowIds | None, copies: bool = False
  ) -> DeviceRows:
    return DeviceRows(block, rows, copies)

  def _put(self, tree: Any) -> Any:
    """Copies host arrays to the device, which will not be written again."""
    return to_device(tree, owned=True)

  def _write(self, block: RowBlock, at: jax.Array, new: RowBlock) -> RowBlock:
    """Writes rows at places of a block, which is donated."""
    return apply.write_slots(block, at, new)

  def swap_hot(self, here: bool) -> None:
    """Moves the hot rows to the device, or back, if the placement swaps them.

    Counts all of them. Does nothing if they are there already.
    """
    swaps = self.placement.swaps and len(self._hot_rows)
    if not swaps or here == self.hot_here:
      return
    self.write_back()
    self.kept = self._on_device(self.none, NO_ROWS)
    if here:
      self._keep_some(self._hot_slots())
      return
    moved = len(self._hot_rows)
    nbytes = moved * self.row_bytes
    self._count(Counters(rows_stored=moved, bytes_stored=nbytes))

  @property
  def hot_here(self) -> bool:
    """Whether the device has the hot rows of a placement that swaps them."""
    return self.placement.swaps and bool(self.kept.size)

  def load(
    self,
    plan: Plan,
    reassigned: ReassignedRows = NO_ROWS,
    on_host: bool = False,
  ) -> RowBlock:
    """Returns the plan's rows, padded with zeros to their bucket.

    Rows that left the device reach the host's store after the next step was
    dispatched. So loading never waits for the step under way: its stored rows
    are taken from its block. Until `store`, this plan may be loaded again, or
    another one in its place.

    Args:
      plan: of the batch.
      reassigned: unique rows that are loaded with their first values.
      on_host: whether to return them on the host, where all rows must be. Then
        it waits for the write-backs.
    """
    if on_host:
      self.write_back()
      return self._gather(plan.rows, bucket(len(plan.rows)), reassigned)
    # First, as the batch may need these rows again.
    self.write_backs.settle(last=False, helpers=self.helpers)
    if len(plan.evict):
      # Now, as `store` donates the block and reuses these slots.
      evicted = self.kept.gather(plan.evict_slots)
      self.write_backs.evicted(plan.evict, evicted)
    forwarded = self.write_backs.forwarded(plan, reassigned)
    block, indices = self._assemble(plan, forwarded, reassigned)
    self.kept.loaded = plan, indices
    if len(reassigned):
      there = np.isin(plan.rows, reassigned)
      there[plan.load] = False
      at = np.flatnonzero(there)
      block = self._with_first(block, at, plan.rows[at])
    return block

  def gather_early(self, plan: Plan) -> None:
    """Starts gathering what a plan loads. No step before it may move a row.

    `load` takes these rows, unless those of the host were changed meanwhile. It
    does nothing where gathering takes less than the change of threads.
    """
    if self._early is not None and self._early.plan is plan:
      return
    self.forget_early()
    if not (self.kept.size and len(plan.load) and self.write_backs.settled):
      return
    on_disk = self.host.counts is not None
    if not on_disk and len(plan.load) * self.row_bytes < EARLY_BYTES:
      return
    loaded = plan.rows.take(plan.load)
    room = len(apply.pad_positions(plan.load, bucket(len(plan.rows))))
    forwarded = self.write_backs.forwarded(plan, NO_ROWS)
    if forwarded is not None:
      loaded = loaded[forwarded[1] < 0]
      room = bucket(len(loaded), smallest=1024)
    since = self.write_backs, self.write_backs.changes
    block = self._thread.submit(lambda: self._copy_of(loaded, room))
    self._early = _Early(plan, since, block)

  def forget_early(self) -> None:
    """Ends what `gather_early` has started."""
    early, self._early = self._early, None
    if early is not None:
      futures.wait([early.block])

  def _gathered_early(self, plan: Plan) -> RowBlock | None:
    """Returns the rows that were gathered early for a plan, if any."""
    early = self._early
    if early is None or early.plan is not plan:
      return None
    self._early = None
    if early.since != (self.write_backs, self.write_backs.changes):
      return None
    try:
      with TraceAnnotation('gather'):
        return early.block.result()
    except Exception:  # gathering again raises it, or succeeds
      return None

  def close(self) -> None:
    """Ends threads and closes files. Rows cannot be read then."""
    self.forget_early()
    self._thread.shutdown()
    self.host.close()

  def _assemble(
    self,
    plan: Plan,
    forwarded: tuple[RowBlock, Positions] | None,
    reassigned: ReassignedRows,
  ) -> tuple[RowBlock, Indices]:
    """Returns rows on the device [P, ...], and arrays for `kept.write`."""
    kept, slots, load = self.kept.block, plan.slots, plan.load
    size = len(kept.rows)
    if size and not len(load):
      with handing_over():
        block, at_slots = apply.gather_at(kept, apply.pad_slots(slots, size))
      return block, (at_slots, None)
    loaded, room = plan.rows.take(load), bucket(len(plan.rows))
    if size:
      padded = apply.pad_slots(slots, size)
      positions = apply.pad_positions(load, len(padded))
      room = len(positions)
    held = source = None
    if forwarded is not None:
      held, at = forwarded
      loaded = loaded[at < 0]
      some = bucket(len(loaded), smallest=1024)
      source = apply.sources(at, some, len(held.rows), room)
      room = some
    early = None if len(reassigned) else self._gathered_early(plan)
    block = early or self._gather(loaded, room, reassigned)
    if not size and held is None:  # no rows to combine
      return to_step(block), (None, None)
    with handing_over():
      if not size:
        return apply.join(block, held, source), (None, None)
      joined = None if held is None else (held, source)
      block, *indices = apply.assemble(kept, padded, block, positions, joined)
    return block, tuple(indices)

  def _gather(
    self, rows: RowIds, size: int, reassigned: ReassignedRows
  ) -> RowBlock:
    """Returns rows of the host, padded with zeros to `size`."""
    with TraceAnnotation('gather'):
      block = self.host.gather(rows, size, self.helpers)
    if len(reassigned):
      at = np.flatnonzero(np.isin(rows, reassigned))
      set_rows(block, at, self._renewed(rows[at]))
    return block

  def _renewed(self, rows: RowIds) -> RowBlock:
    """Returns the values of reassigned rows before their first step."""
    block = self.first.rows(rows)
    if self.vectors is not None and len(self.vectors[0]):
      own, vectors = self.vectors
      at = np.minimum(np.searchsorted(own, rows), len(own) - 1)
      there = own[at] == rows
      block.rows[there] = vectors[at[there]]
    return block

  def store(
    self,
    plan: Plan,
    block: RowBlock,
    reassigned: ReassignedRows = NO_ROWS,
    on_host: bool = False,
  ) -> None:
    """Stores the step's rows [P, ...] of the plan that was loaded.

    Rows for the host are copied in the background, without waiting, unless the
    step was taken `on_host`.
    """
    self._mark_changes(plan, reassigned)
    if not on_host:
      self.write_backs.stored(plan, self.kept.write(plan, block))
      return
    self.write_back()
    with TraceAnnotation('scatter'):
      self.host.scatter(plan.rows, to_host(block))

  def _mark_changes(self, plan: Plan, reassigned: ReassignedRows) -> None:
    """Marks the rows that a step changes, and resets reassigned ones."""
    if self.frozen is not None and self.hot is not None and plan.hot is None:
      plan = plan._replace(hot=self.hot.places(plan.rows))
    self.dirty.mark(plan, self.frozen, reassigned)
    if not len(reassigned):
      return
    # else their old values would be written later
    self.write_backs.settle(last=True)
    if self.kept.rows is not None:
      self.host.scatter(reassigned, self._renewed(reassigned))
    slots = self.kept.slots_of(reassigned)
    written = slots >= 0
    # The step's own rows are written with it, except to copies.
    if not self.kept.copies:
      written &= ~np.isin(reassigned, plan.rows)
    self.kept.block = self._with_first(
      self.kept.block, slots[written], reassigned[written]
    )

  def _with_first(
    self, block: RowBlock, at: Positions, rows: RowIds
  ) -> RowBlock:
    """Writes first values of rows at places of the block, which is donated."""
    if not len(at):
      return block
    self._count_loads(len(at), self.row_bytes)
    places = apply.pad_slots(at, len(block.rows))
    padding = np.zeros(len(places) - len(rows), np.int64)
    # The padding's values are dropped.
    new = self._renewed(np.concatenate([rows, padding]))
    return self._write(block, *self._put((places, new)))

  def set_rows(self, rows: RowIds, values: Shaped[np.ndarray, 'U _D']) -> None:
    """Sets unique rows between two steps, wherever they are.

    They keep their row state. The values have the group's dtype.
    """
    self.write_backs.settle(last=True)  # else older values would replace them
    self.dirty.add(rows)
    if self.kept.rows is not None:
      # Also rows that the device has: a clean one is evicted without a store.
      block = self.host.gather(rows, len(rows))
      self.host.scatter(rows, block._replace(rows=values))
    slots = self.kept.slots_of(rows)
    at = np.flatnonzero(slots >= 0)
    if len(at):
      self._count_loads(len(at), self.row_bytes)
      block = self.kept.gather(slots[at])
      padded = np.zeros(block.rows.shape, values.dtype)
      padded[: len(at)] = values[at]
      places = apply.pad_slots(slots[at], len(self.kept.block.rows))
      new, to = self._put((padded, places))
      block = block._replace(rows=new)
      self.kept.block = self._write(self.kept.block, to, block)

  def freeze(self, stale: StaleRows | None) -> None:
    """Freezes the stale rows from here on. None: no row is frozen.

    Call it before loading the first step that was planned with them.
    """
    self.frozen = stale
    if not self.placement.copies_frozen:
      return
    # Copies are dropped without being stored, as their rows did not change.
    self.kept = self._on_device(self.none, NO_ROWS)
    if stale is not None and stale.any():
      rows = np.full(len(self._hot_slots()), -1)
      self.kept = self._on_device(self._zeros(len(rows)), rows, copies=True)

  def _hot_slots(self) -> RowIds:
    """Returns the hot rows in slots for all of them. -1: the slot is empty."""
    return self._hot_rows

  def _zeros(self, size: int) -> RowBlock:
    """Returns rows of zeros, made on the device."""
    return apply.zeros(size, self.none)

  def settle(self) -> None:
    """Ends write-backs. The host then has all rows that the device has not."""
    self.write_backs.settle(last=True)

  def own_bits(self, bits: np.ndarray) -> np.ndarray:
    """Returns those marks, as in `DirtyRows.bits`, of rows that are here."""
    return bits

  def write_back(self) -> None:
    """Updates the host's rows with those of the device, if the host has any."""
    self.write_backs.settle(last=True)
    self.kept.write_back(self.host)

  def read_back(self) -> RowBlock:
    """Returns all N rows with their state as host arrays, read-only.

    Reads do not count as stores.
    """
    self.write_back()
    if self.kept.rows is None:
      copy: RowBlock = to_host(self.kept.block)
      return copy
    return self.host.table()

  def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
    """Yields copies of rows `start` to `stop` with their state, ascending.

    Never holds all of them in memory. No step may be taken before the last
    piece.
    """
    self.write_back()
    end = self.num_rows if stop is None else stop
    for rows in pieces_of(end - start, self.row_bytes):
      if self.kept.rows is None:
        block: RowBlock = to_host(self.kept.gather(start + rows))
        block = jax.tree.map(operator.itemgetter(slice(len(rows))), block)
      else:
        block = self.host.gather(start + rows, len(rows))
      yield start + rows, block

  def _count_loads(self, rows: int, row_bytes: int) -> None:
    self._count(Counters(rows_loaded=rows, bytes_loaded=rows * row_bytes))
