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
does not depend on the hot rows.
"""

import functools
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import GOLDEN, hashed, kernel, mix
from slipstream_jax.scoring.linear import checked_lists
from slipstream_jax.types import Lookups

WEIGHTS = 1 << 18
"""Weights of each table. Both tables take 4 MiB with their sums of squares."""
TRIAL = 1 << 14
"""Examples that try all pairs of features."""
KEPT = 32
"""Most pairs of features that are kept."""
PAIRS = 512
"""Most pairs to try. Of more, a fixed pseudorandom choice is tried."""
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
# Plain numbers would promote to f64.
_ZERO, _ONE = np.float32(0), np.float32(1)
_LARGEST = np.float32(3e38)
_LINEAR, _FAR, _TINY = np.float32(10), np.float32(8), np.float32(1e-9)
_MANTISSA = np.uint32(21)  # low bits of an f32 that a bin drops
LIMIT = np.float32(12)
"""Largest size of a logit: scores stay at least 6e-6 away from 0 and 1."""
_LATEST = 100_000  # most examples that a mean covers, so that it follows drift


class PairScorer(NamedTuple):
  """Scorer of rows, dense features and pairs. Learns in place.

  The first four fields have weights and their sums of squared gradients, f32.

  Example:
    >>> scorer = PairScorer.create(features=2, dense_features=1)
    >>> lookups, dense = np.array([[3, 7], [3, 8]]), np.ones((2, 1), np.float32)
    >>> labels = np.array([1, 0], np.float32)
    >>> first, second = scorer.learn(lookups, dense, labels)
    >>> bool(first == 0.5 < second)
    True
  """

  rows: Float[np.ndarray, 'W 2']
  """At hashes of rows and bins."""
  pairs: Float[np.ndarray, 'W 2']
  """At hashes of pairs."""
  dense: Float[np.ndarray, 'I_and_1 2']
  """Of each dense feature, then of the bias."""
  mix: Float[np.ndarray, '3 2']
  """Of the linear part, the pairs and a bias."""
  spread: Float[np.ndarray, 'I 2']
  """Mean and variance of each dense feature, f32, over about 1e5 examples."""
  seen: Int[np.ndarray, '1']
  """Number of examples learned from, i64."""
  useful: Float[np.ndarray, ' _PAIRS']
  """Loss that each tried pair took off in the trial, f64. The rest is 0."""
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
      weights: W, a power of two.
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
    """Returns click probabilities f32[n]. See `Scorer.learn`.

    Raises:
      UserError: the shapes do not match the scorer's features.
    """
    features = self.features, len(self.dense) - 1
    where = 'PairScorer.learn'
    lookups = checked_lists(lookups, dense, labels, features, where)
    in_bags = self.features * min(lookups.shape[2] - 1, BAG)
    tried = _tried(*features, in_bags < KEPT)
    # Without a choice to make, no trial is needed.
    trial = TRIAL if len(tried) > self.most > 0 else 0
    before = max(0, min(len(lookups), trial - int(self.seen[0])))
    out = np.empty(len(dense), np.float32)
    for part, tries in ((slice(before), True), (slice(before, None), False)):
      if not len(lookups[part]):
        continue
      pairs = tried if tries else self._kept(tried)
      _learn(
        self,
        np.ascontiguousarray(lookups[part]),
        np.ascontiguousarray(dense[part], np.float32),
        np.ascontiguousarray(labels[part], np.float32),
        pairs,
        self.useful[: len(pairs) if tries else 0],
        BAG,
        _pair_rate(len(pairs) + in_bags),
        out[part],
      )
      self.seen[0] += len(out[part])
    return out

  def _kept(self, tried: Int[np.ndarray, 'P 2']) -> Int[np.ndarray, 'K 2']:
    """Returns the pairs of features that were most useful, in their order."""
    best = np.argsort(-self.useful[: len(tried)], kind='stable')[: self.most]
    return tried[np.sort(best)]

  def get_state(self) -> dict[str, Any]:
    """Returns copies of all that was learned: 4 MiB of arrays by name."""
    return {name: getattr(self, name).copy() for name in _LEARNED}

  def set_state(self, state: dict[str, Any]) -> None:
    """Copies the arrays of a state from `get_state`."""
    for name in _LEARNED:
      getattr(self, name)[:] = state[name]


_LEARNED = PairScorer._fields[:-2]


@functools.lru_cache
def _tried(
  features: int, dense_features: int, with_bins: bool
) -> Int[np.ndarray, 'P 2']:
  """Returns the pairs of features to try, i32: all, or `PAIRS` of them."""
  count = features  # pairs with bins are included only if rows make few
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
  return mix(numbers * GOLDEN)


def _pair_rate(terms: int) -> np.float32:
  """Returns the learning rate of a pair, of examples with `terms` pairs."""
  return np.float32(min(_MOST_RATE, PAIRS_RATE / max(terms, 1)))


@kernel
@no_type_check
def _place(bits: np.uint64, size: int) -> np.int64:
  """Returns a place in a table of `size` weights, a power of two."""
  return np.int64(bits >> np.uint64(32)) & np.int64(size - 1)


@kernel
@no_type_check
def _finite(value: np.float32) -> np.float32:
  """Returns the value, clipped to finite numbers. NaN and -0 become 0."""
  if value != value or value == _ZERO:
    return _ZERO
  return min(max(value, -_LARGEST), _LARGEST)


@kernel
@no_type_check
def _squashed(value: np.float32) -> np.float32:
  """Returns the value, or beyond `_LINEAR` a logarithm of it, at most 890."""
  size = abs(value)
  if size <= _LINEAR:
    return value
  return np.copysign(_LINEAR * (_ONE + np.log(size / _LINEAR)), value)


@kernel
@no_type_check
def _standardized(
  value: np.float32, spread: np.ndarray, share: np.float32
) -> np.float32:
  """Returns deviations from the mean, at most `_FAR`. 0 for a constant.

  Args:
    value: of a feature.
    spread: f32[2], its mean and variance, first updated in place.
    share: weight of this value in them.
  """
  delta = value - spread[0]
  spread[0] += share * delta
  left = value - spread[0]
  spread[1] += share * (delta * left - spread[1])
  if spread[1] <= _TINY * (_ONE + spread[0] * spread[0]):
    return _ZERO
  return min(max(left / np.sqrt(spread[1]), -_FAR), _FAR)


@kernel
@no_type_check
def _hash_rows(
  lookups: np.ndarray,
  i: int,
  size: int,
  bag: int,
  at: np.ndarray,
  last: np.ndarray,
  hashes: np.ndarray,
  pairs_at: np.ndarray,
) -> tuple[int, int]:
  """Writes places of the rows of example i, and of the pairs within its bags.

  Fills `last` with the hash of each feature's last lookup, 0 if it has none.
  `hashes` is scratch for the hashes of a bag.

  Returns:
    How many places it wrote to `at`, and to `pairs_at`.
  """
  count, paired = 0, 0
  for f in range(lookups.shape[1]):
    real = 0
    for k in range(lookups.shape[2]):
      row = lookups[i, f, k]
      if row >= 0:
        hashes[real] = hashed(np.uint64(0), row)
        at[count] = _place(hashes[real], size)
        real, count = real + 1, count + 1
    last[f] = np.uint64(0) if real == 0 else hashes[real - 1]
    # A row paired with itself gives the salt, which counts how often the bag
    # repeats its last row.
    salt = hashed(np.uint64(1), f)
    for k in range(max(0, real - 1 - bag), real - 1):
      pairs_at[paired] = _place(hashes[k] ^ last[f] ^ salt, size)
      paired += 1
  return count, paired


@kernel
@no_type_check
def _take_dense(
  dense: np.ndarray,
  i: int,
  size: int,
  spread: np.ndarray,
  share: np.float32,
  at: np.ndarray,
  last: np.ndarray,
  values: np.ndarray,
) -> int:
  """Writes places of the bins of dense features, four bins per power of two.

  Fills `last` with the bins' hashes and `values` with the standardized
  features. Returns the number of dense features.
  """
  number = np.empty(1, np.float32)
  bits = number.view(np.uint32)
  for j in range(dense.shape[1]):
    number[0] = _finite(dense[i, j])
    values[j] = _standardized(_squashed(number[0]), spread[j], share)
    last[j] = hashed(np.uint64(2 + j), bits[0] >> _MANTISSA)
    at[j] = _place(last[j], size)
  return dense.shape[1]


@kernel
@no_type_check
def _hash_pairs(
  last: np.ndarray, pairs: np.ndarray, size: int, at: np.ndarray
) -> int:
  """Writes places of pairs whose features are both present, and counts them."""
  count = 0
  for p in range(len(pairs)):
    one, other = last[pairs[p, 0]], last[pairs[p, 1]]
    at[count] = _place(one ^ other, size)
    count += one != np.uint64(0) and other != np.uint64(0)
  return count


@kernel
@no_type_check
def _probability(logit: np.float32) -> np.float32:
  """Returns the probability of a logit, clipped to the limit."""
  return _ONE / (_ONE + np.exp(-min(max(logit, -LIMIT), LIMIT)))


@kernel
@no_type_check
def _sum(table: np.ndarray, at: np.ndarray) -> np.float32:
  total = _ZERO
  for k in range(len(at)):
    total += table[at[k], 0]
  return total


@kernel
@no_type_check
def _move_rows(
  table: np.ndarray,
  at: np.ndarray,
  gradient: np.float32,
  rate: np.float32,
  start: np.float32,
  steps: np.ndarray,
) -> None:
  """Applies Adagrad to the weights table[at]. `steps` is scratch."""
  square, scaled = gradient * gradient, rate * gradient
  for k in range(len(at)):
    table[at[k], 1] += square
    steps[k] = table[at[k], 1]
  for k in range(len(at)):  # in its own loop: vectorized, eight roots at a time
    steps[k] = scaled / np.sqrt(start + steps[k])
  for k in range(len(at)):
    table[at[k], 0] -= steps[k]


@kernel
@no_type_check
def _move_few(
  table: np.ndarray,
  values: np.ndarray,
  gradient: np.float32,
  rate: np.float32,
  start: np.float32,
) -> None:
  """Applies Adagrad to weights that are multiplied by dense values."""
  for j in range(len(values)):
    slope = gradient * values[j]
    table[j, 1] += slope * slope
    table[j, 0] -= rate * slope / np.sqrt(start + table[j, 1])


@kernel
@no_type_check
def _product(table: np.ndarray, values: np.ndarray) -> np.float32:
  total = _ZERO
  for j in range(len(values)):
    total += table[j, 0] * values[j]
  return total


@kernel
@no_type_check
def _add_usefulness(
  table: np.ndarray,
  at: np.ndarray,
  last: np.ndarray,
  pairs: np.ndarray,
  slope: np.float32,
  useful: np.ndarray,
) -> None:
  """Adds what pairs take off an example's loss, to first order, to `useful`."""
  count = 0
  for p in range(len(pairs)):
    one, other = last[pairs[p, 0]], last[pairs[p, 1]]
    if one != np.uint64(0) and other != np.uint64(0):
      useful[p] -= slope * table[at[count], 0]
      count += 1


@kernel
@no_type_check
def _learn(
  scorer: PairScorer,
  lookups: np.ndarray,
  dense: np.ndarray,
  labels: np.ndarray,
  pairs: np.ndarray,
  useful: np.ndarray,
  bag: int,
  pair_rate: np.float32,
  out: np.ndarray,
) -> None:
  """Scores n examples, and learns from each after scoring it.

  A weight that an example uses twice is updated twice. Sums run in the order of
  lookups, features and pairs.

  Args:
    scorer: updated in place, except `seen` and `useful`.
    lookups: i32 or i64[n, F, L], rows. -1 is padding.
    dense: f32[n, I].
    labels: f32[n].
    pairs: i32[P, 2], pairs of features by number, F and above for the bins of
      dense features.
    useful: f64[P], increased by what pairs take off the loss, or f64[0].
    bag: most lookups of a feature that make a pair with its last one.
    pair_rate: learning rate of each pair.
    out: f32[n], receives the click probabilities.
  """
  rows, pair_rows, dense_rows = scorer.rows, scorer.pairs, scorer.dense
  mix, spread, seen = scorer.mix, scorer.spread, scorer.seen[0]
  _, features, length = lookups.shape
  at = np.empty(features * length + dense.shape[1], np.int64)
  # One extra place, as an absent pair is written, too, and not counted.
  most = features * min(length, bag + 1) + len(pairs) + 1
  pairs_at = np.empty(most, np.int64)
  steps = np.empty(max(len(at), most), np.float32)
  last = np.empty(features + dense.shape[1], np.uint64)
  hashes = np.empty(length, np.uint64)
  values = np.ones(len(dense_rows), np.float32)  # the bias has value 1
  parts = np.ones(3, np.float32)
  rate, start = np.float32(RATE), np.float32(START)
  size = len(rows)
  for i in range(len(out)):
    count, in_bags = _hash_rows(
      lookups, i, size, bag, at, last, hashes, pairs_at
    )
    looked_up, share = count, _ONE / np.float32(min(seen + i + 1, _LATEST))
    bins_at, bins_last = at[count:], last[features:]
    count += _take_dense(
      dense, i, size, spread, share, bins_at, bins_last, values
    )
    between_at = pairs_at[in_bags:]
    paired = in_bags + _hash_pairs(last, pairs, size, between_at)
    alone = _sum(rows, at[:count]) + _product(dense_rows, values)
    added = _sum(pair_rows, pairs_at[:paired])
    parts[0] = min(max(alone, -LIMIT), LIMIT)
    parts[1] = min(max(added, -LIMIT), LIMIT)
    # Scored before learning, so that the score does not depend on the label.
    out[i] = _probability(_product(mix, parts))
    mix_slope = out[i] - labels[i]
    _move_few(mix, parts, mix_slope, np.float32(_MIX_RATE), _ONE)
    # The linear part learns as if there were no pairs. Pairs learn on top of
    # it.
    slope = _probability(alone) - labels[i]
    if len(useful):
      _add_usefulness(pair_rows, between_at, last, pairs, slope, useful)
    moved, binned = at[:looked_up], at[looked_up:count]
    _move_rows(rows, moved, slope, rate, start, steps)
    _move_rows(rows, binned, slope, np.float32(BIN_RATE), start, steps)
    _move_few(dense_rows, values, slope, rate, start)
    slope = _probability(alone + added) - labels[i]
    moved, pair_start = pairs_at[:paired], np.float32(PAIRS_START)
    _move_rows(pair_rows, moved, slope, pair_rate, pair_start, steps)
