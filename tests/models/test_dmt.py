"""A DMT whose towers are identities is a DLRM, to the bit."""

import jax
import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.errors import UserError

B, DIM, FEATURES = 6, 4, 5
TOWERS = ((0, 1), (2, 3, 4))
SIZES = {'bottom': (8, DIM), 'top': (7,)}


def inputs():
  rng = np.random.default_rng(0)
  dense = rng.normal(size=(B, 3)).astype(np.float32)
  rows = rng.normal(size=(FEATURES, B, DIM)).astype(np.float32)
  return dense, {f'C{number}': own for number, own in enumerate(rows)}


def passed(model, arguments, params=None):
  """Gradients of parameters and embeddings with logits, and parameters."""

  def loss(params, embeddings, dense):
    logits = model.apply(params, dense, embeddings)
    return (logits * logits).sum(), logits

  both = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
  arguments = jax.device_put(arguments)
  with jax.transfer_guard('allow'):
    if params is None:
      params = model.init(jax.random.key(0), *arguments)
    return jax.device_get((both(params, *arguments[::-1]), params))


def test_identities_are_a_dlrm_to_the_bit():
  one, params = passed(slip.DLRM(**SIZES), inputs())
  model = slip.DMT(**SIZES, towers=TOWERS, form='identity')
  other, own = passed(model, inputs())
  jax.tree.map(np.testing.assert_array_equal, own, params)
  jax.tree.map(np.testing.assert_array_equal, other, one)


def test_features_come_in_the_order_of_the_towers():
  dense, rows = inputs()
  towers = (4, 1), (0, 3), (2,)
  order = [place for own in towers for place in own]
  names = [*rows]
  # The same embeddings under the names of the order in which they meet.
  turned = {names[i]: rows[names[place]] for i, place in enumerate(order)}
  (_, one), params = passed(slip.DLRM(**SIZES), (dense, turned))
  model = slip.DMT(**SIZES, towers=towers, form='identity')
  (_, other), _ = passed(model, (dense, rows), params)
  np.testing.assert_array_equal(other, one)


def test_linear_towers_are_a_linear_map_with_blocks():
  """The flat model with a block-diagonal first layer, in float64."""
  dense, rows = inputs()
  model = slip.DMT(**SIZES, towers=TOWERS, width=2)
  _, params = passed(model, (dense, rows))
  rng = np.random.default_rng(1)  # towers start as parts of the identity
  params = jax.tree.map(
    lambda x: (x + 0.2 * rng.normal(size=x.shape)).astype(np.float32), params
  )
  (_, logits), _ = passed(model, (dense, rows), params)
  leaves = jax.tree.map(lambda x: np.asarray(x, np.float64), params['params'])
  tokens = np.stack([*rows.values()], 1).astype(np.float64)
  mix, mixed_bias = np.zeros((FEATURES, FEATURES)), np.zeros(FEATURES)
  out = np.zeros((B, FEATURES, 2))
  for number, own in enumerate(TOWERS):
    tower = leaves[f'tower_{number}']
    layer = tower['features']
    mix[np.ix_(own, own)] = layer['kernel']
    mixed_bias[[*own]] = layer['bias']
  vectors = np.einsum('bfd,fk->bkd', tokens, mix) + mixed_bias[:, None]
  for number, own in enumerate(TOWERS):
    layer = leaves[f'tower_{number}']['elements']
    out[:, own] = vectors[:, own] @ layer['kernel'] + layer['bias']
  x = dense.astype(np.float64)
  for layer in leaves['bottom'].values():
    x = np.maximum(x @ layer['kernel'] + layer['bias'], 0)
  layer = leaves['dense_token']
  x = x @ layer['kernel'] + layer['bias']
  meet = np.concatenate([x[:, None], out], 1)
  i, j = np.tril_indices(FEATURES + 1, -1)
  x = np.concatenate([x, (meet[:, i] * meet[:, j]).sum(-1)], 1)
  *hidden, last = leaves['top'].values()
  for layer in hidden:
    x = np.maximum(x @ layer['kernel'] + layer['bias'], 0)
  expected = (x @ last['kernel'] + last['bias'])[:, 0]
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_towers_keep_features_of_others_apart():
  dense, rows = inputs()
  model = slip.DMT(**SIZES, towers=TOWERS, width=2, form='cross')
  params = passed(model, (dense, rows))[1]['params']
  kernels = {
    name: [leaf.shape for leaf in jax.tree.leaves(own) if leaf.ndim == 2]
    for name, own in params.items()
    if name.startswith('tower')
  }
  assert kernels == {
    'tower_0': [(8, 8), (DIM, 2)],
    'tower_1': [(12, 12), (DIM, 2)],
  }


@pytest.mark.parametrize(
  ('more', 'words'),
  [
    ({'towers': ((0, 1), (2, 3))}, 'each of the 5 features must be in one'),
    ({'towers': ((0, 1, 2), (2, 3, 4))}, 'each of the 5 features'),
    ({'towers': TOWERS, 'form': 'deep'}, 'form'),
    ({'towers': TOWERS, 'form': 'identity', 'width': 2}, 'as they are'),
  ],
)
def test_towers_that_cannot_be_are_refused(more, words):
  with pytest.raises(UserError, match=words):
    passed(slip.DMT(**SIZES, **more), inputs())
