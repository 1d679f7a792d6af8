"""One training step and one prediction, as jitted pure functions."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np
import optax

from slipstream_jax.errors import UserError
from slipstream_jax.stream.buffers import to_device
from slipstream_jax.table_set import Group
from slipstream_jax.training import watch
from slipstream_jax.training.forward import (
  GroupRows,
  Inverses,
  make_forward,
  shape_of,
)
from slipstream_jax.training.recipe import Recipe, shared, TrainState
from slipstream_jax.transforms.rounding import stochastic_round
from slipstream_jax.transforms.row_state import join, split
from slipstream_jax.transforms.skip import touched_rows
from slipstream_jax.types import Batch, RowBlock, Rows

Blocks = tuple[RowBlock, ...]
"""Per group, a batch's unique rows with their row state, [P, ...]."""

RowWeights = tuple[Float[jax.Array, ' P'], ...]
RowIndices = tuple[Int[jax.Array, ' P'], ...]
Masks = tuple[Bool[jax.Array, ' P'], ...]

UpdateFn = Callable[
  [
    TrainState,
    Blocks,
    Inverses,
    Batch,
    jax.Array,
    RowWeights,
    RowIndices | None,
  ],
  tuple[TrainState, Blocks, Float[jax.Array, '']],
]
PredictFn = Callable[
  [TrainState, GroupRows, Inverses, jax.Array, jax.Array | None],
  Float[jax.Array, ' B'],
]


@shared
def make_update(recipe: Recipe) -> UpdateFn:
  """The step, compiled; state and rows are donated. One per recipe.

  All that is of rows is a tuple with an entry per group. It gets the state, the
  batch's unique rows with their row state [P, ...], the inverses [B, K_g] of
  the lookups, the batch, the batches f32[] that the source has delivered so
  far, the mean weight f32[P] of the examples behind each row and, where the
  state has a watch, the place i32[P] of each row among the group's hot ones.
  Both chains may take `batches_seen` and `example_weight` as extra arguments.
  It returns the next state, the changed rows and the loss to report, f32[].

  Minimized is sum(weight * loss) / B, reported sum(weight * loss) /
  sum(weight).
  """
  compiled = compiled_update(recipe)

  def update(
    state: TrainState,
    blocks: Blocks,
    inverses: Inverses,
    batch: Batch,
    batches_seen: Float[jax.Array, ''],
    row_weights: RowWeights,
    row_index: RowIndices | None = None,
  ) -> tuple[TrainState, Blocks, Float[jax.Array, '']]:
    # Also without a watch there is a mask, of no row: one program trains every
    # run, so no bit can depend on whether rows are watched, nor on what XLA
    # would fuse if they were.
    watched = state.watch
    if watched is None or row_index is None:
      none = tuple(np.zeros(len(block.rows), bool) for block in blocks)
      still = to_device(none, owned=True)
    else:
      still = watch.still(watched, row_index)
    state, blocks, loss, touched = compiled(
      state._replace(watch=None),
      blocks,
      inverses,
      batch,
      batches_seen,
      row_weights,
      still,
    )
    if watched is not None and row_index is not None:
      watched = watch.touched(watched, row_index, touched)
    return state._replace(watch=watched), blocks, loss

  return update


@shared
def compiled_update(recipe: Recipe) -> Callable[..., Any]:
  """The jitted part of the step: it knows of no watch."""
  groups, forward = recipe.tables.groups, make_forward(recipe)
  dense_optimizer = optax.with_extra_args_support(recipe.dense_optimizer)
  update_rows = [
    _row_update(recipe, group, number) for number, group in enumerate(groups)
  ]

  def update(
    state: TrainState,
    blocks: Blocks,
    inverses: Inverses,
    batch: Batch,
    batches_seen: Float[jax.Array, ''],
    row_weights: RowWeights,
    still: Masks,
  ) -> tuple[TrainState, Blocks, Float[jax.Array, ''], Masks]:
    # Half precision is of storage only: chains see, and add to, f32.
    before = tuple(block.rows.astype(jnp.float32) for block in blocks)

    def loss(params: Any, rows: GroupRows) -> tuple[jax.Array, Any]:
      logits, model_state = forward(
        {**state.model_state, 'params': params},
        rows,
        inverses,
        batch.dense,
        batch.lookup_weights,
        batch.weights,
      )
      losses = recipe.loss(logits, batch.labels)
      _check_losses(losses, len(batch.labels))
      losses = batch.weights * losses
      # Reported is the mean over the examples that the kept ones stand for,
      # which neither padding nor chance moves. Minimized is a sum over B, a
      # constant: over the weights' sum, itself due to chance, gradients would
      # be biased, and a batch of mostly padding would take a full step.
      reported = losses.sum() / jnp.maximum(batch.weights.sum(), 1e-9)
      return jnp.mean(losses), (reported, model_state)

    # By the rows, not by the tables: their gradient is as small as the batch,
    # and duplicate lookups of a row are summed in it.
    (_, (reported, model_state)), (dense_grads, row_grads) = jax.value_and_grad(
      loss, (0, 1), has_aux=True
    )(state.params, before)
    updates, dense_state = dense_optimizer.update(
      dense_grads,
      state.dense_state,
      state.params,
      batches_seen=batches_seen,
      example_weight=_mean_weight(batch.weights),
    )
    params = optax.apply_updates(state.params, updates)
    of_groups = zip(
      update_rows,
      blocks,
      before,
      row_grads,
      state.row_globals,
      row_weights,
      still,
      strict=True,
    )
    new_blocks, row_globals, touched = zip(
      *(
        update_group(*values, batches_seen, state.step)
        for update_group, *values in of_groups
      ),
      strict=True,
    )
    new_state = TrainState(
      state.step + 1, params, model_state, dense_state, row_globals, state.rng
    )
    return new_state, new_blocks, reported, touched

  return functools.partial(jax.jit, donate_argnums=(0, 1))(update)


def _row_update(
  recipe: Recipe, group: Group, number: int
) -> Callable[..., tuple[RowBlock, tuple[jax.Array, ...], jax.Array]]:
  """What a step does to the rows of one group."""
  layout = recipe.layout(group)
  optimizer = optax.with_extra_args_support(recipe.optimizer_of(group))

  def update(
    block: RowBlock,
    before: Rows,
    gradients: Rows,
    row_globals: tuple[jax.Array, ...],
    row_weights: Float[jax.Array, ' P'],
    still: Bool[jax.Array, ' P'],
    batches_seen: Float[jax.Array, ''],
    step: Int[jax.Array, ''],
  ) -> tuple[RowBlock, tuple[jax.Array, ...], Bool[jax.Array, ' P']]:
    updates, row_state = optimizer.update(
      gradients,
      join(layout, block.state, row_globals),
      before,
      batches_seen=batches_seen,
      example_weight=row_weights,
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


def _check_losses(losses: Any, examples: int) -> None:
  if shape_of(losses) != [examples]:
    # [B, 1] would broadcast to [B, B] here, too; a mean knows no weights.
    raise UserError(
      f'the loss must return one value per example, [{examples}]',
      got=shape_of(losses),
      where='Recipe.loss',
      hint='return the loss of each example, before any mean over them',
    )


@shared
def make_predict(recipe: Recipe) -> PredictFn:
  """The jitted forward pass, not in training; it changes no variable.

  It gets the state, and per group the batch's unique rows [P, D] and the
  inverses [B, K_g] of the lookups; the dense features, and the weights of the
  lookups or None. It returns logits f32[B].
  """
  forward = jax.jit(make_forward(recipe))

  def predict(
    state: TrainState,
    rows: GroupRows,
    inverses: Inverses,
    dense: Float[jax.Array, 'B I'],
    lookup_weights: Float[jax.Array, 'B ...'] | None = None,
  ) -> Float[jax.Array, ' B']:
    logits: jax.Array = forward(
      state.variables, rows, inverses, dense, lookup_weights
    )[0]
    return logits

  return predict
