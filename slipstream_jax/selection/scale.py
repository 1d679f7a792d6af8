"""The scale of a measure at which a wanted number of examples is kept."""

import bisect

from jaxtyping import Float
import numpy as np


def scale_for(
  measure: Float[np.ndarray, ' n'], floor: float, wanted: float
) -> float:
  """The scale at which clip(scale * measure, floor, 1) sums to `wanted`.

  Exact, without a search over scales: the sum is piecewise linear, and rises.

  Args:
    measure: of n examples, finite and at least 0.
    floor: least summand, in [0, 1].
    wanted: examples to keep, in expectation.

  Returns:
    At least 0; where no scale keeps as few, or as many, the nearest that does.
  """

  def total(scale: float) -> float:
    return float(np.clip(scale * measure, floor, 1).sum())

  # Between two corners no example meets floor or 1, so the sum is linear. It
  # never falls with the scale: few of the corners need be summed at.
  some = measure[measure > 0]
  corners = np.unique(np.concatenate([[0.0], floor / some, 1 / some]))
  after = bisect.bisect_left(corners, wanted, key=total)
  if after in (0, len(corners)):  # no scale keeps as few, or as many
    return float(corners[min(after, len(corners) - 1)])
  low, high = corners[after - 1], corners[after]
  missing = (wanted - total(low)) / (total(high) - total(low))
  return float(low + missing * (high - low))
