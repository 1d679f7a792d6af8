"""Items made ahead by threads: order, errors, bounds, and how threads end."""

import itertools
import sys
import threading
import time
import traceback

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from slipstream_jax.data.prefetch import (
  ahead,
  OrderedResults,
  Turns,
  Worker,
)
from tests.support import programs
from tests.support.watchdog import watchdog


class Failure(Exception):
  """Raised in the thread."""


def test_ahead_closed_early_stops_the_thread_and_closes_its_source():
  closed = threading.Event()

  def endless():
    try:
      while True:
        yield 0
    finally:
      closed.set()

  source = endless()  # held here, or to drop it would close it, too
  items = ahead(source)
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
  worker = Worker(iter(['only']), 2, 'slipstream-roomy')
  threads = [t for t in threading.enumerate() if t.name.endswith('roomy')]
  for thread in threads:
    thread.join(timeout=30)
  assert not any(thread.is_alive() for thread in threads)
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


workers = pytest.mark.parametrize('workers', [1, 4])


def failing_at(items, at):
  for number, item in enumerate(items):
    if number == at:
      raise Failure('of an item')
    yield item


MAKERS = {
  'one thread': lambda items, function, _: ahead(map(function, items)),
  'deep': lambda items, function, depth: ahead(map(function, items), depth),
  'threads': OrderedResults,
}


@pytest.mark.parametrize('kind', MAKERS)
@settings(max_examples=25)
@given(
  count=st.integers(0, 40),
  threads=st.integers(1, 6),
  naps=st.lists(st.integers(0, 3), min_size=40, max_size=40),
  item_fails=st.none() | st.integers(0, 40),
  function_fails=st.none() | st.integers(0, 40),
)
def test_it_is_map_whatever_takes_how_long(
  kind, count, threads, naps, item_fails, function_fails
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
      names = [e.name for e in traceback.extract_tb(failure.__traceback__)]
      error = str(failure), {'failing_at', 'function'} & {*names}
    return given, error

  items = failing_at(range(count), item_fails)
  expected = after(map(function, failing_at(range(count), item_fails)))
  results = MAKERS[kind](items, function, threads)
  with watchdog():
    assert after(results) == expected
    with pytest.raises(StopIteration):
      next(results)
    results.close()
    results.close()


@settings(max_examples=25)
@given(
  count=st.integers(0, 40),
  threads=st.integers(2, 6),
  naps=st.lists(st.integers(0, 3), min_size=40, max_size=40),
  opens=st.integers(0, 5),
  fails=st.none() | st.tuples(st.sampled_from('pt'), st.integers(0, 40)),
)
def test_items_take_turns_in_their_order(count, threads, naps, opens, fails):
  """Each is prepared once enough before it have had their turn."""
  turned = []

  def at_once(item):
    return min(item, item % (opens + 1))

  def prepare(item):
    assert item - at_once(item) <= len(turned)
    time.sleep(naps[item] * 1e-4)
    if fails == ('p', item):
      raise Failure('of preparing')
    return item

  def take(item):
    assert item == len(turned)
    if fails == ('t', item):
      raise Failure('of a turn')
    turned.append(item)
    return [item] * (item % 3)

  def function(item):
    time.sleep(naps[-item] * 1e-4)
    return -item

  turns = Turns(prepare, at_once, take)
  results = OrderedResults(iter(range(count)), function, threads, turns)
  good = count if fails is None else min(count, fails[1])
  expected = [-item for item in range(good) for _ in range(item % 3)]
  with watchdog():
    assert list(itertools.islice(results, len(expected))) == expected
    if good < count:
      with pytest.raises(Failure):
        next(results)
    assert next(results, None) is None
    results.close()
  assert turned == list(range(good))


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


@pytest.mark.parametrize('workers', [3, 5])
def test_what_comes_before_an_error_is_given_first(workers):
  """Though the error was there before it."""
  failed = threading.Event()

  def function(item):
    if item == 2:
      failed.set()
      raise Failure('of the function')
    failed.wait(60)
    return item

  results = OrderedResults(itertools.count(), function, workers)
  with watchdog():
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(Failure):
      next(results)
    for _ in range(2):
      results.close()
      assert next(results, None) is None


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
