"""The engine: carries out plans on the host table and the device's rows.

Per step: `load` brings a batch's distinct rows to the step, `store` takes
the changed rows back to where the plan says they live. The step itself sees
the same padded block under every placement, so the very same compiled
program trains them all: placement changes no number.
"""

from slipstream_jax.placement import bucket, Placement, Plan
from slipstream_jax.store import host_table
from slipstream_jax.stream import apply, counters
from slipstream_jax.stream.buffers import to_device, to_host
from slipstream_jax.stream.counters import Counters
from slipstream_jax.types import Distinct, RowBlock


class Engine:
  """Owns the rows of all tables, on the host or on the device.

  Attributes:
    placement: which rows stay on the device between steps.
    num_rows: N, rows of all tables.
    counters: what was moved so far.
  """

  def __init__(self, placement: Placement, table: RowBlock) -> None:
    """Takes over `table`, a host table of all rows; nobody may write it."""
    self.placement = placement
    self.counters = Counters()
    self.num_rows = len(table.rows)
    self._row_bytes = host_table.row_bytes(table)
    self._device_rows = placement.device_rows(self.num_rows)
    self._host: RowBlock | None = None
    self._kept: RowBlock | None = None
    self.restore(table)

  def restore(self, table: RowBlock) -> None:
    """Replaces all rows by those of `table`, a host table it takes over."""
    self._kept = None  # give the memory back before taking more
    if self._device_rows:
      self._kept = to_device(table)
    else:
      self._host = table

  def load(self, plan: Plan) -> RowBlock:
    """The plan's rows on the device, padded with zeros to their bucket."""
    if self._kept is not None:
      slots = to_device(apply.pad_slots(plan.slots, self._device_rows))
      return apply.gather_slots(self._kept, slots)
    assert self._host is not None
    size = bucket(len(plan.load))
    return to_device(host_table.gather(self._host, plan.load, size))

  def store(self, plan: Plan, block: RowBlock, inputs: int) -> None:
    """Puts the step's rows where they live, and counts the step.

    Args:
      plan: the plan that `load` got.
      block: the rows after the step; donated.
      inputs: B, inputs of the step.
    """
    if self._kept is not None:
      slots = to_device(apply.pad_slots(plan.slots, self._device_rows))
      self._kept = apply.write_slots(self._kept, slots, block)
    if len(plan.store):
      assert self._host is not None
      host_table.scatter(self._host, plan.store, to_host(block))
    step = counters.count(plan, inputs, self._row_bytes)
    self.counters = counters.merge(self.counters, step)

  def plan(self, distinct: Distinct) -> Plan:
    """The plan of a lone batch, outside of training; moves nothing."""
    start = self.placement.start(self.num_rows)
    return self.placement.plan(start, [distinct])[1]

  def read_back(self) -> RowBlock:
    """All N rows with their state as host arrays, not to be written."""
    if self._kept is not None:
      return to_host(self._kept)
    assert self._host is not None
    return self._host
