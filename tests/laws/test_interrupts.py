"""A step is taken whole or not at all, whatever cuts it off.

After an error or a Ctrl-C at any point of a step, a run that continues ends
with the bits of an uninterrupted run. Where it cannot continue, it says so.
"""

import contextlib
import itertools
import os
import random
import signal
import sys
import threading
import time

from hypothesis import given, Phase, settings
from hypothesis import strategies as st
import jax
import pytest

import slipstream_jax as slip
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.data.interrupts import held
from slipstream_jax.data.numbered import ColumnBatches, NumberedBatches
from slipstream_jax.data.prefetch import Worker
from slipstream_jax.errors import UserError
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from tests.api import shop
from tests.support import programs
from tests.support.short_runs import (
  BATCH,
  BATCHES,
  batches_for,
  COLUMNS,
  SCHEDULES,
  start,
  unbroken,
  WHERE,
)
from tests.support.small import assert_same_bits, everything
from tests.support.watchdog import watchdog

WATCHDOG_S = 300
# Each draw is a run, so what fails is reported as drawn.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)


class Fault(Exception):
  """What no program expects."""


POINTS = ('before load', 'after load', 'before update')
TORN_AFTER = ('after update', 'before store', 'after store')


def cut_off(trainer, point, at, act):
  """Lets `act()` happen at that point of step number `at`, once."""
  when, _, what = point.partition(' ')
  owner, name = {
    'load': (trainer.engine, 'load'),
    'update': (trainer, 'update'),
    'store': (trainer.engine, 'store'),
  }[what]
  call, calls = getattr(owner, name), []

  def broken(*args):
    calls.append(None)
    if len(calls) == at and when == 'before':
      act()
    result = call(*args)
    if len(calls) == at and when == 'after':
      act()
    return result

  setattr(owner, name, broken)


def fail():
  raise Fault('in mid-step')


def interrupt():
  signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _interrupts_raise():
  """As in any program; what Python drops of them is no finding."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  hook = sys.unraisablehook

  def unless_interrupt(dropped):
    if not issubclass(dropped.exc_type, KeyboardInterrupt | Fault):
      hook(dropped)

  sys.unraisablehook = unless_interrupt
  yield
  sys.unraisablehook = hook
  signal.signal(signal.SIGINT, before)


def train_on(trainer, batches, stop):
  """Trains to the end, again after each `stop`; returns how many came."""
  stops = 0
  while True:
    try:
      for _ in train(trainer, batches, 10_000):
        pass
      return stops
    except stop:
      stops += 1


any_run = given(
  placement=st.sampled_from(sorted(WHERE)),
  schedule=st.sampled_from(SCHEDULES),
  depth=st.sampled_from([0, 2]),
  at=st.integers(1, BATCHES),
  point=st.sampled_from(POINTS + TORN_AFTER),
)


@pytest.mark.parametrize('act', [fail, interrupt])
@settings(max_examples=40, phases=NO_SHRINKING)
@any_run
def test_a_step_is_taken_whole_or_not_at_all(
  act, placement, schedule, depth, at, point
):
  """A Ctrl-C waits for the end of its step. An error may tear it."""
  trainer, batches = start(placement, schedule, depth)
  cut_off(trainer, point, at, act)
  with batches:
    if act is fail and point in TORN_AFTER:
      held_out = ColumnBatches(COLUMNS, BATCH, epochs=1)
      for use in (
        lambda: train_on(trainer, batches, Fault),
        lambda: evaluate(trainer, held_out),
      ):
        with pytest.raises(UserError, match='interrupted in the middle of'):
          use()
      return
    assert train_on(trainer, batches, (Fault, KeyboardInterrupt)) == 1
  rows, counters = unbroken(placement, schedule)
  assert_same_bits(everything(trainer), rows)
  assert trainer.engine.counters == counters


def in_short(counters):
  """What does not depend on what the planner remembers."""
  return counters[: counters._fields.index('hits')], counters.rows_used


class Hail:
  """Ctrl-C after Ctrl-C from another thread, each once the last was raised."""

  def __init__(self, seed, burst):
    self.raised, self.ended = threading.Event(), threading.Event()
    self.rng, self.burst, self.count = random.Random(seed), burst, 0
    self.training = False
    self.thread = threading.Thread(target=self.run, daemon=True)

  def begin(self):
    signal.signal(signal.SIGINT, self.interrupt)
    self.thread.start()

  def interrupt(self, number, frame):
    self.raised.set()
    if self.training:  # not in the midst of the test's own lines
      self.training = False
      self.count += 1
      raise KeyboardInterrupt

  def run(self):
    for _ in range(40):  # then the run may go on in peace
      if self.ended.wait(self.rng.random() * 0.03):
        return
      for _ in range(self.burst):
        os.kill(os.getpid(), signal.SIGINT)
      while not (self.raised.wait(0.05) or self.ended.is_set()):
        pass
      self.raised.clear()

  def train(self, trainer, batches):
    """Trains to the end, again after each Ctrl-C."""
    try:
      while not self.ended.is_set():
        try:
          self.training = True
          for _ in train(trainer, batches, 10_000):
            pass
          self.training = False
          self.ended.set()
        except KeyboardInterrupt:
          continue
    finally:
      self.training = False
      self.ended.set()
      self.thread.join(WATCHDOG_S)
      assert not self.thread.is_alive()


# Of each placement and schedule one pair of depth and burst is not slow.
HAILS = [
  pytest.param(
    *run,
    2 * (pair % 2),
    1 + pair // 2,
    marks=[] if (number + number // 4) % 4 == pair else pytest.mark.slow,
  )
  for number, run in enumerate(itertools.product(WHERE, SCHEDULES))
  for pair in range(4)
]


@pytest.mark.parametrize(('placement', 'schedule', 'depth', 'burst'), HAILS)
def test_a_run_under_a_hail_of_ctrl_c_keeps_its_bits(
  placement, schedule, depth, burst
):
  rows, counters = unbroken(placement, schedule)  # nothing left to compile
  hails = (
    under_a_hail(placement, schedule, depth, Hail(seed, burst), rows, counters)
    for seed in range(50)  # a short run may end before the first
  )
  assert any(hails)


def under_a_hail(placement, schedule, depth, hail, rows, counters):
  """Checks a run under a hail. Returns how many Ctrl-C came."""
  trainer, batches = start(placement, schedule, depth)
  with batches:
    hail.begin()
    try:
      hail.train(trainer, batches)
    except UserError as error:
      # A second Ctrl-C may tear a step, but the trainer says so.
      torn = 'interrupted in the middle of' in str(error)
      if not (torn and hail.burst > 1):
        raise
      return hail.count
  assert_same_bits(everything(trainer), rows)
  # What moves may differ: a planner that starts again has forgotten uses.
  assert in_short(trainer.engine.counters) == in_short(counters)
  return hail.count


def test_an_interrupted_stop_is_not_taken_for_done():
  """Else the thread would share its source with whoever comes after it."""
  may_end, items_made = threading.Event(), []

  def items():
    for item in range(3):
      items_made.append(item)
      yield item
      may_end.wait(WATCHDOG_S)

  def later(call, *arguments):
    threading.Timer(0.2, call, arguments).start()

  worker = Worker(items(), 2, 'slipstream-planner')
  assert worker.take() == 0
  later(os.kill, os.getpid(), signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    worker.stop()
  later(may_end.set)
  worker.stop()
  assert may_end.is_set()
  assert items_made == [0, 1]


@pytest.mark.parametrize('times', [1, 2])
def test_a_ctrl_c_waits_for_the_end_and_a_second_one_does_not(times):
  done = []

  def block():
    with held():
      for _ in range(times):
        interrupt()
      done.append('the block')

  with pytest.raises(KeyboardInterrupt):
    block()
  assert done == ['the block'] * (times == 1)
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_holding_changes_nothing_in_other_threads():
  found = []

  def run():
    with held():
      found.append(signal.getsignal(signal.SIGINT))

  thread = threading.Thread(target=run)
  thread.start()
  thread.join(WATCHDOG_S)
  assert found == [signal.default_int_handler]


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('placement', WHERE)
def test_a_torn_trainer_is_whole_after_a_restore(placement, schedule, tmp_path):
  """Also where the device's rows are gone: donated to a write that failed."""
  trainer, batches = start(placement, schedule, 0)

  def lose():
    for leaf in jax.tree.leaves([g.kept.block for g in trainer.engine.groups]):
      if isinstance(leaf, jax.Array):
        leaf.delete()
    fail()

  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
    with batches:
      list(train(trainer, batches, 4))
      checkpoints.save(trainer, batches.get_state())
      cut_off(trainer, 'before store', 1, lose)
      with pytest.raises(Fault):
        list(train(trainer, batches, 10_000))
      with pytest.raises(UserError, match='interrupted in the middle of'):
        checkpoints.save(trainer, batches.get_state())
    with batches_for(trainer, schedule, 2) as batches:
      batches.set_state(checkpoints.restore(trainer).schedule_state)
      list(train(trainer, batches, 10_000))
  assert_same_bits(everything(trainer), unbroken(placement, schedule)[0])


# The same of `slip.Trainer`, whatever a user's code raises, and wherever a
# Ctrl-C comes in `close`.

RUN = 12


def trained_in_one(source):
  with shop.trainer() as trainer:
    trainer.train(source, RUN)
  return trainer


class Once:
  """Raises at one call, and never again."""

  def __init__(self, at, error):
    self.at, self.error, self.calls = at, error, 0

  def __call__(self, *_):
    self.calls += 1
    if self.calls == self.at:
      raise self.error('of the user')


def taken(trainer):
  try:
    return int(trainer.parts.state.step)
  except UserError:  # it is not made yet
    return 0


def go_on(trainer, source, error, **arguments):
  """Trains to the end, again after each error; returns how many came."""
  stops = 0
  while (left := RUN - taken(trainer)) > 0:
    try:
      trainer.train(source, left, **arguments)
    except error:
      stops += 1
  return stops


def raising(once):
  """The shop's examples; `once` is called before each batch."""
  for item in shop.dicts():
    once()
    yield item


@pytest.mark.parametrize('error', [Fault, KeyboardInterrupt])
@pytest.mark.parametrize('prefetch', [0, 2])
@pytest.mark.parametrize('at', [1, 2, RUN])
def test_a_function_of_batches_that_raises_is_called_again(at, prefetch, error):
  once = Once(at, error)
  with watchdog(), shop.trainer(prefetch=prefetch) as trainer:
    source = slip.batches(lambda: raising(once))
    assert go_on(trainer, source, error) == 1
  shop.assert_same(trainer, trained_in_one(shop.dicts()))


@pytest.mark.parametrize('prefetch', [0, 2])
def test_a_function_that_raises_while_skipping_is_called_again(prefetch):
  skip, trainers = shop.SKIPS['surprise'], []
  for once in (Once(9, Fault), Once(0, Fault)):
    with watchdog(), shop.trainer(prefetch=prefetch) as trainer:
      trainer.train(shop.source(), 1, skip=skip)
      source = slip.batches(lambda once=once: raising(once))
      assert go_on(trainer, source, Fault, skip=skip) == (once.at > 0)
    trainers.append(trainer)
  shop.assert_same(*trainers)


@pytest.mark.parametrize('prefetch', [0, 2])
@pytest.mark.parametrize('at', [1, 2, 7])
def test_a_generator_that_raised_says_that_it_cannot_go_on(at, prefetch):
  source = raising(Once(at, Fault))
  with watchdog(), shop.trainer(prefetch=prefetch) as trainer:
    with pytest.raises(Fault):
      trainer.train(source, RUN)
    assert taken(trainer) == at - 1  # what came before it is trained
    for _ in range(2):
      with pytest.raises(UserError, match='an end, after Fault: of the user'):
        trainer.train(source, 1)
    trainer.train(shop.source(), 1)
    with pytest.raises(UserError, match='an end, after Fault'):
      trainer.train(source, 1)


class Asked(NumberedBatches):
  """Batches that the user holds, of which each call may raise."""

  def __init__(self, once, trainer):
    self.once, self.inner = once, shop.source().bind(trainer.tables)

  def __next__(self):
    self.once()
    return next(self.inner)

  def get_state(self):
    self.once()
    return self.inner.get_state()

  def set_state(self, state):
    self.once()
    self.inner.set_state(state)

  def close(self):
    self.once()


@pytest.mark.parametrize('error', [Fault, KeyboardInterrupt])
@pytest.mark.parametrize('prefetch', [0, 2])
def test_any_call_of_a_source_may_raise(prefetch, error):
  """Also those that bind, save, set back and close it."""
  wanted = trained_in_one(shop.source())
  rng = random.Random(prefetch)
  for at in [*range(1, 9), *rng.sample(range(9, 60), 8)]:
    trainer = shop.trainer(prefetch=prefetch)
    source = Asked(Once(at, error), trainer)
    with watchdog():
      for steps in (1, 4, 6, RUN):
        for _ in range(2):  # again after it has raised
          try:
            if taken(trainer) < steps:
              trainer.train(source, steps - taken(trainer))
            trainer.close()
          except error:
            continue
      trainer.close()
    assert taken(trainer) == RUN
    shop.assert_same(trainer, wanted)


class Flaky(shop.Recommender):
  """A model of its own for each case, whose call may raise."""

  number: int = 0

  def __call__(self, dense, e):
    calls[self.number]()
    return super().__call__(dense, e)


calls = {}


@pytest.mark.parametrize('at', [1, 2, 3])
def test_a_model_that_raises_once_is_called_again(at):
  wanted = trained_in_one(shop.dicts())
  calls[at] = once = Once(at, Fault)
  with watchdog(), shop.trainer(model=Flaky(number=at)) as trainer:
    assert go_on(trainer, shop.dicts(), Fault) <= 1
    # Of a generator, too, the first batch is trained.
    assert once.calls >= at
  shop.assert_same(trainer, wanted)


class Stop(Once):
  """Keeps records and stops at one of them."""

  def __init__(self, records, at):
    super().__init__(at, Fault)
    self.records = records

  def __call__(self, record):
    self.records.append(record)
    super().__call__()


@pytest.mark.parametrize('skip', [*shop.SKIPS])
@pytest.mark.parametrize('stops', ['break', 'raise'])
def test_there_are_as_many_steps_as_records(stops, skip):
  wanted, skip = [], shop.SKIPS[skip]
  for stopping in (False, True):
    rng, source, records = random.Random(5), shop.source(), []
    with shop.trainer() as trainer:
      while (left := 40 - taken(trainer)) > 0:
        on_step = Stop(records, rng.randint(1, 7) if stopping else 99)
        with contextlib.suppress(Fault):
          if stops == 'raise':
            trainer.train(source, left, skip=skip, on_step=on_step)
          else:
            for record in trainer.steps(source, left, skip=skip):
              on_step(record)
        assert [r.step for r in records] == [*range(1, taken(trainer) + 1)]
    wanted.append((trainer, records))
  (one, all_at_once), (other, in_parts) = wanted
  shop.assert_same(one, other)
  assert [r.loss for r in all_at_once] == [r.loss for r in in_parts]
  assert [r.counters[:3] for r in all_at_once] == [
    r.counters[:3] for r in in_parts
  ]


def at_call(number, act):
  """Lets `act()` happen at the start of that function call from here on."""
  left = [number]

  def look(frame, event, argument):
    name = frame.f_code.co_filename
    if event != 'call' or '/slipstream_jax/' not in name:
      return
    if name.endswith(('interrupts.py', 'api/trainer.py')) and left[0] == number:
      return  # before anything is done
    left[0] -= 1
    if not left[0]:
      sys.setprofile(None)
      act()

  sys.setprofile(look)
  return left


CLOSED = {
  'arrays': lambda: shop.source(),
  'a function': lambda: slip.batches(shop.dicts),
  'a generator': shop.dicts,
}


# Of each kind two pairs of prefetch and act are not slow.
CUTS = [
  pytest.param(
    *cut, marks=[] if number in (0, 3, 5, 6, 8, 11) else pytest.mark.slow
  )
  for number, cut in enumerate(
    itertools.product(CLOSED, [0, 2], [fail, interrupt])
  )
]


@pytest.mark.parametrize(('kind', 'prefetch', 'act'), CUTS)
def test_close_may_be_cut_off_at_any_call(kind, prefetch, act):
  wanted = trained_in_one(CLOSED[kind]())
  done, number = False, 1
  while not done:
    source, trainer = CLOSED[kind](), shop.trainer(prefetch=prefetch)
    trainer.train(source, 5)
    with watchdog():
      left = at_call(number, act)
      try:
        trainer.close()
      except (Fault, KeyboardInterrupt):
        pass
      finally:
        sys.setprofile(None)
      done = left[0] > 0  # it was over before
      go_on(trainer, source, Fault)
      trainer.close()
    shop.assert_same(trainer, wanted)
    number += 1 + number // 8
  assert number > 10


LEFT_OPEN = """
import atexit, os, signal, sys, tempfile, threading

def alive():
  print([t.name for t in threading.enumerate() if 'slipstream' in t.name])

atexit.register(alive)  # called last, as it is the first one registered
import numpy as np
import slipstream_jax as slip

signal.signal(signal.SIGINT, signal.default_int_handler)
rng, tables = np.random.default_rng(0), {'a': slip.Table(500, 4)}
data = np.zeros((4000, 1), np.float32), {'a': rng.integers(0, 500, 4000)}
labels, folder = rng.integers(0, 2, 4000).astype(np.float32), tempfile.mkdtemp()
trainers = []
for number, place in enumerate(['streamed', 'pinned', slip.cached(40)]):
  kept = {'store': slip.tiered(1 << 16, folder)} if number == 0 else {}
  model = slip.DLRM(bottom=(4,), top=(4,))
  how = {'placement': place, 'prefetch': 3, 'workers': 2, 'hot_bytes': 4000}
  trainers.append(slip.Trainer(model, tables, **how, **kept))
  phases = slip.Phases(1, 2, 1, 9)
  skip = slip.Skip(policy='stale', phases=phases) if number == 1 else None
  source = slip.batches(*data, labels, batch_size=16, seed=0)
  trainers[-1].train(source, steps=3, skip=skip)
print(any('slipstream' in t.name for t in threading.enumerate()))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGINT)
"""


def test_no_thread_of_a_trainer_left_open_outlives_python():
  """One waits for a step that nobody will take; Ctrl-C ends it, too."""
  begun = time.monotonic()
  done = programs.finished([sys.executable, '-c', LEFT_OPEN])
  assert done.stdout.splitlines() == ['True', '[]'], done.stderr
  assert 'KeyboardInterrupt' in done.stderr
  assert time.monotonic() - begun < WATCHDOG_S
