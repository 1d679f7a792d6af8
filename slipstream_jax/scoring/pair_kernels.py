"""Logistic regression with pairs of features, one example after the other.

Weights lie in two tables of fixed size, at hashes of what they stand for, each
beside the sum of its squared gradients. This file stays out of jaxtyping's
import hook, which numba cannot compile through.
"""

from typing import NamedTuple

import numpy as np

from slipstream_jax.hashing import hashed, kernel

# Plain numbers would make f64 of all they meet.
_ZERO, _ONE = np.float32(0), np.float32(1)
LIMIT = np.float32(12)
"""Largest size of a logit: no score is nearer than 6e-6 to 0 or 1."""
_LARGEST = np.float32(3e38)
_LINEAR, _FAR, _TINY = np.float32(10), np.float32(8), np.float32(1e-9)
_LATEST = 100_000  # examples that a mean is of, at most: it follows a drift
_MANTISSA = np.uint32(21)  # bits of an f32 that a bin leaves out


class Rates(NamedTuple):
  """Step sizes of Adagrad, and the sums of squares that it starts from."""

  rate: np.float32
  """Of the weights of rows and of dense features."""
  bin_rate: np.float32
  """Of those of bins."""
  start: np.float32
  """Of all of these."""
  pair_rate: np.float32
  """Of the weights of pairs."""
  pair_start: np.float32
  """... and their start."""
  mix_rate: np.float32
  """Of the three weights of the mix, which start from 1."""


@kernel
def _place(bits: np.uint64, size: int) -> np.int64:
  """Where in a table of `size` weights, a power of two; by the high bits."""
  return np.int64(bits >> np.uint64(32)) & np.int64(size - 1)


@kernel
def _finite(value: np.float32) -> np.float32:
  """The value itself, the largest one for infinity, 0 for NaN and for -0."""
  if value != value or value == _ZERO:
    return _ZERO
  return min(max(value, -_LARGEST), _LARGEST)


@kernel
def _squashed(value: np.float32) -> np.float32:
  """The value, or beyond `_LINEAR` its logarithm: none is larger than 890."""
  size = abs(value)
  if size <= _LINEAR:
    return value
  return np.copysign(_LINEAR * (_ONE + np.log(size / _LINEAR)), value)


@kernel
def _standardized(
  value: np.float32, spread: np.ndarray, share: np.float32
) -> np.float32:
  """How many deviations from the mean, at most `_FAR`; 0 of a constant.

  Args:
    value: of a feature.
    spread: f32[2], its mean and variance so far; updated in place first.
    share: of this value in them.
  """
  delta = value - spread[0]
  spread[0] += share * delta
  left = value - spread[0]
  spread[1] += share * (delta * left - spread[1])
  if spread[1] <= _TINY * (_ONE + spread[0] * spread[0]):
    return _ZERO
  return min(max(left / np.sqrt(spread[1]), -_FAR), _FAR)


@kernel
def _probability(logit: np.float32) -> np.float32:
  """Of a logit, which is held within the limit."""
  return _ONE / (_ONE + np.exp(-min(max(logit, -LIMIT), LIMIT)))


@kernel
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
  """Places of the rows of example i, and of the pairs within its bags.

  Fills `last` with the hash of the last lookup of every feature, 0 where it
  has none, and `hashes`, scratch for those of a bag.

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
    # A row beside itself gives the salt: how often a bag has its last row.
    salt = hashed(np.uint64(1), f)
    for k in range(max(0, real - 1 - bag), real - 1):
      pairs_at[paired] = _place(hashes[k] ^ last[f] ^ salt, size)
      paired += 1
  return count, paired


@kernel
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
  """Places of the bins of dense features, four to each power of two.

  Fills `last` with their hashes, and `values` with the standardized features.
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
def _hash_pairs(
  last: np.ndarray, pairs: np.ndarray, size: int, at: np.ndarray
) -> int:
  """Places of pairs of features, of those that have both."""
  count = 0
  for p in range(len(pairs)):
    one, other = last[pairs[p, 0]], last[pairs[p, 1]]
    at[count] = _place(one ^ other, size)
    count += one != np.uint64(0) and other != np.uint64(0)
  return count


@kernel
def _sum(table: np.ndarray, at: np.ndarray) -> np.float32:
  total = _ZERO
  for k in range(len(at)):
    total += table[at[k], 0]
  return total


@kernel
def _move(
  table: np.ndarray,
  at: np.ndarray,
  gradient: np.float32,
  rate: np.float32,
  start: np.float32,
  steps: np.ndarray,
) -> None:
  """Adagrad on the weights at these places; `steps` is scratch."""
  square, scaled = gradient * gradient, rate * gradient
  for k in range(len(at)):
    table[at[k], 1] += square
    steps[k] = table[at[k], 1]
  for k in range(len(at)):  # alone in its loop: eight roots at a time
    steps[k] = scaled / np.sqrt(start + steps[k])
  for k in range(len(at)):
    table[at[k], 0] -= steps[k]


@kernel
def _move_few(
  table: np.ndarray,
  values: np.ndarray,
  gradient: np.float32,
  rate: np.float32,
  start: np.float32,
) -> None:
  """Adagrad on weights that are multiplied by values, not looked up."""
  for j in range(len(values)):
    slope = gradient * values[j]
    table[j, 1] += slope * slope
    table[j, 0] -= rate * slope / np.sqrt(start + table[j, 1])


@kernel
def _product(table: np.ndarray, values: np.ndarray) -> np.float32:
  total = _ZERO
  for j in range(len(values)):
    total += table[j, 0] * values[j]
  return total


@kernel
def _weigh(
  table: np.ndarray,
  at: np.ndarray,
  last: np.ndarray,
  pairs: np.ndarray,
  slope: np.float32,
  useful: np.ndarray,
) -> None:
  """Adds up by how much the pairs of an example make its loss less.

  To first order, from the loss without them; before they learn from it.
  """
  count = 0
  for p in range(len(pairs)):
    one, other = last[pairs[p, 0]], last[pairs[p, 1]]
    if one != np.uint64(0) and other != np.uint64(0):
      useful[p] -= slope * table[at[count], 0]
      count += 1


@kernel
def learn(
  rows: np.ndarray,
  pair_rows: np.ndarray,
  dense_rows: np.ndarray,
  mix: np.ndarray,
  spread: np.ndarray,
  seen: int,
  lookups: np.ndarray,
  dense: np.ndarray,
  labels: np.ndarray,
  pairs: np.ndarray,
  useful: np.ndarray,
  bag: int,
  rates: Rates,
  out: np.ndarray,
) -> None:
  """Click probabilities of n examples, each learned from after it was scored.

  A weight that an example meets twice moves twice. All sums are in the order
  of lookups, features and pairs.

  Args:
    rows: f32[W, 2], weight and sum of squared gradients of rows and bins, W a
      power of two; updated in place, as the next four.
    pair_rows: f32[W, 2], the same of pairs.
    dense_rows: f32[I + 1, 2], the same of each dense feature and the bias.
    mix: f32[3, 2], the same of the logit without pairs, of that of the pairs,
      and of a bias.
    spread: f32[I, 2], mean and variance of each dense feature.
    seen: examples that were learned from before.
    lookups: i32 or i64[n, F, L], rows, -1 padding.
    dense: f32[n, I].
    labels: f32[n], 1 for a click, else 0.
    pairs: i32[P, 2], what makes a pair: features by number, F and above for
      the bins of dense ones.
    useful: f64[P], gets what pairs take off the loss; or f64[0].
    bag: most lookups of a feature that make a pair with its last one.
    rates: of Adagrad.
    out: f32[n].
  """
  _, features, length = lookups.shape
  at = np.empty(features * length + dense.shape[1], np.int64)
  # One more than ever counts: a pair that is not there is written, too.
  most = features * min(length, bag + 1) + len(pairs) + 1
  pairs_at = np.empty(most, np.int64)
  steps = np.empty(max(len(at), most), np.float32)
  last = np.empty(features + dense.shape[1], np.uint64)
  hashes = np.empty(length, np.uint64)
  values = np.ones(len(dense_rows), np.float32)  # the bias's stays 1
  parts = np.ones(3, np.float32)
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
    # Scored before its label is learned from: else it would know the answer.
    out[i] = _probability(_product(mix, parts))
    _move_few(mix, parts, out[i] - labels[i], rates.mix_rate, _ONE)
    # The linear part learns as if there were no pairs, these on top of it.
    slope = _probability(alone) - labels[i]
    if len(useful):
      _weigh(pair_rows, between_at, last, pairs, slope, useful)
    moved, binned = at[:looked_up], at[looked_up:count]
    _move(rows, moved, slope, rates.rate, rates.start, steps)
    _move(rows, binned, slope, rates.bin_rate, rates.start, steps)
    _move_few(dense_rows, values, slope, rates.rate, rates.start)
    slope = _probability(alone + added) - labels[i]
    moved = pairs_at[:paired]
    _move(pair_rows, moved, slope, rates.pair_rate, rates.pair_start, steps)
