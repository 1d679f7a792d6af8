"""FAE's rate scheduler: how long its strips are (arXiv 2103.00686)."""

import math
from typing import NamedTuple


class Rate(NamedTuple):
  """FAE's rate scheduler."""

  percent: float = 50.0
  """R, of a pass's batches of one kind in a strip of it."""
  patience: int = 4
  """Swaps in a row at which the loss has fallen, until R is doubled."""
  floor: float = 1.0
  """Least R."""

  def batches(self, total: int) -> int:
    """Those of a strip, of so many of its kind."""
    return max(1, math.ceil(total * self.percent / 100))


class Past(NamedTuple):
  """What the rate scheduler remembers."""

  loss: float | None = None
  """At the swap before."""
  fallen: int = 0
  """Swaps in a row at which it has fallen."""


def after_swap(rate: Rate, past: Past, loss: float) -> tuple[Rate, Past]:
  """The rate after a swap at which the loss was this one."""
  fallen = past.fallen + 1
  if past.loss is None or loss == past.loss:
    return rate, Past(loss)
  if loss > past.loss:
    half = max(rate.percent / 2, rate.floor)
    return rate._replace(percent=half), Past(loss)
  if fallen < rate.patience:
    return rate, Past(loss, fallen)
  return rate._replace(percent=min(2 * rate.percent, 100.0)), Past(loss)
