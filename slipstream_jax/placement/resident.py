"""Every row lives on the device: nothing moves.

The yardstick of the others, for tables that do fit.
"""

from collections.abc import Sequence

import numpy as np

from slipstream_jax.placement.base import NO_ROWS, Placement, Plan
from slipstream_jax.types import Distinct


def _plan(state: None, window: Sequence[Distinct]) -> tuple[None, Plan]:
  rows, inverse = window[0]
  lookups = int(np.count_nonzero(inverse >= 0))
  plan = Plan(rows, inverse, rows, NO_ROWS, NO_ROWS, lookups, lookups)
  return state, plan


RESIDENT = Placement(
  name='resident',
  device_rows=lambda num_rows: num_rows,
  start=lambda num_rows: None,
  plan=_plan,
)
