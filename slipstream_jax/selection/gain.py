"""Estimates what choosing examples can gain, and what dropping them costs.

Everything comes from scores that were computed before their labels were learned
from: whether choosing by them pays at all (the switch of Katharopoulos and
Fleuret, arXiv 1803.00942), and how much may be dropped.

The bound. Let p be the calibrated click probability of an example, and
g = p - y the slope of its loss, with E g^2 = E p(1 - p) = v and E |g| = 2v.
Let a share k be kept, each with probability pi and weight 1/pi. The second
moment of the slope is then E g^2/pi: v/k at random, where pi = k, and at least
4v^2/k, where pi = k |g| / 2v. Training on all examples has v. So what dropping
adds to the variance is at best

  (4v^2/k - v) / (v/k - v) = (4v - k) / (1 - k)

of what dropping at random adds, or 0 if that is negative. As pi is at most 1,
the true share may be above the bound. The bound also holds for the correction
by an offset: kept with pi = c |g|, c = k/2v, an example is a click with
probability 1/2, and has c p(1 - p)/2 of information on its logit rather than
p(1 - p). The variance of an estimate is thus 4v/k times that of all examples,
and 1/k times at random. v is at most 1/4, for balanced noise, where nothing is
gained.

The cost. A model trained on n examples is worse than the best one by d/2n, for
d parameters that count. On a random share k of them it is worse than on all by
A (1/k - 1), where A is what half of the examples would cost. With probabilities
pi, 1/k is replaced by E (g^2/pi) / E g^2: equal variance costs equal loss. A is
measured: a second scorer learns from every fourth example only, and its log
loss on them is compared with that of the first scorer: the scorer has this A. A
model may learn for longer, or what no scorer can: its A was a hundred times as
large where the scorer was done after a tenth of the data. So the losses of its
steps are laid beside the scorer's on the same examples, and what the model
gained on the scorer is added (`cost_to_model`). A model that is still worse
than the scorer lacks steps, whichever examples they have. So what it is behind
counts as with random dropping. All this looks back: what a model gains after a
plateau is not foreseen. As A falls as 1/n, an early measurement is too large.

Counts are f64[bins, 2]: examples without a click and with one, by the logit of
their score.
"""

import bisect
from collections.abc import Callable, Sequence
import math
from typing import NamedTuple

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError

_BINS = 512  # of the logits of scores
LIMIT = 12.0
"""Largest size of the logit of a score."""
_WIDTH = 2 * LIMIT / _BINS
LOGITS = (np.arange(_BINS) + 0.5) * _WIDTH - LIMIT
"""Middle of each bin, f64[bins]."""
_BY_BIN = np.logaddexp(0, [LOGITS, -LOGITS]).T  # loss without a click, and with
RECENT = 1 << 17
"""Examples after which old ones count half."""
FEWER = 4
"""The second scorer learns from one example in this many."""
SURE = 2.0
"""Standard errors by which an effect must be seen to be believed."""
LEAST = 0.6
"""Share of random dropping's variance above which no policy is worth it. Where
the bound was 0.62, on balanced ratings, policies had 0.7 of random dropping's
loss."""
GROWN = 1.25
"""Factor by which examples grow from one report to the next."""
_DOUBLING = 3  # reports in which examples double
DROPS = tuple(round(0.05 * i, 2) for i in range(11))
"""Drop targets to choose from: up to a half."""
APART = 1.1
"""Ratio of the log losses of scorer and model, in either direction, from which
scores are not those of a model like the trained one."""
_TOLD = 0.01  # share of the base rate's loss that scores must gain to be better
VERDICTS = (
  'choosing may pay',
  'nothing to gain here: scores are no better than the base rate',
  'nothing to gain here: labels are too uncertain for any choice',
  'too few examples to see if scores are better than the base rate',
)
"""Verdicts, by number."""

Counts = Float[np.ndarray, '_bins 2']
NO_COUNTS = np.zeros((_BINS, 2))
"""Counts of no example."""


def tally(
  labels: Float[np.ndarray, ' n'], scores: Float[np.ndarray, ' n']
) -> Counts:
  """Counts examples by score. Leaves out unknown scores, NaN.

  Args:
    labels: 1.0 for a click, else 0.0, or its probability.
    scores: click probabilities, computed before the labels were learned from.
  """
  unknown = np.isnan(scores)
  if unknown.any():
    scores, labels = scores[~unknown], labels[~unknown]
  at = ((logits_of(scores) + LIMIT) / _WIDTH).astype(np.int64)
  at = np.minimum(at, _BINS - 1)
  counts = np.empty((_BINS, 2))
  counts[:, 1] = np.bincount(at, labels, _BINS)
  counts[:, 0] = np.bincount(at, minlength=_BINS) - counts[:, 1]
  return counts


def faded(sums: np.ndarray, examples: float) -> np.ndarray:
  """Halves sums once they are over more than `RECENT` examples."""
  return sums if examples <= RECENT else sums / 2


def auc(counts: Counts) -> float | None:
  """Returns the area under the ROC curve, to 1e-4. None for a single class."""
  negative, positive = counts.T
  pairs = negative.sum() * positive.sum()
  if not pairs:
    return None
  below = np.cumsum(negative) - negative / 2  # a tie counts one half
  return float((positive * below).sum() / pairs)


def log_loss(counts: Counts) -> float | None:
  """Returns the mean cross entropy of the scores in nats, or None."""
  if not counts.any():
    return None
  return float((counts * _BY_BIN).sum() / counts.sum())


def base_log_loss(counts: Counts) -> float | None:
  """Returns the mean cross entropy of the base rate in nats, or None."""
  if not counts.any():
    return None
  rate = counts.sum(axis=0) / counts.sum()
  return float(-(rate * np.log(np.maximum(rate, 1e-300))).sum())


def advantage(counts: Counts) -> tuple[float, float]:
  """Returns by how much scores beat the base rate, and its standard error.

  In log loss per example. 0 and infinity if there is only one class.
  """
  examples = counts.sum()
  rate = counts.sum(axis=0) / max(examples, 1)
  if examples < 2 or not rate.min():
    return 0.0, math.inf
  gained = -np.log(rate) - _BY_BIN
  mean = (counts * gained).sum() / examples
  square = (counts * gained**2).sum() / examples
  deviation = math.sqrt(max(square - mean**2, 0) / examples)
  return float(mean), deviation


def calibrated(counts: Counts) -> Float[np.ndarray, ' bins']:
  """Returns the share of clicks by the logit of a score, f64, never falling.

  It is the monotone regression of labels on scores (pool adjacent violators).
  Bins without an example are interpolated.
  """
  mass = counts.sum(axis=1)
  some = np.flatnonzero(mass)
  if not len(some):
    return 1 / (1 + np.exp(-LOGITS))
  # Blocks of bins: clicks, examples, bins. Pooled while a rate falls.
  blocks: list[tuple[float, float, int]] = []
  for clicks, examples in zip(counts[some, 1], mass[some], strict=True):
    blocks.append((clicks, examples, 1))
    while len(blocks) > 1:
      (a, b, c), (d, e, f) = blocks[-2:]
      if a * e < d * b:
        break
      blocks[-2:] = [(a + d, b + e, c + f)]
  rates = np.repeat([b[0] / b[1] for b in blocks], [b[2] for b in blocks])
  return np.interp(LOGITS, LOGITS[some], rates)


def noise_of(counts: Counts) -> float:
  """Returns E p(1 - p) of the calibrated scores, or 1/4 without examples."""
  if not counts.any():
    return 0.25
  chance = calibrated(counts)
  mass = counts.sum(axis=1)
  return float((mass * chance * (1 - chance)).sum() / counts.sum())


def errors(
  counts: Counts, labels: Float[np.ndarray, ' n'], scores: np.ndarray
) -> Float[np.ndarray, ' n']:
  """Returns |p - y| by calibrated scores, f64, or 1/2 for unknown scores."""
  chance = np.interp(logits_of(scores), LOGITS, calibrated(counts))
  return np.where(np.isnan(scores), 0.5, abs(chance - labels))


def logits_of(scores: np.ndarray) -> np.ndarray:
  """Returns the logits of scores, f64, within the limit. NaN stays NaN."""
  edge = 1 / (1 + math.exp(LIMIT))
  chance = np.clip(scores.astype(np.float64), edge, 1 - edge)
  return np.log(chance / (1 - chance))


def bound(noise: float, kept: float) -> float:
  """Returns the least share of random dropping's variance that choosing has.

  Args:
    noise: v = E p(1 - p), in [0, 1/4].
    kept: k, share of the examples that is kept, in (0, 1]. At 1 there is
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


def lag(
  labels: Float[np.ndarray, ' n'],
  scores: Float[np.ndarray, ' n'],
  fewer: Float[np.ndarray, ' n'],
) -> Float[np.ndarray, '3']:
  """Compares two scorers on the same examples.

  Args:
    labels: as for `tally`.
    scores: of the scorer that learns from all examples.
    fewer: of the one that learns from one in `FEWER`: these.

  Returns:
    The number of examples with both scores, and the sums of the differences in
    log loss and of their squares, f64.
  """
  later, earlier = (
    np.logaddexp(0, logits) - labels * logits
    for logits in map(logits_of, (fewer, scores))
  )
  apart = (later - earlier)[~np.isnan(fewer + scores)]
  return np.array([len(apart), apart.sum(), (apart**2).sum()], np.float64)


def cost_of_half(lagging: Float[np.ndarray, '3']) -> float:
  """Returns A, an upper bound of the log loss that half of the examples cost.

  It is two standard errors above the measurement, the sum of `lag` over all
  batches, or inf below 100 examples.
  """
  examples, total, squares = lagging.tolist()
  if examples < 100:
    return math.inf
  mean = total / examples
  variance = max(squares / examples - mean**2, 0)
  most = max(mean, 0.0) + SURE * math.sqrt(variance / examples)
  return most / (FEWER - 1)


class Segment(NamedTuple):
  """Steps in a row, and by how much the model's loss is above the scorer's.

  The sums are over batches. Each counts by the sum of its weights, w, and has
  the difference d of two mean log losses over its examples, computed before
  either learned from them.
  """

  before: float = 0.0
  """Examples before the segment: the sum of all w."""
  weight: float = 0.0
  """Sum of w."""
  apart: float = 0.0
  """Sum of w d."""
  squares: float = 0.0
  """Sum of w d^2."""
  batches: int = 0

  def mean(self) -> tuple[float, float]:
    """Returns the mean of d, and its standard error, inf of one batch."""
    if self.batches < 2 or not self.weight:
      return 0.0, math.inf
    mean = self.apart / self.weight
    variance = max(self.squares / self.weight - mean**2, 0.0)
    return mean, math.sqrt(variance / (self.batches - 1))


class ModelCost(NamedTuple):
  """Costs of dropping to the model beyond those to a scorer, in log loss."""

  half: float
  """Cost of half of the examples by their noise."""
  behind: float
  """Loss by which the model is worse than the scorer. It needs steps to make
  that up, whichever examples they have."""


def cost_to_model(segments: Sequence[Segment], loss: float) -> ModelCost:
  """Estimates what dropping costs the model more than a scorer.

  A model that gains more from examples than the scorer does comes closer to it,
  or leaves it behind: by as much over the last doubling of the examples as it
  loses with half of them. And a model that is still worse than the scorer has
  that much to gain. Both are two standard errors above what was measured. They
  are inf while too little is known, and where the model is better by more than
  `APART`: scores do not know what it knows.

  Weights of an offset (`surprise_offset`) count kept examples, by logits that
  contain the offset. That makes differences larger by up to 1/4v.

  Args:
    segments: in order. With each, there are `GROWN` times as many examples.
    loss: mean log loss of the scorer.
  """
  if len(segments) <= _DOUBLING:
    return ModelCost(math.inf, math.inf)
  (then, error), (now, error_now) = (
    segments[at].mean() for at in (-1 - _DOUBLING, -1)
  )
  if loss > APART * (loss + now):
    return ModelCost(math.inf, math.inf)
  fell = then - now + SURE * math.hypot(error, error_now)
  return ModelCost(max(fell, 0.0), max(now + SURE * error_now, 0.0))


def verdict(counts: Counts, kept: float) -> int:
  """Returns a place in `VERDICTS`: whether choosing examples can pay.

  Args:
    counts: of the scores.
    kept: share of the examples that is kept, as for `bound`.
  """
  gained, deviation = advantage(counts)
  if gained <= SURE * deviation:
    least = _TOLD * (base_log_loss(counts) or 0.0)
    return 3 if gained + SURE * deviation > least else 1
  return 2 if bound(noise_of(counts), kept) > LEAST else 0


def next_drop(drop: float) -> float:
  """Returns the drop target after this one. More would cost before it shows."""
  return DROPS[min(bisect.bisect_right(DROPS, drop), len(DROPS) - 1)]


def affordable(cost: Callable[[float], float], most: float) -> float:
  """Returns the largest of `DROPS` that costs at most `most`.

  Args:
    cost: by the share that is dropped. It never falls.
    most: the largest cost to accept.
  """
  # The first one, 0, always is.
  return DROPS[bisect.bisect_right(DROPS, most, lo=1, key=cost) - 1]
