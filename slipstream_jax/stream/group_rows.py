"""Where the rows of one group are: on the host, on the device, on their way.

All of them together are given here, replaced and read; what a step moves is of
`group_engine`.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store import host_table
from slipstream_jax.store.base import FirstRows, pieces_of, RowStore
from slipstream_jax.stream.buffers import to_device
from slipstream_jax.stream.counters import Counters
from slipstream_jax.stream.device.kept import AllRows, Kept
from slipstream_jax.stream.dirty.budget import Budget
from slipstream_jax.stream.dirty.claimed import Claimed
from slipstream_jax.stream.dirty.draining import Drain
from slipstream_jax.stream.leaving import Leaving
from slipstream_jax.types import RowBlock, RowIds, Slots

Piece = tuple[RowIds, RowBlock]
"""Some rows, each once, and what they are."""


class GroupRows:
  """All rows of a group and their row state; each has one place.

  Attributes:
    num_rows: N.
    row_bytes: what one row and its state take on the link.
    host: keeps the rows that the device does not.
    kept: those that the device keeps.
    leaving: those on their way from there.
    none: no row, of the group's dtypes and shapes.
  """

  kept: Kept
  leaving: Leaving

  def __init__(
    self, host: RowStore, first: FirstRows, count: Callable[[Counters], None]
  ) -> None:
    """Has no rows before `reset` or `restore`.

    Args:
      host: is this group's alone.
      first: of the group.
      count: told what comes to the device.
    """
    self.host, self.num_rows = Claimed(host), first.num_rows
    self.row_bytes, self.none = host.row_bytes, first.rows(NO_ROWS)
    self._count = count
    self._let_go()

  def reset(
    self, keeps: RowIds | None, first: FirstRows, pieces: Iterable[Piece] = ()
  ) -> None:
    """Makes all rows those before their first step, or those of the pieces.

    Args:
      keeps: the row in each slot of the device, -1 where it is empty; None:
        the device keeps all.
      first: what rows are before their first step.
      pieces: rows that are others; later ones come after earlier ones.
    """
    self._let_go()
    if keeps is None:
      table = first.block()
      for some, block in pieces:
        host_table.scatter(table, some, block)
      self._keep_all(table)
      return
    self.host.reset(first)
    for some, block in pieces:
      self.host.scatter(some, block)
    self._keep_some(keeps)

  def restore(self, keeps: RowIds | None, table: RowBlock) -> None:
    """Replaces all rows by those of `table`, a host table it takes over."""
    self._let_go()
    if keeps is None:
      self._keep_all(table)
    else:
      self.host.fill(table)
      self._keep_some(keeps)

  def place(self, keeps: RowIds) -> None:
    """Moves rows so that the device keeps those of `keeps`, as of `reset`."""
    self.write_back()
    self._let_go()
    self._keep_some(keeps)

  def _let_go(self) -> None:
    # Gives memory back before taking more.
    self.kept = Kept(self.none, NO_ROWS)
    self.leaving = Leaving(self.host)

  def _keep_all(self, table: RowBlock) -> None:
    self.host.drop()
    self.kept = AllRows(to_device(table, owned=True))
    self._count_loads(self.num_rows)

  def _keep_some(self, keeps: RowIds) -> None:
    if len(keeps):
      # Empty slots get the values of row 0, which nobody reads.
      block = self.copy_of(np.maximum(keeps, 0), len(keeps))
      # `write` changes its list; that of pinned is the hot rows' own.
      self.kept = Kept(block, keeps.copy())
    self._count_loads(int((keeps >= 0).sum()))

  def _count_loads(self, rows: int) -> None:
    nbytes = rows * self.row_bytes
    self._count(Counters(rows_loaded=rows, bytes_loaded=nbytes))

  def keep(self, rows: RowIds) -> None:
    """Keeps these rows on the device, and no others; those kept are stored."""
    self.write_back()
    self.leaving = Leaving(self.host)
    self.kept = Kept(self.copy_of(rows, len(rows)), rows.copy())

  @property
  def all_kept(self) -> bool:
    """Whether all rows are on the device, and none on the host."""
    return self.kept.rows is None

  def write_back(self) -> None:
    """Brings the host's rows up to date, where the host has rows."""
    self.leaving.settle(last=True)
    self.kept.write_back(self.host)

  def read_back(self) -> RowBlock:
    """All N rows with their state as host arrays, not to be written."""
    self.leaving.settle(last=True)
    return self.kept.read_back(self.host)

  def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
    """Rows from `start` to `stop` with their state as copies, ascending.

    At no time are all of them in memory for it. No step may be taken before
    the last piece.
    """
    self.write_back()
    end = self.num_rows if stop is None else stop
    for rows in pieces_of(end - start, self.row_bytes):
      yield start + rows, self.kept.read(self.host, start + rows)

  def drain(self, bits: np.ndarray, budget: Budget) -> Drain:
    """The rows of these bits, as they are now, for another thread to take.

    It can begin at once; `save_of_device` is to follow, before the next step.

    Args:
      bits: as in `mark_kernels`, taken over.
      budget: of what is to be copied before it is taken.
    """
    self.leaving.settle(last=True)
    return self.host.drain(bits, budget)

  def save_of_device(self, drain: Drain) -> None:
    """Copies what the device has of a drain's rows; may wait for its budget."""
    for rows, slots in self.kept.marked(drain.bits):

      def take(
        some: RowIds, rows: RowIds = rows, slots: Slots = slots
      ) -> RowBlock:
        return self.kept.gather(slots[np.searchsorted(rows, some)])

      drain.save(rows, take)
    drain.ready()

  def like(self) -> RowBlock:
    """Host arrays for all rows and their state, to fill and to `restore`.

    Where rows are in host memory, they are those.
    """
    return self.host.like()

  def copy_of(self, rows: RowIds, size: int) -> RowBlock:
    """Rows of the host on the device, padded with zeros to `size`."""
    on_device: RowBlock = to_device(self.host.gather(rows, size), owned=True)
    return on_device
