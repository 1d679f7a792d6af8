"""The rows of one group of tables: on the host, on the device, on their way.

Per step: `load` brings a batch's unique rows to the step, `store` takes
the changed rows back to where the plan says they live. The step itself sees
the same padded block under every placement, so the very same compiled
program trains them all: placement changes no number.
"""

from collections.abc import Callable
import functools

import jax
from jax.profiler import TraceAnnotation
import numpy as np

from slipstream_jax.placement import Placement, Plan, StaleRows
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store import host_table
from slipstream_jax.store.helpers import ALONE
from slipstream_jax.stream import apply
from slipstream_jax.stream.buffers import to_device
from slipstream_jax.stream.counters import Counters
from slipstream_jax.stream.dirty.marks import DirtyRows
from slipstream_jax.stream.kept import (
  AllRows,
  assembled,
  Copies,
  Kept,
  NOWHERE,
  Placed,
)
from slipstream_jax.stream.leaving import Leaving
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
  """Owns the rows of one group, on the host or on the device.

  Attributes:
    placement: which rows stay on the device between steps.
    num_rows: N, rows of the group.
    row_bytes: what one row and its state take on the link.
    hot: its rows that may be watched and pinned, if any were chosen at all.
    frozen: which of these stand still, as last readied; None: none does.
    helpers: threads that a step's rows are copied by.
    dirty: which rows changed, and since when.
  """

  def __init__(
    self,
    placement: Placement,
    table: RowBlock,
    hot: HotRows | None,
    count: Callable[[Counters], None],
    untrained: Callable[[RowIds], RowBlock],
  ) -> None:
    """Takes over `table`, a host table of all rows; nobody may write it.

    Args:
      placement: which rows stay on the device.
      table: the rows.
      hot: as the attribute.
      count: told what is moved beside steps.
      untrained: what rows of these numbers are before their first step.

    Raises:
      UserError: the placement needs hot rows.
    """
    self.placement, self.hot, self.helpers = placement, hot, ALONE
    self._count, self._untrained = count, untrained
    self.num_rows = len(table.rows)
    self.row_bytes = host_table.row_bytes(table)
    self._hot_rows = NO_ROWS if hot is None else hot.rows
    self.dirty = DirtyRows(self.num_rows)
    self.restore(table)
    self.dirty.clear()

  def choose_hot(self, hot: HotRows) -> None:
    """Chooses hot rows where there are none yet."""
    self.hot, self._hot_rows = hot, hot.rows

  def restore(self, table: RowBlock) -> None:
    """Replaces all rows by those of `table`, a host table it takes over."""
    self.dirty.mark_all()
    # Copied, for even an empty slice would keep all of `table` in memory.
    none = jax.tree.map(lambda leaf: leaf[:0].copy(), table)
    # Gives memory back before taking more.
    self._kept, self._host = Kept(none, NO_ROWS), none
    self.frozen: StaleRows | None = None
    # The last plan that was loaded, with what of it is on the device.
    self._placed: tuple[Plan, Placed] | None = None
    self._leaving = Leaving(none)
    rows = self.placement.keeps(self.num_rows, self.hot)
    if rows is None:
      self._kept = AllRows(to_device(table, owned=True))
      self._count_loads(self.num_rows, self.row_bytes)
    else:
      self._host, self._leaving = table, Leaving(table)
      if len(rows):
        # Empty slots get the values of row 0, which nobody reads.
        block = self._copy_of(np.maximum(rows, 0), len(rows))
        # `write` changes its list; that of pinned is the hot rows' own.
        self._kept = Kept(block, rows.copy())
      self._count_loads(int((rows >= 0).sum()), self.row_bytes)

  @property
  def contents(self) -> RowIds | None:
    """Row in each of the device's slots, as in `Placement.keeps`."""
    return self._kept.rows

  def slots_of(self, rows: RowIds) -> Slots:
    """Slot of each row, i64[U]; -1 if it has none."""
    return self._kept.slots_of(rows)

  def check(self, plan: Plan) -> None:
    """Looks whether the plan's rows are where it finds them.

    Raises:
      UserError: the plan was made for other contents.
    """
    self._kept.check(plan)

  def load(self, plan: Plan, fresh: FreshRows = NO_ROWS) -> RowBlock:
    """The plan's rows on the device, padded with zeros to their bucket.

    Rows that left the device reach the host table once a step was dispatched
    after the one that changed them. So nothing waits here for the step under
    way: what that one stored is taken from its block.
    Until `store`, the same plan may be loaded again, or another in its place.

    Args:
      plan: of the batch.
      fresh: rows that are loaded as untrained ones, each once.
    """
    # Before anything is gathered: it may come back.
    self._leaving.settle(last=False, helpers=self.helpers)
    if len(plan.evict):
      # Now, for `store` donates the block and gives these slots to others.
      evicted = self._kept.gather(plan.evict_slots)
      self._leaving.evicted(plan.evict, evicted)
    gather = functools.partial(self.gather, fresh)
    forwarded = self._leaving.forwarded(plan, fresh)
    block = self._kept.block
    block, placed = assembled(
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
    """Host rows, padded with zeros, `fresh` ones as they are untrained."""
    with TraceAnnotation('gather'):
      block = host_table.gather(self._host, rows, size, self.helpers)
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
    """Puts the step's rows [P, ...], of the plan that `load` got, back.

    Those for the host table start on their way: nothing waits for the step.
    """
    self.dirty.mark(plan, self.frozen, fresh)
    if len(fresh):
      self.renew(plan, fresh)
    loaded, placed = self._placed or (None, NOWHERE)
    if loaded is not plan:  # another one was, last
      placed = NOWHERE
    self._placed = None
    self._leaving.stored(plan, self._kept.write(plan, block, placed))

  def renew(self, plan: Plan, fresh: FreshRows) -> None:
    """Makes rows untrained wherever they are, before the step's are stored."""
    self._leaving.settle(last=True)  # or what leaves would come after it
    if len(self._host.rows):
      block = self._untrained(fresh)
      host_table.scatter(self._host, fresh, block)
    slots = self._kept.slots_of(fresh)
    written = slots >= 0
    if not isinstance(self._kept, Copies):  # whose rows no step writes
      written &= ~np.isin(fresh, plan.rows)
    self._kept.block = self._with_untrained(
      self._kept.block, slots[written], fresh[written]
    )

  def _with_untrained(
    self, block: RowBlock, at: Positions, rows: RowIds
  ) -> RowBlock:
    """The block, donated, with these rows as untrained ones at some places."""
    if not len(at):
      return block
    self._count_loads(len(at), self.row_bytes)
    places = apply.pad_slots(at, len(block.rows))
    padding = np.zeros(len(places) - len(rows), np.int64)
    # Their values go to no place.
    new = self._untrained(np.concatenate([rows, padding]))
    return apply.write_slots(block, *to_device((places, new), owned=True))

  def freeze(self, stale: StaleRows | None) -> None:
    """Readies the rows that stand still from here on; None: none does.

    The first step planned with them must not have been loaded yet.
    """
    self.frozen = stale
    if not self.placement.copies_frozen:
      return
    self._leaving.settle(last=True)
    self._placed = None  # it is of slots that are no more
    # Copies are dropped, never stored: the rows they are of did not change.
    none = jax.tree.map(lambda leaf: leaf[:0], self._host)
    self._kept = Kept(none, NO_ROWS)
    if stale is not None and stale.any():
      slots = np.flatnonzero(stale)
      padded = apply.pad_slots(slots, len(stale))
      block = self._copy_of(self._hot_rows[slots], len(padded))
      # As long as the hot rows, so that no refresh recompiles `assemble`.
      block = apply.write_slots(
        apply.zeros_like(block, len(stale)),
        to_device(padded, owned=True),
        block,
      )
      self._kept = Copies(block, np.where(stale, self._hot_rows, -1))
      self._count_loads(len(slots), self.row_bytes)

  def keep(self, rows: RowIds) -> None:
    """Keeps these rows on the device, and no others; those kept are stored."""
    self._host = self.read_back()
    self._leaving, self._placed = Leaving(self._host), None
    self._kept = Kept(self._copy_of(rows, len(rows)), rows.copy())

  def hot_rows_now(self) -> Rows:
    """The hot rows [H, D] as they are.

    They may be the very array that the device keeps, which the next `store`
    donates and so deletes: copy it, or be done with it before that.
    """
    hot, kept_rows = self._hot_rows, self.contents
    if kept_rows is not None and len(hot) and np.array_equal(kept_rows, hot):
      # No copy: all who ask (`watch.start`, `opened`, `closed`) read them in a
      # program that is dispatched before the next `store`, and copy there.
      rows: Rows = self._kept.block.rows
      return rows
    slots = self._kept.slots_of(hot)
    missing = np.flatnonzero(slots < 0)
    self._leaving.settle(last=True)  # some of them may be hot
    # Row state is not watched, so none is moved.
    host, kept = (b._replace(state=()) for b in (self._host, self._kept.block))
    gather = functools.partial(host_table.gather, host)
    rows = assembled(gather, kept, hot, slots, missing)[0].rows
    self._count_loads(len(missing), rows.nbytes // len(rows))
    return apply.first_rows(rows, len(hot))

  def read_back(self) -> RowBlock:
    """All N rows with their state as host arrays, not to be written.

    Not counted as stores: how often a program looks is its own affair.
    """
    self._leaving.settle(last=True)
    return self._kept.read_back(self._host)

  def like(self) -> RowBlock:
    """Host arrays for all rows and their state, to fill and to `restore`.

    Where there is a host table, they are its own.
    """
    if len(self._host.rows):
      return self._host  # there may be no room for a second one
    return jax.tree.map(
      lambda leaf: np.empty(leaf.shape, leaf.dtype), self._kept.block
    )

  def _copy_of(self, rows: RowIds, size: int) -> RowBlock:
    """Rows of the host table on the device, padded with zeros to `size`."""
    on_device: RowBlock = to_device(
      host_table.gather(self._host, rows, size), owned=True
    )
    return on_device

  def _count_loads(self, rows: int, row_bytes: int) -> None:
    self._count(Counters(rows_loaded=rows, bytes_loaded=rows * row_bytes))
