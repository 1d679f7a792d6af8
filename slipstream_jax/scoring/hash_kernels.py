"""What an example is to a scorer: places of its weights, and its numbers.

Weights lie in tables of a power of two of places, at hashes of what they stand
for. This file stays out of jaxtyping's import hook, which numba cannot compile
through.
"""

import numpy as np

from slipstream_jax.hashing import hashed, kernel

# Plain numbers would make f64 of all they meet.
_ZERO, _ONE = np.float32(0), np.float32(1)
_LARGEST = np.float32(3e38)
_LINEAR, _FAR, _TINY = np.float32(10), np.float32(8), np.float32(1e-9)
_MANTISSA = np.uint32(21)  # bits of an f32 that a bin leaves out


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
def hash_rows(
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
def take_dense(
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
def hash_pairs(
  last: np.ndarray, pairs: np.ndarray, size: int, at: np.ndarray
) -> int:
  """Places of pairs of features, of those that have both."""
  count = 0
  for p in range(len(pairs)):
    one, other = last[pairs[p, 0]], last[pairs[p, 1]]
    at[count] = _place(one ^ other, size)
    count += one != np.uint64(0) and other != np.uint64(0)
  return count
