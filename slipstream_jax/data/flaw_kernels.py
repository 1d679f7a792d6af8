"""The host loop that looks at a batch where it enters.

It stays out of jaxtyping's import hook, which numba cannot compile through.
"""

import numba
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)

_LARGEST = np.float32(np.finfo(np.float32).max)


@_kernel
def find_flaws(
  lookups: np.ndarray,
  firsts: np.ndarray,
  ends: np.ndarray,
  dense: np.ndarray,
  labels: np.ndarray,
  weights: np.ndarray,
  lookup_weights: np.ndarray,
) -> int:
  """Which arrays of a batch hold a value that they must not.

  It does not stop at the first one: so its loops have no branches, and take
  4 % of the time of finding unique rows.

  Args:
    lookups: global rows, [n, K].
    firsts: first row of each column's table, [K], of the lookups' type.
    ends: the row after its last, likewise.
    dense: f32[n * I].
    labels: f32[n * T].
    weights: f32[n].
    lookup_weights: f32[n * K], or of length 0.

  Returns:
    0, or the sum of: 1, a lookup is neither -1 nor a row of its feature's
    table; 2, a dense feature or a lookup's weight is not finite; 4, a label is
    outside [0, 1]; 8, a weight is negative or not finite.
  """
  examples, columns = lookups.shape
  rows = values = clicks = shares = False
  for i in range(examples):
    for k in range(columns):
      row = lookups[i, k]
      rows |= (row != -1) & ((row < firsts[k]) | (row >= ends[k]))
    shares |= not ((weights[i] >= 0) & (weights[i] <= _LARGEST))
  for i in range(len(labels)):
    clicks |= not ((labels[i] >= 0) & (labels[i] <= 1))
  for i in range(len(dense)):
    values |= not abs(dense[i]) <= _LARGEST  # NaN compares as False
  for i in range(len(lookup_weights)):
    values |= not abs(lookup_weights[i]) <= _LARGEST
  return rows + 2 * values + 4 * clicks + 8 * shares
