"""DLRM against a float64 oracle, and the gradient of its interaction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.models.interactions import dot_interaction
from tests.support.oracles import mlp


def layers(params):
  found = [params[f'Dense_{i}'] for i in range(len(params))]
  return [(x['kernel'].astype(float), x['bias'].astype(float)) for x in found]


@pytest.mark.parametrize('first_order', [False, True])
def test_logits_equal_the_oracle(first_order):
  rng, dim = np.random.default_rng(0), 8
  dense = rng.normal(size=(20, 5)).astype(np.float32)
  rows = rng.normal(size=(20, 3, dim)).astype(np.float32)
  by_name = {name: rows[:, i] for i, name in enumerate('abc')}
  model = DLRM((16, dim - first_order), (7, 5), first_order)
  start = jax.jit(lambda *x: model.init_with_output(jax.random.key(0), *x))
  found, variables = start(*jax.device_put((dense, by_name)))
  params = jax.device_get(variables['params'])
  vectors = rows[..., :-1] if first_order else rows
  x = mlp(layers(params['bottom']), dense.astype(float), True)
  met = np.concatenate([x[:, None], vectors], 1)
  pairs = [(i, j) for i in range(4) for j in range(i)]
  dots = np.stack([(met[:, i] * met[:, j]).sum(1) for i, j in pairs], 1)
  expected = mlp(layers(params['top']), np.concatenate([x, dots], 1), False)
  expected = expected[:, 0] + first_order * rows[..., -1].sum(1)
  np.testing.assert_allclose(jax.device_get(found), expected, atol=1e-5)


def test_interaction_gradient_equals_the_derived_one():
  def derived(vectors):
    i, j = np.tril_indices(vectors.shape[1], -1)
    return jnp.einsum('bvd,bwd->bvw', vectors, vectors)[:, i, j]

  vectors = jax.device_put(
    np.random.default_rng(0).normal(size=(6, 5, 3)).astype(np.float32)
  )

  def value_and_gradient(interaction):
    def total(v):
      return jnp.sum(jnp.sin(interaction(v)))

    return jax.device_get(
      jax.jit(lambda v: (interaction(v), jax.grad(total)(v)))(vectors)
    )

  ours, other = map(value_and_gradient, (dot_interaction, derived))
  np.testing.assert_allclose(ours[0], other[0], rtol=1e-6)
  np.testing.assert_allclose(ours[1], other[1], rtol=1e-5, atol=1e-6)
