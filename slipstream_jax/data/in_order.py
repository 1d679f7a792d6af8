"""A function of many items, worked out by several threads, given in order."""

from collections.abc import Callable, Iterator
import threading
from typing import Generic, TypeVar

from slipstream_jax.data.exits import ends_at_exit

T = TypeVar('T')
R = TypeVar('R')


class InOrder(Generic[T, R]):
  """What a function makes of each item, in the order of the items.

  Each thread takes an item, one thread at a time, and works out its function
  while others take the next ones. With one worker there is no thread: whoever
  asks does all of it.
  """

  def __init__(
    self, items: Iterator[T], function: Callable[[T], R], workers: int = 1
  ) -> None:
    """Starts no thread before the first item is asked for.

    Args:
      items: taken by one thread at a time, up to `workers` of them ahead.
      function: of one item; what it gives must not depend on their order.
      workers: threads; at least 1.
    """
    self._items, self._function, self._workers = items, function, workers
    self._taking = threading.Lock()
    self._changed = threading.Condition()
    # By number of the item, what it came to: a list of one, or an error.
    self._results: dict[int, list[R] | BaseException] = {}
    # How many were taken, with the one that is waited for; and were given.
    self._taken = self._given = 0
    self._is_taking = self._is_asked = False
    # None comes any more: at the end, after an error, once it is closed.
    self._over = False
    self._threads: list[threading.Thread] = []

  @property
  def starves(self) -> bool:
    """Whether no more comes before the items give their next one.

    Whoever asks has then got all that came before. Also once it is closed, as
    threads may still be waiting for an item.
    """
    with self._changed:
      last = self._is_taking and self._given == self._taken - 1
      return self._workers == 1 or self._over or (self._is_asked and last)

  @property
  def is_current(self) -> bool:
    """Whether the caller runs in one of its threads."""
    return threading.current_thread() in self._threads

  def __iter__(self) -> Iterator[R]:
    return self

  def __next__(self) -> R:
    if self._workers == 1:
      return self._alone()
    if not self._threads:
      self._start()
    with self._changed:
      if self._over:  # what came after an error is not for anybody
        raise StopIteration
      self._is_asked = True
      self._changed.wait_for(lambda: self._given in self._results or self._over)
      self._is_asked = False
      result = self._results.pop(self._given, StopIteration())
      self._given += 1
      self._over |= isinstance(result, BaseException)
      self._changed.notify_all()
    if isinstance(result, BaseException):
      try:
        raise result
      finally:
        # Else the error and this frame would hold each other, and with it all
        # that its callers have, until the collector comes by.
        del result
    return result[0]

  def _alone(self) -> R:
    if self._over:
      raise StopIteration
    try:
      return self._function(next(self._items))
    except BaseException:
      self._over = True
      raise

  def threads(self) -> Iterator[threading.Thread]:
    """Asks the threads to end, and yields them."""
    self._over = True
    # Not for ever: an interrupt may have left it locked.
    if self._changed.acquire(timeout=1.0):
      self._changed.notify_all()
      self._changed.release()
    yield from self._threads

  def _start(self) -> None:
    ends_at_exit(self)
    for _ in range(self._workers):
      thread = threading.Thread(
        target=self._run, name='slipstream-worker', daemon=True
      )
      self._threads.append(thread)
      thread.start()

  def _run(self) -> None:
    while (taken := self._take()) is not None:
      number, item = taken
      try:
        self._put(number, [self._function(item)])
      except BaseException as error:  # for whoever asks, and raises it
        self._put(number, error)

  def _take(self) -> tuple[int, T] | None:
    """The next item and its number; None if no more is to be taken."""
    with self._taking:
      with self._changed:
        self._changed.wait_for(
          lambda: self._over or self._taken - self._given < self._workers
        )
        # What follows an error is not asked for: it would be lost.
        errors = (isinstance(r, BaseException) for r in self._results.values())
        if self._over or any(errors):
          return None
        number, self._taken = self._taken, self._taken + 1
        self._is_taking = True
      try:
        return number, next(self._items)
      except BaseException as error:  # the end, or a failure
        self._put(number, error)
        return None
      finally:
        with self._changed:
          self._is_taking = False

  def _put(self, number: int, result: list[R] | BaseException) -> None:
    with self._changed:
      self._results[number] = result
      self._changed.notify_all()

  def close(self) -> None:
    """Ends the threads, once they are done with what they are at."""
    with self._changed:
      self._over = True
      self._changed.notify_all()
    for thread in self._threads:
      thread.join()
