"""One step of DLRM against an independent float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.models.layers import dot_interaction
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.training.loop import take_step
from slipstream_jax.training.trainer_parts import make_parts, planned
from tests.support import oracles, small

TOLERANCE = {'rtol': 1e-5, 'atol': 1e-5}


def layers(params, name):
  found = jax.device_get(params)[name]
  return [
    (
      found[f'Dense_{i}']['kernel'].astype(float),
      found[f'Dense_{i}']['bias'].astype(float),
    )
    for i in range(len(found))
  ]


# Each optimizer, number of lookups, first order and offset at least once.
STEPS = [
  ('sgd', False, None, None),
  ('adagrad', True, 3, None),
  ('adagrad', True, None, np.linspace(-3, 2, 32)),
  ('rowwise_adagrad', False, 3, None),
  ('lazy_adam', True, None, None),
]


@pytest.mark.parametrize(
  ('optimizer', 'first_order', 'length', 'offset'), STEPS
)
def test_loss_gradients_and_rows_of_a_step(
  optimizer, first_order, length, offset
):
  dim, rate = 8, 0.05
  recipe = small.recipe(
    optimizer,
    dim,
    rate,
    bottom=(16, dim - first_order),
    first_order=first_order,
    length=length,
  )._replace(dense_optimizer=optax.sgd(1.0))  # updates are the gradients
  trainer = make_parts(recipe, PLACEMENTS['streamed'], small.DENSE)
  columns = small.columns(32, length=length)
  columns.labels[:] = np.arange(32) % 2
  batches = planned(trainer, ColumnBatches(columns, 32), 0)
  item = next(batches)
  weights = np.linspace(0, 2, 32, dtype=np.float32)
  if offset is not None:
    offset = offset.astype(np.float32)
  weighted = item.batch._replace(weights=weights, offset=offset)
  item = item._replace(scheduled=item.scheduled._replace(batch=weighted))
  before = trainer.engine.read_back()[0].rows[item.plans[0].rows].astype(float)
  bottom, top = (layers(trainer.state.params, n) for n in ('bottom', 'top'))

  loss = float(jax.device_get(take_step(trainer, item)))

  expected_loss, d_bottom, d_top, d_rows = oracles.dlrm_loss_and_gradients(
    bottom,
    top,
    before,
    item.plans[0].inverse.reshape(32, len(small.ROWS), -1),
    weighted,
    small.POOLINGS,
    first_order,
  )
  np.testing.assert_allclose(loss, expected_loss, **TOLERANCE)
  for name, old, grads in (('bottom', bottom, d_bottom), ('top', top, d_top)):
    new = layers(trainer.state.params, name)
    for (w, b), (w_new, b_new), (d_w, d_b) in zip(old, new, grads, strict=True):
      np.testing.assert_allclose(w - w_new, d_w, **TOLERANCE)
      np.testing.assert_allclose(b - b_new, d_b, **TOLERANCE)
  after = trainer.engine.read_back()[0].rows[item.plans[0].rows]
  oracle = oracles.RowOracle(optimizer, rate)
  for i, (row, g) in enumerate(zip(before, d_rows, strict=True)):
    # A gradient of the size of f32's rounding has no direction to check.
    if optimizer == 'lazy_adam' and np.abs(g).min() < 1e-6:
      continue
    np.testing.assert_allclose(after[i], oracle.step(i, row, g), **TOLERANCE)


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
