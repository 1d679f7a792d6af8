"""Online logistic regression with pairs of features.

Weights are in two tables of fixed size, at hashes of their features, each
beside its sum of squared gradients.
"""

from typing import NamedTuple

import numpy as np

from slipstream_jax.hashing import kernel
from slipstream_jax.scoring.hash_kernels import (
  hash_pairs,
  hash_rows,
  take_dense,
)

# Plain numbers would promote to f64.
_ZERO, _ONE = np.float32(0), np.float32(1)
LIMIT = np.float32(12)
"""Largest size of a logit: scores stay at least 6e-6 away from 0 and 1."""
_LATEST = 100_000  # most examples that a mean covers, so that it follows drift


class Rates(NamedTuple):
  """Step sizes of Adagrad and the initial sums of squares."""

  rate: np.float32
  """For the weights of rows and of dense features."""
  bin_rate: np.float32
  """For the weights of bins."""
  start: np.float32
  """Initial sum of squares of all of these."""
  pair_rate: np.float32
  """For the weights of pairs."""
  pair_start: np.float32
  """Initial sum of squares of pairs."""
  mix_rate: np.float32
  """For the three weights of the mix, whose initial sum is 1."""


@kernel
def _probability(logit: np.float32) -> np.float32:
  """Returns the probability of a logit, clipped to the limit."""
  return _ONE / (_ONE + np.exp(-min(max(logit, -LIMIT), LIMIT)))


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
  """Applies Adagrad to the weights at these places. `steps` is scratch."""
  square, scaled = gradient * gradient, rate * gradient
  for k in range(len(at)):
    table[at[k], 1] += square
    steps[k] = table[at[k], 1]
  for k in range(len(at)):  # in its own loop: vectorized, eight roots at a time
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
  """Applies Adagrad to weights that are multiplied by dense values."""
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
def _add_usefulness(
  table: np.ndarray,
  at: np.ndarray,
  last: np.ndarray,
  pairs: np.ndarray,
  slope: np.float32,
  useful: np.ndarray,
) -> None:
  """Adds to `useful` by how much an example's pairs reduce its loss.

  To first order from the loss without pairs, before they learn from it.
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
  """Scores n examples, and learns from each after scoring it.

  A weight that an example uses twice is updated twice. Sums run in the order of
  lookups, features and pairs.

  Args:
    rows: f32[W, 2], weight and sum of squared gradients of rows and bins, W a
      power of two. Updated in place, as are the next four.
    pair_rows: f32[W, 2], the same of pairs.
    dense_rows: f32[I + 1, 2], the same of each dense feature and the bias.
    mix: f32[3, 2], the same of the linear logit, of the pairs' logit, and of a
      bias.
    spread: f32[I, 2], mean and variance of each dense feature.
    seen: number of examples learned from before.
    lookups: i32 or i64[n, F, L], rows. -1 is padding.
    dense: f32[n, I].
    labels: f32[n], 1 for a click, else 0.
    pairs: i32[P, 2], pairs of features by number, F and above for the bins of
      dense features.
    useful: f64[P], increased by what pairs take off the loss, or f64[0].
    bag: most lookups of a feature that make a pair with its last one.
    rates: step sizes of Adagrad.
    out: f32[n], receives the click probabilities.
  """
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
  size = len(rows)
  for i in range(len(out)):
    count, in_bags = hash_rows(
      lookups, i, size, bag, at, last, hashes, pairs_at
    )
    looked_up, share = count, _ONE / np.float32(min(seen + i + 1, _LATEST))
    bins_at, bins_last = at[count:], last[features:]
    count += take_dense(
      dense, i, size, spread, share, bins_at, bins_last, values
    )
    between_at = pairs_at[in_bags:]
    paired = in_bags + hash_pairs(last, pairs, size, between_at)
    alone = _sum(rows, at[:count]) + _product(dense_rows, values)
    added = _sum(pair_rows, pairs_at[:paired])
    parts[0] = min(max(alone, -LIMIT), LIMIT)
    parts[1] = min(max(added, -LIMIT), LIMIT)
    # Scored before learning, so that the score does not depend on the label.
    out[i] = _probability(_product(mix, parts))
    _move_few(mix, parts, out[i] - labels[i], rates.mix_rate, _ONE)
    # The linear part learns as if there were no pairs. Pairs learn on top of
    # it.
    slope = _probability(alone) - labels[i]
    if len(useful):
      _add_usefulness(pair_rows, between_at, last, pairs, slope, useful)
    moved, binned = at[:looked_up], at[looked_up:count]
    _move(rows, moved, slope, rates.rate, rates.start, steps)
    _move(rows, binned, slope, rates.bin_rate, rates.start, steps)
    _move_few(dense_rows, values, slope, rates.rate, rates.start)
    slope = _probability(alone + added) - labels[i]
    moved = pairs_at[:paired]
    _move(pair_rows, moved, slope, rates.pair_rate, rates.pair_start, steps)
