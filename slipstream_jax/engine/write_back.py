"""Write-back queue: rows on their way from the device to the host.

Rows that a step stores are copied while the next step runs. They are in the
host's store before the step after that gathers anything. The next step needs
them earlier, and takes them from the block of the step before (forwarding).
"""

import collections

from jax.profiler import TraceAnnotation
import numpy as np

from slipstream_jax.engine.buffers import start_to_host, to_host
from slipstream_jax.placement import Plan
from slipstream_jax.placement.base import link
from slipstream_jax.store.base import RowStore
from slipstream_jax.store.helpers import ALONE, Helpers
from slipstream_jax.types import Positions, ReassignedRows, RowBlock, RowIds


class WriteBackQueue:
  """Queue of rows for the host, in order, and the last step's block."""

  def __init__(self, store: RowStore) -> None:
    """Makes an empty queue for this store."""
    self._store = store
    self._rows = collections.deque[tuple[RowIds, RowBlock]]()
    self._last: tuple[Plan, RowBlock] | None = None

  def evicted(self, rows: RowIds, block: RowBlock) -> None:
    """Queues evicted rows, none of which is in the next batch."""
    start_to_host(block)
    self._rows.append((rows, block))

  def stored(self, plan: Plan, block: RowBlock | None) -> None:
    """Queues the rows `plan.store` of a step, padded. None: there are none."""
    self._last = None
    if block is not None:
      self._last = plan, block
      self.evicted(plan.rows[plan.store], block)

  def settle(self, *, last: bool, helpers: Helpers = ALONE) -> None:
    """Writes queued rows to the store.

    Those of the last step are written only if `last`, which waits for the step.
    """
    held = None if self._last is None or last else self._last[1]
    while self._rows and self._rows[0][1] is not held:
      rows, block = self._rows[0]
      values = to_host(block)
      with TraceAnnotation('scatter'):
        self._store.scatter(rows, values, helpers)
      self._rows.popleft()  # only now, so that an interrupted write is repeated
    if last:  # the store may change them now, so they must not be forwarded
      self._last = None

  def forwarded(
    self, plan: Plan, reassigned: ReassignedRows
  ) -> tuple[RowBlock, Positions] | None:
    """Returns the rows to take from the last step, or None if there are none.

    They are the block of the rows that it stored, padded, on the device, and
    the place there of each row to load, or -1 if it comes from the host, as
    reassigned rows do.
    """
    if self._last is None or not len(plan.load):
      return None
    before, block = self._last
    forward = plan.forward
    # The planner linked the plans, unless other batches came in between.
    if forward is None or forward.before is not before.rows:
      forward = link(before, plan).forward
      assert forward is not None
    at = forward.at
    if len(reassigned):
      at = np.where(np.isin(plan.rows[plan.load], reassigned), -1, at)
    return block, at
