"""Stack distances of rows: a Fenwick tree over the times of their last use.

The distance of a use is the number of rows used since the row's last use,
itself included. It is the size of the smallest LRU cache that still holds the
row (Mattson et al., 1970). The tree counts the rows last used after a given
time in O(log T).
"""

import numba
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)


@_kernel
def _add(tree: np.ndarray, at: int, change: int) -> None:
  # Entry `at` sums up `at & -at` times, its lowest set bit.
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
  """Computes the distances of a batch's rows, then marks them as used.

  Args:
    tree: i32[T + 1], Fenwick tree of ones at the time of every row's last use.
      Changed in place.
    last: i32[N], time of each row's last use, 0 if never used. Changed in
      place.
    rows: integer[U], unique. The first one counts as used first.
    clock: time of the last use so far. clock + U must not pass T.
    used: rows used so far.
    distances: out, i64[U]. 0 where a row was never used.

  Returns:
    How many rows were used after the batch.
  """
  # All distances come first, as a batch is moved as a whole and its rows must
  # not affect each other's distances.
  for i in range(len(rows)):
    before = last[rows[i]]
    # Times start at 1, so 0 means never.
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
  """Clears the tree and sets last uses of `rows`, oldest first, to 1, 2, ..."""
  tree[:] = 0
  for i in range(len(rows)):
    last[rows[i]] = i + 1
    tree[i + 1] = 1
  # Linear construction: each entry is added to the next one that spans it.
  for at in range(1, len(tree)):
    above = at + (at & -at)
    if above < len(tree):
      tree[above] += tree[at]
