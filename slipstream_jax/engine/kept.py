"""Rows that the device keeps between steps, and the slot of each.

A step reads its rows from here and from the host's store. `check` verifies that
a plan's rows are where it expects them. The classes differ in what is kept:
some rows or none (`DeviceRows`), all rows (`AllDeviceRows`), or copies of
frozen rows (`FrozenCopies`).
"""

from collections.abc import Iterator
from typing import NamedTuple, no_type_check

import jax
from jaxtyping import Int
import numba
import numpy as np

from slipstream_jax.engine import apply
from slipstream_jax.engine.buffers import handing_over, to_host
from slipstream_jax.errors import UserError
from slipstream_jax.placement import Plan
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store.base import RowStore
from slipstream_jax.types import Array, Positions, RowBlock, RowIds, Slots

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)

_PART = 1 << 17  # bytes of bits, for a million rows


class DeviceIndices(NamedTuple):
  """Device arrays of a plan's padded indices, from assembling its rows."""

  slots: Int[jax.Array, ' P'] | None = None
  """Padded slots. None: not on the device."""
  positions: Int[jax.Array, ' Q'] | None = None
  """Padded positions of the loaded rows. None: not on the device."""


NO_INDICES = DeviceIndices()


class DeviceRows:
  """Rows on the device, one per slot.

  Attributes:
    block: [C, ...], replaced by every `write`, which donates the old one.
    rows: i64[C], the row in each slot, -1 if empty. None: all rows, each in the
      slot of its number.
  """

  rows: RowIds | None

  def __init__(self, block: RowBlock, rows: RowIds) -> None:
    """Takes over both arguments."""
    self.block = block
    self.rows = self._rows = rows
    self._by_row: Slots | None = None

  @property
  def size(self) -> int:
    """C, the number of slots."""
    return len(self.block.rows)

  def slots_of(self, rows: RowIds) -> Slots:
    """Returns the slot of each row, i64[U]. -1 if it has none."""
    if not self.size:
      return np.full(len(rows), -1)
    # Sorted on demand: only single batches and windows ask, and an array of all
    # N rows would need an update in every step.
    if self._by_row is None:
      self._by_row = np.argsort(self._rows)
    places = np.searchsorted(self._rows, rows, sorter=self._by_row)
    slots = self._by_row.take(np.minimum(places, self.size - 1))
    return np.where(self._rows.take(slots) == rows, slots, -1)

  def check(self, plan: Plan) -> None:
    """Checks that the plan's rows are where it expects them.

    Raises:
      UserError: the plan expects other rows in the slots.
    """
    # The slots of rows to load still have the rows that they replace.
    self._check(plan.slots, plan.rows, plan.load)
    self._check(plan.evict_slots, plan.evict, NO_ROWS)

  def _check(self, slots: Slots, planned: RowIds, load: Positions) -> None:
    at = _misplaced(self._rows, slots, planned, load)
    if at >= 0:
      slot = slots[at]
      held = f'row {self._rows[slot]}' if slot < self.size else 'no slot'
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

  def write(
    self, plan: Plan, block: RowBlock, placed: DeviceIndices = NO_INDICES
  ) -> RowBlock | None:
    """Writes those of the step's rows [P, ...] that have slots.

    Loaded rows take their slots only now, so a step that fails earlier moves no
    row.

    Args:
      plan: the step's.
      block: its rows.
      placed: device arrays of the same plan.

    Returns:
      The rows that the plan stores, padded. None if it stores none.
    """
    if not self.size:
      return _stored(plan, block, placed)
    stored = self._write(plan, block, placed)
    self._take_slots(plan)
    return stored

  def _take_slots(self, plan: Plan) -> None:
    if _take_slots(self._rows, plan.slots, plan.rows, plan.load):
      self._by_row = None

  def _write(
    self, plan: Plan, block: RowBlock, placed: DeviceIndices
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
    """Updates the host's rows with those kept here."""
    full = np.flatnonzero(self._rows >= 0)
    if len(full):
      block: RowBlock = jax.tree.map(lambda x: x[full], to_host(self.block))
      store.scatter(self._rows[full], block)

  def marked(self, bits: np.ndarray) -> Iterator[tuple[RowIds, Slots]]:
    """Yields the marked rows that are not on the host, with their slots.

    Args:
      bits: which rows, as in `DirtyRows.bits`.

    Yields:
      Rows, i64[n], ascending within and across parts, and their slots.
    """
    # One pass over the slots, without keeping them sorted.
    rows, slots = (np.empty(self.size, np.int64) for _ in range(2))
    count = _marked_slots(self._rows, bits, rows, slots)
    rows, slots = rows[:count], slots[:count]
    order = np.argsort(rows, kind='stable')
    yield rows[order], slots[order]


class AllDeviceRows(DeviceRows):
  """All rows of a group on the device. The host has none."""

  def __init__(self, block: RowBlock) -> None:
    """Takes over the rows [N, ...]."""
    super().__init__(block, NO_ROWS)
    self.rows = None

  def slots_of(self, rows: RowIds) -> Slots:
    """Returns the rows, as every row's slot is its number."""
    return rows

  def check(self, plan: Plan) -> None:
    """Accepts every plan."""

  def write(
    self, plan: Plan, block: RowBlock, placed: DeviceIndices = NO_INDICES
  ) -> RowBlock | None:
    """Writes the step's rows. Returns those that the plan stores, if any."""
    return self._write(plan, block, placed)

  def write_back(self, store: RowStore) -> None:
    """Does nothing, as the host has no rows."""

  def marked(self, bits: np.ndarray) -> Iterator[tuple[RowIds, Slots]]:
    """Yields all marked rows."""
    for start in range(0, len(bits), _PART):
      some = bits[start : start + _PART]
      rows = np.flatnonzero(np.unpackbits(some, bitorder='little'))
      rows += 8 * start
      yield rows, rows


class FrozenCopies(DeviceRows):
  """Copies of frozen rows of the host, which are read and never written."""

  def write(
    self, plan: Plan, block: RowBlock, placed: DeviceIndices = NO_INDICES
  ) -> RowBlock | None:
    """Writes nothing, as the step does not change frozen rows."""
    return _stored(plan, block, placed)

  def write_back(self, store: RowStore) -> None:
    """Does nothing, as the host has the same values."""

  def marked(self, bits: np.ndarray) -> Iterator[tuple[RowIds, Slots]]:
    """Yields nothing, as the host has all rows."""
    yield from ()


def _stored(
  plan: Plan, block: RowBlock, placed: DeviceIndices
) -> RowBlock | None:
  """Returns the rows that the plan stores, padded. None if there are none."""
  if len(plan.store) in (0, len(plan.rows)):
    return block if len(plan.store) else None
  with handing_over():
    return apply.gather_slots(block, _positions(plan, block, placed))


def _positions(plan: Plan, block: RowBlock, placed: DeviceIndices) -> Array:
  """Returns padded positions of the rows that the plan stores."""
  # Most placements store what they load, and share the array.
  if placed.positions is not None and plan.store is plan.load:
    return placed.positions
  return apply.pad_positions(plan.store, len(block.rows))


@_kernel
@no_type_check
def _misplaced(
  held: np.ndarray, slots: np.ndarray, rows: np.ndarray, load: np.ndarray
) -> int:
  """Returns the first row that is not in its planned slot, or -1.

  Args:
    held: i64[C], the row in each slot.
    slots: i64[U], of the rows. -1 where a row has none.
    rows: i64[U].
    load: positions of rows whose slots may still have other rows.
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


@_kernel
@no_type_check
def _take_slots(
  held: np.ndarray, slots: np.ndarray, rows: np.ndarray, load: np.ndarray
) -> bool:
  """Puts loaded rows into their slots. Returns whether there are any.

  Args:
    held: out, i64[C], the row in each slot.
    slots: i64[U], of the rows. -1 where a row has none.
    rows: i64[U].
    load: positions of the loaded rows.
  """
  some = False
  for position in load:
    slot = slots[position]
    if slot >= 0:
      held[slot] = rows[position]
      some = True
  return some


@_kernel
@no_type_check
def _marked_slots(
  rows: np.ndarray, bits: np.ndarray, out: np.ndarray, slots: np.ndarray
) -> int:
  """Finds the marked rows and their slots, in the order of slots.

  Args:
    rows: i64[C], of each slot. -1 where it is empty.
    bits: u8[ceil(N / 8)], as in `DirtyRows.bits`.
    out: i64[C], receives the rows.
    slots: i64[C], receives their slots.

  Returns:
    How many it found.
  """
  count = 0
  for slot in range(len(rows)):
    row = rows[slot]
    if row >= 0 and bits[row >> 3] & np.uint8(1 << (row & 7)):
      out[count] = row
      slots[count] = slot
      count += 1
  return count
