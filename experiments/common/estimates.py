"""Figures over seeds with confidence intervals, and how pages write them."""

from collections.abc import Callable, Sequence
import math
from typing import NamedTuple

import numpy as np
from scipy import special

CONFIDENCE = 0.95
NONE = '-'
"""Written for a value that is not known."""
_NORMAL = float(special.ndtri((1 + CONFIDENCE) / 2))


class Estimate(NamedTuple):
  """A mean with its confidence interval."""

  mean: float
  low: float | None = None
  """None where too few values are known for an interval, as is `high`."""
  high: float | None = None
  seeds: int = 1


def mean(values: Sequence[float]) -> Estimate | None:
  """Returns the mean of independent values with Student's interval.

  None without values.
  """
  if not values:
    return None
  middle = float(np.mean(values))
  if len(values) < 2:
    return Estimate(middle)
  error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
  half = _quantile(len(values)) * error
  return Estimate(middle, middle - half, middle + half, len(values))


def ratio(tops: Sequence[float], bottoms: Sequence[float]) -> Estimate | None:
  """Returns the geometric mean of ratios of pairs.

  The interval is Student's for the logarithms, so that the inverse ratio has
  the inverse interval. None without pairs, or with a value that is not
  positive.
  """
  pairs = list(zip(tops, bottoms, strict=True))
  if any(min(pair) <= 0 for pair in pairs):
    return None
  logs = mean([math.log(top) - math.log(bottom) for top, bottom in pairs])
  if logs is None:
    return None
  # Two seeds may be so far apart that the interval has no finite end.
  middle, low, high = (
    None if log is None else math.exp(min(log, 700.0)) for log in logs[:3]
  )
  assert middle is not None
  return Estimate(middle, low, high, logs.seeds)


def share(tops: Sequence[float], bottoms: Sequence[float]) -> Estimate | None:
  """Returns the ratio of two means of pairs, with Fieller's interval.

  For values that may be 0 or negative, such as differences. The interval holds
  the ratios that a paired t test of `tops - ratio * bottoms` does not reject.
  None where the mean of the bottoms is not positive. There is no interval
  where that mean cannot be told from 0, as no ratio could be excluded.
  """
  pairs = np.array(list(zip(tops, bottoms, strict=True)), np.float64)
  if not len(pairs) or pairs[:, 1].mean() <= 0:
    return None
  top, bottom = pairs.mean(axis=0)
  middle, count = float(top / bottom), len(pairs)
  if count < 2:
    return Estimate(middle)
  spread = np.cov(pairs.T) * _quantile(count) ** 2 / count
  # The ends solve a quadratic equation: a r^2 - 2 b r + c = 0.
  a, b, c = (
    bottom**2 - spread[1, 1],
    top * bottom - spread[0, 1],
    top**2 - spread[0, 0],
  )
  if a <= 0:
    return Estimate(middle, seeds=count)
  half = math.sqrt(max(b**2 - a * c, 0.0))
  return Estimate(middle, float((b - half) / a), float((b + half) / a), count)


def _quantile(count: int) -> float:
  """Returns Student's t for the interval of `count` values."""
  return float(special.stdtrit(count - 1, (1 + CONFIDENCE) / 2))


def of_test_set(auc: float, positives: int, examples: int) -> Estimate | None:
  """Returns one run's AUC with the interval that its test set alone gives.

  After Hanley and McNeil (1982). None where the test set has only one class.
  """
  negatives = examples - positives
  if min(positives, negatives) < 1:
    return None
  both_above = auc / (2 - auc) - auc**2
  both_below = 2 * auc**2 / (1 + auc) - auc**2
  variance = auc * (1 - auc)
  variance += (positives - 1) * both_above + (negatives - 1) * both_below
  half = _NORMAL * math.sqrt(max(variance, 0.0) / (positives * negatives))
  return Estimate(auc, auc - half, auc + half)


def seconds_to(
  curve: Sequence[tuple[float, float]], auc: float
) -> float | None:
  """Returns when a learning curve first reaches an AUC, interpolated.

  None if it never does, or if the curve or the AUC is unknown. If the first
  point is there already, the true time is at most that point's.

  Args:
    curve: seconds and AUC of its points.
    auc: the AUC to reach.
  """
  before: tuple[float, float] | None = None
  for seconds, value in curve:
    if value >= auc:
      if before is None:
        return seconds
      part = (auc - before[1]) / (value - before[1])
      return before[0] + part * (seconds - before[0])
    before = seconds, value
  return None


Form = Callable[[float], str]
"""Writes a number."""


def middle(estimate: Estimate | None, form: Form) -> str:
  """Writes the mean."""
  return NONE if estimate is None else form(estimate.mean)


def interval(estimate: Estimate | None, form: Form) -> str:
  """Writes the interval."""
  if estimate is None or estimate.low is None or estimate.high is None:
    return NONE
  return f'{form(estimate.low)} to {form(estimate.high)}'


def sure(estimate: Estimate | None, form: Form) -> str:
  """Writes the mean, with its interval if that is known."""
  text, ends = middle(estimate, form), interval(estimate, form)
  return text if ends == NONE else f'{text} ({ends})'


def times(value: float) -> str:
  """Writes a ratio."""
  return f'{value:.2f}' if value < 99.5 else f'{value:,.3g}'


def percent(value: float) -> str:
  """Writes a share."""
  return f'{value:.1%}'


def quality(value: float) -> str:
  """Writes an AUC or a log loss."""
  return f'{value:.4f}'


def change(value: float) -> str:
  """Writes a small difference with its sign. Never writes -0.0000."""
  return f'{value:+z.4f}'
