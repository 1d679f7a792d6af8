"""Rows that left the device, on their way to the host.

What a step stores is copied while the next one runs, and is in the host's store
before the one after that gathers anything. The next one would come too early:
it takes such rows from the step's own block (forwarding).
"""

import collections
from typing import NamedTuple

from jax.profiler import TraceAnnotation
from jaxtyping import Int
import numpy as np

from slipstream_jax.placement import Plan
from slipstream_jax.placement.base import link
from slipstream_jax.store.base import RowStore
from slipstream_jax.store.helpers import ALONE, Helpers
from slipstream_jax.stream.buffers import start_to_host, to_host
from slipstream_jax.types import FreshRows, RowBlock, RowIds


class Forwarded(NamedTuple):
  """What a step takes from the one before."""

  block: RowBlock
  """Rows that the step before stored, padded, on the device."""
  at: Int[np.ndarray, ' load']
  """Of each row to load its place there; -1: it comes from the host."""


class _Rows(NamedTuple):
  """On their way."""

  rows: RowIds
  block: RowBlock


class Leaving:
  """The rows that left, in order, and the last step's until the next one's."""

  def __init__(self, store: RowStore) -> None:
    """Writes to this store; no row is on its way yet."""
    self._store = store
    self._rows = collections.deque[_Rows]()
    self._last: tuple[Plan, RowBlock] | None = None

  def evicted(self, rows: RowIds, block: RowBlock) -> None:
    """Rows leave before a step, whose own rows are none of them."""
    start_to_host(block)
    self._rows.append(_Rows(rows, block))

  def stored(self, plan: Plan, block: RowBlock | None) -> None:
    """A step was taken.

    Args:
      plan: the step's.
      block: its rows `plan.store`, padded; None if there are none.
    """
    self._last = None
    if block is not None:
      self._last = plan, block
      self.evicted(plan.rows[plan.store], block)

  def settle(self, *, last: bool, helpers: Helpers = ALONE) -> None:
    """Writes the rows to the store.

    Args:
      helpers: threads that do it.
      last: also those that the last step stored; it waits for that step.
    """
    held = None if self._last is None or last else self._last[1]
    while self._rows and self._rows[0].block is not held:
      rows, block = self._rows[0]
      values = to_host(block)
      with TraceAnnotation('scatter'):
        self._store.scatter(rows, values, helpers)
      self._rows.popleft()  # only now: what was cut off is done once more
    if last:  # and what changes them there is not to be forwarded past
      self._last = None

  def forwarded(self, plan: Plan, fresh: FreshRows) -> Forwarded | None:
    """What a step takes from the one before; None if it need not ask.

    Args:
      plan: the step's.
      fresh: rows that are others by now.
    """
    if self._last is None or not len(plan.load):
      return None
    before, block = self._last
    forward = plan.forward
    # The planner looked, unless other batches were trained in between.
    if forward is None or forward.before is not before.rows:
      forward = link(before, plan).forward
      assert forward is not None
    at = forward.at
    if len(fresh):
      at = np.where(np.isin(plan.rows[plan.load], fresh), -1, at)
    return Forwarded(block, at)
