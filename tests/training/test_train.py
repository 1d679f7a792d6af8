"""Resumed runs, compilations, and the errors of the loop."""

import itertools

import numpy as np
import optax
import pytest

from experiments.common.meter import compiled
from slipstream_jax.data.numbered import ColumnBatches, Columns
from slipstream_jax.errors import UserError
from slipstream_jax.placement import bucket, PLACEMENTS
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.loop import score_held_out, train
from slipstream_jax.training.trainer_parts import make_parts, planned
from tests.support import small
from tests.support.small import assert_same_bits, everything


def trainer_of(name, optimizer='lazy_adam', seed=0, **changes):
  recipe = small.recipe(optimizer)._replace(**changes)
  hot = small.hot(small.columns(2000))
  return make_parts(recipe, PLACEMENTS[name], small.DENSE, seed, hot)


@pytest.mark.parametrize('name', PLACEMENTS)
def test_steady_state_never_recompiles(name):
  def own_loss(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits, labels)

  examples, batches_per_epoch = 512, 60
  columns = small.columns(examples * batches_per_epoch)
  # Batch i has the own lookups of the i-th part of its examples: another
  # number of unique rows each time, through several buckets.
  number = np.arange(len(columns.labels))
  own = number % examples * batches_per_epoch < number // examples * examples
  lookups = np.where(own[:, None], columns.lookups, columns.lookups[0])
  varied = Columns(columns.dense, lookups, columns.labels)
  trainer = trainer_of(name, loss=own_loss)  # so that it is not compiled yet
  batches = planned(trainer, ColumnBatches(varied, examples))
  epoch = itertools.islice(batches, batches_per_epoch)
  unique = [len(item.plans[0].rows) for item in epoch]
  sizes = {bucket(count) for count in unique}
  assert len(set(unique)) > 50
  assert len(sizes) > 3
  before = compiled().programs
  # One more, as what a step takes from the one before is of both their sizes.
  list(train(trainer, batches, batches_per_epoch + 1))
  # Per size: gather, update, write, and what the first two get handed on.
  assert 0 < compiled().programs - before <= 5 * len(sizes) + 2
  steady = compiled().programs
  list(train(trainer, batches, 2 * batches_per_epoch))
  batches.close()
  assert compiled().programs == steady


def test_buckets_are_few_and_close():
  sizes = [bucket(count) for count in range(1, 100_000)]
  for count, size in enumerate(sizes, 1):
    assert count <= size <= max(256, 1.25 * count + 1)
  assert len(set(sizes)) < 40
  assert sizes == sorted(sizes)


def test_model_and_tables_of_different_dims():
  with pytest.raises(UserError, match='width of the vectors') as caught:
    make_parts(
      small.recipe(dim=8, bottom=(16, 4)),
      PLACEMENTS['streamed'],
      small.DENSE,
    )
  assert 'got 4' in str(caught.value)


def test_loss_that_is_not_finite():
  columns = small.columns(64 * 6)
  columns.dense[64 * 3 : 64 * 4] = 3e38  # finite, but not what it becomes
  trainer = trainer_of('streamed')
  batches = planned(trainer, ColumnBatches(columns, 64))
  with pytest.raises(UserError, match='loss must stay finite') as caught:
    list(train(trainer, batches, 6))
  batches.close()
  assert 'step 4' in str(caught.value)


def test_training_learns_and_evaluation_changes_nothing():
  columns = small.columns(64 * 40)
  columns.labels[:] = columns.lookups[:, 1] % 2
  trainer = trainer_of('streamed')
  batches = planned(trainer, ColumnBatches(columns, 64))
  list(train(trainer, batches, 120))
  batches.close()
  before, counted = everything(trainer), trainer.engine.counters
  test = small.columns(1000, seed=9)
  test.labels[:] = test.lookups[:, 1] % 2
  metrics = evaluate(
    trainer, ColumnBatches(test, 300, epochs=1, pad_remainder=True)
  )
  assert metrics.examples == 1000
  assert metrics.auc > 0.95
  assert_same_bits(before, everything(trainer))
  assert trainer.engine.counters == counted


def test_the_loss_of_held_out_examples_is_their_weighted_mean():
  trainer = trainer_of('pinned')
  batch = next(ColumnBatches(small.columns(16), 16))

  def loss(weights):
    trainer.held_out = batch._replace(weights=np.float32(weights))
    score_held_out(trainer, 1)
    return float(trainer.probe.losses.wait(1))

  losses = [loss(one) for one in np.eye(16)]
  assert len(set(losses)) > 8
  weights = np.arange(16) % 5
  expected = np.average(losses, weights=weights)
  np.testing.assert_allclose(loss(weights), expected, rtol=1e-5)
