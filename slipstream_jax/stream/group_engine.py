"""The rows of one group of tables: on the host, on the device, on their way.

Per step: `load` brings a batch's unique rows to the step, `store` takes
the changed rows back to where the plan says they live. The step itself sees
the same padded block under every placement, so the very same compiled
program trains them all: placement changes no number.
"""

from collections.abc import Callable, Iterable, Iterator
import functools

from jax.profiler import TraceAnnotation
import numpy as np

from slipstream_jax.placement import Placement, Plan, StaleRows
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store.base import FirstRows, RowStore
from slipstream_jax.store.helpers import ALONE
from slipstream_jax.stream.buffers import to_device
from slipstream_jax.stream.counters import Counters
from slipstream_jax.stream.device import apply
from slipstream_jax.stream.device.assembling import assembled
from slipstream_jax.stream.device.kept import (
  Copies,
  Kept,
  NOWHERE,
  Placed,
)
from slipstream_jax.stream.dirty.marks import DirtyRows
from slipstream_jax.stream.group_rows import GroupRows, Piece
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
    rows: where they are.
    hot: its rows that may be watched and pinned, if any were chosen at all.
    frozen: which of these stand still, as last readied; None: none does.
    helpers: threads that a step's rows are copied by.
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
    """All rows as they are before the first step.

    Args:
      placement: which rows stay on the device.
      host: keeps the others; it is this engine's alone.
      first: what rows are before their first step.
      hot: as the attribute.
      count: told what is moved beside steps.
      untrained: what rows of these numbers become that get another id.

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
    """Makes all rows those before their first step, or those of the pieces.

    Args:
      first: what they are before it.
      pieces: rows that are others; later ones come after earlier ones.
    """
    self.dirty.clear()
    self.rows.reset(self._begin(), first, self._marked(pieces))

  def _marked(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
    for rows, block in pieces:
      self.dirty.add(rows)
      yield rows, block

  def restore(self, table: RowBlock) -> None:
    """Replaces all rows by those of `table`, a host table it takes over."""
    self.dirty.mark_all()
    self.rows.restore(self._begin(), table)

  def _begin(self) -> RowIds | None:
    """Forgets what it knew; says which rows the device is to keep."""
    self.frozen: StaleRows | None = None
    # The last plan that was loaded, with what of it is on the device.
    self._placed: tuple[Plan, Placed] | None = None
    return self.placement.keeps(self.num_rows, self.hot)

  @property
  def contents(self) -> RowIds | None:
    """Row in each of the device's slots, as in `Placement.keeps`."""
    return self.rows.kept.rows

  def slots_of(self, rows: RowIds) -> Slots:
    """Slot of each row, i64[U]; -1 if it has none."""
    return self.rows.kept.slots_of(rows)

  def check(self, plan: Plan) -> None:
    """Looks whether the plan's rows are where it finds them.

    Raises:
      UserError: the plan was made for other contents.
    """
    self.rows.kept.check(plan)

  def load(self, plan: Plan, fresh: FreshRows = NO_ROWS) -> RowBlock:
    """The plan's rows on the device, padded with zeros to their bucket.

    Rows that left the device reach the host's store once a step was dispatched
    after the one that changed them. So nothing waits here for the step under
    way: what that one stored is taken from its block.
    Until `store`, the same plan may be loaded again, or another in its place.

    Args:
      plan: of the batch.
      fresh: rows that are loaded as untrained ones, each once.
    """
    # Before anything is gathered: it may come back.
    self.rows.leaving.settle(last=False, helpers=self.helpers)
    if len(plan.evict):
      # Now, for `store` donates the block and gives these slots to others.
      evicted = self.rows.kept.gather(plan.evict_slots)
      self.rows.leaving.evicted(plan.evict, evicted)
    gather = functools.partial(self.gather, fresh)
    forwarded = self.rows.leaving.forwarded(plan, fresh)
    block = self.rows.kept.block
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
    """Puts the step's rows [P, ...], of the plan that `load` got, back.

    Those for the host start on their way: nothing waits for the step.
    """
    self.dirty.mark(plan, self.frozen, fresh)
    if len(fresh):
      self.renew(plan, fresh)
    loaded, placed = self._placed or (None, NOWHERE)
    if loaded is not plan:  # another one was, last
      placed = NOWHERE
    self._placed = None
    self.rows.leaving.stored(plan, self.rows.kept.write(plan, block, placed))

  def renew(self, plan: Plan, fresh: FreshRows) -> None:
    """Makes rows untrained wherever they are, before the step's are stored."""
    self.rows.leaving.settle(last=True)  # or what leaves would come after it
    if not self.rows.all_kept:
      self.rows.host.scatter(fresh, self._untrained(fresh))
    slots = self.rows.kept.slots_of(fresh)
    written = slots >= 0
    if not isinstance(self.rows.kept, Copies):  # whose rows no step writes
      written &= ~np.isin(fresh, plan.rows)
    self.rows.kept.block = self._with_untrained(
      self.rows.kept.block, slots[written], fresh[written]
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
    self.rows.leaving.settle(last=True)
    self._placed = None  # it is of slots that are no more
    # Copies are dropped, never stored: the rows they are of did not change.
    self.rows.kept = Kept(self.rows.none, NO_ROWS)
    if stale is not None and stale.any():
      slots = np.flatnonzero(stale)
      padded = apply.pad_slots(slots, len(stale))
      block = self.rows.copy_of(self._hot_rows[slots], len(padded))
      # As long as the hot rows, so that no refresh recompiles `assemble`.
      block = apply.write_slots(
        apply.zeros_like(block, len(stale)),
        to_device(padded, owned=True),
        block,
      )
      self.rows.kept = Copies(block, np.where(stale, self._hot_rows, -1))
      self._count_loads(len(slots), self.row_bytes)

  def keep(self, rows: RowIds) -> None:
    """Keeps these rows on the device, and no others; those kept are stored."""
    self.rows.keep(rows)
    self._placed = None

  def hot_rows_now(self) -> Rows:
    """The hot rows [H, D] as they are.

    They may be the very array that the device keeps, which the next `store`
    donates and so deletes: copy it, or be done with it before that.
    """
    hot, kept_rows = self._hot_rows, self.contents
    if kept_rows is not None and len(hot) and np.array_equal(kept_rows, hot):
      # No copy: all who ask (`watch.start`, `opened`, `closed`) read them in a
      # program that is dispatched before the next `store`, and copy there.
      rows: Rows = self.rows.kept.block.rows
      return rows
    slots = self.rows.kept.slots_of(hot)
    missing = np.flatnonzero(slots < 0)
    self.rows.leaving.settle(last=True)  # some of them may be hot
    # Row state is not watched, so none is moved.
    kept = self.rows.kept.block._replace(state=())

    def gather(some: RowIds, size: int) -> RowBlock:
      return self.rows.host.gather(some, size)._replace(state=())

    rows = assembled(gather, kept, hot, slots, missing)[0].rows
    self._count_loads(len(missing), rows.nbytes // len(rows))
    return apply.first_rows(rows, len(hot))

  def write_back(self) -> None:
    """Brings the host's rows up to date, where the host has rows."""
    self.rows.write_back()

  def read_back(self) -> RowBlock:
    """All N rows with their state as host arrays, not to be written.

    Not counted as stores: how often a program looks is its own affair.
    """
    return self.rows.read_back()

  def _count_loads(self, rows: int, row_bytes: int) -> None:
    self._count(Counters(rows_loaded=rows, bytes_loaded=rows * row_bytes))
