"""Weights of examples in chains that forget a gradient's scale."""

from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.store.host_table import row_weights, unique_rows
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from slipstream_jax.transforms.weights import scale_by_data_seen, weight_aware
from tests.support import small

ROWS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
GRADIENTS = np.cos(np.arange(12, dtype=np.float32)).reshape(3, 4)


def updates_of(tx, gradients, **extra):
  """The updates of some steps, f32[steps, 3, 4]."""
  rows = jnp.asarray(jax.device_put(ROWS))
  state, found = jax.jit(tx.init)(rows), []
  update = jax.jit(lambda g, state, extra: tx.update(g, state, rows, **extra))
  for gradient in gradients:
    got, state = update(*jax.device_put((gradient, state, extra)))
    found.append(jax.device_get(got))
  return np.array(found)


@pytest.mark.parametrize('name', ROW_OPTIMIZERS)
def test_weight_1_changes_nothing_and_those_of_sgd_cancel(name):
  plain = ROW_OPTIMIZERS[name](0.1)
  steps = [GRADIENTS, 3 * GRADIENTS, GRADIENTS]
  expected = updates_of(optax.with_extra_args_support(plain), steps)
  weights = [np.float32(1), np.ones(3, np.float32)]
  weights += [np.float32([1, 4, 20])] * (name == 'sgd')
  for weight in weights:
    found = updates_of(weight_aware(plain), steps, example_weight=weight)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize('weight', [1.0, 2.0, 9.0])
def test_adagrad_grows_as_if_the_example_had_come_that_often(weight):
  """One gradient w g moves a row by sqrt(w), and counts as w squares."""
  tx = weight_aware(ROW_OPTIMIZERS['adagrad'](0.1, 0.0, 0.0))
  heavy = np.float32(weight)
  first, second = updates_of(tx, [heavy * GRADIENTS] * 2, example_weight=heavy)
  direction = np.sign(GRADIENTS)
  np.testing.assert_allclose(first, -0.1 * weight**0.5 * direction, rtol=1e-5)
  expected = -0.1 * weight / (2 * weight) ** 0.5 * direction
  np.testing.assert_allclose(second, expected, rtol=1e-5)


@given(
  lookups=hnp.arrays(
    np.int64,
    hnp.array_shapes(min_dims=2, max_dims=3, max_side=5),
    elements=st.integers(-1, 6),
  ),
  data=st.data(),
)
def test_row_weights_are_means_over_lookups(lookups, data):
  weights = data.draw(
    hnp.arrays(
      np.float32,
      len(lookups),
      elements=st.sampled_from([0.0, 1.0, 2.5, 20.0]),
    )
  )
  found = unique_rows(lookups, 7)
  got = row_weights(found.inverse, weights, len(found.rows) + 2)
  for place, row in enumerate(found.rows):
    of_lookups = [
      weights[i]
      for i in range(len(lookups))
      for r in lookups[i].flat
      if r == row and weights[i] > 0
    ]
    expected = np.mean(of_lookups) if of_lookups else 1.0
    assert got[place] == pytest.approx(expected, rel=1e-5)
  assert (got[len(found.rows) :] == 1).all()


@pytest.mark.parametrize('weight', [np.float32(0), np.zeros(3, np.float32)])
def test_no_example_of_weight_moves_nothing(weight):
  """Of weight 0 come gradients of 0, not 0 / 0."""
  tx = weight_aware(ROW_OPTIMIZERS['adagrad'](0.1))
  found = updates_of(tx, [np.zeros_like(GRADIENTS)] * 2, example_weight=weight)
  np.testing.assert_array_equal(found, np.zeros((2, 3, 4), np.float32))


class Weighted(ColumnBatches):
  """Batches whose examples weigh anything, 0 too, or nothing at all."""

  def __next__(self):
    batch = super().__next__()
    weights = np.resize(np.float32([0, 1, 2.5, 0, 20]), len(batch.labels))
    return batch._replace(weights=weights * (batch.labels.sum() % 3 > 0))


@pytest.mark.parametrize('name', ROW_OPTIMIZERS)
def test_examples_of_weight_0_with_lookups_break_no_row(name):
  columns = small.columns(16 * 12)
  recipe = small.recipe(name)
  recipe = recipe._replace(
    row_optimizer=weight_aware(recipe.row_optimizer),
    dense_optimizer=weight_aware(recipe.dense_optimizer),
  )
  trainer = make_parts(recipe, PLACEMENTS['streamed'], small.DENSE)
  before = np.array(trainer.engine.read_back()[0].rows)
  with planned(trainer, Weighted(columns, 16)) as batches:
    empty = [not record.loss for record in train(trainer, batches, 12)]
  assert any(empty)
  assert not all(empty)
  (table,) = trainer.engine.read_back()
  for leaf in jax.tree.leaves((table, jax.device_get(trainer.state))):
    assert np.isfinite(leaf).all()
  assert (table.rows != before).any()


class Alone(nn.Module):
  """A layer over two embeddings."""

  @nn.compact
  def __call__(self, embeddings):
    return nn.Dense(1)(embeddings['user'] + embeddings['item'])


def test_a_trainer_feels_the_weights_of_examples():
  """Whether or not its optimizers are wrapped already."""
  rng = np.random.default_rng(0)
  users, weights = rng.integers(0, 20, 200), rng.choice([0.5, 1, 4], 200)
  clicks = (rng.random(200) < 0.3).astype(np.float32)
  source = slip.batches(
    None,
    {'user': users, 'item': users},
    clicks,
    batch_size=10,
    weights=weights,
  )
  found = []
  for wrap in (lambda tx: tx, weight_aware):
    trainer = slip.Trainer(
      Alone(),
      {
        'user': slip.Table(20, 4),
        'item': slip.Table(20, 4, optimizer=wrap(slip.adagrad(0.2))),
      },
      row_optimizer=wrap(slip.rowwise_adagrad(0.1)),
      dense_optimizer=wrap(optax.adam(0.01)),
    )
    trainer.train(source, steps=20)
    rows = [trainer.rows(name) for name in ('user', 'item')]
    found.append(jax.device_get((rows, trainer.params)))
  for one, other in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_array_equal(one, other)
  plain = weight_aware(optax.adam(0.01))
  assert weight_aware(plain) == plain
  inner = optax.adam(0.01)
  # Equal ones share their programs.
  assert weight_aware(inner) == weight_aware(inner) != inner


def test_rates_follow_the_data_seen():
  tx = scale_by_data_seen(optax.linear_schedule(1.0, 0.0, 100))
  for seen, factor in ((0, 1.0), (25, 0.75), (100, 0.0), (500, 0.0)):
    (found,) = updates_of(tx, [GRADIENTS], batches_seen=np.float32(seen))
    np.testing.assert_allclose(found, factor * GRADIENTS, rtol=1e-6, atol=1e-7)
