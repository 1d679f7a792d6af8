"""What is in the device's slots: kept by the engine, plan by plan."""

import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.placement import Plan
from slipstream_jax.types import RowIds, Slots


class Contents:
  """The row in each of the device's slots.

  Attributes:
    rows: i64[C], -1 where a slot is empty.
  """

  def __init__(self, rows: RowIds) -> None:
    """Takes over `rows`."""
    self.rows = rows
    self._by_row: Slots | None = None

  def slots_of(self, rows: RowIds) -> Slots:
    """Slot of each row, i64[U]; -1 if it has none."""
    if not len(self.rows):
      return np.full(len(rows), -1)
    if self._by_row is None:
      self._by_row = np.argsort(self.rows)
    places = np.searchsorted(self.rows, rows, sorter=self._by_row)
    slots = self._by_row.take(np.minimum(places, len(self.rows) - 1))
    return np.where(self.rows.take(slots) == rows, slots, -1)

  def check(self, plan: Plan) -> None:
    """Looks whether the plan's rows are where it finds them.

    Raises:
      UserError: the plan was made for other contents.
    """
    there = plan.slots >= 0
    there[plan.load] = False
    _check(self.rows.take(plan.slots[there]), plan.rows[there])
    _check(self.rows.take(plan.evict_slots), plan.evict)

  def carry_out(self, plan: Plan) -> None:
    """Lets the rows that the plan loads take their slots."""
    if len(plan.load):
      loaded = np.zeros(len(plan.rows), bool)
      loaded[plan.load] = True
      placed = (plan.slots >= 0) & loaded
      if placed.any():
        self.rows[plan.slots[placed]] = plan.rows[placed]
        self._by_row = None


def _check(found: RowIds, planned: RowIds) -> None:
  wrong = np.flatnonzero(found != planned)
  if len(wrong):
    raise UserError(
      f'the plan looks for row {planned[wrong[0]]} where the device keeps it',
      got=f'row {found[wrong[0]]} there',
      where='Engine.load, plan',
      mend='train one iterator of planned batches at a time, and none planned '
      'before a restore',
    )
