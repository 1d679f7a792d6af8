"""Items made ahead in a thread: order, errors, and how threads end."""

import threading
import time

import pytest

from slipstream_jax.data.ahead import ahead, Worker


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
