"""Runs an iterator ahead in a thread, so that reading and work overlap."""

from collections.abc import Generator, Iterator
import queue
import threading
from typing import TypeVar

T = TypeVar('T')

_WAIT_S = 0.1  # between looks at whether anybody still wants the items


def ahead(items: Iterator[T], depth: int = 2) -> Generator[T, None, None]:
  """The same items, made in a thread that is up to `depth` of them ahead.

  The thread ends with the items, with their error, which is raised here with
  its traceback, or when this generator is closed.

  Args:
    items: made by the thread alone; a generator is closed there.
    depth: most items that wait, at least 1; the memory they take is the price.
  """
  ready: queue.Queue[tuple[list[T], BaseException | None]] = queue.Queue(depth)
  stopped = threading.Event()

  def put(made: list[T], error: BaseException | None) -> bool:
    while not stopped.is_set():
      try:
        ready.put((made, error), timeout=_WAIT_S)
        return True
      except queue.Full:
        continue
    return False

  def run() -> None:
    end: BaseException = StopIteration()
    try:
      for item in items:
        if not put([item], None):
          break
    except BaseException as error:  # for the consumer, who raises it
      end = error
    finally:
      if isinstance(items, Generator):
        items.close()
    put([], end)

  thread = threading.Thread(target=run, name='slipstream-reader', daemon=True)
  thread.start()
  try:
    while True:
      made, error = ready.get()
      if isinstance(error, StopIteration):
        return
      if error is not None:
        raise error
      yield from made
  finally:
    stopped.set()
    thread.join()
