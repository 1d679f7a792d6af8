"""Protects steps from interrupts and from other threads.

A step changes rows either completely or not at all. `held` delays Ctrl-C until
its block ends, and `TurnLock` lets one thread at a time use the rows.
"""

import _signal
from collections.abc import Callable, Iterator
import contextlib
import signal
import threading
import time
from types import FrameType
from typing import Any, TypeVar

Handler = Callable[[int, FrameType | None], Any]
T = TypeVar('T')

_POLL_S = 0.0005  # how often a thread checks for its turn
# Those of `signal` look up an enum for each handler: five times as long.
_get_handler: Callable[[int], Any] = _signal.getsignal
_set_handler: Callable[[int, Any], Any] = _signal.signal
_INTERRUPT = int(signal.SIGINT)


@contextlib.contextmanager
def held() -> Iterator[None]:
  """Delays SIGINT until the block ends. A second one is not delayed.

  Python raises KeyboardInterrupt between any two bytecodes of the main thread.
  Between the update of the dense parameters and the storing of their rows, it
  would leave an inconsistent state. Other threads are never interrupted.
  """
  handler = None  # only the main thread needs it, and asking takes a while
  if threading.current_thread() is threading.main_thread():
    handler = _get_handler(_INTERRUPT)
  # In a nested block the outer block decides when the delay ends.
  if not callable(handler) or isinstance(handler, _DelayedHandler):
    yield
    return
  delayed = _DelayedHandler(handler)
  _set_handler(_INTERRUPT, delayed)
  try:
    yield
  finally:
    # Restored first, as the call below usually raises KeyboardInterrupt.
    _set_handler(_INTERRUPT, handler)
    if delayed.first is not None:
      handler(*delayed.first)


class _DelayedHandler:
  """A handler that stores the first signal and forwards all later ones."""

  def __init__(self, handler: Handler) -> None:
    self._handler = handler
    self.first: tuple[int, FrameType | None] | None = None

  def __call__(self, number: int, frame: FrameType | None) -> None:
    # A second Ctrl-C ends the program even if that leaves a broken state.
    if self.first is not None:
      self._handler(number, frame)
    self.first = number, frame


class TurnLock:
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
      # A `with` of the lock itself: if it were wrapped in Python, a Ctrl-C
      # between its acquisition and the block would leave it locked.
      with self._lock:
        self._waiting.discard(token)
        owner, self._owner = self._owner, threading.get_ident()
        try:
          return call()
        finally:
          self._owner = owner
    finally:
      self._waiting.discard(token)
