"""A step is taken whole or not at all, whatever cuts it off.

After an error or a Ctrl-C at any point of a step, going on gives the bits of a
run without it; where it cannot, the trainer says that it is torn.
"""

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

from slipstream_jax.data.ahead import Worker
from slipstream_jax.data.base import ColumnBatches
from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import UserError
from slipstream_jax.saving.checkpoint import Checkpoints
from slipstream_jax.stream import leaving
from slipstream_jax.stream.device import apply
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import train
from tests.laws.test_placements import assert_same_bits
from tests.support import programs
from tests.support.short_runs import (
  BATCH,
  BATCHES,
  batches_for,
  COLUMNS,
  everything,
  SCHEDULES,
  start,
  unbroken,
  WHERE,
)

WATCHDOG_S = 300
# A run each: what fails is told as it was drawn.
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
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
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


@settings(max_examples=60, phases=NO_SHRINKING)
@any_run
def test_after_an_error_in_a_step_the_run_goes_on_or_says_it_is_torn(
  placement, schedule, depth, at, point
):
  trainer, batches = start(placement, schedule, depth)
  cut_off(trainer, point, at, fail)
  with batches:
    if point in TORN_AFTER:
      with pytest.raises(UserError, match='cut off in the midst of'):
        train_on(trainer, batches, Fault)
      held_out = ColumnBatches(COLUMNS, BATCH, epochs=1)
      with pytest.raises(UserError, match='cut off in the midst of'):
        evaluate(trainer, held_out)
      return
    assert train_on(trainer, batches, Fault) == 1
  rows, counters = unbroken(placement, schedule)
  assert_same_bits(everything(trainer), rows)
  assert trainer.engine.counters == counters


@settings(max_examples=60, phases=NO_SHRINKING)
@any_run
def test_a_ctrl_c_waits_for_the_end_of_its_step(
  placement, schedule, depth, at, point
):
  trainer, batches = start(placement, schedule, depth)
  cut_off(trainer, point, at, interrupt)
  with batches:
    assert train_on(trainer, batches, KeyboardInterrupt) == 1
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
    self._rng, self._burst, self.count = random.Random(seed), burst, 0
    self._training = False
    signal.signal(signal.SIGINT, self._raise)
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def _raise(self, number, frame):
    self.raised.set()
    if self._training:  # not in the midst of the test's own lines
      self._training = False
      self.count += 1
      raise KeyboardInterrupt

  def _run(self):
    for _ in range(40):  # then the run may go on in peace
      if self.ended.wait(self._rng.random() * 0.03):
        return
      for _ in range(self._burst):
        os.kill(os.getpid(), signal.SIGINT)
      while not (self.raised.wait(0.05) or self.ended.is_set()):
        pass
      self.raised.clear()

  def train(self, trainer, batches):
    """Trains to the end, again after each Ctrl-C."""
    try:
      while not self.ended.is_set():
        try:
          self._training = True
          for _ in train(trainer, batches, 10_000):
            pass
          self._training = False
          self.ended.set()
        except KeyboardInterrupt:
          continue
    finally:
      self._training = False
      self.ended.set()
      self._thread.join(WATCHDOG_S)
      assert not self._thread.is_alive()


@pytest.mark.parametrize('burst', [1, 2])
@pytest.mark.parametrize('depth', [0, 2])
@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('placement', WHERE)
def test_a_run_under_a_hail_of_ctrl_c_keeps_its_bits(
  placement, schedule, depth, burst
):
  rows, counters = unbroken(placement, schedule)  # nothing left to compile
  hails = (
    under_a_hail(placement, schedule, depth, burst, rows, counters)
    for _ in range(50)  # a short run may end before the first
  )
  assert any(hails)


def under_a_hail(placement, schedule, depth, burst, rows, counters):
  """How many a run took, which is looked at; whoever insists may tear it."""
  trainer, batches = start(placement, schedule, depth)
  with batches:
    hail = Hail(depth, burst)
    try:
      hail.train(trainer, batches)
    except UserError as error:
      # Whoever insists may tear a step, but it is told.
      torn = 'cut off in the midst of' in str(error)
      if not (torn and burst > 1):
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


def test_what_is_held_is_raised_at_the_end_and_only_once():
  done = []

  def block():
    with held():
      interrupt()
      done.append('the block')

  with pytest.raises(KeyboardInterrupt):
    block()
  assert done == ['the block']
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait():
  done = []

  def block():
    with held():
      interrupt()
      interrupt()
      done.append('the block')

  with pytest.raises(KeyboardInterrupt):
    block()
  assert not done
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
def test_a_torn_trainer_is_whole_after_a_restore(
  placement, schedule, tmp_path, monkeypatch
):
  """Also where the device's rows are gone: donated to a write that failed."""
  trainer, batches = start(placement, schedule, 0)
  checkpoints = Checkpoints(tmp_path)
  with batches:
    list(train(trainer, batches, 4))
    checkpoints.save(trainer, batches.get_state())

    def lose(kept, *_):
      jax.tree.map(lambda leaf: leaf.delete(), kept)
      fail()

    with monkeypatch.context() as patched:
      patched.setattr(apply, 'write_slots', lose)
      patched.setattr(leaving.Leaving, 'stored', lambda *_: fail())
      with pytest.raises(Fault):
        list(train(trainer, batches, 10_000))
    with pytest.raises(UserError, match='cut off in the midst of'):
      checkpoints.save(trainer, batches.get_state())
  with batches_for(trainer, schedule, 2) as batches:
    batches.set_state(checkpoints.restore(trainer).schedule_state)
    list(train(trainer, batches, 10_000))
  checkpoints.close()
  assert_same_bits(everything(trainer), unbroken(placement, schedule)[0])


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
