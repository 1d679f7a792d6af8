"""Which block of a file each row's record is in, and which blocks are free.

Records are written where there is room, many rows to a block, and never again
in place: a row that is written anew gets another place, and its old one is dead
until its whole block is. So what leaves memory reaches the disk in few writes
that lie side by side, whichever rows it is of. Where dead places have come to
take a third of the file, the live records of the emptiest blocks are moved
together, which frees these.
"""

from collections import deque
from typing import NamedTuple

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.store.disk import space_kernels as kernels

PLACE_BYTES = 4
"""For every row of the tables, by which its record is found."""
_SHARE = 1.5  # blocks that a file may have, of those that its rows fill
_LEAST, _MOST = 8, 1024  # blocks that are kept free to move records to
_MOVED = 1 << 21  # records that are moved at a time, about

Rows = Int[np.ndarray, ' n']
Blocks = Int[np.ndarray, ' b']
"""Numbers of blocks, ascending."""


class Size(NamedTuple):
  """How many blocks a file may have."""

  num_rows: int
  """N."""
  per: int
  """Records of a block."""

  @property
  def spare(self) -> int:
    """Blocks that are kept free, so that records can be moved to them."""
    return min(max(_LEAST, self._full(self.num_rows) // 64), _MOST)

  def most(self, rows: int) -> int:
    """Blocks of a file that so many rows were written to."""
    return int(_SHARE * self._full(rows)) + 2 * self.spare + _LEAST

  def _full(self, rows: int) -> int:
    return -(-rows // self.per)


class Space:
  """Where records of N rows are; one thread writes, others may read.

  Attributes:
    size: how many blocks there may be.
    rows: how many rows have a record.
  """

  def __init__(self, num_rows: int, per: int) -> None:
    """No row has a record.

    Args:
      num_rows: N.
      per: records of a block.
    """
    self.size, self.rows = Size(num_rows, per), 0
    blocks = self.size.most(num_rows)
    # A record's position, and 1; 0: there is none. No memory is touched for
    # rows that are never written.
    few = blocks * per < np.iinfo(np.uint32).max
    self._place = np.zeros(num_rows, np.uint32 if few else np.int64)
    self._live = np.zeros(blocks, np.uint16)  # records of each block
    self._free = deque[int]()
    self._end = 0  # blocks that were ever used

  def has(self, rows: Rows) -> Bool[np.ndarray, ' n']:
    """Which rows have a record."""
    return self.at(rows) >= 0

  def at(self, rows: Rows) -> Rows:
    """The position of each row's record; -1: it has none."""
    return self._place.take(rows).astype(np.int64) - 1

  @property
  def room(self) -> int:
    """Blocks that can be written to, but for those that are spared."""
    most = self.size.most(self.rows) - self._end
    return len(self._free) + most - self.size.spare

  def take(self, count: int) -> Blocks:
    """Blocks to write to, to be given to `put` or to `give_back`."""
    old = [self._free.popleft() for _ in range(min(count, len(self._free)))]
    more = count - len(old)
    new = np.arange(self._end, self._end + more)
    self._end += more
    return np.sort(np.concatenate([np.array(old, np.int64), new]))

  def give_back(self, blocks: Blocks) -> None:
    """They were not written to."""
    self._free.extend(blocks.tolist())

  def put(self, rows: Rows, blocks: Blocks) -> None:
    """Rows have records in these blocks now, one after the other."""
    freed = np.empty(len(rows), np.int64)
    per = self.size.per
    first, count = kernels.put(
      self._place, self._live, rows, blocks, per, freed
    )
    self.rows += first
    # First in, first out: who still reads a block of before has long done so
    # when others are written to it.
    self._free.extend(freed[:count].tolist())

  def crowded(self) -> Rows:
    """Rows whose records are to be moved, those of the emptiest blocks first.

    As many as free a sixteenth of the blocks, or as can be moved at a time.
    """
    used, per = self._live[: self._end], self.size.per
    counts = np.bincount(used, minlength=per + 1)
    counts[0] = 0  # these are free
    freed = np.cumsum(counts * (1 - np.arange(per + 1) / per))
    # Up to how many records a block has that is emptied; none that is full.
    goal = max(2 * self.size.spare, counts.sum() // 16)
    most = min(int(np.searchsorted(freed, goal)), per - 1)
    blocks = np.flatnonzero((used > 0) & (used <= most))
    blocks = blocks[np.argsort(used[blocks], kind='stable')]
    records = np.cumsum(used[blocks], dtype=np.int64)
    blocks = blocks[: 1 + np.searchsorted(records, _MOVED)]
    # Of each block its turn, and 1; 0: it stays.
    turn = np.zeros(len(used), np.int32)
    turn[blocks] = 1 + np.arange(len(blocks))
    rows = np.empty(int(used[blocks].sum()), np.int64)
    turns = np.empty(len(rows), np.int32)
    kernels.rows_in(self._place, turn, per, rows, turns)
    return rows[np.argsort(turns, kind='stable')]
