"""Every interaction against a float64 oracle, which also checks gradients."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.models.interactions import (
  Attention,
  Cross,
  Deep,
  Dot,
  INTERACTIONS,
  Linear,
)
from tests.support.oracles import mlp

SHAPE = EXAMPLES, COUNT, DIM = 5, 4, 6
EVERY = pytest.mark.parametrize('name', INTERACTIONS)


def dense(layer, x):
  return x @ layer['kernel'] + layer.get('bias', 0)


def dot(params, tokens):
  pairs = [(i, j) for i in range(COUNT) for j in range(i)]
  products = [(tokens[:, i] * tokens[:, j]).sum(1) for i, j in pairs]
  return np.stack(products, 1)[..., None]


def fm(params, tokens):
  pairs = [(i, j) for i in range(COUNT) for j in range(i)]
  return sum(tokens[:, i] * tokens[:, j] for i, j in pairs)[:, None]


def cross(params, tokens):
  x0 = x = tokens.reshape(EXAMPLES, -1)
  layers = [params[f'Dense_{i}'] for i in range(len(params))]
  while layers:
    factor = x
    if 'bias' not in layers[0]:
      factor = dense(layers.pop(0), factor)
    x = x0 * dense(layers.pop(0), factor) + x
  return x.reshape(SHAPE)


def attention(params, tokens):
  query, key, value = (
    dense(params[name], tokens) for name in ('query', 'key', 'value')
  )
  mixed = np.zeros(SHAPE)
  for b in range(EXAMPLES):
    for i in range(COUNT):
      scores = [query[b, i] @ key[b, j] / DIM**0.5 for j in range(COUNT)]
      shares = np.exp(scores) / np.exp(scores).sum()
      mixed[b, i] = shares @ value[b]
  return dense(params['out'], mixed)


def linear(params, tokens):
  return dense(params['Dense_0'], tokens.swapaxes(1, 2)).swapaxes(1, 2)


def deep(params, tokens):
  layers = params['MLP_0']
  found = [layers[f'Dense_{i}'] for i in range(len(layers))]
  pairs = [(x['kernel'], x['bias']) for x in found]
  return mlp(pairs, tokens.reshape(EXAMPLES, -1), True)[:, None]


ORACLES = {
  'dot': dot,
  'fm': fm,
  'cross': cross,
  'low_rank_cross': cross,
  'attention': attention,
  'linear': linear,
  'deep': deep,
}


def drawn(seed=0, shape=SHAPE):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def params_of(module, *inputs):
  """Parameters of normal values, for inputs of these shapes.

  Compiling the module's own start takes longer than all else.
  """
  shapes = jax.eval_shape(
    lambda *x: module.init(jax.random.key(0), *x), *inputs
  )
  rng = np.random.default_rng(1)

  def draw(leaf):
    return (0.3 * rng.normal(size=leaf.shape)).astype(np.float32)

  return jax.tree.map(draw, shapes.get('params', {}))


@functools.cache
def started(name):
  """A jitted interaction and its parameters."""
  module = INTERACTIONS[name]()
  apply = jax.jit(lambda params, x: module.apply({'params': params}, x))
  return apply, params_of(module, drawn())


def doubled(tree):
  return jax.tree.map(lambda leaf: leaf.astype(np.float64), tree)


@EVERY
def test_values_equal_the_oracle(name):
  apply, params = started(name)
  tokens = drawn()
  found = jax.device_get(apply(*jax.device_put((params, tokens))))
  expected = ORACLES[name](*doubled((params, tokens)))
  assert found.dtype == np.float32
  assert found.shape == expected.shape
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def keras_layers():
  """Layers of keras-rs, which is imported late as it takes seconds."""
  os.environ.setdefault('KERAS_BACKEND', 'jax')
  import keras_rs

  return keras_rs.layers


def keras_dot(params, tokens):
  found = keras_layers().DotInteraction()([*tokens.swapaxes(0, 1)])
  return np.asarray(found)[..., None]


def keras_cross(params, tokens):
  start = x = tokens.reshape(EXAMPLES, -1)
  found = [params[f'Dense_{i}'] for i in range(len(params))]
  while found:
    low = None if 'bias' in found[0] else found.pop(0)['kernel']
    rank = None if low is None else low.shape[1]
    layer = keras_layers().FeatureCross(projection_dim=rank)
    layer(start, x)  # makes its weights
    last = found.pop(0)
    kernels = [] if low is None else [low]
    layer.set_weights([*kernels, last['kernel'], last['bias']])
    x = layer(start, x)
  return np.asarray(x).reshape(SHAPE)


def torch_attention(params, tokens):
  torch = pytest.importorskip('torch')
  layer = torch.nn.MultiheadAttention(DIM, 1, batch_first=True)
  kernels = [params[name]['kernel'].T for name in ('query', 'key', 'value')]
  loaded = {
    'in_proj_weight': np.concatenate(kernels),
    'in_proj_bias': np.zeros(3 * DIM, np.float32),
    'out_proj.weight': params['out']['kernel'].T,
    'out_proj.bias': params['out']['bias'],
  }
  layer.load_state_dict({k: torch.tensor(v) for k, v in loaded.items()})
  x = torch.from_numpy(tokens)
  return layer(x, x, x, need_weights=False)[0].detach().numpy()


def torch_deep(params, tokens):
  torch = pytest.importorskip('torch')
  layers = params['MLP_0']
  x = torch.tensor(tokens.reshape(EXAMPLES, -1))
  for i in range(len(layers)):
    layer = layers[f'Dense_{i}']
    weights = torch.tensor(layer['kernel'].T), torch.tensor(layer['bias'])
    x = torch.relu(torch.nn.functional.linear(x, *weights))
  return x.numpy()[:, None]


def torch_linear(params, tokens):
  functional = pytest.importorskip('torch.nn.functional')
  torch = pytest.importorskip('torch')
  layer = params['Dense_0']
  weights = torch.tensor(layer['kernel'].T), torch.tensor(layer['bias'])
  mixed = functional.linear(torch.tensor(tokens.swapaxes(1, 2)), *weights)
  return mixed.numpy().swapaxes(1, 2)


@pytest.mark.parametrize(
  ('module', 'rival'),
  [
    (Dot(), keras_dot),
    (Cross(2), keras_cross),
    (Cross(2, rank=5), keras_cross),
    (Attention(), torch_attention),
    (Linear(3), torch_linear),
    (Deep((7, 5)), torch_deep),
  ],
)
def test_values_equal_those_of_another_library(module, rival):
  tokens = drawn()
  params = params_of(module, tokens)
  found = jax.jit(module.apply)(*jax.device_put(({'params': params}, tokens)))
  with jax.transfer_guard('allow'), jax.numpy_rank_promotion('allow'):
    expected = rival(params, tokens)
  found = jax.device_get(found)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@EVERY
def test_gradients_equal_finite_differences_of_the_oracle(name):
  """Along random directions of parameters and tokens."""
  apply, params = started(name)
  oracle = ORACLES[name]
  point = doubled((params, drawn()))
  weights = drawn(2, oracle(*point).shape)

  def loss(params, tokens, weights):
    return jnp.sum(apply(params, tokens) * weights)

  gradient = jax.jit(jax.grad(loss, (0, 1)))
  slopes = jax.device_get(gradient(*jax.device_put((params, drawn(), weights))))
  leaves, structure = jax.tree.flatten(point)
  rng = np.random.default_rng(3)
  for _ in range(3):
    along = [rng.normal(size=leaf.shape) for leaf in leaves]

    def at(step, along=along):
      moved = [a + step * b for a, b in zip(leaves, along, strict=True)]
      return (oracle(*structure.unflatten(moved)) * weights).sum()

    expected = (at(1e-6) - at(-1e-6)) / 2e-6
    parts = zip(jax.tree.leaves(slopes), along, strict=True)
    slope = sum((a * b).sum() for a, b in parts)
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-4)


@EVERY
def test_half_precision_is_near_and_its_sums_are_f32(name):
  apply, params = started(name)
  tokens = drawn()
  half = jax.device_put(tokens.astype(jnp.bfloat16))
  found = jax.device_get(apply(jax.device_put(params), half))
  expected = ORACLES[name](*doubled((params, tokens)))
  assert found.dtype == np.float32
  np.testing.assert_allclose(found, expected, rtol=0.1, atol=0.3)


def test_permuted_tokens_permute_attention_and_not_mixtures():
  order = [2, 0, 3, 1]
  for name, permutes in ('attention', True), ('linear', False):
    apply, params = started(name)
    tokens = drawn()
    one, other = (
      jax.device_get(apply(*jax.device_put((params, x))))
      for x in (tokens, tokens[:, order])
    )
    assert np.allclose(one[:, order], other, atol=1e-5) == permutes


def test_heads_split_the_elements():
  with pytest.raises(UserError, match=r'divide the width of its tokens, 6'):
    params_of(Attention(4), drawn())
  params, tokens = params_of(Attention(3), drawn()), drawn()
  apply = jax.jit(lambda params, x: Attention(3).apply({'params': params}, x))
  found = jax.device_get(apply(*jax.device_put((params, tokens))))
  query, key, value = (
    dense(params[name], tokens) for name in ('query', 'key', 'value')
  )
  parts = []
  for head in range(3):
    part = np.s_[..., 2 * head : 2 * head + 2]
    scores = np.einsum('bmd,bnd->bmn', query[part], key[part]) / 2**0.5
    shares = np.exp(scores) / np.exp(scores).sum(2, keepdims=True)
    parts.append(np.einsum('bmn,bnd->bmd', shares, value[part]))
  expected = dense(params['out'], np.concatenate(parts, 2))
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
