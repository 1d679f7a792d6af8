"""Items made ahead of their consumer, in a thread of their own."""

from collections.abc import Callable, Generator, Iterator
import queue
import threading
from typing import Generic, TypeVar

from slipstream_jax.data.exits import ends_at_exit
from slipstream_jax.data.interrupts import held

T = TypeVar('T')

_WAIT_S = 0.05  # how often a full or empty queue looks for a stop


def ahead(items: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
  """The same items, made in a thread that is up to `depth` of them ahead.

  The thread ends with the items, with their error, which is raised here with
  its traceback, or when this generator is closed.

  Args:
    items: made by the thread alone, none of them None; see `Worker`.
    depth: most items that wait, at least 1; the memory they take is the price.
  """
  worker: Worker[T] | None = None
  try:
    with held():  # else an interrupt may leave a thread that nobody stops
      worker = Worker(items, depth, 'slipstream-reader')
    while (item := worker.take()) is not None:
      yield item
  finally:
    if worker is not None:
      worker.stop()


class Worker(Generic[T]):
  """Items made in a thread of their own, a bounded number of them ahead.

  The thread holds the iterator and this object, but not the consumer: one that
  is dropped is freed at once, and its `finally` stops the thread.
  """

  def __init__(self, items: Iterator[T], depth: int, name: str) -> None:
    """Starts making `items`, up to `depth` ahead.

    Args:
      items: iterated in the thread; a generator is closed there, too.
      depth: most items that wait to be taken, at least 1. With one more than
        there are items, the thread ends even if nobody takes them.
      name: of the thread.
    """
    self._queue: queue.Queue[tuple[list[T], BaseException | None]]
    # An item is in a list of one; the end, or an error, comes with none.
    self._queue = queue.Queue(depth)
    self._stopped, self._over = threading.Event(), False
    self._thread = threading.Thread(
      target=self._run, args=(items,), name=name, daemon=True
    )
    ends_at_exit(self)
    self._thread.start()

  def threads(self) -> Iterator[threading.Thread]:
    """Asks the thread to end after the item under way, and yields it."""
    self._stopped.set()
    yield self._thread

  def _run(self, items: Iterator[T]) -> None:
    end: BaseException = StopIteration()
    try:
      for item in items:
        if not self._put([item], None):
          break
      # Here, as no other thread may close a generator while it runs.
      if isinstance(items, Generator):
        items.close()
    except BaseException as error:  # for the consumer, who raises it
      end = error
    self._put([], end)
    self._over = True

  def _put(self, items: list[T], error: BaseException | None) -> bool:
    # In short waits, as nothing wakes a thread that waits for room.
    while not self._stopped.is_set():
      try:
        self._queue.put((items, error), timeout=_WAIT_S)
        return True
      except queue.Full:
        continue
    return False

  @property
  def is_current(self) -> bool:
    """Whether the caller runs in the thread that makes the items."""
    return self._thread is threading.current_thread()

  def take(
    self,
    starves: Callable[[], bool] = lambda: False,
    give_up: Callable[[], None] = lambda: None,
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
          items, error = self._queue.get(timeout=_WAIT_S)
        except queue.Empty:
          # In this order: one that starves has queued all that it made.
          if starves() and self._queue.empty():
            give_up()
          continue
      if isinstance(error, StopIteration):
        return None
      if error is not None:
        raise error
      return items[0]

  def stop(self, wait: bool = True) -> None:
    """Ends the thread after the item under way; waits for that, if asked."""
    self._stopped.set()
    # The thread itself may be the one that frees the consumer, and so be here.
    if not wait or self._thread is threading.current_thread():
      return
    # Until Python 3.12 a `join` that an interrupt breaks off takes the thread
    # for ended, and the next one does not wait: two would share the items.
    while not self._over or self._thread.is_alive():
      with held():
        self._thread.join(_WAIT_S)
