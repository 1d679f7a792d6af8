"""What a scorer is worth, by the labels of what it scored.

All of it comes from counts of labels by score, which two streams' counts add up
to, like any other mergeable sum: the area under the ROC curve, log losses, and
the chance of a click that a score really stands for.
"""

import math
from typing import NamedTuple

from jaxtyping import Float
import numpy as np

_BINS = 512  # of the logits of scores
_LIMIT = 12.0  # their largest size
_WIDTH = 2 * _LIMIT / _BINS
LOGITS = (np.arange(_BINS) + 0.5) * _WIDTH - _LIMIT
"""Of the middle of each bin, f64[bins]."""
_BY_BIN = np.logaddexp(0, [LOGITS, -LOGITS]).T  # loss without a click, and with
RECENT = 1 << 17
"""Examples after which old ones count half."""


class Tally(NamedTuple):
  """Labels by score; all there is to know of a scorer's quality."""

  counts: Float[np.ndarray, '_bins 2'] = np.zeros((_BINS, 2))
  """Examples without a click and with one, f64, by the logit of their score."""

  def __add__(self, other: 'Tally') -> 'Tally':  # type: ignore[override]
    return Tally(self.counts + other.counts)

  @property
  def examples(self) -> float:
    """How many there are."""
    return float(self.counts.sum())


def tally(
  labels: Float[np.ndarray, ' n'], scores: Float[np.ndarray, ' n']
) -> Tally:
  """Counts some examples; those of unknown score, NaN, are left out.

  Args:
    labels: 1.0 for a click, else 0.0, or its chance.
    scores: click probabilities, given before the labels were learned from.
  """
  known = ~np.isnan(scores)
  logits = logits_of(scores[known])
  at = np.clip((logits + _LIMIT) / _WIDTH, 0, _BINS - 1).astype(np.int64)
  every = np.bincount(at, minlength=_BINS)
  clicks = np.bincount(at, labels[known].astype(np.float64), _BINS)
  return Tally(np.stack([every - clicks, clicks], axis=1))


def fading(counted: Tally) -> Tally:
  """The same where it is short; of a long one, half of each example."""
  if counted.examples <= RECENT:
    return counted
  return Tally(counted.counts / 2)


def auc(counted: Tally) -> float | None:
  """Area under the ROC curve, to some 1e-4; None if one class is absent."""
  negative, positive = counted.counts.T
  pairs = negative.sum() * positive.sum()
  if not pairs:
    return None
  below = np.cumsum(negative) - negative / 2  # a tie counts one half
  return float((positive * below).sum() / pairs)


def log_loss(counted: Tally) -> float | None:
  """Mean cross entropy of the scores in nats; None without examples."""
  if not counted.examples:
    return None
  return float((counted.counts * _BY_BIN).sum() / counted.examples)


def base_log_loss(counted: Tally) -> float | None:
  """That of the base rate, known beforehand; None without examples."""
  examples = counted.examples
  if not examples:
    return None
  rate = counted.counts.sum(axis=0) / examples
  return float(-(rate * np.log(np.maximum(rate, 1e-300))).sum())


def advantage(counted: Tally) -> tuple[float, float]:
  """By how much scores beat the base rate, and the standard error of that.

  In log loss per example; 0 and infinity of examples of one class.
  """
  examples = counted.examples
  rate = counted.counts.sum(axis=0) / max(examples, 1)
  if examples < 2 or not rate.min():
    return 0.0, math.inf
  gained = -np.log(rate) - _BY_BIN
  mean = (counted.counts * gained).sum() / examples
  square = (counted.counts * gained**2).sum() / examples
  deviation = math.sqrt(max(square - mean**2, 0) / examples)
  return float(mean), deviation


def calibrated(counted: Tally) -> Float[np.ndarray, ' bins']:
  """The share of clicks by the logit of a score, f64, which never falls.

  The monotone regression of labels on scores (pool adjacent violators); bins
  without an example lie between their neighbours.
  """
  mass = counted.counts.sum(axis=1)
  some = np.flatnonzero(mass)
  if not len(some):
    return 1 / (1 + np.exp(-LOGITS))
  # Blocks of bins: clicks, examples, bins. Pooled while a rate falls.
  blocks: list[tuple[float, float, int]] = []
  for clicks, examples in zip(counted.counts[some, 1], mass[some], strict=True):
    blocks.append((clicks, examples, 1))
    while len(blocks) > 1 and _falls(blocks[-2], blocks[-1]):
      (a, b, c), (d, e, f) = blocks[-2:]
      blocks[-2:] = [(a + d, b + e, c + f)]
  rates = np.repeat([b[0] / b[1] for b in blocks], [b[2] for b in blocks])
  return np.interp(LOGITS, LOGITS[some], rates)


def _falls(
  before: tuple[float, float, int], after: tuple[float, float, int]
) -> bool:
  return bool(before[0] * after[1] >= after[0] * before[1])


def noise_of(counted: Tally) -> float:
  """E p(1 - p) of the calibrated scores; 1/4 without examples."""
  if not counted.examples:
    return 0.25
  chance = calibrated(counted)
  mass = counted.counts.sum(axis=1)
  return float((mass * chance * (1 - chance)).sum() / counted.examples)


def errors(
  counted: Tally, labels: Float[np.ndarray, ' n'], scores: np.ndarray
) -> Float[np.ndarray, ' n']:
  """|p - y| of examples by their scores, calibrated; f64, 1/2 if unknown."""
  chance = np.interp(logits_of(scores), LOGITS, calibrated(counted))
  return np.where(np.isnan(scores), 0.5, abs(chance - labels))


def logits_of(scores: np.ndarray) -> np.ndarray:
  """Of scores, f64, within the limit; NaN stays NaN."""
  edge = 1 / (1 + math.exp(_LIMIT))
  chance = np.clip(scores.astype(np.float64), edge, 1 - edge)
  return np.log(chance / (1 - chance))


def losses(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
  """Cross entropy in nats of each example, f64."""
  return np.logaddexp(0, logits) - labels * logits
