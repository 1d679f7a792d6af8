"""A Ctrl-C that waits: what changes rows is done whole, or not at all."""

from collections.abc import Callable, Iterator
import contextlib
import signal
import threading
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@contextlib.contextmanager
def held() -> Iterator[None]:
  """Lets SIGINT wait until the block is left; a second one does not wait.

  Python raises KeyboardInterrupt between any two bytecodes of the main thread;
  between the update of the dense parameters and the storing of their rows it
  would leave a state that no run has. In other threads, which are never
  interrupted so, and where SIGINT is ignored or left to the system, nothing
  is changed.
  """
  handler = None  # in other threads it need not be known, which takes a while
  if threading.current_thread() is threading.main_thread():
    handler = signal.getsignal(signal.SIGINT)
  # Within a block that holds already, the outer one decides when it ends.
  if not callable(handler) or isinstance(handler, _Wait):
    yield
    return
  wait = _Wait(handler)
  signal.signal(signal.SIGINT, wait)
  try:
    yield
  finally:
    # Put back first, as the call below raises KeyboardInterrupt as a rule.
    signal.signal(signal.SIGINT, handler)
    if wait.first is not None:
      handler(*wait.first)


class _Wait:
  """A handler that keeps the first signal, and passes on those after it."""

  def __init__(self, handler: Handler) -> None:
    self._handler = handler
    self.first: tuple[int, FrameType | None] | None = None

  def __call__(self, number: int, frame: FrameType | None) -> None:
    # Whoever asks twice wants out, even at the price of a torn state.
    if self.first is not None:
      self._handler(number, frame)
    self.first = number, frame
