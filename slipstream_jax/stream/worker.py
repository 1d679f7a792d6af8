"""A thread that runs an iterator ahead of its consumer."""

from collections.abc import Callable, Iterator
import queue
import threading
from typing import Generic, TypeVar

from slipstream_jax.stream.interrupts import held

T = TypeVar('T')

_WAIT_S = 0.05  # how often a full or empty queue looks for a stop


class Worker(Generic[T]):
  """Items made in a thread of their own, a bounded number of them ahead.

  The thread knows the iterator and this object alone: when the consumer is
  dropped, nothing keeps it from being told to stop.
  """

  def __init__(self, items: Iterator[T], depth: int, name: str) -> None:
    """Starts making `items`, up to `depth` ahead; depth is at least 1."""
    self._queue: queue.Queue[tuple[list[T], BaseException | None]]
    self._queue = queue.Queue(depth)
    self._stopped = threading.Event()
    self._thread = threading.Thread(
      target=self._run, args=(items,), name=name, daemon=True
    )
    self._thread.start()

  def _run(self, items: Iterator[T]) -> None:
    end: BaseException = StopIteration()
    try:
      for item in items:
        if not self._put(([item], None)):
          return
    except BaseException as error:  # handed to the consumer, who raises it
      end = error
    self._put(([], end))

  def _put(self, made: tuple[list[T], BaseException | None]) -> bool:
    while not self._stopped.is_set():
      try:
        self._queue.put(made, timeout=_WAIT_S)
        return True
      except queue.Full:
        continue
    return False

  def take(
    self, starves: Callable[[], bool], give_up: Callable[[], None]
  ) -> T | None:
    """The next item, or None if there is none; waits for it.

    Args:
      starves: whether the iterator waits for what only the consumer can do.
      give_up: called then; makes the iterator fail.

    Raises:
      BaseException: what the iterator raised, with its traceback.
    """
    while True:
      with held():  # a lock that an interrupt breaks into may stay locked
        try:
          made, error = self._queue.get(timeout=_WAIT_S)
        except queue.Empty:
          # In this order: one that starves has queued all that it made.
          if starves() and self._queue.empty():
            give_up()
          continue
      if isinstance(error, StopIteration):
        return None
      if error is not None:
        raise error
      return made[0]

  def stop(self, wait: bool = True) -> None:
    """Ends the thread after the item under way; waits for that, if asked."""
    self._stopped.set()
    if wait and self._thread is not threading.current_thread():
      self._thread.join()
