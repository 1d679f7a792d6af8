"""Compiled loops over the positions of records."""

import numba
import numpy as np

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)


@_kernel
def put(
  place: np.ndarray,
  live: np.ndarray,
  rows: np.ndarray,
  blocks: np.ndarray,
  per: int,
  freed: np.ndarray,
) -> tuple[int, int]:
  """Assigns the places of some blocks to rows, one after the other.

  Args:
    place: u32 or i64[N], position of each row's record plus 1. 0: none.
    live: u16[M], records of each block.
    rows: i64[n], unique.
    blocks: i64[b], empty blocks. b * per is at least n.
    per: records per block.
    freed: out, i64[n], receives the blocks that became empty.

  Returns:
    How many rows had no record before, and how many blocks became empty.
  """
  first = count = 0
  for i in range(len(rows)):
    old = np.int64(place[rows[i]])
    block = blocks[i // per]
    place[rows[i]] = block * per + i % per + 1
    live[block] += 1
    if old == 0:
      first += 1
      continue
    block = (old - 1) // per
    live[block] -= 1
    if live[block] == 0:
      freed[count] = block
      count += 1
  return first, count


@_kernel
def rows_in(
  place: np.ndarray,
  turn: np.ndarray,
  per: int,
  rows: np.ndarray,
  turns: np.ndarray,
) -> None:
  """Finds the rows whose records are in some blocks.

  Its cost is proportional to N, as no array lists the rows of a block.

  Args:
    place: as in `put`.
    turn: i32[M], above 0 for the blocks to search.
    per: records per block.
    rows: out, i64[n], as long as there are such rows.
    turns: out, i32[n], `turn` of each row's block.
  """
  count = 0
  for row in range(len(place)):
    position = np.int64(place[row])
    if position > 0:
      own = turn[(position - 1) // per]
      if own > 0:
        rows[count], turns[count] = row, own
        count += 1
