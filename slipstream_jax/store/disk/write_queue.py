"""Records on their way to a file, which are read from here meanwhile."""

from collections import deque
from collections.abc import Callable
from concurrent import futures
import threading
import time
from typing import NamedTuple

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.store.disk.records import Places, put_whole, Records
from slipstream_jax.store.disk.scratch import ScratchFile

Rows = Int[np.ndarray, ' n']


class _Write(NamedTuple):
  rows: np.ndarray
  """i64[n], ascending."""
  records: np.ndarray
  """u8[n, W]."""


class WriteQueue:
  """Writes records by a thread of its own, those of a row in their order.

  All methods but `close` are called while `changed` is held.

  Attributes:
    waited_s: seconds that callers waited for room.
    rows_written: rows that reached the file so far.
  """

  def __init__(
    self, file: ScratchFile, most_bytes: int, changed: threading.Condition
  ) -> None:
    """Writes to the file, which nobody else writes to.

    Args:
      file: gets the records.
      most_bytes: of records that may wait; who puts more waits.
      changed: the lock over all that follows; notified when room is made.
    """
    self.waited_s, self.rows_written = 0.0, 0
    self._file, self._most, self._changed = file, most_bytes, changed
    self._writes = deque[_Write]()
    self._bytes, self._busy = 0, False
    self._error: Exception | None = None
    self._pool = futures.ThreadPoolExecutor(1, 'slipstream-writer')

  def put(self, rows: Rows, records: Records) -> None:
    """Takes over records of rows, each once; waits for nothing."""
    order = np.argsort(rows)
    self._writes.append(_Write(rows[order], records[order]))
    self._bytes += records.nbytes
    self._go_on()

  def copy(
    self, rows: Rows, records: Records, at: Places
  ) -> Bool[np.ndarray, ' n']:
    """Copies what waits of some rows; says of which rows something does.

    Args:
      rows: i64[n].
      records: gets them.
      at: i64[n], where to put each.
    """
    out = np.zeros(len(rows), bool)
    for write in reversed(self._writes):  # the newest first
      places = np.searchsorted(write.rows, rows)
      places = np.minimum(places, len(write.rows) - 1)
      here = np.flatnonzero(~out & (write.rows[places] == rows))
      if len(here):
        put_whole(records, at[here], write.records[places[here]])
        out[here] = True
    return out

  def make_room(self) -> None:
    """Waits until there is room for more.

    Raises:
      OSError: what could not be written; it stays, and is tried again.
    """
    self._wait(lambda: self._bytes <= self._most)

  def empty(self) -> None:
    """Waits until all is written.

    Raises:
      OSError: as `make_room`.
    """
    self._wait(lambda: not self._writes)

  def _wait(self, done: Callable[[], bool]) -> None:
    started = time.perf_counter()
    while self._error is None and not done():
      self._go_on()
      self._changed.wait()
    self.waited_s += time.perf_counter() - started
    if self._error is not None:
      error, self._error = self._error, None
      raise error

  def forget(self) -> None:
    """Drops all that waits; waits for what is being written."""
    self._writes.clear()
    while self._busy:
      self._changed.wait()
    self._writes.clear()  # of what was put meanwhile, too
    self._bytes, self._error = 0, None

  def _go_on(self) -> None:
    if self._writes and not self._busy and self._error is None:
      self._busy = True
      self._pool.submit(self._write_all)

  def _write_all(self) -> None:
    """In the thread: writes until nothing waits."""
    error: Exception | None = None
    while True:
      with self._changed:
        writes = [*self._writes]
        if error is not None or not writes:
          self._error, self._busy = error, False
          self._changed.notify_all()
          return
      # All at once, so that rows of a block reach it together. Of a row that
      # comes twice the last one counts: `unique` gives the first.
      try:
        rows = np.concatenate([write.rows for write in writes[::-1]])
        rows, first = np.unique(rows, return_index=True)
        records = np.concatenate([write.records for write in writes[::-1]])
        self._file.write(rows, records[first])
      except Exception as failed:  # for whoever comes next, who raises it
        error = failed
        continue
      with self._changed:
        self.rows_written += len(rows)
        for write in writes:
          if self._writes and self._writes[0] is write:  # not forgotten
            self._bytes -= self._writes.popleft().records.nbytes
        self._changed.notify_all()

  def close(self) -> None:
    """Ends the thread once it has written what waits."""
    self._pool.shutdown()
