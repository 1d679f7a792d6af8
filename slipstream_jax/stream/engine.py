"""The engine: carries out plans on the host table and the device's rows.

Per step: `load` brings a batch's distinct rows to the step, `store` takes
the changed rows back to where the plan says they live. The step itself sees
the same padded block under every placement, so the very same compiled
program trains them all: placement changes no number.
"""

import numpy as np

from slipstream_jax.placement import bucket, Placement, Plan, StaleRows
from slipstream_jax.store import host_table
from slipstream_jax.stream import apply, counters
from slipstream_jax.stream.buffers import to_device, to_host
from slipstream_jax.stream.counters import Counters
from slipstream_jax.types import HotRows, Lookups, RowBlock, RowIds, Rows


class Engine:
  """Owns the rows of all tables, on the host or on the device.

  Attributes:
    placement: which rows stay on the device between steps.
    num_rows: N, rows of all tables.
    hot: the rows that may be watched and pinned, if any were chosen.
    counters: what was moved so far.
  """

  def __init__(
    self, placement: Placement, table: RowBlock, hot: HotRows | None = None
  ) -> None:
    """Takes over `table`, a host table of all rows; nobody may write it.

    Raises:
      UserError: the placement needs hot rows.
    """
    self.placement, self.hot = placement, hot
    self.num_rows = len(table.rows)
    self.counters = Counters()
    self._row_bytes = host_table.row_bytes(table)
    self._kept_rows = placement.keeps(self.num_rows, hot)
    self._host: RowBlock | None = None
    self._kept: RowBlock | None = None
    self._frozen: RowBlock | None = None
    self.restore(table)

  def restore(self, table: RowBlock) -> None:
    """Replaces all rows by those of `table`, a host table it takes over."""
    self._kept = self._frozen = None  # give memory back before taking more
    if self._kept_rows is None:
      self._host, self._kept = None, to_device(table)
    else:
      self._host = table
      if len(self._kept_rows):
        self._kept = self._copy_of(self._kept_rows, len(self._kept_rows))
    kept = 0 if self._kept is None else len(self._kept.rows)
    self._count_loads(kept, self._row_bytes)

  def load(self, plan: Plan) -> RowBlock:
    """The plan's rows on the device, padded with zeros to their bucket."""
    kept = self._kept if self._frozen is None else self._frozen
    if kept is None:
      assert self._host is not None
      size = bucket(len(plan.rows))
      return to_device(host_table.gather(self._host, plan.rows, size))
    slots = apply.pad_slots(plan.slots, len(kept.rows))
    if not len(plan.load):
      return apply.gather_slots(kept, to_device(slots))
    assert self._host is not None
    positions = apply.pad_positions(plan.load, len(slots))
    missing = plan.rows[plan.load]
    loaded = host_table.gather(self._host, missing, len(positions))
    on_device = to_device((slots, loaded, positions))
    return apply.assemble(kept, *on_device)

  def store(self, plan: Plan, block: RowBlock) -> None:
    """Puts the step's rows [P, ...], of the plan that `load` got, back."""
    if self._kept is not None:
      slots = apply.pad_slots(plan.slots, len(self._kept.rows))
      self._kept = apply.write_slots(self._kept, to_device(slots), block)
    if not len(plan.store):
      return
    assert self._host is not None
    if len(plan.store) < len(plan.rows):
      positions = apply.pad_positions(plan.store, len(block.rows))
      block = apply.gather_slots(block, to_device(positions))
    host_table.scatter(self._host, plan.rows[plan.store], to_host(block))

  def count(self, step: Counters) -> None:
    """Adds what one step did."""
    self.counters = counters.merge(self.counters, step)

  @property
  def row_bytes(self) -> int:
    """Bytes that one row and its state take on the link."""
    return self._row_bytes

  def freeze(self, stale: StaleRows | None) -> None:
    """Readies the rows that stand still from here on; None: none does.

    The first step planned with them must not have been loaded yet.
    """
    if not self.placement.copies_frozen:
      return
    self._frozen = None
    if stale is not None and stale.any():
      assert self.hot is not None
      slots = np.flatnonzero(stale)
      padded = apply.pad_slots(slots, len(stale))
      block = self._copy_of(self.hot.rows[slots], len(padded))
      # As long as the hot rows, so that no refresh recompiles `assemble`.
      empty = apply.zeros_like(block, len(stale))
      self._frozen = apply.write_slots(empty, to_device(padded), block)
      self._count_loads(len(slots), self._row_bytes)

  def hot_rows_now(self) -> Rows:
    """The hot rows [H, D] as they are; may share memory with the engine's."""
    assert self.hot is not None
    if self._kept is None:
      assert self._host is not None
      table, hot = RowBlock(self._host.rows, ()), self.hot.rows
      rows: Rows = to_device(host_table.gather(table, hot, len(hot))).rows
      self._count_loads(len(hot), rows.nbytes // len(hot))
      return rows
    if self._kept_rows is None:
      slots = to_device(self.hot.rows)
      return apply.gather_slots(RowBlock(self._kept.rows, ()), slots).rows
    return self._kept.rows

  def plan(self, lookups: Lookups) -> Plan:
    """The plan of a lone batch, outside of training; moves nothing."""
    start = self.placement.start(self.num_rows, self.hot)
    found = host_table.distinct(lookups, self.num_rows, self.hot)
    return self.placement.plan(start, [found])[1]

  def read_back(self) -> RowBlock:
    """All N rows with their state as host arrays, not to be written.

    Not counted as stores: how often a program looks is its own affair.
    """
    if self._host is None:
      return to_host(self._kept)
    if self._kept is not None:
      assert self._kept_rows is not None
      host_table.scatter(self._host, self._kept_rows, to_host(self._kept))
    return self._host

  def _copy_of(self, rows: RowIds, size: int) -> RowBlock:
    """Rows of the host table on the device, padded with zeros to `size`."""
    assert self._host is not None
    on_device: RowBlock = to_device(host_table.gather(self._host, rows, size))
    return on_device

  def _count_loads(self, rows: int, row_bytes: int) -> None:
    self.count(Counters(rows_loaded=rows, bytes_loaded=rows * row_bytes))
