"""Items made ahead in a thread: order, errors, and how threads end."""

import sys
import threading
import time

import pytest

from slipstream_jax.data.prefetch import ahead, Worker
from tests.support import programs


class Failure(Exception):
  """Raised in the thread."""


def test_ahead_keeps_order_and_ends():
  assert list(ahead(iter(range(50)), depth=3)) == list(range(50))
  assert list(ahead(iter(()))) == []


def test_ahead_raises_the_error_of_the_thread_with_its_traceback():
  def failing():
    yield 1
    raise Failure('in the thread')

  items = ahead(failing())
  assert next(items) == 1
  with pytest.raises(Failure, match='in the thread') as caught:
    next(items)
  assert 'failing' in [entry.name for entry in caught.traceback]
  assert list(items) == []


def test_ahead_closed_early_stops_the_thread_and_closes_its_source():
  closed = threading.Event()

  def endless():
    try:
      while True:
        yield 0
    finally:
      closed.set()

  items = ahead(endless())
  next(items)
  items.close()
  assert closed.is_set()


def test_a_source_that_fails_to_close_is_told():
  def failing():
    try:
      yield 0
      yield 1
    finally:
      raise Failure('at the end')

  items = ahead(failing())
  assert [next(items), next(items)] == [0, 1]
  with pytest.raises(Failure, match='at the end'):
    next(items)


def test_a_thread_with_room_for_its_items_needs_nobody_to_take_them():
  worker = Worker(iter(['only']), 2, 'slipstream-test')
  worker._thread.join(timeout=30)
  assert not worker._thread.is_alive()
  assert [worker.take(), worker.take()] == ['only', None]


def test_an_iterator_that_starves_is_given_up_once_all_is_taken():
  fed = threading.Event()

  def hungry():
    yield 1
    while not fed.wait(0.01):
      pass
    raise Failure('nobody fed it')

  worker = Worker(hungry(), 2, 'slipstream-test')
  time.sleep(0.05)
  assert worker.take(lambda: True, fed.set) == 1
  with pytest.raises(Failure, match='nobody fed it'):
    worker.take(lambda: True, fed.set)
  worker.stop()
  worker.stop()


LEFT_OPEN = """
import atexit, itertools, threading, time

def alive():
  print([t.name for t in threading.enumerate() if 'slipstream' in t.name])

atexit.register(alive)  # called last, as it is the first one registered
from slipstream_jax.data.prefetch import ahead, Worker
from slipstream_jax.data.prefetch import OrderedResults

reader = ahead(itertools.count(), depth=1)
next(reader)
worker = Worker(itertools.count(), 1, 'slipstream-reader')
sleep = lambda n: time.sleep(0.01)
ordered = OrderedResults(itertools.count(), sleep, workers=3)
next(ordered)
waits = OrderedResults(ahead(itertools.count()), lambda n: n, workers=2)
next(waits)
print(len([t for t in threading.enumerate() if 'slipstream' in t.name]))
raise KeyboardInterrupt
"""


def test_no_thread_is_left_as_python_exits():
  """Python would kill it, and abort where it comes back from C++ then."""
  done = programs.finished([sys.executable, '-c', LEFT_OPEN])
  assert done.stdout.splitlines() == ['8', '[]'], done.stderr
