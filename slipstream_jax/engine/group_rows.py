"""All rows of one group: on the host, on the device, and in transfer.

This file replaces and reads all rows. `group_engine` moves those of a step.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from slipstream_jax.engine.buffers import to_device
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.device_rows import AllDeviceRows, DeviceRows
from slipstream_jax.engine.dirty.budget import Budget
from slipstream_jax.engine.dirty.copy_on_write import CopyOnWriteStore
from slipstream_jax.engine.dirty.draining import Drain
from slipstream_jax.engine.write_back import WriteBackQueue
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.store import host_table
from slipstream_jax.store.base import FirstRows, pieces_of, RowStore
from slipstream_jax.types import RowBlock, RowIds, Slots

Piece = tuple[RowIds, RowBlock]
"""Some unique rows and their values."""


class GroupRows:
  """All rows of a group and their row state. Each row has one current place.

  Attributes:
    num_rows: N.
    row_bytes: bytes that one row and its state take on the link.
    host: keeps the rows that the device does not.
    kept: the rows that the device keeps.
    write_backs: rows on their way from the device to the host.
    none: an empty block of the group's dtypes and shapes.
  """

  kept: DeviceRows
  write_backs: WriteBackQueue

  def __init__(
    self, host: RowStore, first: FirstRows, count: Callable[[Counters], None]
  ) -> None:
    """Has no rows before `reset` or `restore`.

    Args:
      host: a store for this group only.
      first: of the group.
      count: called with what is moved to the device.
    """
    self.host, self.num_rows = CopyOnWriteStore(host), first.num_rows
    self.row_bytes, self.none = host.row_bytes, first.rows(NO_ROWS)
    self._count = count
    self._free_rows()

  def reset(
    self, keeps: RowIds | None, first: FirstRows, pieces: Iterable[Piece] = ()
  ) -> None:
    """Sets all rows to their first values, or to those of the pieces.

    Args:
      keeps: the row in each slot of the device, -1 if empty. None: the device
        keeps all rows.
      first: first values of the rows.
      pieces: other values of some rows. Later pieces replace earlier ones.
    """
    self._free_rows()
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
    """Replaces all rows by the host table `table` and takes it over."""
    self._free_rows()
    if keeps is None:
      self._keep_all(table)
    else:
      self.host.fill(table)
      self._keep_some(keeps)

  def place(self, keeps: RowIds) -> None:
    """Moves rows so that the device keeps those of `keeps`, as of `reset`."""
    self.write_back()
    self._free_rows()
    self._keep_some(keeps)

  def _free_rows(self) -> None:
    # Frees memory before allocating more.
    self.kept = DeviceRows(self.none, NO_ROWS)
    self.write_backs = WriteBackQueue(self.host)

  def _keep_all(self, table: RowBlock) -> None:
    self.host.drop()
    self.kept = AllDeviceRows(to_device(table, owned=True))
    self._count_loads(self.num_rows)

  def _keep_some(self, keeps: RowIds) -> None:
    if len(keeps):
      # Empty slots get the values of row 0, which are never read.
      block = self.copy_of(np.maximum(keeps, 0), len(keeps))
      # A copy, as `write` changes it and `keeps` may be the hot rows' own.
      self.kept = DeviceRows(block, keeps.copy())
    self._count_loads(int((keeps >= 0).sum()))

  def _count_loads(self, rows: int) -> None:
    nbytes = rows * self.row_bytes
    self._count(Counters(rows_loaded=rows, bytes_loaded=nbytes))

  def keep(self, rows: RowIds) -> None:
    """Keeps exactly these rows on the device. Stores those kept before."""
    self.write_back()
    self.write_backs = WriteBackQueue(self.host)
    self.kept = DeviceRows(self.copy_of(rows, len(rows)), rows.copy())

  @property
  def all_kept(self) -> bool:
    """Whether all rows are on the device, and none on the host."""
    return self.kept.rows is None

  def write_back(self) -> None:
    """Updates the host's rows with those of the device, if the host has any."""
    self.write_backs.settle(last=True)
    self.kept.write_back(self.host)

  def read_back(self) -> RowBlock:
    """Returns all N rows with their state as host arrays, read-only."""
    self.write_backs.settle(last=True)
    return self.kept.read_back(self.host)

  def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
    """Yields copies of rows `start` to `stop` with their state, ascending.

    Never holds all of them in memory. No step may be taken before the last
    piece.
    """
    self.write_back()
    end = self.num_rows if stop is None else stop
    for rows in pieces_of(end - start, self.row_bytes):
      yield start + rows, self.kept.read(self.host, start + rows)

  def drain(self, bits: np.ndarray, budget: Budget) -> Drain:
    """Takes a snapshot of the marked rows, for another thread to read.

    That thread can begin at once. Call `save_of_device` before the next step.

    Args:
      bits: as in `mark_kernels`, taken over.
      budget: bounds the copies of rows that are not read yet.
    """
    self.write_backs.settle(last=True)
    return self.host.drain(bits, budget)

  def save_of_device(self, drain: Drain) -> None:
    """Copies the device's rows of a drain. May wait for its budget."""
    for rows, slots in self.kept.marked(drain.bits):

      def take(
        some: RowIds, rows: RowIds = rows, slots: Slots = slots
      ) -> RowBlock:
        return self.kept.gather(slots[np.searchsorted(rows, some)])

      drain.save(rows, take)
    drain.ready()

  def like(self) -> RowBlock:
    """Returns host arrays for all rows and their state, to pass to `restore`.

    If the rows are in host memory, these are their arrays.
    """
    return self.host.like()

  def copy_of(self, rows: RowIds, size: int) -> RowBlock:
    """Copies rows of the host to the device, padded with zeros to `size`."""
    on_device: RowBlock = to_device(self.host.gather(rows, size), owned=True)
    return on_device
