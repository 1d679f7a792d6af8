"""One training step and one prediction, as jitted pure functions."""

from collections.abc import Callable
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np
import optax

from slipstream_jax.errors import UserError
from slipstream_jax.models.layers import embed
from slipstream_jax.stream.buffers import to_device
from slipstream_jax.training import watch
from slipstream_jax.training.recipe import (
  model_keywords,
  Recipe,
  shared,
  TrainState,
)
from slipstream_jax.transforms.rounding import stochastic_round
from slipstream_jax.transforms.row_state import join, split
from slipstream_jax.transforms.skip import touched_rows
from slipstream_jax.types import Batch, RowBlock, Rows

UpdateFn = Callable[
  [
    TrainState,
    RowBlock,
    jax.Array,
    Batch,
    jax.Array,
    jax.Array,
    jax.Array | None,
  ],
  tuple[TrainState, RowBlock, Float[jax.Array, '']],
]
PredictFn = Callable[
  [dict[str, Any], jax.Array, jax.Array, jax.Array], Float[jax.Array, ' B']
]


@shared
def make_update(recipe: Recipe) -> UpdateFn:
  """The step, compiled; state and rows are donated. One per recipe.

  It gets the state, the batch's unique rows with their row state [P, ...],
  the inverse of the lookups, the batch, the batches f32[] that the source has
  delivered so far, the mean weight f32[P] of the examples behind each row and,
  where the state has a watch, the place i32[P] of each row among the hot ones.
  Both chains may take `batches_seen` and `example_weight` as extra arguments.
  It returns the next state, the changed rows and the loss to report, f32[].

  Minimized is sum(weight * loss) / B, reported sum(weight * loss) /
  sum(weight).
  """
  compiled = compiled_update(recipe)

  def update(
    state: TrainState,
    block: RowBlock,
    inverse: Int[jax.Array, '...'],
    batch: Batch,
    batches_seen: Float[jax.Array, ''],
    row_weights: Float[jax.Array, ' P'],
    row_index: Int[jax.Array, ' P'] | None = None,
  ) -> tuple[TrainState, RowBlock, Float[jax.Array, '']]:
    # Also without a watch there is a mask, of no row: one program trains every
    # run, so no bit can depend on whether rows are watched, nor on what XLA
    # would fuse if they were.
    watched = state.watch
    if watched is None or row_index is None:
      still = to_device(np.zeros(len(block.rows), bool), owned=True)
    else:
      still = watch.still(watched, row_index)
    state, block, loss, touched = compiled(
      state._replace(watch=None),
      block,
      inverse,
      batch,
      batches_seen,
      row_weights,
      still,
    )
    if watched is not None and row_index is not None:
      watched = watch.touched(watched, row_index, touched)
    return state._replace(watch=watched), block, loss

  return update


@shared
def compiled_update(recipe: Recipe) -> Callable[..., Any]:
  """The jitted part of the step: it knows of no watch."""
  layout, forward = recipe.layout(), _make_forward(recipe)
  dense_optimizer = optax.with_extra_args_support(recipe.dense_optimizer)
  row_optimizer = optax.with_extra_args_support(recipe.row_optimizer)

  def update(
    state: TrainState,
    block: RowBlock,
    inverse: Int[jax.Array, '...'],
    batch: Batch,
    batches_seen: Float[jax.Array, ''],
    row_weights: Float[jax.Array, ' P'],
    still: Bool[jax.Array, ' P'],
  ) -> tuple[TrainState, RowBlock, Float[jax.Array, ''], Bool[jax.Array, ' P']]:
    # Half precision is of storage only: chains see, and add to, f32.
    before = block.rows.astype(jnp.float32)

    def loss(params: Any, rows: jax.Array) -> tuple[jax.Array, Any]:
      logits, model_state = forward(
        {**state.model_state, 'params': params},
        rows,
        inverse,
        batch.dense,
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
    row_updates, row_state = row_optimizer.update(
      row_grads,
      join(layout, block.state, state.row_globals),
      before,
      batches_seen=batches_seen,
      example_weight=row_weights,
    )
    row_leaves, row_globals = split(layout, row_state)
    rows = optax.apply_updates(before, row_updates)
    if block.rows.dtype != rows.dtype:
      rows = _rounded(rows, block.rows.dtype, state.step)
    new_state = TrainState(
      state.step + 1, params, model_state, dense_state, row_globals
    )
    # Last, and from the old block itself: an update of zero would still move
    # row state, and -0.0 + 0.0 is another bit pattern.
    new_block = _held(still, block, RowBlock(rows, row_leaves))
    # By updates, not rows: half precision may round what was touched to itself.
    return new_state, new_block, reported, touched_rows(row_updates)

  return functools.partial(jax.jit, donate_argnums=(0, 1))(update)


def _held(
  still: Bool[jax.Array, ' P'], old: RowBlock, new: RowBlock
) -> RowBlock:
  """The new block, but for the rows that stand still: bits of the old one."""

  def hold(old: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.where(still.reshape(len(new), *[1] * (new.ndim - 1)), old, new)

  return jax.tree.map(hold, old, new)


def _rounded(rows: Rows, dtype: np.dtype, step: Int[jax.Array, '']) -> Rows:
  """Rows f32[P, D] in half precision; the same draws wherever they live."""
  # The key is constant: a draw shall depend on the step and the row's place in
  # the batch alone, which are the same under every placement and after a
  # restore. So a checkpoint needs no key, and seeds differ in rows alone.
  key = jax.random.fold_in(jax.random.key(0), step)
  return stochastic_round(
    rows, dtype, jax.random.bits(key, rows.shape, jnp.uint32)
  )


def _mean_weight(weights: Float[jax.Array, ' B']) -> Float[jax.Array, '']:
  """Of the examples that have weight; 1 where none has."""
  some = (weights > 0).sum()
  return jnp.where(some > 0, weights.sum() / jnp.maximum(some, 1), 1)


@shared
def make_predict(recipe: Recipe) -> PredictFn:
  """The jitted forward pass, not in training; it changes no variable.

  It gets the model's variables, the batch's unique rows [P, D], the inverse
  of the lookups and the dense features, and returns logits f32[B].
  """
  forward = _make_forward(recipe)

  def predict(
    variables: dict[str, Any],
    rows: Float[jax.Array, 'P D'],
    inverse: Int[jax.Array, '...'],
    dense: Float[jax.Array, 'B I'],
  ) -> Float[jax.Array, ' B']:
    return forward(variables, rows, inverse, dense)[0]

  return jax.jit(predict)


def _make_forward(recipe: Recipe) -> Callable[..., Any]:
  """The forward pass; with the examples' weights in the loss, in training.

  It returns logits f32[B] and the model's state after the pass.
  """
  model, keywords = recipe.model, model_keywords(recipe.model)

  def forward(
    variables: dict[str, Any],
    rows: Float[jax.Array, 'P D'],
    inverse: Int[jax.Array, '...'],
    dense: Float[jax.Array, 'B I'],
    weights: Float[jax.Array, ' B'] | None = None,
  ) -> tuple[Float[jax.Array, ' B'], dict[str, Any]]:
    rows = rows.astype(jnp.float32)
    embeddings = embed(
      rows, inverse, [f.pooling for f in recipe.tables.features.values()]
    )
    state = {name: variables[name] for name in variables if name != 'params'}
    train = weights is not None
    if weights is None:
      weights = jnp.ones(len(dense), jnp.float32)
    wanted = keywords(train, weights, inverse >= 0)
    mutable = list(state) if train else []
    logits, changed = model.apply(
      variables, dense, embeddings, mutable=mutable, **wanted
    )
    changed = {**state, **changed}
    _check_logits(model, logits, len(dense))
    _check_state(model, state, changed)
    return logits, changed

  return forward


def _check_logits(model: nn.Module, logits: Any, examples: int) -> None:
  if _shape(logits) != [examples]:
    # [B, 1] would broadcast against the labels to [B, B], and train on that.
    raise UserError(
      f'the model must return one logit per example, [{examples}]',
      got=_shape(logits),
      where=type(model).__name__,
      hint='return an array without a last axis, e.g. x[:, 0]',
    )


def _check_losses(losses: Any, examples: int) -> None:
  if _shape(losses) != [examples]:
    # [B, 1] would broadcast to [B, B] here, too; a mean knows no weights.
    raise UserError(
      f'the loss must return one value per example, [{examples}]',
      got=_shape(losses),
      where='Recipe.loss',
      hint='return the loss of each example, before any mean over them',
    )


def _shape(value: Any) -> list[int] | str:
  """The shape of an array, or what it is instead."""
  is_array = isinstance(value, jax.Array | np.ndarray)
  return list(value.shape) if is_array else f'a {type(value).__name__}'


def _check_state(
  model: nn.Module, state: dict[str, Any], changed: dict[str, Any]
) -> None:
  before, after = (
    jax.tree.map(lambda x: f'{jnp.result_type(x)}{list(jnp.shape(x))}', tree)
    for tree in (state, changed)
  )
  if before != after:
    # It would compile every step anew, and fit no checkpoint.
    raise UserError(
      f'the model must keep the shapes of its state, {before}',
      got=after,
      where=type(model).__name__,
      hint='let each step replace the values; sow, for one, adds to them',
    )
