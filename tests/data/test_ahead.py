"""Reading ahead in a thread: order, errors, and an early end."""

import threading

import pytest

from slipstream_jax.data.ahead import ahead
from tests.support.raw_example import Failure


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
