"""Loops over the places of records; as `kernels`, apart for numba's sake."""

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
  """Gives rows the places of some blocks, one after the other.

  Args:
    place: u32 or i64[N], position of each row's record, and 1; 0: it has none.
    live: u16[M], records of each block.
    rows: i64[n], each once.
    blocks: i64[b], that no record is in; b * per is at least n.
    per: records of a block.
    freed: out, i64[n]; blocks that have no record any more.

  Returns:
    How many rows had none before, and how many blocks are freed.
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

  In proportion to all rows: no other array says which rows a block has.

  Args:
    place: as of `put`.
    turn: i32[M], of the blocks above 0.
    per: records of a block.
    rows: out, i64[n], as many as there are.
    turns: out, i32[n], of the block of each.
  """
  count = 0
  for row in range(len(place)):
    position = np.int64(place[row])
    if position > 0:
      own = turn[(position - 1) // per]
      if own > 0:
        rows[count], turns[count] = row, own
        count += 1
