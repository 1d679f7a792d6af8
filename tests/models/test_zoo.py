"""The click models: their logits, their parts and their sizes."""

import functools

from flax import linen as nn
import jax
import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.errors import UserError
from slipstream_jax.models.interactions import Attention, Cross, INTERACTIONS
from tests.models import test_interactions as oracles
from tests.support.oracles import mlp

EXAMPLES, WIDTH, DIM = oracles.EXAMPLES, 3, oracles.DIM
NAMES = [f'f{i}' for i in range(oracles.COUNT - 1)]
SMALL = {'bottom': (7, DIM), 'top': (8,)}


def inputs(dim=DIM):
  """Dense features and rows, f32."""
  rng = np.random.default_rng(0)
  shapes = (EXAMPLES, WIDTH), (EXAMPLES, len(NAMES), dim)
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def called(model, dense, rows):
  """Logits, and the parameters in float64."""
  by_name = {name: rows[:, i] for i, name in enumerate(NAMES)}
  params = oracles.params_of(model, dense, by_name)
  apply = jax.jit(lambda params, *x: model.apply({'params': params}, *x))
  logits = apply(*jax.device_put((params, dense, by_name)))
  return jax.device_get(logits), oracles.doubled(params)


def layers(params):
  found = [params[f'Dense_{i}'] for i in range(len(params))]
  return [(x['kernel'], x['bias']) for x in found]


def tokens_of(params, dense, vectors):
  x = mlp(layers(params['bottom']), dense.astype(float), True)
  return np.concatenate([x[:, None], vectors.astype(float)], 1)


def head(params, features):
  features = features.reshape(len(features), -1)
  return mlp(layers(params['top']), features, False)[:, 0]


@pytest.mark.parametrize('rank', [None, 2])
def test_dcn_is_its_crosses_below_an_mlp(rank):
  dense, rows = inputs()
  logits, params = called(slip.DCN(**SMALL, crosses=2, rank=rank), dense, rows)
  crossed = oracles.cross(params['cross'], tokens_of(params, dense, rows))
  np.testing.assert_allclose(logits, head(params, crossed), atol=1e-5)


@pytest.mark.parametrize('model', [slip.WideDeep, slip.DeepFM])
def test_a_linear_part_beside_an_mlp(model):
  dense, rows = inputs(DIM + 1)
  logits, params = called(model(**SMALL), dense, rows)
  tokens = tokens_of(params, dense, rows[..., :-1])
  expected = head(params, tokens) + rows[..., -1].sum(1)
  expected += (dense @ params['wide']['kernel'])[:, 0]
  if model is slip.DeepFM:
    expected += oracles.fm({}, tokens).sum((1, 2))
  np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_without_an_interaction_the_head_sees_the_tokens():
  dense, rows = inputs()
  logits, params = called(slip.TokenModel(**SMALL), dense, rows)
  expected = head(params, tokens_of(params, dense, rows))
  np.testing.assert_allclose(logits, expected, atol=1e-5)


class Layers(slip.DHEN):
  """The layers alone, without stems and head."""

  @nn.compact
  def __call__(self, tokens):
    return self.interact(tokens[:, 0], tokens)


def features_of(model):
  """What the head of a model sees, and the model's parameters."""
  params = oracles.params_of(model, oracles.drawn())
  apply = jax.jit(lambda params, x: model.apply({'params': params}, x))
  found = apply(*jax.device_put((params, oracles.drawn())))
  return jax.device_get(found), params


@pytest.mark.parametrize('name', INTERACTIONS)
def test_one_bare_module_in_one_layer_is_that_module(name):
  bare = {'residual': False, 'norm': False, 'projected': False}
  found, params = features_of(Layers(layers=((name,),), **bare))
  apply, alone = oracles.started(name)
  assert [*map(list, params.values())] == [[*alone]] * bool(alone)
  own = next(iter(params.values()), {})
  expected = apply(*jax.device_put((own, oracles.drawn())))
  np.testing.assert_array_equal(
    found, jax.device_get(expected).reshape(EXAMPLES, -1)
  )


def layered(params, x, count):
  """Two layers of products, mixtures and the sum of products, in float64."""
  for layer in ('layer_0', 'layer_1'):
    start, ends = x.shape[1], count or oracles.COUNT
    shares = [(ends + i) // 3 for i in range(3)]
    pairs = [(i, j) for i in range(start) for j in range(i)]
    dots = np.stack([(x[:, i] * x[:, j]).sum(1) for i, j in pairs], 1)
    (matrix,) = layers(params[f'{layer}_tokens_0'])
    first = (dots @ matrix[0] + matrix[1]).reshape(EXAMPLES, shares[0], DIM)
    mixed = oracles.linear(params[f'Linear_{layer[-1]}'], x)
    second = oracles.linear(params[f'{layer}_tokens_1'], mixed)
    products = sum(x[:, i] * x[:, j] for i, j in pairs)[:, None]
    third = oracles.linear(params[f'{layer}_tokens_2'], products)
    y = np.concatenate([first, second, third], 1)
    same = start == ends
    x = y + (x if same else oracles.linear(params[f'{layer}_residual'], x))
    mean, var = x.mean(2, keepdims=True), x.var(2, keepdims=True)
    norm = params[f'{layer}_norm']
    x = (x - mean) / np.sqrt(var + 1e-6) * norm['scale'] + norm['bias']
  return x.reshape(EXAMPLES, -1)


@pytest.mark.parametrize('count', [None, 6])
def test_layers_project_add_and_normalize(count):
  """Values, and gradients by finite differences, for both residuals."""
  model = Layers(layers=(('dot', 'linear', 'fm'),) * 2, tokens=count)
  found, params = features_of(model)
  point = oracles.doubled((params, oracles.drawn()))
  expected = layered(*point, count)
  np.testing.assert_allclose(found, expected, atol=2e-5)
  weights = oracles.drawn(2, expected.shape)

  def loss(params, x, weights):
    return (model.apply({'params': params}, x) * weights).sum()

  given = jax.device_put((params, oracles.drawn(), weights))
  slopes = jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(*given))
  leaves, structure = jax.tree.flatten(point)
  rng = np.random.default_rng(3)
  for _ in range(3):
    along = [rng.normal(size=leaf.shape) for leaf in leaves]
    ends = (
      structure.unflatten(
        [a + step * b for a, b in zip(leaves, along, strict=True)]
      )
      for step in (1e-6, -1e-6)
    )
    up, down = ((layered(*end, count) * weights).sum() for end in ends)
    parts = zip(jax.tree.leaves(slopes), along, strict=True)
    slope = sum((a * b).sum() for a, b in parts)
    np.testing.assert_allclose(slope, (up - down) / 2e-6, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize('combine', ['sum', 'weighted_sum'])
def test_layers_sum_outputs(combine):
  layer = functools.partial(Layers, combine=combine, residual=False, norm=False)
  pair, params = features_of(layer(layers=(('linear', 'fm'),), tokens=2))
  x = oracles.drawn()
  params, x = oracles.doubled((params, x))
  mixed = oracles.linear(params['Linear_0'], x)
  weights = params.pop('layer_0_weights', np.ones(2))
  expected = weights[0] * oracles.linear(params['layer_0_tokens_0'], mixed)
  products = oracles.fm({}, x)
  expected += weights[1] * oracles.linear(params['layer_0_tokens_1'], products)
  np.testing.assert_allclose(pair, expected.reshape(EXAMPLES, -1), atol=1e-5)
  m, d = oracles.COUNT, 2
  numbers = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert numbers == (m + 1) * m + (m + 1) * d + 2 * d
  assert (weights != 1).all() == (combine == 'weighted_sum')


@pytest.mark.parametrize('count', [None, 5])
@pytest.mark.parametrize('depth', [1, 3])
def test_the_number_of_parameters_has_a_closed_form(depth, count):
  layer = ('dot', 'cross', 'attention')
  model = Layers(layers=(layer,) * depth, tokens=count)
  params = oracles.params_of(model, oracles.drawn())
  numbers = sum(leaf.size for leaf in jax.tree.leaves(params))
  expected, m, d = 0, oracles.COUNT, DIM
  for _ in range(depth):
    ends = count or m
    shares = [(ends + i) // 3 for i in range(3)]
    expected += (m * (m - 1) // 2 + 1) * shares[0] * d  # products to tokens
    expected += (m * d + 1) * m * d + (m + 1) * shares[1]  # the cross
    expected += 4 * d * d + d + (m + 1) * shares[2]  # attention
    expected += (m + 1) * ends if m != ends else 0  # the residual
    expected += 2 * d  # the normalization
    m = ends
  assert numbers == expected


def test_an_interaction_of_ones_own():
  """A class or a function that makes one stands beside names."""
  for own in (Attention, lambda: Cross(2)):
    found, params = features_of(Layers(layers=((own, 'dot'),)))
    assert found.shape == (EXAMPLES, oracles.COUNT * DIM)
    assert any(key.startswith(('Att', 'Cro')) for key in params)


@pytest.mark.parametrize(
  ('settings', 'said'),
  [
    ({'layers': (('dots',),)}, r"got 'dots'"),
    ({'layers': (('dot', 'fm'),), 'tokens': 1}, r'for each interaction, 2'),
    ({'layers': (('dot',),), 'projected': False}, r'end at one width, 6'),
    ({'layers': (('dot',),), 'combine': 'mean'}, r'weighted_sum'),
    (
      {
        'layers': (('fm', 'linear'),),
        'projected': False,
        'combine': 'sum',
      },
      r'equally many',
    ),
  ],
)
def test_layers_that_do_not_fit(settings, said):
  with pytest.raises(UserError, match=said):
    features_of(Layers(**settings))
