"""Validation changes no number, and an early stop leaves those of the best.

A run that stopped early is a run that was asked for the steps of the best
validation: in all bits, and also in what is trained after it.
"""

import os
import tempfile
import unittest.mock

from hypothesis import example, given, Phase, settings
from hypothesis import strategies as st
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from tests.api import shop
from tests.support import market

# Training moves away from these labels, sooner or later.
FLIPPED = np.where(np.arange(shop.EXAMPLES) % 3, 1 - shop.CLICKS, shop.CLICKS)
runs = st.fixed_dictionaries(
  {
    'placement': st.sampled_from([*shop.PLACINGS.values()]),
    'skip': st.sampled_from([*shop.SKIPS.values()]),
    'every': st.integers(1, 40),
    'prefetch': st.sampled_from([0, 2]),
    'waits': st.booleans(),
    'epochs': st.sampled_from([None, 9]),
  }
)
HARD = {
  'placement': 'pinned',
  'skip': shop.SKIPS['rows'],
  'every': 7,
  'prefetch': 2,
  'waits': False,
  'epochs': None,
}


def started(case):
  of = {name: case[name] for name in ('placement', 'prefetch')}
  return shop.trainer(**of), shop.source(epochs=case['epochs'])


def trained(trainer, source, case, steps, **more):
  on_step = (lambda record: None) if case['waits'] else None
  return trainer.train(
    source, steps, skip=case['skip'], on_step=on_step, **more
  )


def decided(history):
  return [
    {k: v for k, v in event.items() if k != 'seconds_choosing'}
    for event in history.events
  ]


def assert_same(one, other):
  """Tables, row state, parameters, state of optimizers and counts."""
  pairs = zip(market.state_of(one), market.state_of(other), strict=True)
  for a, b in pairs:
    np.testing.assert_array_equal(a, b)
  assert shop.examples_of(one) == shop.examples_of(other)


def assert_same_run(one, other):
  for a, b in zip(one, other, strict=True):
    np.testing.assert_array_equal(a, b)


@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
@given(runs, st.integers(1, shop.STEPS))
@example(HARD, 60)
def test_validation_changes_no_number(case, steps):
  trainer, source = started(case)
  other, same = started(case)
  with trainer, other:
    plain = trained(trainer, source, case, steps)
    seen = trained(
      other, same, case, steps, validation=shop.held_out(), every=case['every']
    )
    assert_same_run([plain.losses], [seen.losses])
    assert decided(plain) == decided(seen)
    assert_same(trainer, other)
    taken = len(plain.losses)
    last = [] if taken % case['every'] == 0 else [taken]
    every = [*range(case['every'], taken + 1, case['every']), *last]
    assert [v.step for v in seen.validations] == every
    more = trained(trainer, source, case, 5), trained(other, same, case, 5)
    assert_same_run([more[0].losses], [more[1].losses])


@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(runs, st.integers(1, 3))
@example(HARD, 1)
@example(HARD | {'every': 13, 'skip': None, 'placement': 'streamed'}, 2)
def test_an_early_stop_is_the_best_state_in_all_bits(case, patience):
  trainer, source = started(case)
  other, same = started(case)
  with (
    trainer,
    other,
    tempfile.TemporaryDirectory() as own,
    unittest.mock.patch.object(tempfile, 'tempdir', own),
  ):
    history = trained(
      trainer,
      source,
      case,
      40,
      validation=shop.held_out(FLIPPED),
      every=case['every'],
      patience=patience,
    )
    best = history.best.step
    scores = history.curve('log_loss')
    assert best == history.validations[int(np.argmin(scores))].step
    after = [v for v in history.validations if v.step > best]
    assert len(after) <= patience
    trained(other, same, case, best)
    assert_same(trainer, other)
    assert history.counters == trainer.parts.engine.counters
    # Where it goes on, too: with the same skip, or without.
    for skip in case['skip'], None:
      how = case | {'skip': skip}
      one = trained(trainer, source, how, 6)
      two = trained(other, same, how, 6)
      assert_same_run([one.losses, one.steps], [two.losses, two.steps])
    assert_same(trainer, other)
    assert not os.listdir(own)


@pytest.mark.parametrize('skip', shop.SKIPS.values(), ids=shop.SKIPS)
def test_passes_end_with_their_last_kept_examples(skip):
  """Also those that a schedule still holds when the last batch was read."""
  whole, counted, looped = (shop.trainer() for _ in range(3))
  source = shop.source(epochs=4)
  with whole, counted, looped:
    losses = whole.train(shop.source(epochs=4), skip=skip).losses
    at_once = counted.train(shop.source(epochs=4), epochs=4, skip=skip)
    each = [looped.train(source, epochs=1, skip=skip) for _ in range(4)]
    joined = np.concatenate([history.losses for history in each])
    assert_same_run([losses, losses], [at_once.losses, joined])
    assert_same(whole, counted)
    assert_same(whole, looped)
  source, passes = shop.source(), 0
  with shop.trainer() as endless:
    for epochs in 1, 1, 2, 1, 1, 1:
      passes += epochs
      seen = endless.train(source, epochs=epochs, skip=skip).counters
      most = passes * (shop.EXAMPLES // shop.BATCH) * shop.BATCH
      assert most - 5 * shop.BATCH < seen.examples_seen <= most


def stopped_and_not(make, source, held_out, skip=None):
  """A trainer that stopped early, and one that took the best's steps alone."""
  (one, first), (other, second) = (make(), source()), (make(), source())
  values = iter([2.0, 1.0, 1.0, 3.0])
  stops = {'every': 6, 'patience': 2, 'monitor': lambda metrics: next(values)}
  with one, other:
    history = one.train(first, skip=skip, validation=held_out, **stops)
    assert [v.step for v in history.validations] == [6, 12, 18, 24]
    other.train(second, 12, skip=skip)
    assert_same(one, other)
    yield one, other
    for trainer, given in (one, first), (other, second):
      trainer.train(given, 6, skip=skip)
    assert_same(one, other)
    yield one, other


@pytest.mark.parametrize('skip', market.SKIPS.values(), ids=market.SKIPS)
def test_vocabularies_that_grow_go_back_as_well(skip):
  words = market.vocabularies(), market.vocabularies()
  known = iter(words)

  def source():
    return market.source(next(known), epochs=4)

  held_out = market.source(words[0], seed=None, epochs=1)
  runs = stopped_and_not(market.trainer, source, held_out, skip)
  for one, other in runs:
    assert market.words_of(one) == market.words_of(other)


@pytest.mark.parametrize('kind', ['a chain that skips', 'a disk'])
def test_any_trainer_goes_back(kind, tmp_path):
  chain = optax.chain(slip.rowwise_adagrad(0.1), slip.skip_stale(0.1, 12, 4))

  def make():
    if kind == 'a disk':
      return shop.trainer(store=slip.tiered(1 << 12, tmp_path))
    return shop.trainer(row_optimizer=chain)

  def source():
    return shop.source(epochs=5)

  assert len([*stopped_and_not(make, source, shop.held_out())]) == 2
