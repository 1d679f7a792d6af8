"""When skipping pays, beside a simulation of the threads."""

import itertools
import time

import jax
import numpy as np
import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.engine import clock, planner
from slipstream_jax.engine.clock import HostClock, HostMs, Threads
from slipstream_jax.engine.engine import Engine
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.schedules.base import Edge, Predictions, ScheduledBatch
from slipstream_jax.schedules.chooser import Chooser
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from slipstream_jax.types import Batch
from tests.support import small

TICK = 0.01  # ms
COUNT = 120  # batches of the source
NO_EDGE = Edge()


def simulated_ms(host, threads, left_out, step_ms):
  """Returns the ms per batch of the source, from threads that take turns.

  Each thread is a generator. It yields the ms that it works, or a condition
  that it waits for.
  """
  now, free = 0.0, [0.0]
  lock, queued = [False], [0.0]
  numbers, found, planned, done = itertools.count(), {}, [], []
  read = itertools.count()

  def worker():
    while True:
      while lock[0] or len(found) >= threads.workers:
        yield lambda: not lock[0] and len(found) < threads.workers
      lock[0], scored = True, 0.0
      while queued[0] < 1:
        if next(read) >= COUNT:
          lock[0] = False
          return
        yield host.read + host.choose
        scored += host.score
        queued[0] += 1 - left_out
      queued[0] -= 1
      number = next(numbers)
      found[number] = False
      lock[0] = False
      yield host.find + scored
      found[number] = True

  def planner():
    for number in itertools.count():
      while not found.get(number) or len(planned) > 2:
        yield lambda n=number: found.get(n) and len(planned) <= 2
      del found[number]
      yield host.plan
      planned.append(number)

  def alone():
    while True:
      while len(planned) > 2:
        yield lambda: len(planned) <= 2
      while queued[0] < 1:
        if next(read) >= COUNT:
          return
        yield host.read + host.choose + host.score
        queued[0] += 1 - left_out
      queued[0] -= 1
      yield host.find
      yield host.plan
      planned.append(0)

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

  ahead = [alone()]
  if threads.workers > 1:
    ahead = [worker() for _ in range(threads.workers)] + [planner()]
  tasks = [[thread, 0.0, None] for thread in [*ahead, stepper()]]
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


@pytest.mark.parametrize('phase', HostMs._fields[:5])
def test_any_thread_can_be_the_busiest(phase):
  host = HostMs(*[0.1] * 5)._replace(**{phase: 3.0})
  formula = clock.batch_ms(host, Threads(2, 8), 0.25, 0.1)
  truth = simulated_ms(host, Threads(2, 8), 0.25, 0.1)
  assert formula == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize('seed', range(16))
def test_choosing_pays_from_that_step_on(seed):
  host, threads, left_out = drawn(seed)
  none = host._replace(choose=0.0, score=0.0)
  least = clock.step_ms_to_pay(host, none, threads, left_out)
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
  assert clock.step_ms_to_pay(host, host, Threads(2, 2), 0.3) == 0
  # One thread reads, so a batch takes that long, however few are trained.
  reads = host._replace(read=5.0)
  assert clock.step_ms_to_pay(reads, reads, Threads(2, 2), 0.3) == 5
  # Batches of chosen examples take longer, so leaving some out saves nothing.
  slower = host._replace(find=2.0, plan=2.0, step=2.0)
  assert clock.step_ms_to_pay(slower, host, Threads(2, 2), 0.3) > 2


def test_other_threads_take_cores():
  host, whole = HostMs(choose=0.4, step=1.0, rest=1.0), HostMs(step=1, rest=1)
  assert clock.step_ms_to_pay(host, whole, Threads(2, 2), 0.1) == pytest.approx(
    1.1
  )
  assert clock.step_ms_to_pay(host, whole, Threads(2, 4), 0.1) == 0
  # On the CPU they are the device's: 0.9 of 2 ms is less than 2.
  paid = clock.payoff(host, whole, Threads(2, 2), 0.1, 1.0, on_host=True)
  assert paid == (0.1, 1.0, None, True)


def test_workers_share_what_scores():
  host = HostMs(read=0.1, choose=0.2, score=2.0, find=1.0)
  assert clock.batch_ms(host, Threads(2, 4), 0.5, 0.1) == pytest.approx(1.4)
  assert clock.batch_ms(host, Threads(4, 4), 0.5, 0.1) == pytest.approx(0.7)


def test_a_step_on_the_host_takes_its_cores():
  host, whole = HostMs(choose=1.0, step=1.0), HostMs(step=1.0)
  rest = Threads(1, 2), 0.5, 0.8
  own = clock.payoff(host, whole, *rest, on_host=False)
  assert own == (0.5, 0.8, 1.0, False)
  # One thread spends 1.8 ms without skipping, and 0.9 ms, less than 1, with it.
  assert clock.payoff(host, whole, *rest, on_host=True).pays
  costly = host._replace(choose=2.0)
  assert not clock.payoff(costly, whole, *rest, on_host=True).pays
  # With one core, 0.05 of 3 ms is saved, and 0.5 ms is spent on choosing.
  cheap, rest = host._replace(choose=0.5), (Threads(1, 1), 0.05, 2.0)
  assert clock.payoff(cheap, whole, *rest, on_host=False).pays
  assert not clock.payoff(cheap, whole, *rest, on_host=True).pays


def timed(
  one,
  spent,
  seen,
  dropped,
  *,
  trained=100,
  wait=bool,
  work=bool,
  edge=NO_EDGE,
  size=None,
):
  weights = (np.arange(100) < trained).astype(np.float32)
  batch = Batch(None, None, np.zeros(100), weights)
  item = ScheduledBatch(batch, {}, seen, dropped, edge, batch_size=size)
  with one.timed(spent, item, wait):
    work()


def test_what_is_read_counts_by_the_batch_of_the_source():
  one = HostClock(Threads(1, 1))
  spent = HostMs(read=3.0, choose=6.0, find=2.0, plan=4.0)
  for _ in range(100):  # each step takes three batches of the source
    timed(one, spent, 300, 200)
  timed(one, spent._replace(choose=1e6, find=1e6), 300, 200)  # compiles
  host = one.host_ms()
  assert host[:4] == pytest.approx((1, 2, 2, 4))
  assert one.left_out == pytest.approx(2 / 3)


def test_what_is_trained_counts_by_the_full_batch():
  one = HostClock(Threads(1, 1))
  for _ in range(100):  # not filled up again
    timed(one, HostMs(1.0, 1.0, 2.0, 4.0), 100, 75, trained=25)
  assert one.host_ms()[:4] == pytest.approx((1, 1, 8, 16))
  assert one.left_out == pytest.approx(0.75)


def test_one_thread_does_everything_without_a_batch_ahead():
  columns = small.columns(small.BATCH)
  trainer = make_parts(
    small.recipe('adagrad'), PLACEMENTS['streamed'], small.DENSE
  )
  source = ColumnBatches(columns, small.BATCH)
  with planned(trainer, source, depth=0, workers=4) as batches:
    assert batches.clock.threads == (1, 1)


def test_some_steps_are_taken_alone_while_examples_are_left_out(monkeypatch):
  wall, cpu, waits = [0.0], [0.0], []
  monkeypatch.setattr(clock.time, 'perf_counter', lambda: wall[0])
  monkeypatch.setattr(clock.time, 'thread_time', lambda: cpu[0])
  # All threads together spend 11.5 ms for each step.
  monkeypatch.setattr(clock.time, 'process_time', lambda: cpu[0] * 11.5 / 3)

  def wait():  # for a device that takes 20 ms
    waits.append(wall[0])
    wall[0] += 0.02

  def work():
    wall[0] += 0.003
    cpu[0] += 0.003

  one = HostClock(Threads(1, 1))
  for _ in range(120):
    # A scorer learns before anything is left out.
    scored = HostMs(read=1.0, choose=5.0, score=1.0)
    timed(one, scored, 200, 0, wait=wait, work=work)
  assert not waits
  assert one.payoff() is None
  assert one.host_ms() == pytest.approx((0.5, 2.5, 0, 0, 3, 0.5, 1.5))
  spent = HostMs(read=1.0, choose=2.0)
  for _ in range(100):
    timed(one, spent, 200, 150, trained=50, wait=wait, work=work)
  timed(one, HostMs(read=9.0), 200, 0)  # the time of skipping is over
  assert one.whole == pytest.approx((0.5, 0, 0, 0, 3, 0, 1.5))
  assert len(waits) == 4  # before and after each of two steps
  for _ in range(2000):
    timed(one, spent, 200, 150, trained=50, wait=wait, work=work)
  assert len(waits) == 40
  assert one.payoff()[:2] == pytest.approx((0.75, 40))  # of a full batch
  assert one.host_ms() == pytest.approx((0.5, 1, 0, 0, 6, 0, 11))
  # An accelerator may take a smaller batch in the time of a full one.
  for size, known in ((100, 'cpu gpu'), (101, 'cpu')):
    timed(one, spent, 200, 150, trained=50, size=size)
    for backend in ('gpu', 'cpu'):
      monkeypatch.setattr(jax, 'default_backend', lambda name=backend: name)
      assert (one.payoff() is not None) == (backend in known)
  # What predictions for other batches take is not measured.
  timed(one, spent, 200, 150, wait=wait, edge=Edge(predicts=Predictions((), 0)))
  assert one.payoff() is None


SLOWED = {
  'read': (ColumnBatches, '__next__'),
  'choose': (Chooser, 'choose'),
  'score': (Chooser, 'prepare'),
  'find': (planner, 'row_weights'),
  'plan': (planner, 'link'),
  'step': (Engine, 'load'),
}


@pytest.mark.parametrize('phase', SLOWED)
def test_a_training_loop_measures_each_thread(phase, monkeypatch):
  owner, name = SLOWED[phase]
  real = getattr(owner, name)

  def slow(*arguments):
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
      pass
    return real(*arguments)

  monkeypatch.setattr(owner, name, slow)
  columns = small.columns(20 * small.BATCH)
  trainer = make_parts(
    small.recipe('adagrad'),
    PLACEMENTS['streamed'],
    small.DENSE,
    hot=small.hot(columns),
  )
  source = ColumnBatches(columns, small.BATCH)
  skip = Skip(0.5, 'random', phases=Phases(0, 0, 2, 0), drop_of='hot')
  with slipstream(trainer, source, skip) as batches:
    assert len(list(train(trainer, batches, 110))) == 110
    host, paid = batches.clock.host_ms(), batches.clock.payoff()
  assert getattr(host, phase) >= 10
  # Choosing compiles, and other threads compute the step.
  done = dict.fromkeys(('choose', 'score', 'rest', phase), 0.0)
  others = host._replace(**done)
  assert max(others) < 10
  assert min(host[:-1]) > 0
  assert 0 < paid.left_out < 1
  assert paid.step_ms > 0


def test_a_step_that_fails_is_not_measured():
  one = HostClock(Threads(1, 1))
  item = ScheduledBatch(Batch(None, None, np.zeros(4), np.ones(4)), {}, 8, 4)
  with pytest.raises(ZeroDivisionError), one.timed(HostMs(), item, bool):
    raise ZeroDivisionError
  assert one.left_out == 0
