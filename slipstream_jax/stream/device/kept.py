"""The rows that the device keeps between steps, and which row is where.

A step reads its rows from what is kept and from the host's store, and `Kept`
says for each plan whether its rows are where the plan finds them. How much is
kept is the one thing that differs: some rows, among them none at all (`Kept`),
all of them (`AllRows`), or copies of rows that stand still (`Copies`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
from jaxtyping import Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.placement import Plan
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store.base import RowStore
from slipstream_jax.stream.buffers import handing_over, to_host
from slipstream_jax.stream.device import apply
from slipstream_jax.stream.device import slot_kernels as kernels
from slipstream_jax.stream.dirty import mark_kernels
from slipstream_jax.types import Array, Positions, RowBlock, RowIds, Slots

_PART = 1 << 17  # bytes of bits: a million rows


class Placed(NamedTuple):
  """What of a plan is on the device since its rows were put together there."""

  slots: Int[jax.Array, ' P'] | None = None
  """Padded; None: nothing is."""
  positions: Int[jax.Array, ' Q'] | None = None
  """Of the rows that were loaded, padded; None likewise."""


NOWHERE = Placed()


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
    # The slots of rows to load are still of the rows that they replace.
    self._check(plan.slots, plan.rows, plan.load)
    self._check(plan.evict_slots, plan.evict, NO_ROWS)

  def _check(self, slots: Slots, planned: RowIds, load: Positions) -> None:
    at = kernels.misplaced(self._rows, slots, planned, load)
    if at >= 0:
      slot = slots[at]
      held = f'row {self._rows[slot]}' if slot < self.size else 'no slot'
      raise UserError(
        f'the plan looks for row {planned[at]} where the device keeps it',
        got=f'{held} there',
        where='Engine.load, plan',
        hint='train one iterator of planned batches at a time, and none '
        'planned before a restore',
      )

  def gather(self, slots: Slots) -> RowBlock:
    """The rows at these slots, padded to their bucket; zeros for -1."""
    with handing_over():
      padded = apply.pad_slots(slots, self.size)
      return apply.gather_slots(self.block, padded)

  def write(
    self, plan: Plan, block: RowBlock, placed: Placed = NOWHERE
  ) -> RowBlock | None:
    """Puts those of the step's rows [P, ...] here that the plan has slots for.

    Rows that the plan loaded take their slots only now: of a step that failed
    before, no row is where its plan put it.

    Args:
      plan: the step's.
      block: its rows.
      placed: what `assembled` gave of the same plan.

    Returns:
      Those of its rows that the plan stores, padded; None if it stores none.
    """
    if not self.size:
      return _stored(plan, block, placed)
    stored = self._write(plan, block, placed)
    self._take_slots(plan)
    return stored

  def _take_slots(self, plan: Plan) -> None:
    if kernels.take_slots(self._rows, plan.slots, plan.rows, plan.load):
      self._by_row = None

  def _write(
    self, plan: Plan, block: RowBlock, placed: Placed
  ) -> RowBlock | None:
    slots: Array = placed.slots
    if slots is None:
      slots = apply.pad_slots(plan.slots, self.size)
    if len(plan.store) in (0, len(plan.rows)):
      with handing_over():
        self.block = apply.write_slots(self.block, slots, block)
      return _stored(plan, block, placed)
    positions = _positions(plan, block, placed)
    with handing_over():
      self.block, stored = apply.write_and_take(
        self.block, slots, block, positions
      )
    return stored

  def write_back(self, store: RowStore) -> None:
    """Brings the host's rows up to date with those kept here."""
    full = np.flatnonzero(self._rows >= 0)
    if len(full):
      block: RowBlock = jax.tree.map(lambda x: x[full], to_host(self.block))
      store.scatter(self._rows[full], block)

  def marked(self, bits: np.ndarray) -> Iterator[tuple[RowIds, Slots]]:
    """Of the rows that are here and not on the host, some, with their slots.

    Args:
      bits: which rows, as in `mark_kernels`.

    Yields:
      Rows, i64[n], ascending, from part to part too.
    """
    # By the bits, once over the slots: no order of all slots is kept for it.
    rows, slots = (np.empty(self.size, np.int64) for _ in range(2))
    count = kernels.marked_slots(self._rows, bits, rows, slots)
    rows, slots = rows[:count], slots[:count]
    order = np.argsort(rows, kind='stable')
    yield rows[order], slots[order]

  def read_back(self, store: RowStore) -> RowBlock:
    """All rows on the host, where those kept here are brought up to date."""
    self.write_back(store)
    return store.table()

  def read(self, store: RowStore, rows: RowIds) -> RowBlock:
    """Some rows on the host, after `write_back`."""
    return store.gather(rows, len(rows))


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

  def write(
    self, plan: Plan, block: RowBlock, placed: Placed = NOWHERE
  ) -> RowBlock | None:
    """Puts the step's rows here."""
    return self._write(plan, block, placed)

  def write_back(self, store: RowStore) -> None:
    """The host has none of them."""

  def marked(self, bits: np.ndarray) -> Iterator[tuple[RowIds, Slots]]:
    """All that the bits name."""
    for start in range(0, len(bits), _PART):
      some = bits[start : start + _PART]
      rows = np.empty(mark_kernels.count(some), np.int64)
      mark_kernels.rows_of(some, rows)
      rows += 8 * start
      yield rows, rows

  def read_back(self, store: RowStore) -> RowBlock:
    """A copy of all rows."""
    copy: RowBlock = to_host(self.block)
    return copy

  def read(self, store: RowStore, rows: RowIds) -> RowBlock:
    """Some rows, of the device."""
    block: RowBlock = to_host(self.gather(rows))
    return jax.tree.map(lambda leaf: leaf[: len(rows)], block)


class Copies(Kept):
  """Copies of host rows that stand still: read here, and never written."""

  def write(
    self, plan: Plan, block: RowBlock, placed: Placed = NOWHERE
  ) -> RowBlock | None:
    """Nothing is put: the step leaves these rows as they were."""
    return _stored(plan, block, placed)

  def write_back(self, store: RowStore) -> None:
    """The host has them, as they stand."""

  def marked(self, bits: np.ndarray) -> Iterator[tuple[RowIds, Slots]]:
    """None: the host has all of them."""
    yield from ()


def _stored(plan: Plan, block: RowBlock, placed: Placed) -> RowBlock | None:
  """The rows that the plan stores, padded; None if there are none."""
  if len(plan.store) in (0, len(plan.rows)):
    return block if len(plan.store) else None
  with handing_over():
    return apply.gather_slots(block, _positions(plan, block, placed))


def _positions(plan: Plan, block: RowBlock, placed: Placed) -> Array:
  """Where the rows are that the plan stores, on either side."""
  # The very array: most placements store what they loaded.
  if placed.positions is not None and plan.store is plan.load:
    return placed.positions
  return apply.pad_positions(plan.store, len(block.rows))
