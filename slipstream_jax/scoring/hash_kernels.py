"""Compiled loops that hash an example's features to places of weights.

Weights are in tables whose sizes are powers of two.
"""

import numpy as np

from slipstream_jax.hashing import hashed, kernel

# Plain numbers would promote to f64.
_ZERO, _ONE = np.float32(0), np.float32(1)
_LARGEST = np.float32(3e38)
_LINEAR, _FAR, _TINY = np.float32(10), np.float32(8), np.float32(1e-9)
_MANTISSA = np.uint32(21)  # low bits of an f32 that a bin drops


@kernel
def _place(bits: np.uint64, size: int) -> np.int64:
  """Returns a place in a table of `size` weights, a power of two."""
  return np.int64(bits >> np.uint64(32)) & np.int64(size - 1)


@kernel
def _finite(value: np.float32) -> np.float32:
  """Returns the value, clipped to finite numbers. NaN and -0 become 0."""
  if value != value or value == _ZERO:
    return _ZERO
  return min(max(value, -_LARGEST), _LARGEST)


@kernel
def _squashed(value: np.float32) -> np.float32:
  """Returns the value, or beyond `_LINEAR` a logarithm of it, at most 890."""
  size = abs(value)
  if size <= _LINEAR:
    return value
  return np.copysign(_LINEAR * (_ONE + np.log(size / _LINEAR)), value)


@kernel
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
def hash_pairs(
  last: np.ndarray, pairs: np.ndarray, size: int, at: np.ndarray
) -> int:
  """Writes places of pairs whose features are both present, and counts them."""
  count = 0
  for p in range(len(pairs)):
    one, other = last[pairs[p, 0]], last[pairs[p, 1]]
    at[count] = _place(one ^ other, size)
    count += one != np.uint64(0) and other != np.uint64(0)
  return count
