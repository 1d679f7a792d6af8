"""Stack distances of rows: a Fenwick tree over the times of their last use.

The distance of a use is the number of rows used since the row's last one,
itself included: the smallest LRU cache that still holds it (Mattson et al.,
1970). The tree counts, in O(log T), the rows last used after a given time.
As `kernels`, this file stays out of jaxtyping's import hook.
"""

import numba
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)


@_kernel
def _add(tree: np.ndarray, at: int, change: int) -> None:
  # The lowest set bit, `at & -at`, is how many times entry `at` sums up.
  while at < len(tree):
    tree[at] += change
    at += at & -at


@_kernel
def _sum_to(tree: np.ndarray, at: int) -> int:
  total = 0
  while at > 0:
    total += tree[at]
    at -= at & -at
  return total


@_kernel
def use(
  tree: np.ndarray,
  last: np.ndarray,
  rows: np.ndarray,
  clock: int,
  used: int,
  distances: np.ndarray,
) -> int:
  """Takes one batch; all its distances are those of before the batch.

  Args:
    tree: i32[T + 1], 1 at the time of every row's last use, as a Fenwick
      tree; changed in place.
    last: i32[N], time of each row's last use, 0 if there was none; changed.
    rows: integer[U], unique; the first one counts as used first.
    clock: time of the last use so far; clock + U may not pass T.
    used: rows used so far.
    distances: out, i64[U]; 0 where a row was never used.

  Returns:
    Rows used after the batch.
  """
  # All distances come first, as a batch is moved whole: none of its rows may
  # push another out before that is found.
  for i in range(len(rows)):
    before = last[rows[i]]
    # Rows used after it, and itself; times start at 1, so 0 means never.
    distances[i] = used - _sum_to(tree, before) + 1 if before else 0
  for i in range(len(rows)):
    before = last[rows[i]]
    if before:
      _add(tree, before, -1)
    else:
      used += 1
    clock += 1
    last[rows[i]] = clock
    _add(tree, clock, 1)
  return used


@_kernel
def renumber(tree: np.ndarray, last: np.ndarray, rows: np.ndarray) -> None:
  """Gives `rows`, oldest use first, the times 1, 2, ...; empties the rest."""
  tree[:] = 0
  for i in range(len(rows)):
    last[rows[i]] = i + 1
    tree[i + 1] = 1
  # Each entry is added to the next that spans it: linear in the times.
  for at in range(1, len(tree)):
    above = at + (at & -at)
    if above < len(tree):
      tree[above] += tree[at]
