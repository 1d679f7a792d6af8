"""Estimates what choosing examples can gain, and what dropping them costs.

Everything comes from scores that were given before their labels were learned
from: whether to choose by them pays at all (the switch of Katharopoulos and
Fleuret, arXiv 1803.00942), and how much may be dropped.

The bound. Let p be the click probability of an example, calibrated, and g =
p - y the slope of its loss, with E g^2 = E p(1 - p) = v and E |g| = 2v. Of a
share k that is kept with chance pi, each weighing 1/pi, the second moment of
the slope is E g^2/pi: v/k at random, where pi = k, and least, 4v^2/k, where pi
= k |g| / 2v. To train on all has v. So what dropping adds to the variance is at
best

  (4v^2/k - v) / (v/k - v) = (4v - k) / (1 - k)

of what dropping at random adds, or 0 where that is negative: pi can be no more
than 1, so the true share is above the bound where that matters. Corrected by an
offset it is the same: kept with pi = c |g|, c = k/2v, an example is a click
with chance 1/2, and has c p(1 - p)/2 of information on its logit rather than
p(1 - p). The variance of an estimate is thus 4v/k times that of all examples,
and 1/k times at random. v is at most 1/4, of balanced noise, where nothing is
gained.

The cost. A model trained on n examples is worse than the best one by d/2n, for
d parameters that count; on a share k of them at random, by A (1/k - 1) more
than on all, where A is what half of the examples would cost. Chosen with
chances pi, 1/k is replaced by E (g^2/pi) / E g^2: the same loss for the same
variance. A is measured: a second scorer learns from every fourth example only,
and its log loss on them is compared with that of the first, example by example.
So the model is taken to gain from examples what a scorer does. Where a model
goes on to learn what no scorer can, that is too little; and as A falls as 1/n,
what is found early is too much.
"""

from collections.abc import Callable
import math
from typing import NamedTuple

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError

_BINS = 512  # of the logits of scores
_LIMIT = 12.0  # their largest size
_WIDTH = 2 * _LIMIT / _BINS
LOGITS = (np.arange(_BINS) + 0.5) * _WIDTH - _LIMIT
"""Of the middle of each bin, f64[bins]."""
_BY_BIN = np.logaddexp(0, [LOGITS, -LOGITS]).T  # loss without a click, and with
RECENT = 1 << 17
"""Examples after which old ones count half."""


class Tally(NamedTuple):
  """Labels by score, from which a scorer's quality follows."""

  counts: Float[np.ndarray, '_bins 2'] = np.zeros((_BINS, 2))
  """Examples without a click and with one, f64, by the logit of their score."""

  def __add__(self, other: 'Tally') -> 'Tally':  # type: ignore[override]
    return Tally(self.counts + other.counts)

  @property
  def examples(self) -> float:
    """Number of examples."""
    return float(self.counts.sum())


def tally(
  labels: Float[np.ndarray, ' n'], scores: Float[np.ndarray, ' n']
) -> Tally:
  """Counts examples by score. Leaves out unknown scores, NaN.

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
  """Halves all counts once there are more than `RECENT` examples."""
  if counted.examples <= RECENT:
    return counted
  return Tally(counted.counts / 2)


def auc(counted: Tally) -> float | None:
  """Returns the area under the ROC curve, to 1e-4; None for a single class."""
  negative, positive = counted.counts.T
  pairs = negative.sum() * positive.sum()
  if not pairs:
    return None
  below = np.cumsum(negative) - negative / 2  # a tie counts one half
  return float((positive * below).sum() / pairs)


def log_loss(counted: Tally) -> float | None:
  """Returns the mean cross entropy of the scores in nats, or None."""
  if not counted.examples:
    return None
  return float((counted.counts * _BY_BIN).sum() / counted.examples)


def base_log_loss(counted: Tally) -> float | None:
  """Returns the mean cross entropy of the base rate in nats, or None."""
  examples = counted.examples
  if not examples:
    return None
  rate = counted.counts.sum(axis=0) / examples
  return float(-(rate * np.log(np.maximum(rate, 1e-300))).sum())


def advantage(counted: Tally) -> tuple[float, float]:
  """Returns by how much scores beat the base rate, and its standard error.

  In log loss per example. 0 and infinity if there is only one class.
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
  """Returns the share of clicks by the logit of a score, f64, never falling.

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
  """Returns E p(1 - p) of the calibrated scores, or 1/4 without examples."""
  if not counted.examples:
    return 0.25
  chance = calibrated(counted)
  mass = counted.counts.sum(axis=1)
  return float((mass * chance * (1 - chance)).sum() / counted.examples)


def errors(
  counted: Tally, labels: Float[np.ndarray, ' n'], scores: np.ndarray
) -> Float[np.ndarray, ' n']:
  """Returns |p - y| by calibrated scores, f64, or 1/2 for unknown scores."""
  chance = np.interp(logits_of(scores), LOGITS, calibrated(counted))
  return np.where(np.isnan(scores), 0.5, abs(chance - labels))


def logits_of(scores: np.ndarray) -> np.ndarray:
  """Returns the logits of scores, f64, within the limit. NaN stays NaN."""
  edge = 1 / (1 + math.exp(_LIMIT))
  chance = np.clip(scores.astype(np.float64), edge, 1 - edge)
  return np.log(chance / (1 - chance))


def losses(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
  """Returns the cross entropy in nats of each example, f64."""
  return np.logaddexp(0, logits) - labels * logits


FEWER = 4
"""The second scorer learns from one example in so many."""
SURE = 2.0
"""Standard errors by which something must be seen to be believed."""
LEAST = 0.9
"""Of random dropping's variance: where no policy has less, none is worth it."""
DROPS = tuple(round(0.05 * i, 2) for i in range(19))
"""What may be dropped where that is found out: up to 0.9."""


def bound(noise: float, kept: float) -> float:
  """Returns the least share of random dropping's variance that choosing has.

  Args:
    noise: v = E p(1 - p), in [0, 1/4].
    kept: k, share of the examples that is kept, in (0, 1]; at 1 there is
      nothing to choose from, and the bound is its limit, 0 or 1.

  Raises:
    UserError: either is out of range.
  """
  if not (0 <= noise <= 0.25 + 1e-9 and 0 < kept <= 1):
    raise UserError(
      'the noise must be in [0, 1/4], and the share kept in (0, 1]',
      got=(noise, kept),
      where='bound',
      hint='give E p(1 - p), and 1 - drop',
    )
  if kept == 1:
    return float(noise >= 0.25)
  return min(max((4 * noise - kept) / (1 - kept), 0.0), 1.0)


def extra_variance(
  error: Float[np.ndarray, ' n'], probability: Float[np.ndarray, ' n']
) -> float:
  """Returns the share that dropping adds to the variance.

  It is E (g^2/pi) / E g^2 - 1. Random dropping to a share k adds 1/k - 1.

  Args:
    error: |g| of n examples drawn at random.
    probability: with which each is kept, above 0.
  """
  square = np.asarray(error, np.float64) ** 2
  total = square.sum()
  if not total:
    return 0.0
  return max(float((square / probability).sum() / total) - 1, 0.0)


class Lag(NamedTuple):
  """Sums of how far a scorer that learns from fewer examples lags behind."""

  examples: float = 0.0
  total: float = 0.0
  """Of the differences in log loss."""
  squares: float = 0.0

  def __add__(self, other: 'Lag') -> 'Lag':  # type: ignore[override]
    return Lag(*map(sum, zip(self, other, strict=True)))


def lag(
  labels: Float[np.ndarray, ' n'],
  scores: Float[np.ndarray, ' n'],
  fewer: Float[np.ndarray, ' n'],
) -> Lag:
  """Compares two scorers on the same examples.

  Args:
    labels: as for `tally`.
    scores: of the scorer that learns from all examples.
    fewer: of the one that learns from one in `FEWER`: these.
  """
  later, earlier = (losses(labels, logits_of(some)) for some in (fewer, scores))
  apart = (later - earlier)[~np.isnan(fewer + scores)]
  return Lag(len(apart), float(apart.sum()), float((apart**2).sum()))


def faded(lagging: Lag) -> Lag:
  """Halves the sums once they cover more than `RECENT` examples."""
  if lagging.examples * FEWER <= RECENT:
    return lagging
  return Lag(*(value / 2 for value in lagging))


def cost_of_half(lagging: Lag) -> float:
  """Returns A, an upper bound of the log loss that half of the examples cost.

  It is two standard errors above the measurement, or inf below 100 examples.
  """
  examples = lagging.examples
  if examples < 100:
    return math.inf
  mean = lagging.total / examples
  variance = max(lagging.squares / examples - mean**2, 0)
  most = max(mean, 0.0) + SURE * math.sqrt(variance / examples)
  return most / (FEWER - 1)


VERDICTS = (
  'choosing may pay',
  'nothing to gain here: scores are no better than the base rate',
  'nothing to gain here: labels are too uncertain for any choice',
)
"""Verdicts, by number."""


def verdict(counted: Tally, kept: float) -> int:
  """Returns a place in `VERDICTS`: whether choosing examples can pay.

  Args:
    counted: labels by score.
    kept: share of the examples that is kept, as for `bound`.
  """
  gained, deviation = advantage(counted)
  if gained <= SURE * deviation:
    return 1
  return 2 if bound(noise_of(counted), kept) > LEAST else 0


def affordable(extra: Callable[[float], float], most: float) -> float:
  """Returns the largest of `DROPS` whose extra variance is at most `most`.

  Args:
    extra: `extra_variance` by the share that is dropped; it never falls.
    most: the extra variance that may be had.
  """
  low, high = 0, len(DROPS)
  while high - low > 1:  # DROPS[low] is affordable, and 0 always is
    middle = (low + high) // 2
    low, high = (
      (middle, high) if extra(DROPS[middle]) <= most else (low, middle)
    )
  return DROPS[low]
