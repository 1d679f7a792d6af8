"""A lock by which threads take turns with something that steps change."""

from collections.abc import Callable
import threading
import time
from typing import TypeVar

T = TypeVar('T')

_POLL_S = 0.0005  # how often a thread looks whether those before it are in


class Turns:
  """Lets one thread at a time run, in the order in which they came.

  A plain lock would let a loop of steps take it again and again while another
  thread waits. A thread may take a turn within its own turn.
  """

  def __init__(self) -> None:
    """Starts with no thread running."""
    self._lock = threading.RLock()
    self._waiting: set[object] = set()
    self._owner: int | None = None

  @property
  def mine(self) -> bool:
    """Whether this thread has the turn."""
    return self._owner == threading.get_ident()

  def run(self, call: Callable[[], T]) -> T:
    """Calls `call` when it is this thread's turn and returns its result."""
    token = object()
    before = [] if self.mine else [*self._waiting]
    try:
      self._waiting.add(token)
      while any(other in self._waiting for other in before):
        time.sleep(_POLL_S)
      # A `with` of the lock itself: a Ctrl-C between its acquisition and the
      # block would leave a lock that is wrapped in Python locked for ever.
      with self._lock:
        self._waiting.discard(token)
        owner, self._owner = self._owner, threading.get_ident()
        try:
          return call()
        finally:
          self._owner = owner
    finally:
      self._waiting.discard(token)
