"""When skipping pays, beside a simulation of the threads."""

import itertools
import time

import numpy as np
import pytest

from slipstream_jax.engine import clock
from slipstream_jax.engine.clock import HostClock, HostMs, Threads
from slipstream_jax.schedules.base import ScheduledBatch
from slipstream_jax.types import Batch

TICK = 0.01  # ms
COUNT = 120  # batches of the source


def simulated_ms(host, threads, left_out, step_ms):
  """Returns the ms per batch of the source, from threads that take turns.

  Each thread is a generator. It yields the ms that it works, or a condition
  that it waits for.
  """
  now, free = 0.0, [0.0]
  lock, queued = [False], [0.0]
  numbers, found, planned, done = itertools.count(), {}, [], []
  read = itertools.count()
  ended = []

  def worker():
    while True:
      while lock[0] or len(found) >= threads.workers:
        yield lambda: not lock[0] and len(found) < threads.workers
      lock[0] = True
      while queued[0] < 1:
        if next(read) >= COUNT:
          ended.append(True)
          lock[0] = False
          return
        yield host.read + host.choose
        queued[0] += 1 - left_out
      queued[0] -= 1
      number = next(numbers)
      found[number] = False
      lock[0] = False
      yield host.find
      found[number] = True

  def planner():
    for number in itertools.count():
      while not found.get(number) or len(planned) > 2:
        yield lambda n=number: found.get(n) and len(planned) <= 2
      del found[number]
      yield host.plan
      planned.append(number)

  def stepper():
    while True:
      while not planned:
        yield lambda: bool(planned)
      planned.pop(0)
      yield host.step
      before, free[0] = free[0], max(free[0], now) + step_ms
      while now < before:
        yield lambda until=before: now >= until
      done.append(now)

  waiting = [worker() for _ in range(threads.workers)] + [planner(), stepper()]
  tasks = [[thread, 0.0, None] for thread in waiting]
  idle = 0
  while idle < 1000:
    running = 0
    for task in list(tasks):
      thread, work, wait = task
      while work <= 1e-9 and (wait is None or wait()):
        asked = next(thread, 'end')
        if asked == 'end':
          tasks.remove(task)
          break
        work, wait = (0.0, asked) if callable(asked) else (asked, None)
      task[1:] = work, wait
      if work > 1e-9 and running < threads.cores and task in tasks:
        task[1] -= TICK
        running += 1
    tasks.append(tasks.pop(0))  # threads take turns
    now += TICK
    idle = 0 if running or now < free[0] else idle + 1
  half = len(done) // 2
  return (done[-1] - done[half]) / (len(done) - 1 - half) * (1 - left_out)


def drawn(seed):
  rng = np.random.default_rng(seed)
  host = HostMs(*np.exp(rng.normal(-1, 0.7, 5)).tolist())
  threads = Threads(int(rng.integers(1, 4)), int(rng.integers(1, 5)))
  return host, threads, float(rng.uniform(0.1, 0.8))


@pytest.mark.parametrize('seed', range(12))
@pytest.mark.parametrize('step_ms', [0.0, 0.5, 2.0])
def test_a_batch_takes_what_the_busiest_takes(seed, step_ms):
  host, threads, left_out = drawn(seed)
  for part in (0.0, left_out):
    formula = clock.batch_ms(host, threads, part, step_ms)
    truth = simulated_ms(host, threads, part, step_ms)
    assert formula == pytest.approx(truth, rel=0.1), (seed, part)


@pytest.mark.parametrize('seed', range(16))
def test_choosing_pays_from_that_step_on(seed):
  host, threads, left_out = drawn(seed)
  none = host._replace(choose=0.0)
  least = clock.step_ms_to_pay(host, threads, left_out)
  for step_ms in np.arange(0.005, 20, 0.01).tolist():
    some = clock.batch_ms(host, threads, left_out, step_ms)
    pays = some < clock.batch_ms(none, threads, 0.0, step_ms)
    assert pays == (step_ms > least), (seed, step_ms)
  for step_ms in (0.7 * least, 1.4 * least) if least else (0.1,):
    some = simulated_ms(host, threads, left_out, step_ms)
    pays = some < simulated_ms(none, threads, 0.0, step_ms)
    assert pays == (step_ms > least), (seed, step_ms)


def test_choosing_that_costs_nothing_always_pays():
  host = HostMs(read=0.1, find=1.0, plan=1.0, step=1.0)
  assert clock.step_ms_to_pay(host, Threads(2, 2), 0.3) == 0
  # One thread reads, so a batch takes that long, however few are trained.
  reads = host._replace(read=5.0)
  assert clock.step_ms_to_pay(reads, Threads(2, 2), 0.3) == 5


def test_a_step_on_the_host_takes_its_cores():
  host, threads = HostMs(choose=1.0, step=1.0), Threads(1, 2)
  own = clock.payoff(host, threads, 0.5, 0.8, on_host=False)
  assert own == (0.5, 0.8, 1.0, False)
  # One thread spends 1.8 ms without skipping, and 0.9 ms, less than 1, with it.
  assert clock.payoff(host, threads, 0.5, 0.8, on_host=True).pays
  costly = host._replace(choose=2.0)
  assert not clock.payoff(costly, threads, 0.5, 0.8, on_host=True).pays


def timed(one, spent, seen, dropped, wait=lambda: None, ms=0.0):
  batch = Batch(None, None, np.zeros(100), np.ones(100, np.float32))
  item = ScheduledBatch(batch, {}, seen, dropped)
  with one.timed(spent, item, wait):
    until = time.thread_time() + ms / 1e3
    while time.thread_time() < until:
      pass


def test_what_is_read_counts_by_the_batch_of_the_source():
  one = HostClock(Threads(1, 1))
  spent = HostMs(read=3.0, choose=6.0, find=2.0, plan=4.0)
  for _ in range(100):  # each step takes three batches of the source
    timed(one, spent, 300, 200)
  timed(one, spent._replace(choose=1e6, find=1e6), 300, 200)  # compiles
  host = one.host_ms()
  assert host[:4] == pytest.approx((1, 2, 2, 4))
  assert one.left_out == pytest.approx(2 / 3)


def test_some_steps_are_taken_alone_while_examples_are_left_out():
  one, waits = HostClock(Threads(1, 1)), []

  def slow():
    waits.append(time.sleep(0.02))

  for _ in range(120):
    timed(one, HostMs(read=1.0), 100, 0, slow)
  assert not waits
  assert one.payoff() is None
  assert one.host_ms().choose == 0
  for _ in range(100):
    timed(one, HostMs(read=1.0, choose=2.0), 200, 100, slow, ms=1)
  timed(one, HostMs(read=9.0), 100, 0)  # the time of skipping is over
  assert len(waits) == 4  # before and after each of two steps
  paid = one.payoff()
  assert paid.step_ms >= 20
  assert one.host_ms()[:4] == pytest.approx((0.5, 1, 0, 0))
  assert one.host_ms().step >= 1


def test_a_step_that_fails_is_not_measured():
  one = HostClock(Threads(1, 1))
  item = ScheduledBatch(Batch(None, None, np.zeros(4), np.ones(4)), {}, 8, 4)
  with pytest.raises(ZeroDivisionError), one.timed(HostMs(), item, bool):
    raise ZeroDivisionError
  assert one.left_out == 0
