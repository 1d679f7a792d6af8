"""Rows of one group of tables: on the host, on the device, and in transfer.

In each step, `load` brings a batch's unique rows to the step, and `store`
returns the changed rows to where the plan keeps them. The step sees the same
padded block under every placement. So one compiled program trains them all, and
placement changes no number.
"""

from collections.abc import Callable, Iterable, Iterator
import functools

from jax.profiler import TraceAnnotation
import numpy as np

from slipstream_jax.engine import apply
from slipstream_jax.engine.assembling import assemble_rows
from slipstream_jax.engine.buffers import to_device
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.device_rows import (
  DeviceIndices,
  DeviceRows,
  FrozenCopies,
  NO_INDICES,
)
from slipstream_jax.engine.dirty.marks import DirtyRows
from slipstream_jax.engine.group_rows import GroupRows, Piece
from slipstream_jax.placement import Placement, Plan, StaleRows
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store.base import FirstRows, RowStore
from slipstream_jax.store.helpers import ALONE
from slipstream_jax.types import (
  FreshRows,
  HotRows,
  Positions,
  RowBlock,
  RowIds,
  Rows,
  Slots,
)


class GroupEngine:
  """Owner of the rows of one group, on the host or on the device.

  Attributes:
    placement: which rows stay on the device between steps.
    num_rows: N, rows of the group.
    row_bytes: bytes that one row and its state take on the link.
    rows: where each row is.
    hot: its rows that can be watched and pinned, if hot rows were chosen.
    frozen: which hot rows are frozen. None: none is.
    helpers: threads that copy a step's rows.
    dirty: which rows changed, and since when.
  """

  def __init__(
    self,
    placement: Placement,
    host: RowStore,
    first: FirstRows,
    hot: HotRows | None,
    count: Callable[[Counters], None],
    untrained: Callable[[RowIds], RowBlock],
  ) -> None:
    """Sets all rows to their first values.

    Args:
      placement: which rows stay on the device.
      host: keeps the other rows, for this engine only.
      first: first values of the rows.
      hot: as the attribute.
      count: called with what is moved outside of steps.
      untrained: returns values for rows that are reassigned.

    Raises:
      UserError: the placement needs hot rows.
    """
    self.placement, self.hot, self.helpers = placement, hot, ALONE
    self.num_rows, self.row_bytes = first.num_rows, host.row_bytes
    self._count, self._untrained = count, untrained
    self.rows = GroupRows(host, first, count)
    self._hot_rows = NO_ROWS if hot is None else hot.rows
    self.dirty = DirtyRows(self.num_rows)
    self.reset(first)

  def choose_hot(self, hot: HotRows, placement: Placement) -> None:
    """Chooses hot rows where there are none yet, and perhaps a placement."""
    self.hot, self._hot_rows = hot, hot.rows
    if placement != self.placement:
      self.placement = placement
      keeps = self._begin()
      assert keeps is not None  # one that keeps all rows needs no hot ones
      self.rows.place(keeps)

  def reset(self, first: FirstRows, pieces: Iterable[Piece] = ()) -> None:
    """Sets all rows to their first values, or to those of the pieces.

    Args:
      first: first values of the rows.
      pieces: other values of some rows. Later pieces replace earlier ones.
    """
    self.dirty.clear()
    self.rows.reset(self._begin(), first, self._mark_pieces(pieces))

  def _mark_pieces(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
    for rows, block in pieces:
      self.dirty.add(rows)
      yield rows, block

  def restore(self, table: RowBlock) -> None:
    """Replaces all rows by the host table `table` and takes it over."""
    self.dirty.mark_all()
    self.rows.restore(self._begin(), table)

  def _begin(self) -> RowIds | None:
    """Clears the state of steps. Returns the rows for the device to keep."""
    self.frozen: StaleRows | None = None
    # The last loaded plan, and its device arrays.
    self._placed: tuple[Plan, DeviceIndices] | None = None
    return self.placement.keeps(self.num_rows, self.hot)

  @property
  def contents(self) -> RowIds | None:
    """Row in each of the device's slots, as in `Placement.keeps`."""
    return self.rows.kept.rows

  def slots_of(self, rows: RowIds) -> Slots:
    """Returns the slot of each row, i64[U]. -1 if it has none."""
    return self.rows.kept.slots_of(rows)

  def check(self, plan: Plan) -> None:
    """Checks that the plan's rows are where it expects them.

    Raises:
      UserError: the plan expects other rows in the slots.
    """
    self.rows.kept.check(plan)

  def load(self, plan: Plan, fresh: FreshRows = NO_ROWS) -> RowBlock:
    """Returns the plan's rows on the device, padded with zeros to their bucket.

    Rows that left the device reach the host's store after the next step was
    dispatched. So loading never waits for the step under way: its stored rows
    are taken from its block. Until `store`, this plan may be loaded again, or
    another one in its place.

    Args:
      plan: of the batch.
      fresh: unique rows that are loaded with their first values.
    """
    # First, as the batch may need these rows again.
    self.rows.write_backs.settle(last=False, helpers=self.helpers)
    if len(plan.evict):
      # Now, as `store` donates the block and reuses these slots.
      evicted = self.rows.kept.gather(plan.evict_slots)
      self.rows.write_backs.evicted(plan.evict, evicted)
    gather = functools.partial(self.gather, fresh)
    forwarded = self.rows.write_backs.forwarded(plan, fresh)
    block = self.rows.kept.block
    block, placed = assemble_rows(
      gather, block, plan.rows, plan.slots, plan.load, forwarded
    )
    self._placed = plan, placed
    if len(fresh):
      there = np.isin(plan.rows, fresh)
      there[plan.load] = False
      at = np.flatnonzero(there)
      block = self._with_untrained(block, at, plan.rows[at])
    return block

  def gather(self, fresh: FreshRows, rows: RowIds, size: int) -> RowBlock:
    """Returns host rows, padded with zeros. `fresh` rows have first values."""
    with TraceAnnotation('gather'):
      block = self.rows.host.gather(rows, size, self.helpers)
    if len(fresh):
      at = np.flatnonzero(np.isin(rows, fresh))
      new = self._untrained(rows[at])
      for leaf, values in zip(
        (block.rows, *block.state), (new.rows, *new.state), strict=True
      ):
        leaf[at] = values
    return block

  def store(
    self, plan: Plan, block: RowBlock, fresh: FreshRows = NO_ROWS
  ) -> None:
    """Stores the step's rows [P, ...] of the plan that was loaded.

    Rows for the host are copied in the background, without waiting.
    """
    self.dirty.mark(plan, self.frozen, fresh)
    if len(fresh):
      self.renew(plan, fresh)
    loaded, placed = self._placed or (None, NO_INDICES)
    if loaded is not plan:  # another plan was loaded last
      placed = NO_INDICES
    self._placed = None
    self.rows.write_backs.stored(
      plan, self.rows.kept.write(plan, block, placed)
    )

  def renew(self, plan: Plan, fresh: FreshRows) -> None:
    """Resets reassigned rows wherever they are, except in the step's block."""
    # else their old values would be written later
    self.rows.write_backs.settle(last=True)
    if not self.rows.all_kept:
      self.rows.host.scatter(fresh, self._untrained(fresh))
    slots = self.rows.kept.slots_of(fresh)
    written = slots >= 0
    # The step's own rows are written with it, except to copies.
    if not isinstance(self.rows.kept, FrozenCopies):
      written &= ~np.isin(fresh, plan.rows)
    self.rows.kept.block = self._with_untrained(
      self.rows.kept.block, slots[written], fresh[written]
    )

  def _with_untrained(
    self, block: RowBlock, at: Positions, rows: RowIds
  ) -> RowBlock:
    """Writes first values of rows at places of the block, which is donated."""
    if not len(at):
      return block
    self._count_loads(len(at), self.row_bytes)
    places = apply.pad_slots(at, len(block.rows))
    padding = np.zeros(len(places) - len(rows), np.int64)
    # The padding's values are dropped.
    new = self._untrained(np.concatenate([rows, padding]))
    return apply.write_slots(block, *to_device((places, new), owned=True))

  def freeze(self, stale: StaleRows | None) -> None:
    """Freezes the stale rows from here on. None: no row is frozen.

    Call it before loading the first step that was planned with them.
    """
    self.frozen = stale
    if not self.placement.copies_frozen:
      return
    self.rows.write_backs.settle(last=True)
    self._placed = None  # its slots no longer exist
    # Copies are dropped without being stored, as their rows did not change.
    self.rows.kept = DeviceRows(self.rows.none, NO_ROWS)
    if stale is not None and stale.any():
      slots = np.flatnonzero(stale)
      padded = apply.pad_slots(slots, len(stale))
      block = self.rows.copy_of(self._hot_rows[slots], len(padded))
      # As long as the hot rows, so that new copies do not recompile `assemble`.
      block = apply.write_slots(
        apply.zeros_like(block, len(stale)),
        to_device(padded, owned=True),
        block,
      )
      self.rows.kept = FrozenCopies(block, np.where(stale, self._hot_rows, -1))
      self._count_loads(len(slots), self.row_bytes)

  def keep(self, rows: RowIds) -> None:
    """Keeps exactly these rows on the device. Stores those kept before."""
    self.rows.keep(rows)
    self._placed = None

  def hot_rows_now(self) -> Rows:
    """Returns the current hot rows [H, D].

    They may be the array that the device keeps, which the next `store` donates
    and so deletes. Use or copy it before that.
    """
    hot, kept_rows = self._hot_rows, self.contents
    if kept_rows is not None and len(hot) and np.array_equal(kept_rows, hot):
      # No copy: all callers (`watch.start`, `opened`, `closed`) copy them in a
      # program that is dispatched before the next `store`.
      rows: Rows = self.rows.kept.block.rows
      return rows
    slots = self.rows.kept.slots_of(hot)
    missing = np.flatnonzero(slots < 0)
    self.rows.write_backs.settle(last=True)  # some of them may be hot
    # Row state is not watched, so it is not moved.
    kept = self.rows.kept.block._replace(state=())

    def gather(some: RowIds, size: int) -> RowBlock:
      return self.rows.host.gather(some, size)._replace(state=())

    rows = assemble_rows(gather, kept, hot, slots, missing)[0].rows
    self._count_loads(len(missing), rows.nbytes // len(rows))
    return apply.first_rows(rows, len(hot))

  def write_back(self) -> None:
    """Updates the host's rows with those of the device, if the host has any."""
    self.rows.write_back()

  def read_back(self) -> RowBlock:
    """Returns all N rows with their state as host arrays, read-only.

    Reads do not count as stores.
    """
    return self.rows.read_back()

  def _count_loads(self, rows: int, row_bytes: int) -> None:
    self._count(Counters(rows_loaded=rows, bytes_loaded=rows * row_bytes))
