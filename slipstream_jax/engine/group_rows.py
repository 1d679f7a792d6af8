"""Rows of one group of tables: on the host, on the device, and in transfer.

In each step, `load` brings a batch's unique rows to the step, and `store`
returns the changed rows to where the plan keeps them. The step sees the same
padded block under every placement. So one compiled program trains them all, and
placement changes no number.
"""

from collections.abc import Callable, Iterable, Iterator
import operator

import jax
from jax.profiler import TraceAnnotation
import numpy as np

from slipstream_jax.engine import apply
from slipstream_jax.engine.buffers import (
  handing_over,
  to_device,
  to_host,
  to_step,
)
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.dirty import DirtyRows
from slipstream_jax.engine.kept import (
  AllDeviceRows,
  DeviceIndices,
  DeviceRows,
  FrozenCopies,
  NO_INDICES,
)
from slipstream_jax.engine.write_back import Forwarded, WriteBackQueue
from slipstream_jax.placement import bucket, Placement, Plan, StaleRows
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store.base import FirstRows, pieces_of, RowStore, set_rows
from slipstream_jax.store.helpers import ALONE
from slipstream_jax.store.memory import MemoryStore
from slipstream_jax.types import (
  HotRows,
  Positions,
  ReassignedRows,
  RowBlock,
  RowIds,
  Rows,
  Slots,
)

Piece = tuple[RowIds, RowBlock]
"""Some unique rows and their values."""


class GroupRows:
  """All rows of a group and their row state. Each row has one current place.

  Attributes:
    placement: which rows stay on the device between steps.
    owner: number of the process whose devices train the rows.
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

    Args:
      placement: which rows stay on the device.
      host: keeps the other rows, for this group only.
      first: first values of the rows.
      hot: as the attribute.
      count: called with what is moved outside of steps.

    Raises:
      UserError: the placement needs hot rows.
    """
    self.placement, self.host, self.hot = placement, host, hot
    self.owner, self.num_rows = first.owner, first.num_rows
    self.row_bytes, self.none = host.row_bytes, first.rows(NO_ROWS)
    self.helpers, self._count = ALONE, count
    self._hot_rows = NO_ROWS if hot is None else hot.rows
    self.dirty = DirtyRows(self.num_rows)
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

    Args:
      first: first values of the rows.
      pieces: other values of some rows. Later pieces replace earlier ones.
    """
    self.dirty.clear()
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
      self.kept = AllDeviceRows(to_device(store.table(), owned=True))
      self._count_loads(self.num_rows, self.row_bytes)
    else:
      self._keep_some(keeps)

  def _free_device(self) -> RowIds | None:
    """Drops the device's rows. Returns the row that each slot is to keep."""
    self.frozen: StaleRows | None = None
    # The last loaded plan, and its device arrays.
    self._placed: tuple[Plan, DeviceIndices] | None = None
    # Frees memory before more is allocated.
    self.kept = DeviceRows(self.none, NO_ROWS)
    self.write_backs = WriteBackQueue(self.host)
    return self.placement.keeps(self.num_rows, self.hot)

  def _keep_some(self, keeps: RowIds) -> None:
    if len(keeps):
      # Empty slots get the values of row 0, which are never read.
      block = self._copy_of(np.maximum(keeps, 0), len(keeps))
      # A copy, as `write` changes it and `keeps` may be the hot rows' own.
      self.kept = DeviceRows(block, keeps.copy())
    self._count_loads(int((keeps >= 0).sum()), self.row_bytes)

  def _copy_of(self, rows: RowIds, size: int) -> RowBlock:
    """Copies rows of the host to the device, padded with zeros to `size`."""
    on_device: RowBlock = to_device(self.host.gather(rows, size), owned=True)
    return on_device

  def swap_hot(self, here: bool) -> None:
    """Moves the hot rows to the device, or back, if the placement swaps them.

    Does nothing if they are there already.
    """
    swaps = self.placement.swaps and len(self._hot_rows)
    if not swaps or here == self.hot_here:
      return
    self.write_back()
    self.write_backs, self._placed = WriteBackQueue(self.host), None
    rows = self._hot_rows if here else NO_ROWS
    self.kept = DeviceRows(self._copy_of(rows, len(rows)), rows.copy())
    moved = len(self._hot_rows)
    if here:
      self._count_loads(moved, self.row_bytes)
    else:
      nbytes = moved * self.row_bytes
      self._count(Counters(rows_stored=moved, bytes_stored=nbytes))

  @property
  def hot_here(self) -> bool:
    """Whether the device has the hot rows of a placement that swaps them."""
    return self.placement.swaps and bool(self.kept.size)

  @property
  def slot_map(self) -> RowIds | None:
    """Row in each of the device's slots, as in `Placement.keeps`."""
    return self.kept.rows

  def load(self, plan: Plan, reassigned: ReassignedRows = NO_ROWS) -> RowBlock:
    """Returns the plan's rows on the device, padded with zeros to their bucket.

    Rows that left the device reach the host's store after the next step was
    dispatched. So loading never waits for the step under way: its stored rows
    are taken from its block. Until `store`, this plan may be loaded again, or
    another one in its place.

    Args:
      plan: of the batch.
      reassigned: unique rows that are loaded with their first values.
    """
    # First, as the batch may need these rows again.
    self.write_backs.settle(last=False, helpers=self.helpers)
    if len(plan.evict):
      # Now, as `store` donates the block and reuses these slots.
      evicted = self.kept.gather(plan.evict_slots)
      self.write_backs.evicted(plan.evict, evicted)
    forwarded = self.write_backs.forwarded(plan, reassigned)
    block, placed = self._assemble(
      self.kept.block, plan.rows, plan.slots, plan.load, forwarded, reassigned
    )
    self._placed = plan, placed
    if len(reassigned):
      there = np.isin(plan.rows, reassigned)
      there[plan.load] = False
      at = np.flatnonzero(there)
      block = self._with_first(block, at, plan.rows[at])
    return block

  def _assemble(
    self,
    kept: RowBlock,
    rows: RowIds,
    slots: Slots,
    load: Positions,
    forwarded: Forwarded | None = None,
    reassigned: ReassignedRows = NO_ROWS,
  ) -> tuple[RowBlock, DeviceIndices]:
    """Returns rows on the device [P, ...], loading those at positions `load`.

    Args:
      kept: rows that the device keeps, with or without their state.
      rows: of the step.
      slots: their slots in `kept`.
      load: positions of the rows to load.
      forwarded: rows among these that come from the previous step.
      reassigned: rows that are loaded with their first values.

    Returns:
      The rows, and device arrays that `kept.write` can reuse.
    """
    size = len(kept.rows)
    if size and not len(load):
      with handing_over():
        block, at_slots = apply.gather_at(kept, apply.pad_slots(slots, size))
      return block, DeviceIndices(at_slots)
    loaded, room = rows[load], bucket(len(rows))
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
    block = self.gather(loaded, room, reassigned)
    if not kept.state:  # row state is not wanted, so it is not moved
      block = block._replace(state=())
    if not size and held is None:  # no rows to combine
      return to_step(block), NO_INDICES
    with handing_over():
      if not size:
        return apply.join(block, held, source), NO_INDICES
      joined = None if held is None else (held, source)
      block, *placed = apply.assemble(kept, padded, block, positions, joined)
    return block, DeviceIndices(*placed)

  def gather(
    self, rows: RowIds, size: int, reassigned: ReassignedRows = NO_ROWS
  ) -> RowBlock:
    """Returns rows of the host, padded with zeros to `size`.

    Args:
      rows: unique rows, in any order.
      size: at least as many.
      reassigned: rows that are returned with their first values.
    """
    with TraceAnnotation('gather'):
      block = self.host.gather(rows, size, self.helpers)
    if len(reassigned):
      at = np.flatnonzero(np.isin(rows, reassigned))
      set_rows(block, at, self.first.rows(rows[at]))
    return block

  def store(
    self, plan: Plan, block: RowBlock, reassigned: ReassignedRows = NO_ROWS
  ) -> None:
    """Stores the step's rows [P, ...] of the plan that was loaded.

    Rows for the host are copied in the background, without waiting.
    """
    self._mark_changes(plan, reassigned)
    loaded, placed = self._placed or (None, NO_INDICES)
    if loaded is not plan:  # another plan was loaded last
      placed = NO_INDICES
    self._placed = None
    self.write_backs.stored(plan, self.kept.write(plan, block, placed))

  def scatter(
    self, plan: Plan, block: RowBlock, reassigned: ReassignedRows = NO_ROWS
  ) -> None:
    """Writes rows that a step changed on the host, as numpy arrays."""
    self._mark_changes(plan, reassigned)
    self.write_back()
    with TraceAnnotation('scatter'):
      self.host.scatter(plan.rows, block)

  def _mark_changes(self, plan: Plan, reassigned: ReassignedRows) -> None:
    """Marks the rows that a step changes, and resets reassigned ones."""
    self.dirty.mark(plan, self.frozen, reassigned)
    if not len(reassigned):
      return
    # else their old values would be written later
    self.write_backs.settle(last=True)
    if self.kept.rows is not None:
      self.host.scatter(reassigned, self.first.rows(reassigned))
    slots = self.kept.slots_of(reassigned)
    written = slots >= 0
    # The step's own rows are written with it, except to copies.
    if not isinstance(self.kept, FrozenCopies):
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
    new = self.first.rows(np.concatenate([rows, padding]))
    return apply.write_slots(block, *to_device((places, new), owned=True))

  def freeze(self, stale: StaleRows | None) -> None:
    """Freezes the stale rows from here on. None: no row is frozen.

    Call it before loading the first step that was planned with them.
    """
    self.frozen = stale
    if not self.placement.copies_frozen:
      return
    self.write_backs.settle(last=True)
    self._placed = None  # its slots no longer exist
    # Copies are dropped without being stored, as their rows did not change.
    self.kept = DeviceRows(self.none, NO_ROWS)
    if stale is not None and stale.any():
      slots = np.flatnonzero(stale)
      padded = apply.pad_slots(slots, len(stale))
      block = self._copy_of(self._hot_rows[slots], len(padded))
      # As long as the hot rows, so that new copies do not recompile `assemble`.
      block = apply.write_slots(
        apply.zeros_like(block, len(stale)),
        to_device(padded, owned=True),
        block,
      )
      self.kept = FrozenCopies(block, np.where(stale, self._hot_rows, -1))
      self._count_loads(len(slots), self.row_bytes)

  def hot_rows_now(self) -> Rows:
    """Returns the current hot rows [H, D].

    They may be the array that the device keeps, which the next `store` donates
    and so deletes. Use or copy it before that.
    """
    hot, slot_map = self._hot_rows, self.slot_map
    if slot_map is not None and len(hot) and np.array_equal(slot_map, hot):
      # No copy: all callers (`watch.start`, `opened`, `closed`) copy them in a
      # program that is dispatched before the next `store`.
      rows: Rows = self.kept.block.rows
      return rows
    slots = self.kept.slots_of(hot)
    missing = np.flatnonzero(slots < 0)
    self.write_backs.settle(last=True)  # some of them may be hot
    kept = self.kept.block._replace(state=())
    rows = self._assemble(kept, hot, slots, missing)[0].rows
    self._count_loads(len(missing), rows.nbytes // len(rows))
    return apply.first_rows(rows, len(hot))

  def write_back(self) -> None:
    """Updates the host's rows with those of the device, if the host has any."""
    self.write_backs.settle(last=True)
    self.kept.write_back(self.host)

  def read_back(self) -> RowBlock:
    """Returns all N rows with their state as host arrays, read-only.

    Reads do not count as stores.
    """
    self.write_back()
    if self.slot_map is None:
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
      if self.slot_map is None:
        block: RowBlock = to_host(self.kept.gather(start + rows))
        block = jax.tree.map(operator.itemgetter(slice(len(rows))), block)
      else:
        block = self.host.gather(start + rows, len(rows))
      yield start + rows, block

  def _count_loads(self, rows: int, row_bytes: int) -> None:
    self._count(Counters(rows_loaded=rows, bytes_loaded=rows * row_bytes))
