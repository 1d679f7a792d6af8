"""One training step and one prediction, as jitted pure functions."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import optax

from slipstream_jax.errors import UserError
from slipstream_jax.models.layers import embed
from slipstream_jax.train.state import Recipe, TrainState
from slipstream_jax.train.watch import hold_stale
from slipstream_jax.transforms.row_state import join, split
from slipstream_jax.types import Batch, RowBlock

UpdateFn = Callable[
  [TrainState, RowBlock, jax.Array, Batch, jax.Array | None],
  tuple[TrainState, RowBlock, Float[jax.Array, '']],
]
PredictFn = Callable[
  [Any, jax.Array, jax.Array, jax.Array], Float[jax.Array, ' B']
]


def make_update(recipe: Recipe) -> UpdateFn:
  """The jitted step; state and rows are donated.

  It gets the state, the batch's distinct rows with their row state [P, ...],
  the inverse of the lookups, the batch and, where the state has a watch, the
  place i32[P] of each row among the hot ones. It returns the next state, the
  changed rows, and the loss f32[]: the mean over the batch of weight * loss.
  """
  layout = recipe.layout()

  def update(
    state: TrainState,
    block: RowBlock,
    inverse: Int[jax.Array, '...'],
    batch: Batch,
    row_index: Int[jax.Array, ' P'] | None = None,
  ) -> tuple[TrainState, RowBlock, Float[jax.Array, '']]:
    def loss(params: Any, rows: jax.Array) -> jax.Array:
      logits = _logits(recipe, params, rows, inverse, batch.dense)
      return jnp.mean(batch.weights * recipe.loss(logits, batch.labels))

    value, (dense_grads, row_grads) = jax.value_and_grad(loss, (0, 1))(
      state.params, block.rows
    )
    updates, dense_state = recipe.dense_optimizer.update(
      dense_grads, state.dense_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    row_updates, row_state = recipe.row_optimizer.update(
      row_grads, join(layout, block.state, state.row_globals), block.rows
    )
    row_leaves, row_globals = split(layout, row_state)
    watch = state.watch
    if watch is not None and row_index is not None:
      watch, row_updates, row_leaves = hold_stale(
        watch, row_updates, block.state, row_leaves, row_index
      )
    rows = optax.apply_updates(block.rows, row_updates)
    new_state = TrainState(
      state.step + 1, params, dense_state, row_globals, watch
    )
    return new_state, RowBlock(rows, row_leaves), value

  return functools.partial(jax.jit, donate_argnums=(0, 1))(update)


def make_predict(recipe: Recipe) -> PredictFn:
  """The jitted forward pass: params, rows, inverse, dense to logits f32[B]."""

  def predict(
    params: Any,
    rows: Float[jax.Array, 'P D'],
    inverse: Int[jax.Array, '...'],
    dense: Float[jax.Array, 'B I'],
  ) -> Float[jax.Array, ' B']:
    return _logits(recipe, params, rows, inverse, dense)

  return jax.jit(predict)


def _logits(
  recipe: Recipe,
  params: Any,
  rows: Float[jax.Array, 'P D'],
  inverse: Int[jax.Array, '...'],
  dense: Float[jax.Array, 'B I'],
) -> Float[jax.Array, ' B']:
  embeddings = embed(rows, inverse, recipe.tables.poolings)
  logits: jax.Array = jnp.asarray(recipe.model.apply(params, dense, embeddings))
  if logits.shape != dense.shape[:1]:
    # [B, 1] would broadcast against the labels to [B, B], and train on that.
    raise UserError(
      f'the model must return one logit per input, {list(dense.shape[:1])}',
      got=list(logits.shape),
      where=type(recipe.model).__name__,
      mend='take the last axis away, e.g. return x[:, 0]',
    )
  return logits
