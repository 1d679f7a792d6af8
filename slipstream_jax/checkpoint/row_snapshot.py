"""Snapshots of rows for a checkpoint, taken while training continues.

A snapshot is created between two steps, and yields its rows with their values
of that moment. The device's rows are copied at once. All others stay in place,
and another thread reads them piece by piece. A write to a row that was not read
yet first saves its old value. When saved values have used up their budget, the
step waits for the other thread.
"""

from collections.abc import Callable, Iterator
import operator
import threading
import time
from typing import NamedTuple, no_type_check

import jax
import numpy as np

from slipstream_jax.engine.buffers import to_host
from slipstream_jax.engine.dirty import mark
from slipstream_jax.engine.group_rows import GroupRows
from slipstream_jax.hashing import kernel
from slipstream_jax.store.base import set_rows
from slipstream_jax.types import RowBlock, RowIds

_PIECE_BYTES = 1 << 19
_DISK_PIECE_BYTES = 1 << 16
"""Most bytes read at a time from a disk, as steps wait for rows being read."""

Gather = Callable[[RowIds], RowBlock]
"""Copies rows with their current values."""


class Budget:
  """Bytes that two threads take and release.

  A single piece larger than the limit is allowed when it is alone.

  Attributes:
    seconds: that takers waited so far.
    most: the most bytes that were taken at a time.
  """

  def __init__(self, limit: int) -> None:
    self._limit, self._taken, self._open = limit, 0, True
    self._changed = threading.Condition()
    self.seconds, self.most = 0.0, 0

  def take(self, nbytes: int) -> None:
    """Waits until there is room, and takes it."""
    with self._changed:
      if self._is_full(nbytes):
        started = time.perf_counter()
        self._changed.wait_for(lambda: not self._is_full(nbytes))
        self.seconds += time.perf_counter() - started
      self._taken += nbytes
      self.most = max(self.most, self._taken)

  def _is_full(self, nbytes: int) -> bool:
    return self._open and self._taken > 0 and self._taken + nbytes > self._limit

  def give(self, nbytes: int) -> None:
    """Releases bytes."""
    with self._changed:
      self._taken -= nbytes
      self._changed.notify_all()

  def close(self) -> None:
    """Ends all waits, now and later, as nothing will be released any more."""
    with self._changed:
      self._open = False
      self._changed.notify_all()


class _SavedRows(NamedTuple):
  """Rows with their saved values of the snapshot."""

  rows: RowIds
  """Ascending."""
  block: RowBlock
  """On host or device. It may be padded."""
  nbytes: int


class _SnapshotClosedError(Exception):
  """Raised by `pieces` if the snapshot was closed before all rows were read."""


class RowSnapshot:
  """Snapshot of the rows of a group for a checkpoint.

  The training thread calls `save`, `ready` and `before_write`. Another thread
  iterates over `pieces`. Either may call `close`.
  """

  def __init__(
    self,
    bits: np.ndarray,
    num_rows: int,
    row_bytes: int,
    gather: Gather,
    budget: Budget,
    piece_rows: int = 1 << 13,
  ) -> None:
    """Starts before the first row is read.

    Args:
      bits: the marked rows, as in `DirtyRows.bits`. Read-only.
      num_rows: N, rows of the group.
      row_bytes: bytes of a row and its state.
      gather: reads rows of the host, in either thread.
      budget: bounds the saved values.
      piece_rows: the most rows of a piece.
    """
    self.bits, self._num_rows, self._row_bytes = bits, num_rows, row_bytes
    self._gather, self._budget, self._piece_rows = gather, budget, piece_rows
    self._saved_bits = np.zeros_like(bits)
    self._saved: list[_SavedRows] = []
    # Rows below `_taken` were read. Those up to `_claimed` are being read. The
    # device's rows below `_ready` are saved.
    self._taken = self._claimed = self._ready = 0
    self._changed = threading.Condition()
    self._closed = False

  @property
  def done(self) -> bool:
    """Whether no row remains that a write could change."""
    return self._closed or self._taken >= self._num_rows

  def wanted(self, rows: RowIds) -> np.ndarray:
    """Returns which rows are marked, and neither saved nor read: bool[U]."""
    marked, saved = (np.empty(len(rows), bool) for _ in range(2))
    _marked(self.bits, rows, marked)
    _marked(self._saved_bits, rows, saved)
    return marked & ~saved & (rows >= self._taken)

  def save(self, rows: RowIds, take: Gather) -> None:
    """Saves rows of the device, ascending and above all rows that are `ready`.

    Their copies from `take` may be padded.
    """
    rows = rows[self.wanted(rows)]
    for start in range(0, len(rows), self._piece_rows):
      piece = rows[start : start + self._piece_rows]
      nbytes = len(piece) * self._row_bytes
      self._budget.take(nbytes)
      if self._closed:  # closed by the other thread
        self._budget.give(nbytes)
        return
      copies = take(piece)
      with self._changed:
        self._add(piece, copies)
      self.ready(int(piece[-1]) + 1)

  def ready(self, end: int | None = None) -> None:
    """Allows reading rows below `end`. None: all rows."""
    with self._changed:
      self._ready = self._num_rows if end is None else end
      self._changed.notify_all()

  def before_write(self, rows: RowIds | None) -> None:
    """Saves those host rows that are about to change and were not read yet.

    Args:
      rows: unique rows. None: all rows are about to be replaced. Then it waits
        until they are read.
    """
    if rows is None:
      with self._changed:
        self._changed.wait_for(lambda: self.done)
    elif not self.done:
      self._save_host(rows)

  def _save_host(self, rows: RowIds) -> None:
    rows = np.sort(rows[self.wanted(rows)])
    if not len(rows):
      return
    self._budget.take(len(rows) * self._row_bytes)
    with self._changed:  # until no row is being read, and none can be
      self._changed.wait_for(lambda: self._closed or not self._reads(rows))
      unread = rows[:0] if self._closed else rows[rows >= self._claimed]
      self._budget.give((len(rows) - len(unread)) * self._row_bytes)
      if len(unread):
        self._add(unread, self._gather(unread))

  def _reads(self, rows: RowIds) -> bool:
    low, high = np.searchsorted(rows, (self._taken, self._claimed))
    return bool(low < high)

  def _add(self, rows: RowIds, block: RowBlock) -> None:
    self._saved.append(_SavedRows(rows, block, len(rows) * self._row_bytes))
    mark(self._saved_bits, rows)

  def pieces(self) -> Iterator[tuple[RowIds, RowBlock]]:
    """Yields rows, i64[n] and ascending, with their values of the snapshot.

    Raises:
      _SnapshotClosedError: it was closed before its last row was read.
    """
    room = np.empty(self._piece_rows, np.int64)
    while self._taken < self._num_rows:
      with self._changed:
        self._changed.wait_for(
          lambda: self._closed or self._ready > self._taken
        )
        if self._closed:
          raise _SnapshotClosedError(f'only rows below {self._taken} were read')
        start = self._taken
        count, end = _next_rows(self.bits, start, self._ready, room)
        rows = room[:count].copy()
        saved_here = np.empty(count, bool)
        _marked(self._saved_bits, rows, saved_here)
        on_host = ~saved_here
        self._claimed = end
        saved = [one for one in self._saved if one.rows[0] < end]
      block = self._read(rows, on_host, saved, start, end)
      with self._changed:
        self._taken = end
        self._forget()
        self._changed.notify_all()
      if count:
        yield rows, block

  def _read(
    self,
    rows: RowIds,
    on_host: np.ndarray,
    saved: list[_SavedRows],
    start: int,
    end: int,
  ) -> RowBlock:
    """Returns the snapshot values of rows in [start, end)."""
    some = rows[on_host]
    if len(some) == len(rows):
      return self._gather(rows)
    parts = [(np.flatnonzero(on_host), self._gather(some))] if len(some) else []
    for one in saved:
      low, high = np.searchsorted(one.rows, (start, end))
      if low < high:
        part = operator.itemgetter(slice(low, high))
        values = jax.tree.map(part, to_host(one.block))
        parts.append((np.searchsorted(rows, one.rows[low:high]), values))
    block = jax.tree.map(
      lambda x: np.empty((len(rows), *x.shape[1:]), x.dtype), parts[0][1]
    )
    for at, values in parts:
      set_rows(block, at, values)
    return block

  def _forget(self) -> None:
    """Drops saved values of rows that were read."""
    saved, self._saved = self._saved, []
    for one in saved:
      if one.rows[-1] < self._taken:
        self._budget.give(one.nbytes)
      else:
        self._saved.append(one)

  def close(self) -> None:
    """Ends all waits and saves. Called at the end or after a failure."""
    with self._changed:
      self._closed = True
      for one in self._saved:
        self._budget.give(one.nbytes)
      self._saved.clear()
      self._changed.notify_all()


def begin_snapshot(
  group: GroupRows, bits: np.ndarray, budget: Budget
) -> RowSnapshot:
  """Starts a snapshot of the marked rows, for another thread to read.

  That thread can begin at once. Call `save_device_rows` before the next step.
  Waits for the group's previous snapshot.
  """
  group.settle()
  host, row_bytes = group.host, max(group.row_bytes, 1)
  host.before_write(None)
  nbytes = _PIECE_BYTES if host.counts is None else _DISK_PIECE_BYTES

  snapshot = RowSnapshot(
    bits,
    group.num_rows,
    row_bytes,
    lambda rows: host.gather(rows, len(rows)),
    budget,
    max(1, nbytes // row_bytes),
  )
  host.before_write = snapshot.before_write
  return snapshot


def save_device_rows(group: GroupRows, snapshot: RowSnapshot) -> None:
  """Copies the device's rows of a snapshot. May wait for its budget."""
  for rows, slots in group.kept.marked(snapshot.bits):

    def take(some: RowIds, rows: RowIds = rows, at: RowIds = slots) -> RowBlock:
      return group.kept.gather(at[np.searchsorted(rows, some)])

    snapshot.save(rows, take)
  snapshot.ready()


@kernel
@no_type_check
def _next_rows(
  bits: np.ndarray, start: int, end: int, out: np.ndarray
) -> tuple[int, int]:
  """Finds the first rows in [start, end) whose bits are set, as many as fit.

  Args:
    bits: as in `DirtyRows.bits`.
    start: first row.
    end: exclusive bound.
    out: i64[n], receives the rows, ascending.

  Returns:
    How many it found, and the row to continue from.
  """
  count, row = 0, start
  while row < end:
    if not row & 7 and bits[row >> 3] == 0:
      row += 8
      continue
    if bits[row >> 3] & np.uint8(1 << (row & 7)):
      if count == len(out):
        return count, row
      out[count] = row
      count += 1
    row += 1
  return count, end


@kernel
@no_type_check
def _marked(bits: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
  """Writes for each row, i64[U], whether its bit is set, to bool[U]."""
  for u in range(len(rows)):
    out[u] = bits[rows[u] >> 3] & np.uint8(1 << (rows[u] & 7)) != 0
