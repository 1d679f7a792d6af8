"""TBSM against a float64 oracle, and what padding and gradients must do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.models.tbsm import TBSM
from tests.support.oracles import mlp

FEATURES, STEPS, DIM = 3, 6, 4
SMALL = {'bottom': (DIM,), 'top': (7, 5), 'attention': (8,), 'final': (9,)}


def examples(count, seed=0, per_step=1):
  """Dense features, embeddings [B, F, L, D], and which lookups are real.

  Histories are padded at the front, by all steps for the first example.
  """
  rng = np.random.default_rng(seed)
  short = rng.integers(0, STEPS, (count, 1))
  short[0] = STEPS - 1
  there = np.arange(STEPS) >= short
  real = np.repeat(there[:, None], FEATURES, axis=1)
  dense = rng.normal(size=(count, STEPS * per_step)).astype(np.float32)
  embeddings = rng.normal(size=(count, FEATURES, STEPS, DIM))
  return dense, (embeddings * real[..., None]).astype(np.float32), real


def named(array):
  """The features of [B, F, ...], by name."""
  return {f'f{i}': array[:, i] for i in range(array.shape[1])}


@functools.cache  # one compilation
def compiled(model):
  """Of a model: its init, its logits, and their slopes."""

  def init(dense, embeddings):
    return model.init(jax.random.key(0), dense, named(embeddings))

  def forward(dense, embeddings, variables, real):
    return model.apply(variables, dense, named(embeddings), real=named(real))

  def total(*arguments):
    return forward(*arguments).sum()

  return jax.jit(init), jax.jit(forward), jax.jit(jax.grad(total, (0, 1, 2)))


def start(model, dense, embeddings):
  return compiled(model)[0](*jax.device_put((dense, embeddings)))


def logits(model, variables, dense, embeddings, real):
  arrays = jax.device_put((dense, embeddings, variables, real))
  return jax.device_get(compiled(model)[1](*arrays))


def slopes(model, variables, dense, embeddings, real):
  """Gradients of the sum of logits: of dense, embeddings and variables."""
  arrays = jax.device_put((dense, embeddings, variables, real))
  return jax.device_get(compiled(model)[2](*arrays))


def layers(params):
  """(kernel, bias) of an MLP's layers, float64."""
  found = [params[f'Dense_{i}'] for i in range(len(params))]
  return [(x['kernel'].astype(float), x['bias'].astype(float)) for x in found]


def oracle(params, dense, embeddings, real, attention=True):
  """The logit of one example, step by step, as the released code has it."""
  params = jax.tree.map(np.asarray, jax.device_get(params))
  per_step = len(dense) // STEPS
  found = []
  for step in range(STEPS):
    x = dense[step * per_step : (step + 1) * per_step].astype(float)
    bottom = mlp(layers(params['bottom']), x[None], True)
    met = [bottom[0], *embeddings[:, step].astype(float)]
    dots = [met[i] @ met[j] for i in range(len(met)) for j in range(i)]
    joined = np.concatenate([bottom[0], dots])
    vector = mlp(layers(params['top']), joined[None], True)[0]
    length = np.linalg.norm(vector)
    vector = vector / length if length > 1e-6 else vector * 1e6
    found.append(vector)
  *history, candidate = found
  inner = params['inner'].astype(float)
  products = np.zeros(STEPS - 1)
  for step, vector in enumerate(history):
    if real[:, step].any():
      products[step] = (inner @ vector) @ (inner @ candidate)
  weights = products
  if attention:
    out = mlp(layers(params['attention']), products[None], False)
    weights = 1 / (1 + np.exp(-out[0]))
  context = np.zeros_like(candidate)
  for step, vector in enumerate(history):
    if real[:, step].any():
      context += weights[step] * vector
  both = np.concatenate([context, candidate])
  return mlp(layers(params['final']), both[None], False)[0, 0]


@pytest.mark.parametrize('per_step', [1, 2])
@pytest.mark.parametrize('attention', [(8,), ()], ids=['mlp', 'products'])
def test_logits_equal_the_oracle(attention, per_step):
  model = TBSM(**SMALL | {'attention': attention})
  dense, embeddings, real = examples(40, per_step=per_step)
  variables = start(model, dense, embeddings)
  found = logits(model, variables, dense, embeddings, real)
  expected = [
    oracle(variables['params'], *one, bool(attention))
    for one in zip(dense, embeddings, real, strict=True)
  ]
  assert found.shape == (40,)
  assert np.std(expected) > 0.01  # they differ from example to example
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_features_of_the_example_are_those_of_every_step():
  model = TBSM(**SMALL)
  dense, embeddings, real = examples(30)
  variables = start(model, dense, embeddings)
  one = dense[:, :1]
  found = logits(model, variables, one, embeddings, real)
  expected = np.repeat(one, STEPS, axis=1)
  expected = logits(model, variables, expected, embeddings, real)
  np.testing.assert_array_equal(found, expected)


def test_the_defaults_are_the_published_widths():
  dense = np.zeros((1, 21), np.float32)
  embeddings = np.zeros((1, 3, 21, 16), np.float32)
  params = start(TBSM(), dense, embeddings)['params']
  shapes = jax.tree.map(np.shape, params)
  kernels = {
    name: [shapes[name][f'Dense_{i}']['kernel'] for i in range(len(part))]
    for name, part in params.items()
    if name != 'inner'
  }
  assert kernels == {
    'bottom': [(1, 16)],
    'top': [(22, 15), (15, 15)],
    'attention': [(20, 15), (15, 15), (15, 20)],
    'final': [(30, 60), (60, 1)],
  }
  assert shapes['inner'] == (15, 15)


def test_padding_steps_change_nothing():
  """Neither their dense features nor their rows do, nor do they learn."""
  model = TBSM(**SMALL)
  dense, embeddings, real = examples(30)
  there = real.any(axis=1)
  assert 0.2 < there.mean() < 0.9
  rng = np.random.default_rng(5)
  other_dense = np.where(there, dense, rng.normal(size=dense.shape) * 50)
  noise = rng.normal(size=embeddings.shape) * 50
  other = np.where(real[..., None], embeddings, noise).astype(np.float32)
  variables = start(model, dense, embeddings)
  one = logits(model, variables, dense, embeddings, real)
  two = logits(model, variables, other_dense.astype(np.float32), other, real)
  np.testing.assert_array_equal(one, two)
  # It is `real` that says so: read as steps, the same arrays give others.
  all_real = np.ones_like(real)
  three = logits(model, variables, dense, embeddings, all_real)
  assert (one != three).any()

  of_dense, of_rows, _ = slopes(
    model, variables, other_dense.astype(np.float32), other, real
  )
  assert not of_rows[~real].any()
  assert not of_dense[~there].any()
  moved = (of_rows != 0).any(axis=3)
  assert moved[real].mean() > 0.8


def test_gradients_equal_differences():
  """Those of the embeddings and of all parameters."""
  model = TBSM(**SMALL)
  dense, embeddings, real = examples(30, seed=2)
  variables = start(model, dense, embeddings)
  # The oracle is float64, so that its differences are exact enough.
  params = jax.tree.map(
    lambda x: np.asarray(x, np.float64), jax.device_get(variables['params'])
  )
  _, of_rows, of_variables = slopes(model, variables, dense, embeddings, real)
  rng, step = np.random.default_rng(0), 1e-5
  moves = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
  of_rows_moved = rng.normal(size=embeddings.shape) * real[..., None]

  def value(of_params, of_rows):
    moved = jax.tree.map(lambda x, y: x + of_params * y, params, moves)
    rows = embeddings + of_rows * of_rows_moved
    each = zip(dense, rows, real, strict=True)
    return sum(oracle(moved, d, e, r) for d, e, r in each)

  products = jax.tree.map(
    lambda g, m: (g * m).sum(), of_variables['params'], moves
  )
  for found, one, other in (
    ((of_rows * of_rows_moved).sum(), (0, step), (0, -step)),
    (sum(jax.tree.leaves(products)), (step, 0), (-step, 0)),
  ):
    expected = (value(*one) - value(*other)) / (2 * step)
    assert abs(expected) > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_a_vector_of_zeros_has_a_finite_gradient():
  model = TBSM(**SMALL)
  dense, embeddings, real = examples(30)
  variables = jax.device_get(start(model, dense, embeddings))
  top = variables['params']['top']
  # ReLU cuts off everything: the vectors that go onto the sphere are 0.
  top['Dense_1'] = jax.tree.map(lambda x: -abs(x) - 1, top['Dense_1'])
  found = slopes(model, variables, dense, embeddings, real)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
  assert not jax.tree.leaves(found[2]['params']['top'])[0].any()


@pytest.mark.parametrize('name', ['layer', 'batch'])
def test_normalization_ignores_padding_and_weightless_examples(name):
  model = TBSM(**SMALL, normalization=name)
  dense, embeddings, real = examples(30)
  variables = start(model, dense, embeddings)
  weights = np.ones(30, np.float32)
  weights[20:] = 0
  there = real.any(axis=1)

  def trained(dense, embeddings):
    arrays = jax.device_put((dense, embeddings, real, weights))

    def forward(variables, dense, embeddings, real, weights):
      return model.apply(
        variables,
        dense,
        named(embeddings),
        real=named(real),
        weights=weights,
        train=True,
        mutable=['batch_stats'],
      )

    return jax.device_get(jax.jit(forward)(variables, *arrays))

  one, state = trained(dense, embeddings)
  counts = there & (weights > 0)[:, None]
  noise = np.random.default_rng(1).normal(size=dense.shape) * 9
  changed = np.where(counts, dense, noise).astype(np.float32)
  two, other_state = trained(changed, embeddings)
  np.testing.assert_allclose(one[:20], two[:20], rtol=1e-5, atol=1e-6)
  for a, b in zip(*map(jax.tree.leaves, (state, other_state)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  if name == 'batch':
    seen = state['batch_stats']['normalization']['weight']
    assert seen == pytest.approx(counts.sum())


@pytest.mark.parametrize(
  ('model', 'dense', 'embeddings', 'says'),
  [
    (TBSM(), 21, (3, 16), r'sequences of a history .* got \[2, 16\]'),
    (TBSM(), 1, (3, 1, 16), r'a history and a candidate'),
    (TBSM(), 22, (3, 21, 16), r'each of the 21 steps .* got 22 in all'),
    (TBSM(), 0, (3, 21, 16), r'got 0 in all'),
    (TBSM(), 21, (3, 21, 8), r'must end at the width .* 8, got 16'),
    (TBSM(normalization='no'), 21, (3, 21, 16), "got 'no'"),
    (DLRM((16,), (4,)), 21, (3, 21, 16), r'pooled .* \[2, 21, 16\]'),
  ],
)
def test_what_does_not_fit_is_refused(model, dense, embeddings, says):
  def init():
    rows = named(jnp.zeros((2, *embeddings)))
    return model.init(jax.random.key(0), jnp.zeros((2, dense)), rows)

  with pytest.raises(UserError, match=says):
    jax.eval_shape(init)
