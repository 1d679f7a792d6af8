"""Queue of records on their way to a file, readable while they wait."""

from collections import deque
from collections.abc import Callable
from concurrent import futures
import threading
import time
from typing import NamedTuple

from jaxtyping import Bool, Int
import numpy as np

from slipstream_jax.store.records import Places, put_whole, Records
from slipstream_jax.store.scratch import ScratchFile

Rows = Int[np.ndarray, ' n']


class _Write(NamedTuple):
  rows: Rows
  """Ascending."""
  records: Records


class WriteQueue:
  """Writes records in a thread of its own, those of one row in order.

  All methods but `close` must be called with `changed` held.

  Attributes:
    waited_s: seconds that callers waited for room.
    rows_written: rows that reached the file so far.
  """

  def __init__(
    self, file: ScratchFile, most_bytes: int, changed: threading.Condition
  ) -> None:
    """Makes an empty queue for a file that has no other writer.

    Args:
      file: receives the records.
      most_bytes: capacity. `make_room` waits while it is exceeded.
      changed: lock of the queue, notified when room is made.
    """
    self.waited_s, self.rows_written = 0.0, 0
    self._file, self._most, self._changed = file, most_bytes, changed
    self._writes = deque[_Write]()
    self._bytes, self._busy = 0, False
    self._error: Exception | None = None
    self._pool = futures.ThreadPoolExecutor(1, 'slipstream-writer')

  def put(self, rows: Rows, records: Records) -> None:
    """Takes over the records of unique rows. Does not wait."""
    order = np.argsort(rows)
    self._writes.append(_Write(rows[order], records[order]))
    self._bytes += records.nbytes
    self._start_writing()

  def copy(
    self, rows: Rows, records: Records, at: Places
  ) -> Bool[np.ndarray, ' n']:
    """Copies the queued records of rows to places of `records`.

    Returns:
      Which rows are queued.
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
      OSError: a write failed. Its records stay queued for the next call.
    """
    self._wait(lambda: self._bytes <= self._most)

  def empty(self) -> None:
    """Waits until all records are written.

    Raises:
      OSError: as in `make_room`.
    """
    self._wait(lambda: not self._writes)

  def _wait(self, done: Callable[[], bool]) -> None:
    started = time.perf_counter()
    while self._error is None and not done():
      self._start_writing()
      self._changed.wait()
    self.waited_s += time.perf_counter() - started
    if self._error is not None:
      error, self._error = self._error, None
      raise error

  def forget(self) -> None:
    """Drops all queued records, after waiting for a write under way."""
    self._writes.clear()
    while self._busy:
      self._changed.wait()
    self._writes.clear()  # records put during the wait
    self._bytes, self._error = 0, None

  def _start_writing(self) -> None:
    if self._writes and not self._busy and self._error is None:
      self._busy = True
      self._pool.submit(self._write_all)

  def _write_all(self) -> None:
    """Writes until the queue is empty. Runs in the queue's thread."""
    error: Exception | None = None
    while True:
      with self._changed:
        writes = [*self._writes]
        if error is not None or not writes:
          self._error, self._busy = error, False
          self._changed.notify_all()
          return
      # All at once, so that rows of one block reach it together. Reversed, as
      # `unique` returns the first occurrence and the last write counts.
      try:
        rows = np.concatenate([write.rows for write in writes[::-1]])
        rows, first = np.unique(rows, return_index=True)
        records = np.concatenate([write.records for write in writes[::-1]])
        self._file.write(rows, records[first])
      except Exception as failed:  # raised by the next caller
        error = failed
        continue
      with self._changed:
        self.rows_written += len(rows)
        for write in writes:
          # not dropped by `forget`
          if self._writes and self._writes[0] is write:
            self._bytes -= self._writes.popleft().records.nbytes
        self._changed.notify_all()

  def close(self) -> None:
    """Ends the thread after it has written the queued records."""
    self._pool.shutdown()
