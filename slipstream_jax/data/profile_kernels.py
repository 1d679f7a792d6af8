"""Loops over profiles; apart from jaxtyping's import hook, for numba's sake."""

import numba
import numpy as np


@numba.njit(cache=True, nogil=True, boundscheck=False)
def count(lookups: np.ndarray, counts: np.ndarray) -> int:
  """Counts how often each row comes.

  Args:
    lookups: global rows, integer[n]; -1 is padding.
    counts: i32[N], added to.

  Returns:
    -1; or the place of a lookup of a row that no table has, where it ends.
  """
  for i in range(len(lookups)):
    row = lookups[i]
    if row >= len(counts):
      return i
    if row >= 0:
      counts[row] += 1
  return -1
