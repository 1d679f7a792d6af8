"""A factorization machine over hashes, one example after the other."""

import numba
import numpy as np

from slipstream_jax.hashing import hashed

_kernel = numba.njit(cache=True, nogil=True, error_model='numpy')
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)


@_kernel
def learn(
  rows: np.ndarray,
  factors: np.ndarray,
  dense_rows: np.ndarray,
  lookups: np.ndarray,
  dense: np.ndarray,
  labels: np.ndarray,
  rate: np.float32,
  out: np.ndarray,
) -> None:
  """Click probabilities of n examples, each learned from after it was scored.

  Args:
    rows: f32[W, 2], weight and sum of squared gradients, W a power of two;
      updated in place, as the next two.
    factors: f32[W, K + 1], K factors of each row and the mean of their squared
      gradients, summed.
    dense_rows: f32[I + 1, 2], as rows, of dense features and the bias.
    lookups: i32 or i64[n, F, L], -1 padding.
    dense: f32[n, I].
    labels: f32[n].
    rate: of Adagrad.
    out: f32[n].
  """
  _, features, length = lookups.shape
  width = factors.shape[1] - 1
  at = np.empty(features * length, np.int64)
  values = np.ones(len(dense_rows), np.float32)
  sums = np.empty(width, np.float32)
  for i in range(len(out)):
    count = 0
    for f in range(features):
      for k in range(length):
        if lookups[i, f, k] >= 0:
          bits = hashed(np.uint64(0), lookups[i, f, k])
          place = np.int64(bits >> np.uint64(32))
          at[count] = place & np.int64(len(rows) - 1)
          count += 1
    values[:-1] = dense[i]
    logit = _ZERO
    for j in range(len(values)):
      logit += dense_rows[j, 0] * values[j]
    sums[:] = _ZERO
    squares = _ZERO
    for k in range(count):
      logit += rows[at[k], 0]
      for d in range(width):
        factor = factors[at[k], d]
        sums[d] += factor
        squares += factor * factor
    logit += _HALF * ((sums * sums).sum() - squares)
    out[i] = _ONE / (_ONE + np.exp(-min(max(logit, -12), 12)))
    slope = np.float32(out[i] - labels[i])
    for j in range(len(values)):
      step = slope * values[j]
      dense_rows[j, 1] += step * step
      dense_rows[j, 0] -= rate * step / np.sqrt(dense_rows[j, 1])
    for k in range(count):
      row = at[k]
      rows[row, 1] += slope * slope
      rows[row, 0] -= rate * slope / np.sqrt(rows[row, 1])
      total = _ZERO
      for d in range(width):
        step = slope * (sums[d] - factors[row, d])
        total += step * step
      factors[row, width] += total / np.float32(width)
      scale = rate * slope / np.sqrt(factors[row, width])
      for d in range(width):
        factors[row, d] -= scale * (sums[d] - factors[row, d])
