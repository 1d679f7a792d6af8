"""A function of items by many threads: order, errors, ends, and bounds."""

import itertools
import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from slipstream_jax.data.prefetch import OrderedResults
from tests.support.watchdog import watchdog

workers = pytest.mark.parametrize('workers', [1, 2, 4, 9])


class Failure(Exception):
  """Raised by an item or its function."""


def failing_at(items, at):
  for number, item in enumerate(items):
    if number == at:
      raise Failure('of an item')
    yield item


@settings(max_examples=40)
@given(
  count=st.integers(0, 40),
  threads=st.integers(1, 6),
  naps=st.lists(st.integers(0, 3), min_size=40, max_size=40),
  item_fails=st.none() | st.integers(0, 40),
  function_fails=st.none() | st.integers(0, 40),
)
def test_it_is_map_whatever_takes_how_long(
  count, threads, naps, item_fails, function_fails
):
  def function(item):
    time.sleep(naps[item] * 1e-4)
    if item == function_fails:
      raise Failure('of the function')
    return -item

  def after(results):
    given, error = [], None
    try:
      for result in results:
        given.append(result)
    except Failure as failure:
      error = str(failure)
    return given, error

  items = failing_at(range(count), item_fails)
  expected = after(map(function, failing_at(range(count), item_fails)))
  results = OrderedResults(items, function, threads)
  with watchdog():
    assert after(results) == expected
    with pytest.raises(StopIteration):
      next(results)
    results.close()
    results.close()


def test_after_an_error_nothing_comes():
  """Though a result of the item behind lies there."""
  behind = threading.Event()

  def function(item):
    if item == 0:
      behind.wait(60)
      raise Failure('of the function')
    behind.set()
    return item

  results = OrderedResults(iter(range(2)), function, 2)
  with watchdog():
    with pytest.raises(Failure):
      next(results)
    assert list(results) == []
    results.close()


@workers
def test_so_many_work_at_once(workers):
  """Each waits until all the others have begun."""
  together = threading.Barrier(workers)

  def function(item):
    together.wait(60)
    return item

  results = OrderedResults(iter(range(4 * workers)), function, workers)
  assert list(results) == list(range(4 * workers))
  results.close()


@workers
def test_no_more_than_that_are_taken_ahead(workers):
  counted = itertools.count()
  results = OrderedResults(counted, lambda item: item, workers)
  for expected in range(20):
    assert next(results) == expected
    taken = int(repr(counted)[len('count(') : -1])
    assert taken <= expected + 1 + workers
  results.close()


@workers
def test_items_are_taken_by_one_thread_at_a_time(workers):
  busy = threading.Lock()

  def items():
    for item in range(200):
      assert busy.acquire(blocking=False)
      time.sleep(1e-5)
      busy.release()
      yield item

  results = OrderedResults(items(), lambda item: item, workers)
  assert list(results) == list(range(200))
  results.close()


@workers
def test_closing_it_ends_its_threads(workers):
  results = OrderedResults(itertools.count(), lambda item: item, workers)
  next(results)
  results.close()
  names = [thread.name for thread in threading.enumerate()]
  assert 'slipstream-worker' not in names


@pytest.mark.parametrize('workers', [2, 5])
def test_it_starves_once_all_that_came_was_given(workers):
  """Not while a function is at work, nor while results lie there."""
  may_come, may_work = threading.Event(), threading.Event()

  def items():
    yield 1
    yield 2
    may_come.wait(60)
    yield 3

  def function(item):
    may_work.wait(60)
    return item

  results, given = OrderedResults(items(), function, workers), []
  consumer = threading.Thread(target=lambda: given.extend(results))
  consumer.start()
  for _ in range(20):
    time.sleep(1e-3)
    assert not results.starves
  may_work.set()
  with watchdog():
    while not results.starves:
      time.sleep(1e-3)
  assert given == [1, 2]
  may_come.set()
  consumer.join()
  assert given == [1, 2, 3]
  results.close()
