"""What a placement is: a pure plan of which rows move for a step.

`plan(state, window)` runs on the host, touches no table and no device, and
gives the same answer for the same ids: it is the planner, the simulator of a
sizing tool, and what property tests attack. `window[0]` is the batch to
plan; the others are the batches known to come next.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.types import Distinct, Inverse, RowIds, Slots


class Plan(NamedTuple):
  """What one step moves, and where it finds its rows."""

  rows: RowIds
  """Distinct rows of the batch, i64[U]; the order of everything below."""
  inverse: Inverse
  """Position in `rows` of each lookup."""
  slots: Slots
  """Place of each row in the device's array, i64[U]; empty if it has none."""
  load: RowIds
  """Rows to move host -> device before the step."""
  store: RowIds
  """Rows to move device -> host after it."""
  lookups: int
  """Lookups of the batch, padding left out."""
  hits: int
  """Lookups whose row was on the device before the step."""


class Placement(NamedTuple):
  """A placement: which rows stay on the device between steps."""

  name: str
  """Its key in `PLACEMENTS`."""
  device_rows: Callable[[int], int]
  """N to C, the rows that the device keeps between steps."""
  start: Callable[[int], Any]
  """N to the planner's first state."""
  plan: Callable[[Any, Sequence[Distinct]], tuple[Any, Plan]]
  """State and window to the next state and the plan of window[0]."""


NO_ROWS: RowIds = np.empty(0, np.int64)


def bucket(count: int, smallest: int = 256) -> int:
  """Rounds a number of rows up, so that few shapes are ever compiled.

  Sizes are 4, 5, 6 or 7 times a power of two: at most a quarter is padding,
  and a run whose batches resemble one another sees one or two sizes.
  """
  if count <= smallest:
    return smallest
  step = 1 << max(0, (count - 1).bit_length() - 3)
  return -(-count // step) * step
