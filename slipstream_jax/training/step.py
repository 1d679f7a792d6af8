"""One training step as one jitted function, and the state before the first."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np
import optax

from slipstream_jax.errors import running_optimizer
from slipstream_jax.tables import Group
from slipstream_jax.training.bad_steps import (
  is_good,
  loss_if,
  state_if,
)
from slipstream_jax.training.forward import (
  Inverses,
  make_passes,
)
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.transforms.row_state import (
  join,
  RowStateLayout,
  split,
)
from slipstream_jax.transforms.rowwise import stochastic_round
from slipstream_jax.transforms.skip import touched_rows
from slipstream_jax.types import Batch, RowBlock, Rows

Blocks = tuple[RowBlock, ...]
"""Per group, a batch's unique rows with their row state, [P, ...]."""

RowWeights = tuple[Float[jax.Array, ' _P'], ...]
RowIndices = tuple[Int[jax.Array, ' _P'], ...]
Masks = tuple[Bool[jax.Array, ' _P'], ...]

DENSE = 'Trainer, dense_optimizer'
"""The argument, in errors."""


def make_step(
  recipe: Recipe, layouts: tuple[RowStateLayout, ...]
) -> Callable[..., Any]:
  """The step, jitted, of the groups' row state layouts: it knows no watch.

  It is `make_gradients` and then `make_row_update`, as one program. State and
  rows are donated. With the arguments of `Compiled.update`, but masks of the
  rows that stand still in place of their places, it returns what that does, and
  masks of the rows that it touched.
  """
  gradients = make_gradients(recipe)
  update_rows = make_row_update(recipe, layouts)

  def update(
    state: TrainState,
    blocks: Blocks,
    inverses: Inverses,
    batch: Batch,
    batches_seen: Float[jax.Array, ''],
    row_weights: RowWeights,
    still: Masks,
  ) -> tuple[TrainState, Blocks, Float[jax.Array, ''], Masks]:
    rows = tuple(block.rows for block in blocks)
    new_state, row_grads, loss = gradients(
      state, rows, inverses, batch, batches_seen
    )
    good = None
    if recipe.skips_bad_steps:
      good = is_good(loss, new_state.params, row_grads)
      still = tuple(mask | ~good for mask in still)
    new_blocks, row_globals, touched = update_rows(
      blocks,
      row_grads,
      state.row_globals,
      row_weights,
      still,
      batches_seen,
      loss,
      state.step,
    )
    new_state = new_state._replace(row_globals=row_globals)
    if good is not None:
      new_state, loss = state_if(good, new_state, state), loss_if(good, loss)
      touched = tuple(mask & good for mask in touched)
    return new_state, new_blocks, loss, touched

  return functools.partial(jax.jit, donate_argnums=(0, 1))(update)


def make_gradients(
  recipe: Recipe, *, pooled: bool = False
) -> Callable[..., tuple[TrainState, Any, Float[jax.Array, '']]]:
  """A step without its rows: forward, backward, and the dense update.

  It takes the state, the rows [P, D] of each group, their inverses, the batch
  and how many batches were seen, and returns the next state, whose
  `row_globals` are as they were, the rows' gradients and the loss to report.

  Args:
    recipe: model, tables and optimizers.
    pooled: rows are embeddings by feature name, and in the place of inverses
      it takes which lookups are real: what `pool` returns. The gradients are
      of the embeddings then.
  """
  passes = make_passes(recipe, pooled=pooled)
  optimizer = optax.with_extra_args_support(recipe.dense_optimizer)

  def gradients(
    state: TrainState,
    rows: Any,
    inverses: Any,
    batch: Batch,
    batches_seen: Float[jax.Array, ''],
  ) -> tuple[TrainState, Any, Float[jax.Array, '']]:
    key = jax.random.wrap_key_data(state.rng)
    dense_grads, row_grads, loss, model_state = passes(
      state.params,
      state.model_state,
      # Half precision is of storage only: chains see, and add to, f32.
      jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rows),
      inverses,
      batch,
      jax.random.fold_in(key, state.step),
    )
    with running_optimizer(DENSE):
      updates, dense_state = optimizer.update(
        dense_grads,
        state.dense_state,
        state.params,
        batches_seen=batches_seen,
        example_weight=_mean_weight(batch.weights),
        value=loss,
      )
    params = optax.apply_updates(state.params, updates)
    new_state = TrainState(
      state.step + 1,
      params,
      model_state,
      dense_state,
      state.row_globals,
      state.rng,
    )
    return new_state, row_grads, loss

  return gradients


def make_row_update(
  recipe: Recipe, layouts: tuple[RowStateLayout, ...]
) -> Callable[..., tuple[Blocks, tuple[tuple[jax.Array, ...], ...], Masks]]:
  """What a step does to the rows of all groups, once their gradients are known.

  It takes, per group, the blocks [P, ...], the gradients f32[P, D], the leaves
  of row state without a row axis, the rows' weights and the masks of those that
  stand still; and the batches seen, the loss, and the number of the step. It
  returns the new blocks, those leaves, and masks of the rows it touched.
  """
  groups = zip(recipe.tables.groups, layouts, strict=True)
  of_groups = [
    _row_update(recipe, group, layout, number)
    for number, (group, layout) in enumerate(groups)
  ]

  def update(
    blocks: Blocks,
    gradients: tuple[Float[jax.Array, '_P _D'], ...],
    row_globals: tuple[tuple[jax.Array, ...], ...],
    row_weights: RowWeights,
    still: Masks,
    batches_seen: Float[jax.Array, ''],
    loss: Float[jax.Array, ''],
    step: Int[jax.Array, ''],
  ) -> tuple[Blocks, tuple[tuple[jax.Array, ...], ...], Masks]:
    per_group = zip(
      of_groups,
      blocks,
      gradients,
      row_globals,
      row_weights,
      still,
      strict=True,
    )
    new_blocks, row_globals, touched = zip(
      *(
        update_group(*values, batches_seen, loss, step)
        for update_group, *values in per_group
      ),
      strict=True,
    )
    return new_blocks, row_globals, touched

  return update


def _row_update(
  recipe: Recipe, group: Group, layout: RowStateLayout, number: int
) -> Callable[..., tuple[RowBlock, tuple[jax.Array, ...], jax.Array]]:
  """What a step does to the rows of one group, the `number`th."""
  optimizer = optax.with_extra_args_support(recipe.optimizer_of(group))

  def update(
    block: RowBlock,
    gradients: Rows,
    row_globals: tuple[jax.Array, ...],
    row_weights: Float[jax.Array, ' P'],
    still: Bool[jax.Array, ' P'],
    batches_seen: Float[jax.Array, ''],
    loss: Float[jax.Array, ''],
    step: Int[jax.Array, ''],
  ) -> tuple[RowBlock, tuple[jax.Array, ...], Bool[jax.Array, ' P']]:
    before = block.rows.astype(jnp.float32)
    updates, row_state = optimizer.update(
      gradients,
      join(layout, block.state, row_globals),
      before,
      batches_seen=batches_seen,
      example_weight=row_weights,
      value=loss,
    )
    leaves, row_globals = split(layout, row_state)
    rows = optax.apply_updates(before, updates)
    if block.rows.dtype != rows.dtype:
      rows = _rounded(rows, block.rows.dtype, step, number)
    # Last, and from the old block itself: an update of zero would still move
    # row state, and -0.0 + 0.0 is another bit pattern.
    new_block = _held(still, block, RowBlock(rows, leaves))
    # By updates, not rows: half precision may round what was touched to itself.
    return new_block, row_globals, touched_rows(updates)

  return update


def _held(
  still: Bool[jax.Array, ' P'], old: RowBlock, new: RowBlock
) -> RowBlock:
  """The new block, but for the rows that stand still: bits of the old one."""

  def hold(old: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.where(still.reshape(len(new), *[1] * (new.ndim - 1)), old, new)

  return jax.tree.map(hold, old, new)


def _rounded(
  rows: Rows, dtype: np.dtype, step: Int[jax.Array, ''], group: int
) -> Rows:
  """Rows f32[P, D] in half precision; the same draws wherever they live."""
  # The key is constant: a draw shall depend on the step, the group and the
  # row's place in the batch alone, which are the same under every placement and
  # after a restore. So a checkpoint needs no key, and seeds differ in rows
  # alone.
  key = jax.random.fold_in(jax.random.key(group), step)
  return stochastic_round(
    rows, dtype, jax.random.bits(key, rows.shape, jnp.uint32)
  )


def _mean_weight(weights: Float[jax.Array, ' B']) -> Float[jax.Array, '']:
  """Of the examples that have weight; 1 where none has."""
  some = (weights > 0).sum()
  return jnp.where(some > 0, weights.sum() / jnp.maximum(some, 1), 1)
