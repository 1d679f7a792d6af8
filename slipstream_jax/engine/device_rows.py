"""Rows that the device keeps between steps, and the slot of each."""

from collections.abc import Iterator
from typing import no_type_check

import jax
from jaxtyping import Int
import numpy as np

from slipstream_jax.engine import apply
from slipstream_jax.engine.buffers import handing_over, to_host
from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.placement import Plan
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store.base import RowStore
from slipstream_jax.types import Array, RowBlock, RowIds, Slots

_PART = 1 << 17  # bytes of bits, for a million rows

Indices = tuple[Int[jax.Array, ' P'] | None, Int[jax.Array, ' Q'] | None]
"""Device arrays of a plan's padded slots, and of the padded positions of its
loaded rows. None: not on the device."""


class DeviceRows:
  """Rows on the device, one per slot.

  Attributes:
    block: [C, ...], replaced by every `write`, which donates the old one.
    rows: i64[C], the row in each slot, -1 if empty. None: all rows of the
      group, each in the slot of its number. The host then has none.
    copies: whether the rows are frozen copies of the host's rows. They are
      written when they are loaded, and never stored.
    loaded: the last loaded plan and its arrays on the device, for `write`.
  """

  def __init__(
    self, block: RowBlock, rows: RowIds | None, copies: bool = False
  ) -> None:
    """Takes over block and rows."""
    self.block, self.rows, self.copies = block, rows, copies
    self.loaded: tuple[Plan, Indices] | None = None
    self._written: RowIds | None = None  # `rows` of the last plan written
    self._by_row: Slots | None = None

  @property
  def size(self) -> int:
    """C, the number of slots."""
    return len(self.block.rows)

  def slots_of(self, rows: RowIds) -> Slots:
    """Returns the slot of each row, i64[U]. -1 if it has none."""
    if self.rows is None:
      return rows
    if not self.size:
      return np.full(len(rows), -1)
    # Sorted on demand: only single batches and windows ask, and an array of all
    # N rows would need an update in every step.
    if self._by_row is None:
      self._by_row = np.argsort(self.rows)
    places = np.searchsorted(self.rows, rows, sorter=self._by_row)
    slots = self._by_row.take(np.minimum(places, self.size - 1))
    return np.where(self.rows.take(slots) == rows, slots, -1)

  def check(self, plan: Plan) -> None:
    """Raises UserError if the plan expects other rows in the slots."""
    if self.rows is None:
      return
    # One that was planned right after the plan written last fits, as that did.
    forward = plan.forward
    if forward is not None and forward.before is self._written:
      return
    for slots, planned, load in (
      # The slots of rows to load still have the rows that they replace.
      (plan.slots, plan.rows, plan.load),
      (plan.evict_slots, plan.evict, NO_ROWS),
    ):
      at = _misplaced(self.rows, slots, planned, load)
      if at >= 0:
        slot = slots[at]
        held = f'row {self.rows[slot]}' if slot < self.size else 'no slot'
        raise UserError(
          f'the plan expects row {planned[at]} in slot {slot}',
          got=held,
          where='Engine.load, plan',
          hint='train one iterator of planned batches at a time, and none '
          'planned before a restore',
        )

  def gather(self, slots: Slots) -> RowBlock:
    """Returns the rows at these slots, padded to their bucket. Zeros for -1."""
    with handing_over():
      padded = apply.pad_slots(slots, self.size)
      return apply.gather_slots(self.block, padded)

  def write(self, plan: Plan, block: RowBlock) -> RowBlock | None:
    """Writes those of the step's rows [P, ...] that have slots.

    Loaded rows take their slots only now, so a step that fails earlier moves no
    row. Returns the rows that the plan stores, padded, or None if it stores
    none.
    """
    loaded, (slots, positions) = self.loaded or (None, (None, None))
    if loaded is not plan:  # another plan was loaded last
      slots = positions = None
    self.loaded, self._written = None, plan.rows
    stored = block if len(plan.store) else None
    some = 0 < len(plan.store) < len(plan.rows)
    # Most placements store what they load, and share the array.
    at: Array = positions if plan.store is plan.load else None
    if some and at is None:
      at = apply.pad_positions(plan.store, len(block.rows))
    with handing_over():
      if not self._takes(plan):
        return apply.gather_slots(block, at) if some else stored
      to: Array = slots
      if to is None:
        to = apply.pad_slots(plan.slots, self.size)
      if some:
        self.block, stored = apply.write_and_take(self.block, to, block, at)
      else:
        self.block = apply.write_slots(self.block, to, block)
    self.moved_in(plan)
    return stored

  def _takes(self, plan: Plan) -> bool:
    """Whether the plan's step changes rows that are kept."""
    if self.copies:
      return bool((plan.slots[plan.load] >= 0).any())
    return bool(self.size)

  def moved_in(self, plan: Plan) -> None:
    """Notes which rows are in the slots after the plan's step."""
    if self.rows is not None and _take_slots(
      self.rows, plan.slots, plan.rows, plan.load
    ):
      self._by_row = None

  def write_back(self, store: RowStore) -> None:
    """Updates the host's rows with those that are only here."""
    if self.rows is None or self.copies:
      return
    full = np.flatnonzero(self.rows >= 0)
    if len(full):
      block: RowBlock = jax.tree.map(lambda x: x[full], to_host(self.block))
      store.scatter(self.rows[full], block)

  def marked(self, bits: np.ndarray) -> Iterator[tuple[RowIds, Slots]]:
    """Yields rows that are marked, and not on the host, with their slots.

    They are i64[n], ascending within and across parts. Bits are as in
    `DirtyRows.bits`.
    """
    if self.rows is None:
      for start in range(0, len(bits), _PART):
        some = bits[start : start + _PART]
        rows = np.flatnonzero(np.unpackbits(some, bitorder='little'))
        rows += 8 * start
        yield rows, rows
    elif not self.copies:
      # One pass over the slots, without keeping them sorted.
      rows, slots = np.empty((2, self.size), np.int64)
      count = _marked(self.rows, bits, rows, slots)
      rows, slots = rows[:count], slots[:count]
      order = np.argsort(rows, kind='stable')
      yield rows[order], slots[order]


@kernel
@no_type_check
def _misplaced(
  held: np.ndarray, slots: np.ndarray, rows: np.ndarray, load: np.ndarray
) -> int:
  """Returns the first of rows i64[U] that is not in its planned slot, or -1.

  Slots at positions `load` may still have other rows. `held`, i64[C], is the
  row in each slot.
  """
  loaded = np.zeros(len(rows), np.bool_)
  for position in load:
    loaded[position] = True
  for u in range(len(rows)):
    slot = slots[u]
    if slot < 0:
      continue
    # Bounds are checked for rows to load, too, as `take_slots` does not.
    if slot >= len(held) or not (loaded[u] or held[slot] == rows[u]):
      return u
  return -1


@kernel
@no_type_check
def _take_slots(
  held: np.ndarray, slots: np.ndarray, rows: np.ndarray, load: np.ndarray
) -> bool:
  """Puts loaded rows into their slots of `held`. Returns whether it had any."""
  some = False
  for position in load:
    slot = slots[position]
    if slot >= 0:
      held[slot] = rows[position]
      some = True
  return some


@kernel
@no_type_check
def _marked(
  rows: np.ndarray, bits: np.ndarray, out: np.ndarray, slots: np.ndarray
) -> int:
  """Writes and counts the marked ones of the rows in slots, and their slots."""
  count = 0
  for slot in range(len(rows)):
    row = rows[slot]
    if row >= 0 and bits[row >> 3] & np.uint8(1 << (row & 7)):
      out[count], slots[count] = row, slot
      count += 1
  return count
