"""The rows that the device keeps between steps, and which row is where.

A step reads its rows from what is kept and from the host table, and `Kept`
says for each plan whether its rows are where the plan finds them. How much is
kept is the one thing that differs: some rows, among them none at all (`Kept`),
all of them (`AllRows`), or copies of rows that stand still (`Copies`).
"""

from collections.abc import Callable

import jax
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.placement import bucket, Plan
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store import host_table
from slipstream_jax.stream import apply
from slipstream_jax.stream.buffers import to_device, to_host
from slipstream_jax.types import Positions, RowBlock, RowIds, Slots


class Kept:
  """Rows on the device, one per slot.

  Attributes:
    block: [C, ...]; replaced by every `write`, which donates the old one.
    rows: i64[C], the row in each slot, -1 where it is empty; None: all rows,
      each in the slot of its number.
  """

  rows: RowIds | None

  def __init__(self, block: RowBlock, rows: RowIds) -> None:
    """Takes over both."""
    self.block = block
    self.rows = self._rows = rows
    self._by_row: Slots | None = None

  @property
  def size(self) -> int:
    """C, how many slots there are."""
    return len(self.block.rows)

  def slots_of(self, rows: RowIds) -> Slots:
    """Slot of each row, i64[U]; -1 if it has none."""
    if not self.size:
      return np.full(len(rows), -1)
    # Sorted when asked for: only lone batches and windows ask, while an array
    # of all N rows would have to be kept up at every step.
    if self._by_row is None:
      self._by_row = np.argsort(self._rows)
    places = np.searchsorted(self._rows, rows, sorter=self._by_row)
    slots = self._by_row.take(np.minimum(places, self.size - 1))
    return np.where(self._rows.take(slots) == rows, slots, -1)

  def check(self, plan: Plan) -> None:
    """Looks whether the plan's rows are where it finds them.

    Raises:
      UserError: the plan was made for other contents.
    """
    there = plan.slots >= 0
    there[plan.load] = False  # these slots are still of the rows they replace
    self._check(plan.slots[there], plan.rows[there])
    self._check(plan.evict_slots, plan.evict)

  def _check(self, slots: Slots, planned: RowIds) -> None:
    # Clipped, as a slot past the last is of a plan for other slots.
    rows = self._rows.take(slots, mode='clip') if self.size else slots
    wrong = np.flatnonzero((rows != planned) | (slots >= self.size))
    if len(wrong):
      at = wrong[0]
      held = f'row {rows[at]}' if slots[at] < self.size else 'no slot'
      raise UserError(
        f'the plan looks for row {planned[at]} where the device keeps it',
        got=f'{held} there',
        where='Engine.load, plan',
        hint='train one iterator of planned batches at a time, and none '
        'planned before a restore',
      )

  def gather(self, slots: Slots) -> RowBlock:
    """The rows at these slots, padded to their bucket; zeros for -1."""
    padded = apply.pad_slots(slots, self.size)
    return apply.gather_slots(self.block, to_device(padded, owned=True))

  def write(self, plan: Plan, block: RowBlock) -> None:
    """Puts those of the step's rows [P, ...] here that the plan has slots for.

    Rows that the plan loaded take their slots only now: of a step that failed
    before, no row is where its plan put it.
    """
    if not self.size:
      return
    self._write(plan, block)
    if not len(plan.load):
      return
    loaded = np.zeros(len(plan.rows), bool)
    loaded[plan.load] = True
    placed = (plan.slots >= 0) & loaded
    if placed.any():
      self._rows[plan.slots[placed]] = plan.rows[placed]
      self._by_row = None

  def _write(self, plan: Plan, block: RowBlock) -> None:
    slots = apply.pad_slots(plan.slots, self.size)
    self.block = apply.write_slots(
      self.block, to_device(slots, owned=True), block
    )

  def read_back(self, host: RowBlock) -> RowBlock:
    """All rows on the host, where those kept here are brought up to date."""
    full = np.flatnonzero(self._rows >= 0)
    if len(full):
      block: RowBlock = jax.tree.map(lambda x: x[full], to_host(self.block))
      host_table.scatter(host, self._rows[full], block)
    return host


class AllRows(Kept):
  """All rows of all tables: nothing is on the host."""

  def __init__(self, block: RowBlock) -> None:
    """Takes over the rows [N, ...]."""
    super().__init__(block, NO_ROWS)
    self.rows = None

  def slots_of(self, rows: RowIds) -> Slots:
    """Every row's slot is its number."""
    return rows

  def check(self, plan: Plan) -> None:
    """Every plan holds."""

  def write(self, plan: Plan, block: RowBlock) -> None:
    """Puts the step's rows here."""
    self._write(plan, block)

  def read_back(self, host: RowBlock) -> RowBlock:
    """A copy of all rows."""
    copy: RowBlock = to_host(self.block)
    return copy


class Copies(Kept):
  """Copies of host rows that stand still: read here, and never written."""

  def write(self, plan: Plan, block: RowBlock) -> None:
    """Nothing: the step leaves these rows as they were."""

  def read_back(self, host: RowBlock) -> RowBlock:
    """The host's own, of which these are copies."""
    return host


def assembled(
  gather: Callable[[RowIds, int], RowBlock],
  kept: RowBlock,
  rows: RowIds,
  slots: Slots,
  load: Positions,
) -> RowBlock:
  """Rows on the device [P, ...]: those at positions `load` from the host."""
  size = len(kept.rows)
  if not size:  # no program has to put rows of two places together
    block: RowBlock = to_device(gather(rows, bucket(len(rows))), owned=True)
    return block
  padded = apply.pad_slots(slots, size)
  if not len(load):
    return apply.gather_slots(kept, to_device(padded, owned=True))
  positions = apply.pad_positions(load, len(padded))
  loaded = gather(rows[load], len(positions))
  return apply.assemble(
    kept, *to_device((padded, loaded, positions), owned=True)
  )
