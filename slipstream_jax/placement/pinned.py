"""Keeps the hot rows on the device, always or for some phases of a run.

Popular rows take most lookups, which FAE (arXiv 2103.00686), Hotline
(2204.05436) and Slipstream (2404.04270) use. `PINNED` never moves them.
`SWAPPED` follows FAE: the hot rows are on the device while popular examples are
trained, and on the host otherwise. The schedule decides when (`Edge.hot_here`).
Under a schedule that never sets it, no row stays.
"""

from collections.abc import Sequence

import numpy as np

from slipstream_jax.placement import link_kernels as kernels
from slipstream_jax.placement.base import (
  check_hot,
  NO_ROWS,
  Placement,
  Plan,
  plan_with,
)
from slipstream_jax.types import HotRows, RowIds, Slots, Unique

SwapState = tuple[bool, int]
"""Whether the hot rows are on the device, and H."""


def _keeps(num_rows: int, hot: HotRows | None) -> RowIds:
  return check_hot(hot, 'placement pinned keeps hot rows on the device').rows


def _slots(num_hot: int, batch: Unique) -> Slots:
  assert batch.hot is not None
  # The device keeps `hot.rows` in order, so a row's place there is its slot.
  slots = np.empty(len(batch.hot), np.int64)
  kernels.slots_of_hot(batch.hot, num_hot, slots)
  return slots


def _plan(num_hot: int, upcoming: Sequence[Unique]) -> tuple[int, Plan]:
  return num_hot, plan_with(upcoming[0], _slots(num_hot, upcoming[0]))


def _start_swapping(
  num_rows: int, hot: HotRows | None, contents: RowIds | None
) -> SwapState:
  hot = check_hot(hot, 'placement swapped moves hot rows to the device')
  return contents is not None and len(contents) > 0, len(hot.rows)


def _plan_swapping(
  state: SwapState, upcoming: Sequence[Unique]
) -> tuple[SwapState, Plan]:
  here, num_hot = state
  slots = _slots(num_hot if here else 0, upcoming[0])
  return state, plan_with(upcoming[0], slots)


# Frozen rows are hot and therefore on the device, so `freeze` does nothing.
PINNED = Placement(
  name='pinned',
  keeps=_keeps,
  start=lambda num_rows, hot, contents: len(_keeps(num_rows, hot)),
  plan=_plan,
  needs_hot=True,
)

SWAPPED = Placement(
  name='swapped',
  keeps=lambda num_rows, hot: NO_ROWS,
  start=_start_swapping,
  plan=_plan_swapping,
  needs_hot=True,
  swap=lambda state, here: (here, state[1]),
  swaps=True,
)
"""A swap moves all hot rows, changed or not, as published."""
