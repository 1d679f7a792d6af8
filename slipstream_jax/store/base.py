"""Interface of row stores: the rows of a group that the device does not keep.

All stores return the same bits. A row has the values last written to it, or its
first values if it was never written. The step's thread calls `gather` and
`scatter`. Another thread may call `prefetch`, and may `gather` rows that no
thread is writing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from slipstream_jax.store.threads import ALONE, Helpers
from slipstream_jax.types import Positions, RowBlock, RowIds

PIECE_BYTES = 1 << 23
"""Approximate number of bytes per piece in loops over all rows."""


class FirstRows(NamedTuple):
  """The values of a group's rows before their first step."""

  num_rows: int
  """N, the number of rows of the group."""
  rows: Callable[[RowIds], RowBlock]
  """Returns the values of some rows [U, ...]."""
  block: Callable[[], RowBlock]
  """Returns the values of all rows, [N, ...], in new arrays."""
  drawn: Sequence[tuple[int, int]] = ()
  """Ranges [first, end) of rows that a user's function draws. Another machine
  may round them otherwise, so that a checkpoint has all of them."""
  tables: Mapping[str, int] = {}
  """Rows of each table by name, in their order."""
  table_of: Callable[[RowIds], np.ndarray] | None = None
  """Returns the number of each row's table, i64[U]. None: `tables` is empty."""


class TierCounts(NamedTuple):
  """Counters of a store on a disk, in rows unless a field says otherwise."""

  gathered: int = 0
  """Rows that were gathered."""
  hits: int = 0
  """Gathered rows found in memory: in the cache or in the write queue."""
  fetched: int = 0
  """Rows read from the disk by `prefetch`."""
  missed: int = 0
  """Rows read from the disk by `gather`."""
  first: int = 0
  """Rows never written, whose first values were computed."""
  written: int = 0
  """Rows that reached the disk."""
  waited_s: float = 0.0
  """Seconds that callers waited for a fetch or for room in the queue."""
  bytes_read: int = 0
  """Bytes of whole blocks, including those of rows moved within the file."""
  bytes_written: int = 0
  """As `bytes_read`."""


BeforeWrite = Callable[[RowIds | None], None]
"""Called with the rows that a store is about to write. None: it is about to
replace or drop all rows."""


def ignore_writes(rows: RowIds | None) -> None:
  """Does nothing: the `before_write` of a new store."""


@runtime_checkable
class RowStore(Protocol):
  """All rows of a group with their row state, numbered from 0 to N - 1.

  Attributes:
    num_rows: N.
    row_bytes: bytes that one row and its state take on the link.
    before_write: called before rows change, by the thread that changes them. A
      snapshot uses it to copy their old values, and may call `gather`.

  A new store is empty: call `reset` first. A call raises OSError when it
  notices a disk error, which an earlier call may have caused. No row is lost,
  and the call can be repeated.
  """

  num_rows: int
  row_bytes: int
  before_write: BeforeWrite

  @property
  def counts(self) -> TierCounts | None:
    """The disk counters, or None without a disk."""

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Returns copies of unique rows, i64[U], padded with zeros to `size` rows.

    The helpers are threads that share the copying.
    """

  def scatter(
    self, rows: RowIds, block: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Writes the first U rows of a block [P, ...] to unique rows, i64[U].

    Does not keep the block.
    """

  def prefetch(self, rows: RowIds) -> None:
    """Announces that unique rows, i64[U], will be gathered soon."""

  def reset(self, first: FirstRows) -> None:
    """Sets all rows to their first values."""

  def table(self) -> RowBlock:
    """Returns all rows [N, ...]. The caller must not write to them."""

  def drop(self) -> None:
    """Frees the memory and disk of the rows. Call `reset` next."""

  def close(self) -> None:
    """Ends threads and frees files. Idempotent."""


class Storage(NamedTuple):
  """A way to keep rows on the host."""

  name: str
  """Its key in `STORES`."""
  open: Callable[[Sequence[FirstRows]], tuple[RowStore, ...]]
  """Returns an empty store for each group, given the groups' first rows."""


def set_rows(block: RowBlock, at: Positions, values: RowBlock) -> None:
  """Writes all rows of `values` to positions of a block."""
  for leaf, some in zip(
    (block.rows, *block.state), (values.rows, *values.state), strict=True
  ):
    leaf[at] = some


def pieces_of(num_rows: int, row_bytes: int) -> Iterator[RowIds]:
  """Yields all row numbers, ascending, in pieces of about `PIECE_BYTES`."""
  step = max(1, PIECE_BYTES // max(row_bytes, 1))
  for start in range(0, num_rows, step):
    yield np.arange(start, min(start + step, num_rows))
