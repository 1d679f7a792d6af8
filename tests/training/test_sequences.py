"""Sequences in a step: what a model is given, and which rows it moves."""

import jax
import numpy as np
import optax

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.training.loop import take_step
from slipstream_jax.training.trainer_parts import make_parts, planned
from tests.support import small


def test_a_step_moves_rows_by_the_gradient_of_their_lookups():
  """Against the model's own slopes, row by row: plain SGD of one batch."""
  columns = small.columns(32, length=small.STEPS)
  recipe = small.sequence_recipe('sgd', rate=1.0)
  trainer = make_parts(recipe, 'streamed', small.DENSE, seed=3)
  item = next(planned(trainer, ColumnBatches(columns, 32), 0))
  before = trainer.engine.read_back()[0].rows.copy()
  variables = jax.device_get(trainer.state.variables)
  inverse = item.plans[0].inverse.reshape(32, 4, small.STEPS)
  real = inverse >= 0
  embeddings = before[item.plans[0].rows][inverse] * real[..., None]

  def loss(embeddings, variables, dense, labels, real):
    by_name, real_by_name = (
      {name: x[:, f] for f, name in enumerate(small.SIZES)}
      for x in (embeddings, real)
    )
    logits = recipe.model.apply(variables, dense, by_name, real=real_by_name)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

  batch = item.batch
  arrays = embeddings, variables, batch.dense, batch.labels, real
  slopes = jax.device_get(jax.jit(jax.grad(loss))(*jax.device_put(arrays)))
  expected = np.zeros(before.shape)
  rows = item.plans[0].rows[inverse[real]]
  np.add.at(expected, rows, slopes[real])
  take_step(trainer, item)
  moved = before - trainer.engine.read_back()[0].rows
  assert np.abs(expected).max() > 1e-4
  np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-6)
