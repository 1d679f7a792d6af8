"""The hot rows stay on the device, the cold ones are streamed.

What FAE (arXiv 2103.00686), Hotline (2204.05436) and Slipstream (2404.04270)
do: popular rows take most lookups, and never move.
"""

from collections.abc import Sequence

import numpy as np

from slipstream_jax.placement.base import (
  check_hot,
  Placement,
  Plan,
  plan_with,
)
from slipstream_jax.types import HotRows, RowIds, Unique


def _keeps(num_rows: int, hot: HotRows | None) -> RowIds:
  return check_hot(hot, 'placement pinned keeps hot rows on the device').rows


def _plan(num_hot: int, upcoming: Sequence[Unique]) -> tuple[int, Plan]:
  batch = upcoming[0]
  assert batch.hot is not None
  # The device keeps `hot.rows` in their order: a row's place there is its slot.
  slots = np.where(batch.hot < num_hot, batch.hot, -1).astype(np.int64)
  return num_hot, plan_with(batch, slots)


# Rows that stand still are hot, so here anyway: there is nothing to `freeze`.
PINNED = Placement(
  name='pinned',
  keeps=_keeps,
  start=lambda num_rows, hot, contents: len(_keeps(num_rows, hot)),
  plan=_plan,
  needs_hot=True,
)
