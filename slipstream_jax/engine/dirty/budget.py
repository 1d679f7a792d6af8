"""A bound on the memory of row copies that wait to be written."""

import threading
import time


class Budget:
  """Bytes that two threads take and release.

  Attributes:
    seconds: that takers waited so far.
    most: the most bytes that were taken at a time.
  """

  def __init__(self, limit: int) -> None:
    """Has `limit` bytes. A single larger piece is allowed when it is alone."""
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
