"""A scorer that also knows pairs: logistic regression over hashes.

The logit is mixed of two parts, each learned as the stream goes by:

* a linear one, of a weight per row looked up, per dense feature (standardized
  by what was seen so far) and per bin of it: logistic regression with a step
  size per weight (McMahan et al., 2013; here Adagrad's);
* a weight per pair of rows: of the last rows of two features, and of a list's
  last row with the others of its list. It is learned on top of the first.

Which features make pairs is learned: the first `TRIAL` examples try all of
them, and the `KEPT` that took most off the loss of examples not yet learned
from stay. Few pairs cost less, and know fewer examples by heart. How much of
either part counts is learned as well, from the scores that were given (three
numbers): where pairs do no good they are left out. So nothing need be set for a
data set; a step is for a whole example, shared by the pairs that it has.

All weights lie in two tables of 2**18 at hashes of rows (the hashing trick,
Weinberger et al., 2009): the state is as large for any data, and knows nothing
of which rows are hot. Every example is scored before it is learned from, and
nothing of what was chosen enters; so a score depends on the examples before it
alone, and not on how the stream is cut into batches.
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
"""Of each table; both together take 4 MiB, with the sums of their squares."""
TRIAL = 1 << 14
"""Examples that try all pairs of features."""
KEPT = 32
"""Most pairs of features that stay."""
PAIRS = 512
"""Most that are tried; of more, a fixed choice that looks random."""
BAG = 32
"""Most rows of a list that make pairs with its last one."""
RATE, START = 0.05, 0.1
"""Of the linear part, as of `LinearScorer`."""
BIN_RATE = 0.02
"""Of bins, which say again what their features do."""
PAIRS_RATE, PAIRS_START = 8.0, 10.0
"""Rate of all pairs of an example together; their steps begin small."""
_MOST_RATE = 0.25  # of a single pair
_MIX_RATE = 0.05
_LISTED = 1 << 16  # pairs, of which some are chosen


class PairScorer(NamedTuple):
  """Predicts clicks from rows, dense features and pairs; learns in place.

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
  """The same at hashes of pairs."""
  dense: Float[np.ndarray, 'I_and_1 2']
  """The same of each dense feature, and of the bias last."""
  mix: Float[np.ndarray, '3 2']
  """The same of the linear part, of the pairs', and of a bias."""
  spread: Float[np.ndarray, 'I 2']
  """Mean and variance of each dense feature, f32, of some 1e5 examples."""
  seen: Int[np.ndarray, '1']
  """Examples learned from, i64."""
  useful: Float[np.ndarray, ' _PAIRS']
  """What pairs of features took off the loss in the trial, f64; of those that
  are tried, and 0."""
  features: int
  """F, columns of the lookups."""
  most: int
  """Pairs of features that stay, at most."""

  @classmethod
  def create(
    cls,
    features: int,
    dense_features: int,
    weights: int = WEIGHTS,
    most: int | None = None,
  ) -> 'PairScorer':
    """A scorer that knows nothing: every score is 0.5.

    Args:
      features: F, columns of the lookups.
      dense_features: I, columns of `Batch.dense`.
      weights: W of each table, a power of two.
      most: pairs of features that stay; None: `KEPT`.

    Raises:
      UserError: it is none.
    """
    if weights < 1 or weights & (weights - 1):
      raise UserError(
        'a scorer has a power of two of weights',
        got=weights,
        where='PairScorer.create, weights',
        hint=f'leave it at {WEIGHTS}',
      )
    mix = np.zeros((3, 2), np.float32)
    mix[0, 0] = 1  # pairs count once they were seen to help
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
    """Click probability of each example, f32, before it was learned from.

    Args:
      lookups: rows, [n, F] or [n, F, L]; -1 is padding.
      dense: dense features, f32.
      labels: 1 for a click, else 0; f32.

    Raises:
      UserError: the examples are not those of this scorer's features.
    """
    lookups = lookups[..., None] if lookups.ndim == 2 else lookups
    self._check(lookups, dense, labels)
    in_bags = self.features * min(lookups.shape[2] - 1, BAG)
    tried = _tried(self.features, len(self.dense) - 1, in_bags < KEPT)
    # Of as few, all stay.
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
    """The pairs of features that were most useful, in their order."""
    best = np.argsort(-self.useful[: len(tried)], kind='stable')[: self.most]
    return tried[np.sort(best)]

  def _check(
    self, lookups: np.ndarray, dense: np.ndarray, labels: np.ndarray
  ) -> None:
    # The kernel looks at no bounds: it would write beside its arrays.
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
    """What was learned so far: 4 MiB of arrays of its own, by name."""
    return {name: getattr(self, name).copy() for name in _LEARNED}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from what another one had learned, which is not changed."""
    for name in _LEARNED:
      getattr(self, name)[:] = state[name]


_LEARNED = PairScorer._fields[:-2]


def pair_scorer(hot: HotRows, features: int, dense_features: int) -> PairScorer:
  """A `PairScorer` of examples of these shapes; it asks for no hot rows."""
  del hot
  return PairScorer.create(features, dense_features)


@functools.lru_cache
def _tried(
  features: int, dense_features: int, with_bins: bool
) -> Int[np.ndarray, 'P 2']:
  """Pairs of features that are tried, i32: all, or `PAIRS` of them.

  Those of bins are only where rows make few.
  """
  count = features
  if with_bins and features * (features - 1) // 2 < KEPT:
    count += dense_features
  total = count * (count - 1) // 2
  if total <= _LISTED:
    pairs = np.stack(np.triu_indices(count, 1), axis=1).astype(np.int32)
    order = np.argsort(_draws(total), kind='stable')[:PAIRS]
    return pairs[np.sort(order)]
  # Too many to be listed. More than are wanted, for some are drawn twice.
  draws = _draws(4 * PAIRS)
  one = draws[::2] % np.uint64(count)
  other = (one + 1 + draws[1::2] % np.uint64(count - 1)) % np.uint64(count)
  drawn = np.sort(np.stack([one, other], axis=1).astype(np.int32), axis=1)
  _, first = np.unique(drawn, axis=0, return_index=True)
  return drawn[np.sort(first)[:PAIRS]]


def _draws(count: int) -> np.ndarray:
  """u64[count], the same for ever."""
  numbers = np.arange(1, count + 1, dtype=np.uint64)
  return hashing.mix(numbers * hashing.GOLDEN)


def _rates(terms: int) -> pair_kernels.Rates:
  """For examples of so many pairs."""
  single = min(_MOST_RATE, PAIRS_RATE / max(terms, 1))
  return pair_kernels.Rates(
    *map(np.float32, (RATE, BIN_RATE, START, single, PAIRS_START, _MIX_RATE))
  )
