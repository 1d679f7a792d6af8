"""Means over seeds, and how sure one can be of them."""

from collections.abc import Callable, Sequence
import math
from typing import NamedTuple

import numpy as np
from scipy import special

CONFIDENCE = 0.95
_NORMAL = float(special.ndtri((1 + CONFIDENCE) / 2))


class Estimate(NamedTuple):
  """A mean with its interval of confidence."""

  mean: float
  low: float | None = None
  """None where there are too few values for an interval; so for `high`."""
  high: float | None = None
  seeds: int = 1


def mean(values: Sequence[float]) -> Estimate | None:
  """The mean of independent values, with Student's t; None of no values."""
  if not values:
    return None
  middle = float(np.mean(values))
  if len(values) < 2:
    return Estimate(middle)
  error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
  half = _quantile(len(values)) * error
  return Estimate(middle, middle - half, middle + half, len(values))


def ratio(tops: Sequence[float], bottoms: Sequence[float]) -> Estimate | None:
  """The geometric mean of ratios of pairs, with Student's t of their logs.

  Logs, so that the ratio of the other way round is one over this, interval and
  all. None without pairs, or with a value that is not positive.
  """
  pairs = list(zip(tops, bottoms, strict=True))
  if any(min(pair) <= 0 for pair in pairs):
    return None
  logs = mean([math.log(top) - math.log(bottom) for top, bottom in pairs])
  return logs and _mapped(logs, _exp)


def share(tops: Sequence[float], bottoms: Sequence[float]) -> Estimate | None:
  """The ratio of two means of pairs, with Fieller's interval.

  For what may be 0 or below, as differences are: the ratios that a paired
  Student's t test of tops less ratio times bottoms does not reject. None where
  the bottoms' mean is not positive; without an interval where it cannot be told
  from 0, so that no ratio could be excluded.
  """
  pairs = np.array(list(zip(tops, bottoms, strict=True)), np.float64)
  if not len(pairs) or pairs[:, 1].mean() <= 0:
    return None
  top, bottom = pairs.mean(axis=0)
  middle, count = float(top / bottom), len(pairs)
  if count < 2:
    return Estimate(middle)
  spread = np.cov(pairs.T) * _quantile(count) ** 2 / count
  # It is a quadratic inequality: a r^2 - 2 b r + c <= 0.
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
  """Student's t of the interval of so many values."""
  return float(special.stdtrit(count - 1, (1 + CONFIDENCE) / 2))


def _exp(value: float) -> float:
  return math.exp(min(value, 700.0))  # two seeds far apart: no bound at all


def _mapped(estimate: Estimate, function: Callable[[float], float]) -> Estimate:
  low, high = (
    None if bound is None else function(bound) for bound in estimate[1:3]
  )
  return Estimate(function(estimate.mean), low, high, estimate.seeds)


def of_test_set(auc: float, positives: int, examples: int) -> Estimate | None:
  """One run's AUC with the interval that its test set alone gives.

  Of Hanley and McNeil (1982). None where the test set has one class only.
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
