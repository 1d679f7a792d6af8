"""What keeps a group's rows on the host: in memory, or on a disk as well.

A store gives the same bits whatever it keeps them in: what was written last,
and of a row that was never written what it is before its first step. The step's
thread gathers and scatters. Another one may call `prefetch`, and `gather` of
rows that nobody scatters meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from slipstream_jax.store.helpers import ALONE, Helpers
from slipstream_jax.types import RowBlock, RowIds

PIECE_BYTES = 1 << 23
"""About what is read or written at a time where all rows are gone through."""


class FirstRows(NamedTuple):
  """What rows of a group are before their first step."""

  num_rows: int
  """N, rows of the group."""
  rows: Callable[[RowIds], RowBlock]
  """Some of them, [U, ...]; none at all gives dtypes and shapes."""
  block: Callable[[], RowBlock]
  """All of them, [N, ...], in arrays of their own."""


class TierCounts(NamedTuple):
  """What a store on a disk did so far: rows, bytes of the disk, and seconds."""

  gathered: int = 0
  """That were asked for."""
  hits: int = 0
  """Of those, found in memory: in the cache, or on their way to the disk."""
  fetched: int = 0
  """Read from the disk ahead of being asked for."""
  missed: int = 0
  """Read from the disk when they were asked for."""
  first: int = 0
  """Worked out, as they were never written."""
  written: int = 0
  """That reached the disk."""
  waited_s: float = 0.0
  """Seconds that the caller waited for what was fetched, or for room."""
  bytes_read: int = 0
  """Of the disk, in whole blocks; those of rows that were moved, too."""
  bytes_written: int = 0
  """Likewise."""


@runtime_checkable
class RowStore(Protocol):
  """All rows of a group with their row state, numbered from 0 to N - 1.

  Attributes:
    num_rows: N.
    row_bytes: what one row and its state take on the link.
    counts: what it did with its disk so far; None: it has none.

  A store is made empty: `reset` or `fill` comes before anything else. What a
  disk refuses is raised as OSError by the call that finds out, which may be a
  later one; no row is lost by it, and the call may be repeated.
  """

  num_rows: int
  row_bytes: int

  @property
  def counts(self) -> TierCounts | None:
    """As the attribute says."""
    ...

  def gather(
    self, rows: RowIds, size: int, helpers: Helpers = ALONE
  ) -> RowBlock:
    """Copies of some rows as they are, padded with zeros to `size` rows.

    Args:
      rows: i64[U], each once, in any order.
      size: P, at least U.
      helpers: threads to copy by.
    """
    ...

  def scatter(
    self, rows: RowIds, block: RowBlock, helpers: Helpers = ALONE
  ) -> None:
    """Writes the first U rows of a block [P, ...]; it may not be kept.

    Args:
      rows: i64[U], each once.
      block: of the store's dtypes.
      helpers: threads to copy by.
    """
    ...

  def prefetch(self, rows: RowIds) -> None:
    """Says that these rows, i64[U], each once, are gathered soon.

    It changes no number, and may be called by a thread other than the step's.
    """
    ...

  def flush(self) -> None:
    """Waits until nothing is on its way to a disk.

    Raises:
      OSError: what could not be written; it is tried again by the next call.
    """
    ...

  def touched(self) -> Iterator[RowIds]:
    """Rows that may differ from their first values, ascending, in pieces.

    None may be written meanwhile. A store in memory does not know: it gives all
    of them. Those that only the device has are not among them.
    """
    ...

  def reset(self, first: FirstRows) -> None:
    """Makes all rows those before their first step.

    Args:
      first: of this group; from here on, rows that are not written are these.
    """
    ...

  def fill(self, table: RowBlock) -> None:
    """Replaces all rows by those of a host table [N, ...], taken over."""
    ...

  def like(self) -> RowBlock:
    """Host arrays [N, ...] of any values, to be written and given to `fill`."""
    ...

  def table(self) -> RowBlock:
    """All rows [N, ...], not to be written; a store on a disk reads them."""
    ...

  def drop(self) -> None:
    """Gives back what the rows take; `reset` or `fill` comes next."""
    ...

  def close(self) -> None:
    """Ends threads and gives back files; may be called again."""
    ...


class Storage(NamedTuple):
  """A way to keep rows on the host."""

  name: str
  """Its key in `STORES`."""
  open: Callable[[Sequence[FirstRows]], tuple[RowStore, ...]]
  """A store, still empty, of each group, by what their rows are at first."""


def pieces_of(num_rows: int, row_bytes: int) -> Iterator[RowIds]:
  """All numbers of rows, ascending, in pieces of about `PIECE_BYTES`."""
  step = max(1, PIECE_BYTES // max(row_bytes, 1))
  for start in range(0, num_rows, step):
    yield np.arange(start, min(start + step, num_rows))
