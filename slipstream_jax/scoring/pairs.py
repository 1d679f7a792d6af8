"""Scorer with pairs of features: logistic regression over hashes.

The logit mixes two parts, both learned online:

* a linear part, with a weight per row looked up, per dense feature
  (standardized by the values seen so far) and per bin of a dense feature. Each
  weight has its own Adagrad step size (compare McMahan et al., 2013).
* a weight per pair of rows: of the last rows of two features, and of a list's
  last row with the list's other rows. It is learned on top of the linear part.

Which features make pairs is learned. The first `TRIAL` examples try all pairs,
and the `KEPT` pairs that most reduce the loss of examples before learning from
them are kept. Few pairs cost less and overfit less. The weights of the two
parts are learned from past scores (three numbers), so pairs that do not help
are left out. No setting depends on the data set. The step size is per example
and shared by its pairs.

All weights are in two tables of 2**18 entries at hashes of rows (the hashing
trick, Weinberger et al., 2009). So the state has the same size for any data and
does not depend on the hot rows. Every example is scored before the scorer
learns from it, whether kept or not. So a score depends only on the examples
before it, not on how they are cut into batches.
"""

import functools
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax import hashing
from slipstream_jax.errors import UserError
from slipstream_jax.scoring import pair_kernels
from slipstream_jax.types import HotRows, Lookups

WEIGHTS = 1 << 18
"""Weights of each table. Both tables take 4 MiB with their sums of squares."""
TRIAL = 1 << 14
"""Examples that try all pairs of features."""
KEPT = 32
"""Most pairs of features that are kept."""
PAIRS = 512
"""Most pairs to try. If there are more, a fixed pseudorandom choice is tried.
"""
BAG = 32
"""Most rows of a list that make pairs with its last row."""
RATE, START = 0.05, 0.1
"""Learning rate and initial sum of squares of the linear part."""
BIN_RATE = 0.02
"""Learning rate of bins, which repeat what their features express."""
PAIRS_RATE, PAIRS_START = 8.0, 10.0
"""Rate of all pairs of an example together, and their large initial sum."""
_MOST_RATE = 0.25  # largest rate of a single pair
_MIX_RATE = 0.05
_LISTED = 1 << 16  # most pairs to list before choosing some


class PairScorer(NamedTuple):
  """Scorer of rows, dense features and pairs. Learns in place.

  Example:
    >>> scorer = PairScorer.create(features=2, dense_features=1)
    >>> lookups, dense = np.array([[3, 7], [3, 8]]), np.ones((2, 1), np.float32)
    >>> labels = np.array([1, 0], np.float32)
    >>> first, second = scorer.learn(lookups, dense, labels)
    >>> bool(first == 0.5 < second)
    True
  """

  rows: Float[np.ndarray, 'W 2']
  """Weight and sum of squared gradients, f32, at hashes of rows and bins."""
  pairs: Float[np.ndarray, 'W 2']
  """Weight and sum of squared gradients at hashes of pairs."""
  dense: Float[np.ndarray, 'I_and_1 2']
  """Weight and sum of squared gradients of each dense feature, then of the
  bias."""
  mix: Float[np.ndarray, '3 2']
  """Weight and sum of squared gradients of the linear part, the pairs and a
  bias."""
  spread: Float[np.ndarray, 'I 2']
  """Mean and variance of each dense feature, f32, over about 1e5 examples."""
  seen: Int[np.ndarray, '1']
  """Number of examples learned from, i64."""
  useful: Float[np.ndarray, ' _PAIRS']
  """By how much each tried pair reduced the loss in the trial, f64. The rest is
  0."""
  features: int
  """F, columns of the lookups."""
  most: int
  """Most pairs of features that are kept."""

  @classmethod
  def create(
    cls,
    features: int,
    dense_features: int,
    weights: int = WEIGHTS,
    most: int | None = None,
  ) -> 'PairScorer':
    """Returns an untrained scorer: every score is 0.5.

    Args:
      features: F, columns of the lookups.
      dense_features: I, columns of `Batch.dense`.
      weights: W of each table, a power of two.
      most: most pairs of features to keep. None: `KEPT`.

    Raises:
      UserError: `weights` is not a power of two.
    """
    if weights < 1 or weights & (weights - 1):
      raise UserError(
        'the number of weights must be a power of two',
        got=weights,
        where='PairScorer.create, weights',
        hint=f'leave it at {WEIGHTS}',
      )
    mix = np.zeros((3, 2), np.float32)
    mix[0, 0] = 1  # pairs get weight once they reduce the loss
    return cls(
      rows=np.zeros((weights, 2), np.float32),
      pairs=np.zeros((weights, 2), np.float32),
      dense=np.zeros((dense_features + 1, 2), np.float32),
      mix=mix,
      spread=np.zeros((dense_features, 2), np.float32),
      seen=np.zeros(1, np.int64),
      useful=np.zeros(PAIRS),
      features=features,
      most=KEPT if most is None else most,
    )

  def learn(
    self,
    lookups: Lookups,
    dense: Float[np.ndarray, 'n I'],
    labels: Float[np.ndarray, ' n'],
  ) -> Float[np.ndarray, ' n']:
    """Returns click probabilities f32[n], each computed before learning.

    Args:
      lookups: rows, [n, F] or [n, F, L]. -1 is padding.
      dense: dense features, f32.
      labels: 1 for a click, else 0, f32.

    Raises:
      UserError: the shapes do not match the scorer's features.
    """
    lookups = lookups[..., None] if lookups.ndim == 2 else lookups
    self._check(lookups, dense, labels)
    in_bags = self.features * min(lookups.shape[2] - 1, BAG)
    tried = _tried(self.features, len(self.dense) - 1, in_bags < KEPT)
    # Without a choice to make, no trial is needed.
    trial = TRIAL if len(tried) > self.most > 0 else 0
    before = max(0, min(len(lookups), trial - int(self.seen[0])))
    out = np.empty(len(dense), np.float32)
    for part, tries in ((slice(before), True), (slice(before, None), False)):
      if not len(lookups[part]):
        continue
      pairs = tried if tries else self._kept(tried)
      pair_kernels.learn(
        *(self.rows, self.pairs, self.dense, self.mix, self.spread),
        int(self.seen[0]),
        np.ascontiguousarray(lookups[part]),
        np.ascontiguousarray(dense[part], np.float32),
        np.ascontiguousarray(labels[part], np.float32),
        pairs,
        self.useful[: len(pairs) if tries else 0],
        BAG,
        _rates(len(pairs) + in_bags),
        out[part],
      )
      self.seen[0] += len(out[part])
    return out

  def _kept(self, tried: Int[np.ndarray, 'P 2']) -> Int[np.ndarray, 'K 2']:
    """Returns the pairs of features that were most useful, in their order."""
    best = np.argsort(-self.useful[: len(tried)], kind='stable')[: self.most]
    return tried[np.sort(best)]

  def _check(
    self, lookups: np.ndarray, dense: np.ndarray, labels: np.ndarray
  ) -> None:
    # The kernel does not check bounds and would write out of them.
    examples, dense_features = len(lookups), len(self.dense) - 1
    got = lookups.shape[1], *dense.shape, *labels.shape
    if got != (self.features, examples, dense_features, examples):
      raise UserError(
        f'an example has {self.features} features, {dense_features} dense ones'
        ' and a label',
        got=f'lookups {list(lookups.shape)}, dense {list(dense.shape)}, labels'
        f' {list(labels.shape)}',
        where='PairScorer.learn',
        hint='give the examples that the scorer was made for',
      )

  def get_state(self) -> dict[str, Any]:
    """Returns copies of all that was learned: 4 MiB of arrays by name."""
    return {name: getattr(self, name).copy() for name in _LEARNED}

  def set_state(self, state: dict[str, Any]) -> None:
    """Copies the arrays of a state from `get_state`."""
    for name in _LEARNED:
      getattr(self, name)[:] = state[name]


_LEARNED = PairScorer._fields[:-2]


def pair_scorer(hot: HotRows, features: int, dense_features: int) -> PairScorer:
  """Returns a `PairScorer` for examples of these shapes. Ignores hot rows."""
  del hot
  return PairScorer.create(features, dense_features)


@functools.lru_cache
def _tried(
  features: int, dense_features: int, with_bins: bool
) -> Int[np.ndarray, 'P 2']:
  """Returns the pairs of features to try, i32: all, or `PAIRS` of them.

  Pairs with bins are included only if rows make few pairs.
  """
  count = features
  if with_bins and features * (features - 1) // 2 < KEPT:
    count += dense_features
  total = count * (count - 1) // 2
  if total <= _LISTED:
    pairs = np.stack(np.triu_indices(count, 1), axis=1).astype(np.int32)
    order = np.argsort(_draws(total), kind='stable')[:PAIRS]
    return pairs[np.sort(order)]
  # Too many to list. Draws more than needed, as some repeat.
  draws = _draws(4 * PAIRS)
  one = draws[::2] % np.uint64(count)
  other = (one + 1 + draws[1::2] % np.uint64(count - 1)) % np.uint64(count)
  drawn = np.sort(np.stack([one, other], axis=1).astype(np.int32), axis=1)
  _, first = np.unique(drawn, axis=0, return_index=True)
  return drawn[np.sort(first)[:PAIRS]]


def _draws(count: int) -> np.ndarray:
  """Returns u64[count], the same in every call."""
  numbers = np.arange(1, count + 1, dtype=np.uint64)
  return hashing.mix(numbers * hashing.GOLDEN)


def _rates(terms: int) -> pair_kernels.Rates:
  """Returns the rates for examples with `terms` pairs."""
  single = min(_MOST_RATE, PAIRS_RATE / max(terms, 1))
  return pair_kernels.Rates(
    *map(np.float32, (RATE, BIN_RATE, START, single, PAIRS_START, _MIX_RATE))
  )
