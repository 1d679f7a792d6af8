"""Training in pieces is training in one, whatever lies between them."""

import gc
import threading
import weakref

import numpy as np
import pytest

from slipstream_jax.errors import UserError
from tests.api import shop

CUTS = (1, 7, 9, 12, 13, 30, 38)  # in the phases' midst, and at their edges


@pytest.fixture(scope='module')
def wholes():
  """Trains a run in one piece for each way to skip: history and trainer."""
  trained = {}
  for name, skip in shop.SKIPS.items():
    with shop.trainer() as trainer:
      history = trainer.train(shop.source(), shop.STEPS, skip=skip)
    assert np.isfinite(history.losses).all()
    trained[name] = history, trainer
  return trained


# Each placement with two ways to skip, and each way with half the placements.
PAIRS = [
  (placing, skip)
  for i, placing in enumerate(shop.PLACINGS)
  for j, skip in enumerate(shop.SKIPS)
  if (i + j) % 2
]


@pytest.mark.parametrize(('placing', 'skip'), PAIRS)
def test_placement_and_pieces_change_no_number(placing, skip, wholes):
  wanted, one = wholes[skip]
  pieces, source, last = [], shop.source(), None
  with shop.trainer(placement=shop.PLACINGS[placing]) as trainer:
    for steps in np.diff([0, *CUTS, shop.STEPS]).tolist():
      last = trainer.train(source, steps, skip=shop.SKIPS[skip])
      pieces.append(last.losses)
  np.testing.assert_array_equal(np.concatenate(pieces), wanted.losses)
  shop.assert_same(trainer, one)
  assert shop.examples_of(trainer) == shop.examples_of(one)
  assert last.counters == trainer.parts.engine.counters
  if skip != 'none':
    assert wanted.events
    assert (wanted.counters.examples_dropped > 0) == (skip != 'rows')


@pytest.mark.parametrize(
  ('skip', 'at'), [('surprise', 7), ('stale', 14), ('rows', 14), ('rows', 33)]
)
def test_skipping_is_switched_off_where_it_has_begun(skip, at):
  """Nothing of it stays: rows move, and all examples are trained."""

  def trained(closes):
    source, trainer = shop.source(), shop.trainer()
    before = trainer.train(source, at, skip=shop.SKIPS[skip]).counters
    if closes:
      trainer.close()
    after = trainer.train(source, 5).counters
    assert trainer.parts.state.watch is None
    assert after.examples_dropped == before.examples_dropped
    assert after.examples_seen - before.examples_seen == trainer_examples(
      before, after
    )
    trainer.train(source, 5, skip=shop.SKIPS[skip])
    trainer.close()
    return trainer

  shop.assert_same(trained(False), trained(True))


def trainer_examples(before, after):
  return after.examples_trained - before.examples_trained


def test_another_source_begins_and_a_bad_one_changes_nothing():
  source, other = shop.source(), shop.source(seed=2)
  with shop.trainer() as trainer, shop.trainer() as by_hand:
    first = trainer.train(source, 4)
    for bad, message in (
      ([{'user': [1, 2]}], "feature 'item'|'item'"),
      (shop.source(None), 'must have labels'),
      (shop.slip.batches(None, {'user': [60], 'item': [1]}, [1], batch_size=1),
       r'\[0, 60\)'),
    ):  # fmt: skip
      with pytest.raises(UserError, match=message):
        trainer.train(bad, 1)
    with pytest.raises(UserError, match='drop'):
      trainer.train(source, 4, skip=shop.slip.Skip(drop=2))
    with pytest.raises(UserError, match='needs an end'):
      trainer.train(source)
    second = trainer.train(other, 4)
    np.testing.assert_array_equal(by_hand.train(shop.source(), 4)[0], first[0])
    by_hand.train(shop.source(seed=2), 4)
    shop.assert_same(trainer, by_hand)
    assert second.counters.examples_seen == 8 * shop.BATCH


def threads():
  return [t for t in threading.enumerate() if t.name.startswith('slipstream')]


@pytest.mark.parametrize('skip', ['none', 'stale'])
def test_threads_end_with_the_trainer(skip):
  trainer = shop.trainer()
  trainer.train(shop.source(), 3, skip=shop.SKIPS[skip])
  assert threads()
  trainer.close()
  assert not threads()
  trainer = shop.trainer()
  trainer.train(shop.source(), 3, skip=shop.SKIPS[skip])
  left = threads()
  assert left
  del trainer
  gc.collect()
  for thread in left:
    thread.join(10)
  assert not threads()
  with shop.trainer() as trainer, pytest.raises(KeyboardInterrupt):
    trainer.train(shop.source(), 9, on_step=interrupt)
  assert not threads()


def interrupt(record):
  if record.step == 3:
    raise KeyboardInterrupt


@pytest.mark.parametrize(('placing', 'skip'), PAIRS[::2])
def test_tables_go_with_their_trainer(placing, skip):
  """At once: a second trainer may need the memory of the first."""
  gc.collect()
  gc.disable()
  try:
    with shop.trainer(placement=shop.PLACINGS[placing]) as trainer:
      trainer.train(shop.source(), 12, skip=shop.SKIPS[skip])
      groups = [weakref.ref(g) for g in trainer.parts.engine.groups]
    assert groups
    del trainer
    assert not any(group() for group in groups)
  finally:
    gc.enable()
