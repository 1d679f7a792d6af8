"""Rows on the hosts of several processes, each of which has its own lanes.

With L numbers on a lane, the row with number n on a process's k-th lane is at
place k * L + n of its store. So a process has memory, or a file, for its own
rows alone.
"""

from collections.abc import Sequence
from typing import no_type_check

from jaxtyping import Int
import numpy as np

from slipstream_jax.distributed.lanes import Lanes
from slipstream_jax.hashing import kernel
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store.base import (
  BeforeWrite,
  FirstRows,
  ignore_writes,
  pieces_of,
  RowStore,
  set_rows,
  Storage,
  TierCounts,
)
from slipstream_jax.store.host_table import row_bytes
from slipstream_jax.store.threads import ALONE, Helpers
from slipstream_jax.types import RowBlock, RowIds


class _Places:
  """The places of a process's rows in its store."""

  def __init__(self, lanes: Lanes, own: Sequence[int]) -> None:
    """Takes the lanes of a group, and the numbers of the process's."""
    self.lanes, self.own = lanes, own
    self._first = np.full(lanes.total, -1)
    self._first[[*own]] = np.arange(len(own)) * lanes.size

  def of(self, rows: RowIds) -> Int[np.ndarray, ' U']:
    """Returns the place of each row, -1 for those of other processes."""
    first = self._first[self.lanes.owners(rows)]
    return np.where(first < 0, -1, first + self.lanes.numbers(rows))

  def rows_at(self, places: Int[np.ndarray, ' U']) -> RowIds:
    """Returns the row at each place. Past the last row it is that one."""
    number, place = np.divmod(places, self.lanes.size)
    rows = np.empty(len(places), np.int64)
    for k, lane in enumerate(self.own):
      at = np.flatnonzero(number == k)
      rows[at] = self.lanes.rows_of(lane, place[at])
    return np.minimum(rows, self.lanes.num_rows - 1)

  def first(self, first: FirstRows) -> FirstRows:
    """Returns the first values of the process's rows, by place."""
    size = len(self.own) * self.lanes.size
    none = first.rows(NO_ROWS)

    def rows(places: RowIds) -> RowBlock:
      return first.rows(self.rows_at(places))

    def block() -> RowBlock:
      # The system allocates no page for zeros that nobody writes.
      leaves = [
        np.zeros((size, *leaf.shape[1:]), leaf.dtype)
        for leaf in (none.rows, *none.state)
      ]
      for places in pieces_of(size, row_bytes(none)):
        values = rows(places)
        for leaf, some in zip(
          leaves, (values.rows, *values.state), strict=True
        ):
          if some.reshape(-1).view(np.uint8).any():  # -0.0 is no zero
            leaf[places[0] : places[-1] + 1] = some
      return RowBlock(leaves[0], tuple(leaves[1:]))

    share = size / max(first.num_rows, 1)
    tables = {name: round(share * rows) for name, rows in first.tables.items()}
    of = first.table_of
    table_of = None if of is None else lambda at: of(self.rows_at(at))
    return FirstRows(size, rows, block, tables=tables, table_of=table_of)


class OwnRows:
  """A store of one process's rows, as the group numbers them. See `RowStore`.

  It has no values for rows of other processes: they are gathered as zeros, and
  scattering leaves them out.
  """

  def __init__(self, store: RowStore, places: _Places) -> None:
    """Takes over the store of the rows by place."""
    self._store, self._places = store, places
    self.num_rows, self.row_bytes = places.lanes.num_rows, store.row_bytes
    self.before_write: BeforeWrite = ignore_writes

  @property
  def counts(self) -> TierCounts | None:
    """The disk counters of the process's store."""
    return self._store.counts

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Returns copies of rows, padded with zeros to `size` rows."""
    places = self._places.of(rows)
    own = np.flatnonzero(places >= 0)
    if len(own) == len(rows):
      return self._store.gather(places, size, helpers)
    block = self._store.gather(NO_ROWS, size)
    set_rows(block, own, self._store.gather(places[own], len(own), helpers))
    return block

  def scatter(
    self, rows: RowIds, block: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Writes those of the first U rows of a block that are the process's."""
    places = self._places.of(rows)
    own = np.flatnonzero(places >= 0)
    if len(own) < len(rows):
      rows, places = rows[own], places[own]
      block = RowBlock(block.rows[own], tuple(x[own] for x in block.state))
    self.before_write(rows)
    self._store.scatter(places, block, helpers)

  def prefetch(self, rows: RowIds) -> None:
    """Announces those of the rows that are the process's."""
    places = self._places.of(rows)
    self._store.prefetch(places[places >= 0])

  def reset(self, first: FirstRows) -> None:
    """Sets all rows to their first values."""
    self.before_write(None)
    self._store.reset(self._places.first(first))

  def table(self) -> RowBlock:
    """Returns the process's rows by place. The caller must not write them."""
    return self._store.table()

  def drop(self) -> None:
    """Frees the memory and disk of the rows."""
    self.before_write(None)
    self._store.drop()

  def close(self) -> None:
    """Ends threads and frees files."""
    self._store.close()


def open_own(
  storage: Storage,
  groups: Sequence[FirstRows],
  lanes: Sequence[Lanes],
  own: Sequence[int],
) -> tuple[OwnRows, ...]:
  """Returns an empty store per group, of the rows of some of its lanes."""
  places = [_Places(one, own) for one in lanes]
  pairs = zip(places, groups, strict=True)
  stores = storage.open([place.first(first) for place, first in pairs])
  return tuple(map(OwnRows, stores, places))


def own_bits(
  bits: Int[np.ndarray, ' n'], lanes: Lanes, own: Sequence[int]
) -> Int[np.ndarray, ' n']:
  """Returns marks of rows, as in `DirtyRows.bits`, without those of others."""
  result = bits.copy()
  is_own = np.zeros(lanes.total, bool)
  is_own[[*own]] = True
  for start in range(0, len(bits), _PART):
    part = result[start : start + _PART]
    rows = np.flatnonzero(np.unpackbits(part, bitorder='little'))
    _clear(part, rows[~is_own[lanes.owners(8 * start + rows)]])
  return result


_PART = 1 << 16  # bytes of bits whose rows are listed at a time


@kernel
@no_type_check
def _clear(bits: np.ndarray, rows: np.ndarray) -> None:
  for row in rows:
    bits[row >> 3] &= np.uint8(~(1 << (row & 7)) & 255)
