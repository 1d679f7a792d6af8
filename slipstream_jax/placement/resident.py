"""Keeps every row on the device: nothing moves.

The baseline of the other placements, for tables that fit on the device.
"""

from collections.abc import Sequence

from slipstream_jax.placement.base import Placement, Plan, plan_with
from slipstream_jax.types import Unique


def _plan(state: None, upcoming: Sequence[Unique]) -> tuple[None, Plan]:
  return state, plan_with(upcoming[0], slots=upcoming[0].rows)


RESIDENT = Placement(
  name='resident',
  keeps=lambda num_rows, hot: None,
  start=lambda num_rows, hot, contents: None,
  plan=_plan,
)
