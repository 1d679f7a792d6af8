"""Calls beside training take turns with its steps: no number differs.

Another thread, or the source itself, calls the trainer while it trains. The
run ends with the bits of one that nobody looked at, and what the calls return
is of some step, never of one that is under way. None waits for ever.
"""

import random
import threading
import time

import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.data.interrupts import TurnLock
from slipstream_jax.errors import UserError
from tests.api import shop
from tests.laws.test_positions import by_hand, SOURCES
from tests.support.watchdog import watchdog

STEPS = 24
PLACINGS = {
  'streamed': 'streamed',
  'pinned': 'pinned',
  'cached': slip.cached(30, look_ahead=2),
}


@pytest.fixture(scope='module')
def stages():
  """A trainer nobody looked at, and its predictions after each step."""
  predictions = {}
  with shop.trainer() as trainer:
    for record in trainer.steps(shop.source(), STEPS):
      logits = trainer.predict(shop.held_out(None), max_batches=3)
      predictions[logits.tobytes()] = record.step
  return trainer, predictions


def beside(calls, work):
  """Does `work` while threads make calls; re-raises what these raise."""
  over, errors = threading.Event(), []

  def run(call):
    try:
      while not over.is_set():
        call()
    except BaseException as error:
      errors.append(error)

  threads = [
    threading.Thread(target=run, args=(c,), daemon=True) for c in calls
  ]
  for thread in threads:
    thread.start()
  try:
    work()
  finally:
    over.set()
  for thread in threads:
    thread.join(60)
    assert not thread.is_alive()
  if errors:
    raise errors[0]


PREFETCHES_AND_SKIPS = [(0, 'none'), (2, 'none'), (2, 'stale')]


@pytest.mark.parametrize(('prefetch', 'skip'), PREFETCHES_AND_SKIPS)
@pytest.mark.parametrize('placing', PLACINGS)
def test_other_threads_change_no_number(
  placing, prefetch, skip, stages, tmp_path
):
  wanted, predictions = stages
  skip, rng = shop.SKIPS[skip], random.Random(f'{placing} {prefetch} {skip}')
  arguments = {'placement': PLACINGS[placing], 'prefetch': prefetch}
  if skip is not None:
    with shop.trainer() as wanted:
      wanted.train(shop.source(), STEPS, skip=skip)
  seen, number = set(), iter(range(10**6))
  with watchdog(), shop.trainer(**arguments) as trainer:
    trainer.train(source := shop.source(), 1, skip=skip)

    def call():
      match rng.choice(['rows', 'evaluate', 'predict', 'save', 'close']):
        case 'rows':
          trainer.rows('user')
        case 'evaluate':
          trainer.evaluate(shop.held_out(), max_batches=1)
        case 'predict':
          logits = trainer.predict(shop.held_out(None), max_batches=3)
          seen.add(logits.tobytes())
        case 'save':
          trainer.save(tmp_path / str(next(number)))
        case 'close':
          trainer.close()
      time.sleep(rng.random() * 0.01)

    def work():
      while left := STEPS - int(trainer.parts.state.step):
        before = int(trainer.parts.state.step)
        trainer.train(source, rng.randint(1, left), skip=skip)
        assert before < int(trainer.parts.state.step)

    beside([call, call], work)
  shop.assert_same(trainer, wanted)
  if skip is None:
    assert seen <= {*predictions}


def test_two_threads_that_train_take_turns_at_steps():
  kinds, order = ('shuffled', 'a generator'), []
  with watchdog(), shop.trainer() as trainer:
    trainer.predict(shop.held_out(None), max_batches=1)

    def train(which):
      source = SOURCES[kinds[which]]()
      trainer.train(source, 10, on_step=lambda r: order.append((r.step, which)))

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(60)
      assert not thread.is_alive()
  assert [step for step, _ in sorted(order)] == [*range(1, 21)]
  turns = [(which, 1) for _, which in sorted(order)]
  shop.assert_same(trainer, by_hand(kinds, turns))


@pytest.mark.parametrize('prefetch', [0, 2])
@pytest.mark.parametrize('placing', PLACINGS)
def test_a_source_may_predict_with_its_trainer(placing, prefetch, tmp_path):
  trainer = shop.trainer(placement=PLACINGS[placing], prefetch=prefetch)
  trainer.predict(shop.held_out(None), max_batches=1)

  def batches():
    for number, item in enumerate(shop.dicts()):
      if number % 3 == 1:
        trainer.predict(shop.held_out(None), max_batches=1)
        trainer.rows('item')
      if number == 5:
        trainer.save(tmp_path)
      yield item

  with watchdog(), trainer:
    trainer.train(batches(), 7)
    trainer.train(slip.batches(batches), 7)
  shop.assert_same(
    trainer, by_hand(['a generator', 'a function'], ((0, 7), (1, 7)))
  )


@pytest.mark.parametrize('what', ['train', 'close', 'restore'])
@pytest.mark.parametrize('prefetch', [0, 2])
def test_a_source_that_trains_its_trainer_is_refused(prefetch, what, tmp_path):
  trainer, source = shop.trainer(prefetch=prefetch), None
  calls = {
    'train': lambda: trainer.train(shop.source(seed=7), 1),
    'close': lambda: trainer.close(),
    'restore': lambda: trainer.restore(tmp_path),
  }
  does = [True]

  def batches():
    for number, item in enumerate(shop.dicts()):
      if number == 4 and does:
        does.clear()
        calls[what]()
      yield item

  source = slip.batches(batches)
  with watchdog(), trainer:
    with pytest.raises(UserError, match=f'got {what} within its call'):
      trainer.train(source, 9)
    trainer.train(source, 9 - int(trainer.parts.state.step))
  shop.assert_same(trainer, by_hand(['a function'], ((0, 9),)))


@pytest.mark.parametrize('at', [5, 11])
def test_a_restore_beside_training_is_of_whole_steps(at, stages, tmp_path):
  _, predictions = stages
  with shop.trainer() as trainer:
    trainer.train(shop.source(), at)
    trainer.save(tmp_path)
  reached = threading.Event()
  with watchdog(), shop.trainer() as trainer:

    def restore():
      reached.wait(60)
      trainer.restore(tmp_path)

    thread = threading.Thread(target=restore)
    thread.start()
    trainer.train(
      shop.source(),
      STEPS - at,
      on_step=lambda record: record.step == 3 and reached.set(),
    )
    thread.join(60)
    logits = trainer.predict(shop.held_out(None), max_batches=3)
    # It was at some step from 3 on, and is as many after the one restored.
    assert predictions[logits.tobytes()] == int(trainer.parts.state.step)


def test_threads_come_in_their_order():
  """Else a loop of steps would never let another thread in."""
  turns, came, threads = TurnLock(), [], []
  inside, go = threading.Event(), threading.Event()

  def wait():
    inside.set()
    go.wait(60)
    turns.run(lambda: turns.run(lambda: came.append('again within')))

  def come(name):
    turns.run(lambda: came.append(name))

  with watchdog():
    calls = [lambda: turns.run(wait), *(lambda n=n: come(n) for n in range(4))]
    for call in calls:
      threads.append(threading.Thread(target=call, daemon=True))
      threads[-1].start()
      inside.wait(60)
      while len(turns._waiting) < len(threads) - 1:
        time.sleep(0.001)
    go.set()
    for thread in threads:
      thread.join(60)
  assert came == ['again within', *range(4)]
  with pytest.raises(KeyError):
    turns.run(lambda: {}[1])
  assert not turns.mine
  np.testing.assert_equal(turns.run(lambda: 3), 3)
