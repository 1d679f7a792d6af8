"""Normalization against float64, and models that have a state of their own."""

import contextlib

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.errors import UserError
from slipstream_jax.models.normalization import NORMALIZATIONS
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.training.evaluate import predict
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from tests.support import small
from tests.support.small import assert_same_bits, everything

EXAMPLES, WIDTH = 40, 6


def draw(seed=0, examples=EXAMPLES):
  """Features far from mean 0 and deviation 1; weights, some of them 0."""
  rng = np.random.default_rng(seed)
  x = rng.normal(3, 2, (examples, WIDTH)) * np.linspace(0.1, 5, WIDTH)
  weights = rng.exponential(size=examples) * (rng.random(examples) < 0.8)
  return x.astype(np.float32), weights.astype(np.float32)


def oracle(name, x, weights, scale, bias):
  """The normalization in float64, from its definition."""
  x = x.astype(np.float64)
  if name == 'layer':
    mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
  else:
    mean = np.average(x, axis=0, weights=weights)
    var = np.average((x - mean) ** 2, axis=0, weights=weights)
  return (x - mean) / np.sqrt(var + 1e-5) * scale + bias


class Only(nn.Module):
  """A normalization and nothing else."""

  name_of: str

  @nn.compact
  def __call__(self, x, weights, train):
    return NORMALIZATIONS[self.name_of](x, weights, train)


class Normalization:
  """One, with its variables, called with numpy arrays."""

  def __init__(self, name):
    model = Only(name)
    arguments = jax.device_put((np.ones((1, WIDTH)), np.ones(1)))
    self.variables = jax.jit(
      lambda: model.init(jax.random.key(0), *arguments, False)
    )()

    def train(v, x, w):
      return model.apply(v, x, w, True, mutable='batch_stats')

    def slopes(v, x, w, c):
      return jax.grad(lambda v, x: jnp.sum(c * train(v, x, w)[0]), (0, 1))(v, x)

    self.calls = {
      'train': jax.jit(train),
      'predict': jax.jit(lambda v, x, w: model.apply(v, x, w, False)),
      'gradients': jax.jit(slopes),
    }

  def call(self, name, *arrays):
    return self.calls[name](self.variables, *jax.device_put(arrays))

  def set(self, scale, bias):
    params = {'scale': scale, 'bias': bias}
    self.variables['params'] = {'normalization': jax.device_put(params)}

  def train(self, x, weights):
    out, changed = self.call('train', x, weights)
    self.variables = {**self.variables, **changed}
    return jax.device_get(out)

  def predict(self, x):
    return jax.device_get(self.call('predict', x, np.ones(len(x), np.float32)))

  def stats(self):
    return jax.device_get(self.variables['batch_stats']['normalization'])


learned = pytest.mark.parametrize('name', ['layer', 'batch'])


@learned
def test_values_and_gradients_equal_float64(name):
  x, weights = draw()
  rng = np.random.default_rng(1)
  scale, bias = rng.normal(1, 0.3, (2, WIDTH)).astype(np.float32)
  cotangent = rng.normal(size=x.shape).astype(np.float32)
  normalization = Normalization(name)
  normalization.set(scale, bias)
  np.testing.assert_allclose(
    normalization.train(x, weights),
    oracle(name, x, weights, scale, bias),
    atol=2e-5,
  )

  variables, d_x = jax.device_get(
    normalization.call('gradients', x, weights, cotangent)
  )
  found = variables['params']['normalization']

  def slope(of, at):
    """Central difference of the oracle, one element of `of` moved."""
    step = np.zeros(of.shape)
    step[at] = 1e-5
    high, low = (
      oracle(
        name,
        *(a + s * step if a is of else a for a in (x, weights, scale, bias)),
      )
      for s in (1, -1)
    )
    return np.sum(cotangent * (high - low)) / 2e-5

  for of, gradient in (
    (x, d_x),
    (scale, found['scale']),
    (bias, found['bias']),
  ):
    expected = np.reshape(
      [slope(of, at) for at in np.ndindex(of.shape)], of.shape
    )
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-3)


def test_padding_changes_nothing():
  x, weights = draw()
  padded, plain = Normalization('batch'), Normalization('batch')
  junk = np.full((9, WIDTH), 1e3, np.float32)
  out = padded.train(
    np.concatenate([x, junk]),
    np.concatenate([weights, np.zeros(9, np.float32)]),
  )
  np.testing.assert_allclose(out[:EXAMPLES], plain.train(x, weights), atol=1e-6)
  after = padded.stats()
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
    after,
    plain.stats(),
  )
  # A batch of nothing else is no news, and no number in it is not finite.
  out = padded.train(junk, np.zeros(9, np.float32))
  assert np.isfinite(out).all()
  np.testing.assert_array_equal(padded.stats()['mean'], after['mean'])
  np.testing.assert_array_equal(padded.stats()['var'], after['var'])


def test_padding_before_all_else_leaves_the_initial_statistics():
  x, _ = draw()
  normalization = Normalization('batch')
  normalization.train(x, np.zeros(EXAMPLES, np.float32))
  np.testing.assert_allclose(normalization.predict(x), x, rtol=1e-5)


def test_running_statistics_are_those_of_all_examples_discounted():
  """From the first step on; batches of any size and weight."""
  normalization, seen = Normalization('batch'), []
  for step in range(60):
    x, weights = draw(step, examples=3 + step % 5)
    x += np.float32(step / 30)  # batches differ in their means, too
    normalization.train(x, weights)
    seen = [(old, 0.99 * w) for old, w in seen] + [(x, weights.astype(float))]
    examples, total = (np.concatenate(c) for c in zip(*seen, strict=True))
    if not total.sum():
      continue
    mean = np.average(examples, axis=0, weights=total)
    var = np.average((examples - mean) ** 2, axis=0, weights=total)
    stats = normalization.stats()
    np.testing.assert_allclose(stats['mean'], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stats['var'], var, rtol=1e-4, atol=1e-5)


def trainer_of(normalization='batch', **changes):
  recipe = small.recipe('adagrad', normalization=normalization)
  return make_parts(
    recipe._replace(**changes), PLACEMENTS['streamed'], small.DENSE
  )


def trained(trainer, steps=20):
  columns = small.columns(64 * 10)
  with planned(trainer, ColumnBatches(columns, 64, shuffle_seed=0)) as batches:
    list(train(trainer, batches, steps))
  return trainer


@pytest.mark.parametrize('name', ['none', 'layer', 'batch'])
def test_a_prediction_depends_on_its_own_example_only(name):
  trainer, test = trained(trainer_of(name)), small.columns(200, seed=5)
  before = everything(trainer)
  whole = predict(trainer, ColumnBatches(test, 200, epochs=1)).logits
  for size in (1, 64):
    source = ColumnBatches(test, size, epochs=1, pad_remainder=True)
    logits = predict(trainer, source, 50).logits
    np.testing.assert_allclose(logits, whole[: len(logits)], atol=1e-5)
  assert_same_bits(before, everything(trainer))


def test_variables_of_each_normalization():
  none, layer, batch = (
    trainer_of(name).state for name in ('none', 'layer', 'batch')
  )
  shapes = [jax.tree.map(np.shape, s.params) for s in (none, layer, batch)]
  own = [part.pop('normalization', None) for part in shapes]
  assert own == [None, {'scale': (18,), 'bias': (18,)}, own[1]]
  assert shapes[0] == shapes[1] == shapes[2]
  assert none.model_state == layer.model_state == {}
  assert jax.tree.map(np.shape, batch.model_state) == {
    'batch_stats': {
      'normalization': {'mean': (18,), 'var': (18,), 'weight': ()}
    }
  }
  # What both have starts from the same bits.
  for part in ('bottom', 'top'):
    assert_same_bits(none.params[part], batch.params[part])


def test_a_normalization_that_does_not_exist():
  with pytest.raises(UserError, match="none, layer, batch, got 'group'"):
    trainer_of('group')


class TwoArguments(nn.Module):
  """A stranger's model; its second argument happens to be a known word."""

  @nn.compact
  def __call__(self, train, weights):
    parts = [train, *weights.values()]
    return nn.Dense(1)(jnp.concatenate(parts, axis=1))[:, 0]


class Counting(nn.Module):
  """Counts, in a collection of its own, the examples it was trained on."""

  @nn.compact
  def __call__(self, dense, embeddings, *, train, weights):
    count = self.variable('tally', 'examples', lambda: jnp.zeros((), jnp.int32))
    self.variable('tally', 'fixed', lambda: jnp.full((3,), 7.0))
    if train:
      count.value += (weights > 0).sum()
    return nn.Dense(1)(dense)[:, 0]


class Sowing(nn.Module):
  @nn.compact
  def __call__(self, dense, embeddings):
    self.sow('losses', 'size', dense.sum())
    return nn.Dense(1)(dense)[:, 0]


def test_a_model_of_two_arguments():
  trainer = trainer_of(model=TwoArguments())
  before = jax.device_get(trainer.state.params)['Dense_0']['kernel']
  trained(trainer, 3)
  assert trainer.state.model_state == {}
  after = jax.device_get(trainer.state.params)['Dense_0']['kernel']
  assert (before != after).any()


def test_a_model_with_a_state_of_its_own(tmp_path):
  trainer = trained(trainer_of(model=Counting()), 3)
  predict(trainer, ColumnBatches(small.columns(64), 64, epochs=1))
  other = trainer_of(model=Counting())
  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
    checkpoints.save(trainer, {})
    checkpoints.restore(other)
  for state in (trainer.state, other.state):
    tally = jax.device_get(state.model_state)['tally']
    assert tally['examples'] == 3 * 64
    assert tally['fixed'].tolist() == [7, 7, 7]


def test_a_state_that_grows_is_refused():
  with pytest.raises(UserError, match='keep the shapes of its state'):
    trained(trainer_of(model=Sowing()), 1)
