"""One training step as one jitted function, and the state before the first."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np
import optax

from slipstream_jax.errors import running_optimizer, UserError
from slipstream_jax.models.adapters import adapt, Inputs
from slipstream_jax.tables import Group
from slipstream_jax.training.forward import (
  Inverses,
  make_passes,
  named_dense,
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
RowGlobals = tuple[tuple[jax.Array, ...], ...]
"""Per group, leaves of the row optimizer's state without a row axis."""
RowWeights = tuple[Float[jax.Array, ' _P'], ...]
RowIndices = tuple[Int[jax.Array, ' _P'], ...]
Masks = tuple[Bool[jax.Array, ' _P'], ...]

DENSE = 'Trainer, dense_optimizer'
"""Name of the dense optimizer's argument in errors."""


def make_step(
  recipe: Recipe, layouts: tuple[RowStateLayout, ...]
) -> Callable[..., tuple[TrainState, Blocks, Float[jax.Array, ''], Masks]]:
  """Returns the jitted step: `make_gradients`, then `make_row_update`.

  Its arguments and results are those of `Compiled.update`, except that it takes
  masks of frozen rows instead of places of rows, and also returns masks of the
  rows that it touched. It donates state and rows.

  Args:
    recipe: model, tables and optimizers.
    layouts: per group, the layout of row state.
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
    frozen: Masks,
  ) -> tuple[TrainState, Blocks, Float[jax.Array, ''], Masks]:
    rows = tuple(block.rows for block in blocks)
    new_state, row_grads, loss = gradients(
      state, rows, inverses, batch, batches_seen
    )
    good = None
    if recipe.skips_bad_steps:
      good = _is_finite(loss, new_state.params, row_grads)
      frozen = tuple(mask | ~good for mask in frozen)
    new_blocks, row_globals, touched = update_rows(
      blocks,
      row_grads,
      state.row_globals,
      row_weights,
      frozen,
      batches_seen,
      loss,
      state.step,
    )
    new_state = new_state._replace(row_globals=row_globals)
    if good is not None:
      new_state = _state_if(good, new_state, state)
      # Reports a loss that is not finite for a bad step, whatever it was.
      loss = jnp.where(good | ~jnp.isfinite(loss), loss, jnp.nan)
      touched = tuple(mask & good for mask in touched)
    return new_state, new_blocks, loss, touched

  return functools.partial(jax.jit, donate_argnums=(0, 1))(update)


def _is_finite(
  loss: Float[jax.Array, ''], *changes: Any
) -> Bool[jax.Array, '']:
  """Whether the loss and every element of these trees are finite."""
  good = jnp.isfinite(loss)
  for leaf in jax.tree.leaves(changes):
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      good &= jnp.isfinite(leaf).all()
  return good


def _state_if(
  good: Bool[jax.Array, ''], new: TrainState, old: TrainState
) -> TrainState:
  """Returns the new state, or the bits of the old one with the new step."""
  # Steps are counted in any case, so that later steps draw the same numbers.
  state: TrainState = jax.tree.map(
    lambda new, old: jnp.where(good, new, old),
    new,
    old._replace(step=new.step),
  )
  return state


def make_gradients(
  recipe: Recipe, *, pooled: bool = False
) -> Callable[..., tuple[TrainState, Any, Float[jax.Array, '']]]:
  """Returns a step without its rows: forward, backward and the dense update.

  It takes the state, the rows [P, D] and inverses of each group, the batch and
  the number of batches seen. It returns the next state with unchanged
  `row_globals`, the gradients of the rows, and the loss to report.

  Args:
    recipe: model, tables and optimizers.
    pooled: whether it takes the results of `pool` instead of rows and inverses.
      Then it returns gradients of the embeddings.
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
      # Half precision is for storage only: optimizers see f32 and add to f32.
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
) -> Callable[..., tuple[Blocks, RowGlobals, Masks]]:
  """Returns the update of the rows of all groups from their gradients.

  Per group, it takes the blocks [P, ...], the gradients f32[P, D], the leaves
  of row state without a row axis, the rows' weights and masks of frozen rows;
  then the batches seen, the loss and the number of the step. It returns the new
  blocks, those leaves, and masks of the rows that it touched.
  """
  groups = zip(recipe.tables.groups, layouts, strict=True)
  updates = [
    _row_update(recipe, group, layout, number)
    for number, (group, layout) in enumerate(groups)
  ]

  def update(
    blocks: Blocks,
    gradients: tuple[Float[jax.Array, '_P _D'], ...],
    row_globals: RowGlobals,
    row_weights: RowWeights,
    frozen: Masks,
    batches_seen: Float[jax.Array, ''],
    loss: Float[jax.Array, ''],
    step: Int[jax.Array, ''],
  ) -> tuple[Blocks, RowGlobals, Masks]:
    of_groups = zip(
      updates, blocks, gradients, row_globals, row_weights, frozen, strict=True
    )
    new_blocks, row_globals, touched = zip(
      *(
        update_group(*values, batches_seen, loss, step)
        for update_group, *values in of_groups
      ),
      strict=True,
    )
    return new_blocks, row_globals, touched

  return update


def _row_update(
  recipe: Recipe, group: Group, layout: RowStateLayout, number: int
) -> Callable[..., tuple[RowBlock, tuple[jax.Array, ...], jax.Array]]:
  """Returns the update of the rows of one group, the `number`th."""
  optimizer = optax.with_extra_args_support(recipe.optimizer_of(group))

  def update(
    block: RowBlock,
    gradients: Rows,
    row_globals: tuple[jax.Array, ...],
    row_weights: Float[jax.Array, ' P'],
    frozen: Bool[jax.Array, ' P'],
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

    def keep_frozen(old: jax.Array, new: jax.Array) -> jax.Array:
      mask = frozen.reshape(len(new), *[1] * (new.ndim - 1))
      return jnp.where(mask, old, new)

    # Frozen rows keep their old bits. An update of zero would not do: it would
    # still change row state, and -0.0 + 0.0 has other bits.
    new_block = jax.tree.map(keep_frozen, block, RowBlock(rows, leaves))
    # Updates tell which rows were touched. Rounding to half precision may
    # leave a touched row as it was.
    return new_block, row_globals, touched_rows(updates)

  return update


def _rounded(
  rows: Rows, dtype: np.dtype, step: Int[jax.Array, ''], group: int
) -> Rows:
  """Rounds rows f32[P, D] to half precision at random."""
  # The key is constant: a draw depends only on the step, the group and the
  # row's place in the batch. These are the same under every placement and after
  # a restore, so a checkpoint needs no key.
  key = jax.random.fold_in(jax.random.key(group), step)
  return stochastic_round(
    rows, dtype, jax.random.bits(key, rows.shape, jnp.uint32)
  )


def _mean_weight(weights: Float[jax.Array, ' B']) -> Float[jax.Array, '']:
  """Returns the mean weight of the examples that have one; 1 if none has."""
  some = (weights > 0).sum()
  return jnp.where(some > 0, weights.sum() / jnp.maximum(some, 1), 1)


def make_init(
  recipe: Recipe,
  layouts: tuple[RowStateLayout, ...],
  dense_features: int,
) -> Callable[[jax.Array], TrainState]:
  """Returns a jitted function of a key's data that makes the initial state.

  Args:
    recipe: model, tables and optimizers.
    layouts: per group, the layout of row state.
    dense_features: I, columns of `Batch.dense`.
  """
  groups = recipe.tables.groups

  def init(data: jax.Array) -> TrainState:
    key = jax.random.wrap_key_data(data)
    params, model_state = _init_model(recipe, dense_features, key)
    row_states = [
      recipe.optimizer_of(group).init(jnp.zeros((1, group.dim), jnp.float32))
      for group in groups
    ]
    with running_optimizer(DENSE):
      dense_state = recipe.dense_optimizer.init(params)
    return TrainState(
      jnp.zeros((), jnp.int32),
      params,
      model_state,
      dense_state,
      tuple(split(*pair)[1] for pair in zip(layouts, row_states, strict=True)),
      data,
    )

  return jax.jit(init)


def _init_model(
  recipe: Recipe, dense_features: int, key: jax.Array
) -> tuple[Any, dict[str, Any]]:
  """Returns the model's initial parameters and state, from one empty example.

  Raises:
    UserError: the model needs dense features, and there are none.
  """
  tables = recipe.tables
  lengths = {name: one.max_length for name, one in tables.features.items()}
  embeddings = {
    name: jnp.zeros(
      (
        1,
        *((lengths[name],) if feature.combiner == 'none' else ()),
        tables.tables[feature.table].embedding_dim,
      ),
      jnp.float32,
    )
    for name, feature in tables.features.items()
  }
  keywords = {
    'train': False,
    'weights': jnp.ones(1, jnp.float32),
    'real': {name: jnp.ones((1, n), bool) for name, n in lengths.items()},
    'rng': None,
  }
  dense = named_dense(recipe, jnp.zeros((1, dense_features), jnp.float32))
  model = adapt(recipe.model)
  try:
    return model.init(key, Inputs(dense, embeddings, keywords))
  except ZeroDivisionError as error:  # flax raises it for an empty kernel
    if dense_features:
      raise
    raise UserError(
      'a model that uses dense features needs examples that have some',
      got='none',
      where=model.name,
      hint='give dense features, or take embeddings alone: the model gets'
      ' dense features only if it names them',
    ) from error
