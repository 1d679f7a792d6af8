"""Items made ahead of their consumer by one thread, or by several in order."""

import atexit
import collections
from collections.abc import Callable, Generator, Iterator, Sequence
import queue
import threading
import time
from typing import (
  Any,
  Generic,
  NamedTuple,
  Protocol,
  runtime_checkable,
  TypeVar,
)
import weakref

from slipstream_jax.data.interrupts import held

T = TypeVar('T')
R = TypeVar('R')

_WAIT_S = 0.05  # how often a full or empty queue checks for a stop
_EXIT_S = 5.0  # how long the exit waits: a source may never return


@runtime_checkable
class ThreadedIterator(Protocol):
  """An iterator that has threads."""

  def threads(self) -> Iterator[threading.Thread]:
    """Asks its threads to end, and yields them without waiting for them."""
    ...


_open: weakref.WeakSet[ThreadedIterator] = weakref.WeakSet()
_lock = threading.Lock()


def ends_at_exit(iterator: ThreadedIterator) -> None:
  """Registers an iterator whose threads end before Python finalizes.

  Python kills daemon threads as it finalizes. A thread that returns from C++
  to take the interpreter's lock is then unwound through C++, which aborts the
  process: "FATAL: exception not rethrown".
  """
  with _lock:
    # Not on import: the last function registered is called first, and threads
    # must end before JAX drops its backends.
    if not _open:
      atexit.unregister(_end_all)
      atexit.register(_end_all)
    _open.add(iterator)


def _end_all() -> None:
  with _lock:
    iterators = list(_open)
  # All are asked before the first is waited for, as some wait for others.
  threads = [thread for one in iterators for thread in one.threads()]
  until = time.monotonic() + _EXIT_S
  for thread in threads:
    thread.join(max(0.0, until - time.monotonic()))


def ahead(items: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
  """Yields the items, which a thread makes up to `depth` of them ahead.

  The thread ends with the items, when this generator is closed, or with an
  error of theirs, which is raised here.

  Args:
    items: made by the thread alone, none of them None. See `Worker`.
    depth: most items that wait, at least 1.
  """
  worker: Worker[T] | None = None
  try:
    with held():  # else an interrupt may leave a thread running
      worker = Worker(items, depth, 'slipstream-reader')
    while (item := worker.take()) is not None:
      yield item
  finally:
    if worker is not None:
      worker.stop()


class Worker(Generic[T]):
  """A thread that makes a bounded number of items ahead.

  The thread does not refer to the consumer. So a consumer that is dropped is
  freed at once, and its `finally` stops the thread.
  """

  def __init__(self, items: Iterator[T], depth: int, name: str) -> None:
    """Starts making `items`, up to `depth` ahead.

    Args:
      items: iterated in the thread. A generator is closed there, too.
      depth: most items that wait to be taken, at least 1. With one more than
        there are items, the thread ends even if they are not taken.
      name: of the thread.
    """
    # Without Python between a `put` and the thread that waits for it, which
    # the bounded queue has much of.
    self._queue: queue.SimpleQueue[tuple[list[T], BaseException | None]]
    # An item is in a list of one. The end, or an error, comes with none.
    self._queue, self._room = queue.SimpleQueue(), queue.SimpleQueue[None]()
    for _ in range(depth):
      self._room.put(None)
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
    try:
      self._put([], end)
    finally:
      # Else the error and this frame refer to each other, and the items stay
      # alive until garbage is collected.
      del end
      self._over = True

  def _put(self, items: list[T], error: BaseException | None) -> bool:
    # In short waits, as nothing wakes a thread that waits for room.
    while not self._stopped.is_set():
      try:
        self._room.get(timeout=_WAIT_S)
      except queue.Empty:
        continue
      self._queue.put((items, error))
      return True
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
    """Waits for the next item and returns it, or None if there is none.

    Raises the iterator's error, with its traceback.

    Args:
      starves: whether the iterator waits for something that only the consumer
        can do.
      give_up: called then to make the iterator fail.
    """
    while True:
      with held():  # a lock that an interrupt breaks into may stay locked
        try:
          items, error = self._queue.get(timeout=_WAIT_S)
        except queue.Empty:
          # In this order: an iterator that starves has queued all its items.
          if starves() and self._queue.empty():
            give_up()
          continue
        self._room.put(None)
      if isinstance(error, StopIteration):
        return None
      if error is not None:
        try:
          raise error
        finally:
          del error  # else the error and this frame refer to each other
      return items[0]

  def stop(self, wait: bool = True) -> None:
    """Ends the thread after the item under way, and may wait for that."""
    self._stopped.set()
    # The thread itself may free the consumer, and so run this method.
    if not wait or self._thread is threading.current_thread():
      return
    # Until Python 3.12 an interrupted `join` takes the thread for ended, and
    # the next `join` does not wait. Two threads would then share the items.
    while not self._over or self._thread.is_alive():
      with held():
        self._thread.join(_WAIT_S)


class Turns(NamedTuple):
  """The stages of an item between its source and the function."""

  prepare: Callable[[Any], Any]
  """Prepares one item, in any order."""
  open_before: Callable[[Any], int]
  """Returns how many items before one need not have had their turn when it is
  prepared."""
  take: Callable[[Any], Sequence[Any]]
  """Called with each prepared item, in their order, by one thread at a time.
  Returns any number of values, to each of which the function is applied."""


class OrderedResults(Generic[T, R]):
  """Results of a function of each item, in the order of the items.

  One thread at a time takes an item, and computes its result while others take
  the next ones. With one worker there is no thread, and the consumer does all.
  """

  def __init__(
    self,
    items: Iterator[Any],
    function: Callable[[T], R],
    workers: int = 1,
    turns: Turns | None = None,
  ) -> None:
    """Starts no thread before the first result is asked for.

    Args:
      items: taken by one thread at a time, up to `workers` of them ahead.
      function: of one item. Its result must not depend on the order of calls.
      workers: threads, at least 1.
      turns: changes the items first. Needs two workers.
    """
    self._items, self._function, self._workers = items, function, workers
    self._turns, self._turn = turns, 0  # items that have had their turn
    self._ready = collections.deque[R]()  # results of delivered items
    self._taking = threading.Lock()
    lock = threading.RLock()
    self._changed = threading.Condition(lock)
    # So that a turn wakes only those who wait for one.
    self._turned = threading.Condition(lock)
    # By number of the item: a list of its results, or an error.
    self._results: dict[int, list[R] | BaseException] = {}
    # Number of items taken, with the one that is waited for, and delivered.
    self._taken = self._delivered = 0
    self._is_taking = self._is_asked = False
    # No item is taken after the end, an error, or `close`.
    self._over = False
    self._threads: list[threading.Thread] = []

  @property
  def starves(self) -> bool:
    """Whether all results are delivered, and the next item is waited for.

    Also true once it is closed, as threads may still wait for an item.
    """
    with self._changed:
      last = self._is_taking and self._delivered == self._taken - 1
      return self._workers == 1 or self._over or (self._is_asked and last)

  @property
  def is_current(self) -> bool:
    """Whether the caller runs in one of its threads."""
    return threading.current_thread() in self._threads

  def __iter__(self) -> Iterator[R]:
    return self

  def __next__(self) -> R:
    if self._workers == 1:
      return self._compute()
    if not self._threads:
      self._start()
    while not self._ready:
      self._ready.extend(self._next_results())
    return self._ready.popleft()

  def _next_results(self) -> list[R]:
    """Waits for the results of the next item. Raises its error."""
    with self._changed:
      if self._over:  # results after an error are not delivered
        raise StopIteration
      self._is_asked = True
      self._changed.wait_for(
        lambda: self._delivered in self._results or self._over
      )
      self._is_asked = False
      result = self._results.pop(self._delivered, StopIteration())
      self._delivered += 1
      self._over |= isinstance(result, BaseException)
      self._changed.notify_all()
      if self._over:
        self._turned.notify_all()
    if isinstance(result, BaseException):
      try:
        raise result
      finally:
        # Else the error and this frame refer to each other, and all that the
        # callers hold stays alive until garbage is collected.
        del result
    return result

  def _compute(self) -> R:
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
    # With a limit: an interrupt may have left it locked.
    if self._changed.acquire(timeout=1.0):
      self._changed.notify_all()
      self._turned.notify_all()
      self._changed.release()
    yield from self._threads

  def _start(self) -> None:
    ends_at_exit(self)
    name = 'slipstream-worker'
    for _ in range(self._workers):
      thread = threading.Thread(target=self._run, name=name, daemon=True)
      self._threads.append(thread)
      thread.start()

  def _run(self) -> None:
    while (taken := self._take()) is not None:
      number, item = taken
      try:
        results = self._results_of(number, item)
      except BaseException as error:  # for the consumer, who raises it
        self._put(number, error)
      else:
        if results is None:
          return
        self._put(number, results)

  def _results_of(self, number: int, item: Any) -> list[R] | None:
    """Returns the results of an item, or None if it does not get its turn."""
    if self._turns is None:
      return [self._function(item)]
    # What is not open before an item has had its turn.
    closed = number - self._turns.open_before(item)
    if not self._has_turn(number, closed):
      return None
    prepared = self._turns.prepare(item)
    if not self._has_turn(number, number):
      return None
    values = self._turns.take(prepared)
    with self._changed:
      self._turn += 1
      self._turned.notify_all()
    return [self._function(value) for value in values]

  def _has_turn(self, number: int, turn: int) -> bool:
    """Waits for a turn. False if an earlier item than `number` has failed."""

    def fails() -> bool:
      return self._over or any(
        at < number and isinstance(result, BaseException)
        for at, result in self._results.items()
      )

    with self._changed:
      self._turned.wait_for(lambda: self._turn >= turn or fails())
      return self._turn >= turn and not self._over

  def _take(self) -> tuple[int, T] | None:
    """Returns the next item and its number, or None if no item may be taken."""
    with self._taking:
      with self._changed:
        self._changed.wait_for(
          lambda: self._over or self._taken - self._delivered < self._workers
        )
        # An item after an error would never be delivered.
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
      if isinstance(result, BaseException):
        self._turned.notify_all()

  def close(self) -> None:
    """Ends the threads after the items under way."""
    with self._changed:
      self._over = True
      self._changed.notify_all()
      self._turned.notify_all()
    for thread in self._threads:
      thread.join()
    # The end of the items, or an error, that nobody took refers to this object
    # by its traceback. All would stay alive until garbage is collected.
    self._results.clear()
