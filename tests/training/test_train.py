"""Checkpoints, compilations, bad models and the loop's own errors."""

import itertools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.common.compiling import compiled
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.data.numbered import ColumnBatches, Columns
from slipstream_jax.errors import UserError
from slipstream_jax.placement import bucket, PLACEMENTS
from slipstream_jax.tables import tables_of
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.evaluate import evaluate, predict
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from tests.support import small
from tests.support.small import assert_same_bits, everything

placements = pytest.mark.parametrize('name', PLACEMENTS)


def trainer_of(name, optimizer='lazy_adam', seed=0, **changes):
  recipe = small.recipe(optimizer)._replace(**changes)
  hot = small.hot(small.columns(2000))
  return make_parts(recipe, PLACEMENTS[name], small.DENSE, seed, hot)


@placements
@pytest.mark.parametrize('normalization', ['none', 'batch'])
def test_resumed_training_has_the_bits_of_uninterrupted(
  normalization, name, tmp_path
):
  columns = small.columns(64 * 9)
  model = small.recipe(normalization=normalization).model

  def start():
    trainer = trainer_of(name, model=model)
    source = ColumnBatches(columns, 64, shuffle_seed=2)
    return trainer, planned(trainer, source)

  whole, batches = start()
  list(train(whole, batches, 30))
  batches.close()

  halfway, batches = start()
  list(train(halfway, batches, 13))
  checkpoints = Checkpoints(tmp_path / 'checkpoints')
  checkpoints.save(halfway, batches.get_state())
  list(train(halfway, batches, 5))  # lost with the crash
  batches.close()
  checkpoints.close()

  resumed, batches = start()
  checkpoints = Checkpoints(tmp_path / 'checkpoints')
  position = checkpoints.restore(resumed)
  checkpoints.close()
  assert position.step == 13
  assert position.counters.examples_trained == 13 * 64
  batches.set_state(position.schedule_state)
  records = list(train(resumed, batches, 17))
  batches.close()
  assert [r.step for r in records] == list(range(14, 31))
  assert_same_bits(everything(whole), everything(resumed))
  assert resumed.engine.counters == whole.engine.counters


def test_a_checkpoint_restores_under_another_placement(tmp_path):
  streamed, resident = trainer_of('streamed', seed=1), trainer_of('resident')
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(streamed, {'delivered': 0})
  checkpoints.restore(resident)
  checkpoints.close()
  assert_same_bits(everything(streamed), everything(resident))


def test_restoring_without_a_checkpoint(tmp_path):
  checkpoints = Checkpoints(tmp_path / 'none')
  with pytest.raises(UserError, match='resuming needs a checkpoint'):
    checkpoints.restore(trainer_of('streamed'))
  checkpoints.close()


def test_restoring_into_another_model(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(trainer_of('streamed'), {'delivered': 0})
  other = make_parts(
    small.recipe('lazy_adam', top=(99,)),
    PLACEMENTS['streamed'],
    small.DENSE,
  )
  with pytest.raises(UserError, match='the model and tables it is of'):
    checkpoints.restore(other)
  checkpoints.close()


@placements
def test_steady_state_never_recompiles(name):
  def own_loss(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits, labels)

  examples, batches_per_epoch = 512, 100
  columns = small.columns(examples * batches_per_epoch)
  # Batch i has i % of its examples' own lookups: another number of unique
  # rows each time, through several buckets.
  number = np.arange(len(columns.labels))
  own = (number % examples) * 100 < (number // examples) * examples
  lookups = np.where(own[:, None], columns.lookups, columns.lookups[0])
  varied = Columns(columns.dense, lookups, columns.labels)
  trainer = trainer_of(name, loss=own_loss)  # so that it is not compiled yet
  batches = planned(trainer, ColumnBatches(varied, examples))
  epoch = itertools.islice(batches, batches_per_epoch)
  unique = [len(item.plans[0].rows) for item in epoch]
  sizes = {bucket(count) for count in unique}
  assert len(set(unique)) > 80
  assert len(sizes) > 3
  before = compiled().programs
  # One more, as what a step takes from the one before is of both their sizes.
  list(train(trainer, batches, batches_per_epoch + 1))
  # Per size: gather, update, write; and what the first two get handed on.
  assert 0 < compiled().programs - before <= 5 * len(sizes) + 2
  steady = compiled().programs
  list(train(trainer, batches, 200))
  batches.close()
  assert compiled().programs == steady


def test_compilations_are_counted():
  before = compiled().programs
  jax.jit(lambda: jnp.arange(17) * 3)()
  assert compiled().programs == before + 1


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


def test_row_state_that_copies_rows_is_refused():
  recipe = small.recipe()._replace(
    row_optimizer=optax.ema(0.9, debias=False),
  )
  assert [len(state) for state in compiled_of(recipe).untrained_row_state] == [
    1
  ]

  copies = optax.GradientTransformation(
    lambda rows: rows, lambda updates, state, rows: (updates, rows)
  )
  with pytest.raises(UserError, match='same state'):
    assert compiled_of(
      recipe._replace(row_optimizer=copies)
    ).untrained_row_state


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


def test_batch_size_of_evaluation_changes_no_score():
  trainer, test = trainer_of('resident'), small.columns(200)
  scores = [
    predict(trainer, ColumnBatches(test, size, epochs=1, pad_remainder=True))
    for size in (64, 200)
  ]
  np.testing.assert_allclose(scores[0].logits, scores[1].logits, atol=1e-5)
  np.testing.assert_array_equal(scores[0].labels, test.labels)


def test_initial_rows_depend_on_seed_and_row_only():
  from slipstream_jax.store import host_table

  def create(sizes, seed=0):
    tables = tables_of(sizes, dim=4)
    return host_table.UntrainedRows(tables, [()], seed).block(0).rows

  few = {'a': 10, 'b': 5}
  one = create(few)
  np.testing.assert_array_equal(one, create(few | {'c': 7})[:15])
  assert not np.array_equal(one, create(few, 1))
  assert np.abs(one[:10]).max() < 10**-0.5
  big = create({'a': 200_000})
  scaled = big * 200_000**0.5
  assert abs(scaled.mean()) < 0.005
  assert abs(scaled.std() - 3**-0.5) < 0.005
  assert len(np.unique(big[:, 0])) > 190_000


def test_adding_weights_scales_the_gradient():
  """A batch of weight 2 moves SGD rows twice as far as one of weight 1."""
  moved = []
  for weight in (1.0, 2.0):
    trainer = trainer_of('streamed', 'sgd', dense_optimizer=optax.sgd(0.0))
    before = trainer.engine.read_back()[0].rows.copy()
    columns = small.columns(64)
    batches = planned(trainer, Weighted(columns, weight), 0)
    list(train(trainer, batches, 1))
    moved.append(trainer.engine.read_back()[0].rows - before)
  np.testing.assert_allclose(2 * moved[0], moved[1], rtol=1e-3, atol=1e-7)


class Weighted(ColumnBatches):
  def __init__(self, columns, weight):
    super().__init__(columns, 64)
    self.weight = weight

  def __next__(self):
    batch = super().__next__()
    return batch._replace(weights=batch.weights * np.float32(self.weight))


class ColumnOfLogits(nn.Module):
  @nn.compact
  def __call__(self, dense, embeddings):
    return nn.Dense(1)(jnp.concatenate(list(embeddings.values()), 1))


def test_a_model_whose_logits_would_broadcast_is_refused():
  trainer = trainer_of('streamed', model=ColumnOfLogits())
  source = ColumnBatches(small.columns(64), 64)
  with (
    planned(trainer, source) as batches,
    pytest.raises(
      UserError, match=r'logits \[B\] for labels \[B\], got logits \[B, 1\]'
    ),
  ):
    list(train(trainer, batches, 1))
