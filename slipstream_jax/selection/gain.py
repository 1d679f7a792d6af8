"""What there is to gain by choosing examples, and what dropping them costs.

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
from slipstream_jax.selection.tally import (
  advantage,
  logits_of,
  losses,
  noise_of,
  RECENT,
  Tally,
)

FEWER = 4
"""The second scorer learns from one example in so many."""
SURE = 2.0
"""Standard errors by which something must be seen to be believed."""
LEAST = 0.9
"""Of random dropping's variance: where no policy has less, none is worth it."""
DROPS = tuple(round(0.05 * i, 2) for i in range(19))
"""What may be dropped where that is found out: up to 0.9."""


def bound(noise: float, kept: float) -> float:
  """The least share of random dropping's variance that choosing can have.

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
  """E (g^2/pi) / E g^2 - 1: what dropping adds to the variance, as a share.

  Of random dropping to a share k it is 1/k - 1.

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
  """How far a scorer that learns from fewer examples lags behind, in sums."""

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
  """As `fading`."""
  if lagging.examples * FEWER <= RECENT:
    return lagging
  return Lag(*(value / 2 for value in lagging))


def cost_of_half(lagging: Lag) -> float:
  """A: log loss that half of the examples would cost; on the safe side.

  Two standard errors more than was measured; inf while little is known.
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
"""What there is to say, by number."""


def verdict(counted: Tally, kept: float) -> int:
  """Whether choosing examples can be worth it: a place in `VERDICTS`.

  Args:
    counted: labels by score.
    kept: share of the examples that is kept, as for `bound`.
  """
  gained, deviation = advantage(counted)
  if gained <= SURE * deviation:
    return 1
  return 2 if bound(noise_of(counted), kept) > LEAST else 0


def affordable(extra: Callable[[float], float], most: float) -> float:
  """The largest of `DROPS` at which so much extra variance is not exceeded.

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
