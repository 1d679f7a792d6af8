"""Index of the block that each row's record is in, and of the free blocks.

Records are written to free blocks, many rows to a block, and never in place. A
row that is written again gets a new position. Its old position is dead until
its whole block is free. So evicted rows reach the disk in few, contiguous
writes. Once dead positions take a third of the file, the live records of the
emptiest blocks are moved together, which frees those blocks.
"""

from collections import deque
from typing import no_type_check

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.hashing import kernel

PLACE_BYTES = 4
"""Bytes of the index per row of the tables."""
_SHARE = 1.5  # most blocks of a file per block that its rows fill
_LEAST, _MOST = 8, 1024  # bounds on the blocks reserved for moving records
_MOVED = 1 << 21  # approximate number of records moved at a time

Rows = Int[np.ndarray, ' n']
Blocks = Int[np.ndarray, ' b']
"""Block numbers, ascending."""


def spare_blocks(num_rows: int, per: int) -> int:
  """Returns the blocks that a file of N rows reserves for moving records."""
  return min(max(_LEAST, -(-num_rows // per) // 64), _MOST)


def most_blocks(rows: int, per: int, spare: int) -> int:
  """Returns the most blocks of a file with records of this many rows."""
  return int(_SHARE * -(-rows // per)) + 2 * spare + _LEAST


class Space:
  """Positions of the records of N rows. One thread writes, others may read.

  Attributes:
    spare: blocks reserved for moving records.
    rows: how many rows have a record.
  """

  def __init__(self, num_rows: int, per: int) -> None:
    """Makes an index without records, for `per` records per block."""
    self.spare, self.rows, self._per = spare_blocks(num_rows, per), 0, per
    blocks = most_blocks(num_rows, per, self.spare)
    # A record's position plus 1, or 0. The system allocates no memory for rows
    # that are never written.
    few = blocks * per < np.iinfo(np.uint32).max
    self._place = np.zeros(num_rows, np.uint32 if few else np.int64)
    self._live = np.zeros(blocks, np.uint16)  # records per block
    self._free = deque[int]()
    self._end = 0  # the number of blocks used so far

  def has(self, rows: Rows) -> Bool[np.ndarray, ' n']:
    """Returns which rows have a record."""
    return self.at(rows) >= 0

  def at(self, rows: Rows) -> Rows:
    """Returns the position of each row's record. -1 if it has none."""
    return self._place.take(rows).astype(np.int64) - 1

  @property
  def room(self) -> int:
    """The number of blocks that can be written to, less the reserved ones."""
    most = most_blocks(self.rows, self._per, self.spare) - self._end
    return len(self._free) + most - self.spare

  def take(self, count: int) -> Blocks:
    """Returns free blocks, to be passed to `put` or to `give_back`."""
    old = [self._free.popleft() for _ in range(min(count, len(self._free)))]
    more = count - len(old)
    new = np.arange(self._end, self._end + more)
    self._end += more
    return np.sort(np.concatenate([np.array(old, np.int64), new]))

  def give_back(self, blocks: Blocks) -> None:
    """Frees blocks from `take` that were not written."""
    self._free.extend(blocks.tolist())

  def put(self, rows: Rows, blocks: Blocks) -> None:
    """Records that rows are now in these blocks, one after the other."""
    freed = np.empty(len(rows), np.int64)
    first, count = _put(self._place, self._live, rows, blocks, self._per, freed)
    self.rows += first
    # First in, first out: a block is reused late, when its readers have
    # finished.
    self._free.extend(freed[:count].tolist())

  def crowded(self) -> Rows:
    """Returns the rows whose records are to be moved, emptiest blocks first.

    Moving them frees about a sixteenth of the blocks. Fewer rows are returned
    if that would move too many at a time.
    """
    used, per = self._live[: self._end], self._per
    counts = np.bincount(used, minlength=per + 1)
    counts[0] = 0  # free blocks
    freed = np.cumsum(counts * (1 - np.arange(per + 1) / per))
    # The most records of a block to empty, never a full block.
    goal = max(2 * self.spare, counts.sum() // 16)
    most = min(int(np.searchsorted(freed, goal)), per - 1)
    blocks = np.flatnonzero((used > 0) & (used <= most))
    blocks = blocks[np.argsort(used[blocks], kind='stable')]
    records = np.cumsum(used[blocks], dtype=np.int64)
    blocks = blocks[: 1 + np.searchsorted(records, _MOVED)]
    # Each block's order of emptying, from 1. 0: not emptied.
    turn = np.zeros(len(used), np.int32)
    turn[blocks] = 1 + np.arange(len(blocks))
    rows = np.empty(int(used[blocks].sum()), np.int64)
    turns = np.empty(len(rows), np.int32)
    _rows_in(self._place, turn, per, rows, turns)
    return rows[np.argsort(turns, kind='stable')]


@kernel
@no_type_check
def _put(
  place: np.ndarray,
  live: np.ndarray,
  rows: np.ndarray,
  blocks: np.ndarray,
  per: int,
  freed: np.ndarray,
) -> tuple[int, int]:
  """Assigns the places of empty blocks to unique rows, one after the other.

  Args:
    place: u32 or i64[N], position of each row's record plus 1. 0: none.
    live: u16[M], records of each block.
    rows: i64[n].
    blocks: i64[b], with places for n records.
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


@kernel
@no_type_check
def _rows_in(
  place: np.ndarray,
  turn: np.ndarray,
  per: int,
  rows: np.ndarray,
  turns: np.ndarray,
) -> None:
  """Finds the rows whose records are in some blocks.

  Its cost is proportional to N, as no array lists the rows of a block.

  Args:
    place: as in `_put`.
    turn: i32[M], above 0 for the blocks to search.
    per: records per block.
    rows: out, i64[n], for as many rows as these blocks have.
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
