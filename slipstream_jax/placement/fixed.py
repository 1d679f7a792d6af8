"""Keeps a fixed set of rows on the device: all, none, or the hot ones.

`RESIDENT` keeps all rows: nothing moves. It is the baseline of the other
placements, for tables that fit on the device.

`STREAMED` keeps none: each step loads its rows and stores them back, which
needs the least device memory. This is how a parameter server (XDL) works.
Frozen rows are the exception. The device has a copy of them, equal to the
host's until they thaw, so they are neither loaded nor stored.

`PINNED` and `SWAPPED` keep the hot rows. Popular rows take most lookups, which
FAE (arXiv 2103.00686), Hotline (2204.05436) and Slipstream (2404.04270) use.
`PINNED` never moves them. `SWAPPED` follows FAE: the hot rows are on the device
while popular examples are trained, and on the host otherwise. The schedule
decides when (`Edge.hot_here`). Under a schedule that never sets it, no row
stays.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Bool
import numpy as np

from slipstream_jax.placement.base import (
  check_hot,
  NO_ROWS,
  Placement,
  Plan,
  plan_with,
)
from slipstream_jax.types import HotRows, RowIds, Slots, StaleRows, Unique


def _planning(slots: Callable[[Any, Unique], Slots]) -> Callable[..., Any]:
  """Returns `Placement.plan` that loads and stores the rows without a slot."""

  def plan(state: Any, upcoming: Sequence[Unique]) -> tuple[Any, Plan]:
    return state, plan_with(upcoming[0], slots(state, upcoming[0]))

  return plan


RESIDENT = Placement(
  name='resident',
  keeps=lambda num_rows, hot: None,
  start=lambda num_rows, hot, contents: None,
  plan=_planning(lambda state, batch: batch.rows),
)


FrozenRows = Bool[np.ndarray, ' H_and_1'] | None
"""The frozen rows, with a final False for all cold rows. None: no row is
frozen."""


def _slots_of_copies(frozen: FrozenRows, batch: Unique) -> Slots:
  slots = np.full(len(batch.rows), -1, np.int64)
  if frozen is not None and batch.hot is not None:
    # `Engine.freeze` puts each copy at its row's place among the hot rows.
    slots = np.where(frozen.take(batch.hot), batch.hot, slots)
  return slots


def _freeze(frozen: FrozenRows, stale: StaleRows | None) -> FrozenRows:
  return None if stale is None else np.append(stale, False)


STREAMED = Placement(
  name='streamed',
  keeps=lambda num_rows, hot: NO_ROWS,
  start=lambda num_rows, hot, contents: None,
  plan=_planning(_slots_of_copies),
  freeze=_freeze,
  copies_frozen=True,
)


SwapState = tuple[bool, int]
"""Whether the hot rows are on the device, and H."""


def _keeps(num_rows: int, hot: HotRows | None) -> RowIds:
  return check_hot(hot, 'placement pinned keeps hot rows on the device').rows


def _slots(num_hot: int, batch: Unique) -> Slots:
  assert batch.hot is not None
  # The device keeps `hot.rows` in order, so a row's place there is its slot.
  return np.where(batch.hot < num_hot, batch.hot, np.int64(-1))


def _start_swapping(
  num_rows: int, hot: HotRows | None, contents: RowIds | None
) -> SwapState:
  hot = check_hot(hot, 'placement swapped moves hot rows to the device')
  return contents is not None and len(contents) > 0, len(hot.rows)


# Frozen rows are hot and therefore on the device, so `freeze` does nothing.
PINNED = Placement(
  name='pinned',
  keeps=_keeps,
  start=lambda num_rows, hot, contents: len(_keeps(num_rows, hot)),
  plan=_planning(_slots),
  needs_hot=True,
)

SWAPPED = Placement(
  name='swapped',
  keeps=lambda num_rows, hot: NO_ROWS,
  start=_start_swapping,
  plan=_planning(
    lambda state, batch: _slots(state[1] if state[0] else 0, batch)
  ),
  needs_hot=True,
  swap=lambda state, here: (here, state[1]),
  swaps=True,
)
"""A swap moves all hot rows, changed or not, as published."""
