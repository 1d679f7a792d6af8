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
from slipstream_jax.models.adapters import adapt
from slipstream_jax.stream.buffers import to_host
from slipstream_jax.table_set import Group
from slipstream_jax.training.forward import (
  Inverses,
  make_gradients,
  named_dense,
)
from slipstream_jax.training.judging import Judge
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.transforms.rounding import stochastic_round
from slipstream_jax.transforms.row_state import (
  join,
  RowStateLayout,
  split,
  without_entries,
)
from slipstream_jax.transforms.skip import touched_rows
from slipstream_jax.types import Batch, RowBlock, Rows

Blocks = tuple[RowBlock, ...]
"""Per group, a batch's unique rows with their row state, [P, ...]."""

RowWeights = tuple[Float[jax.Array, ' _P'], ...]
RowIndices = tuple[Int[jax.Array, ' _P'], ...]
Masks = tuple[Bool[jax.Array, ' _P'], ...]

_DENSE = 'Trainer, dense'


def make_step(
  recipe: Recipe, layouts: tuple[RowStateLayout, ...]
) -> Callable[..., Any]:
  """The step, jitted, of the groups' row state layouts: it knows no watch.

  State and rows are donated. With the arguments of `Compiled.update`, but masks
  of the rows that stand still in place of their places, it returns what that
  does, and masks of the rows that it touched.
  """
  gradients = make_gradients(recipe)
  dense_optimizer = optax.with_extra_args_support(recipe.dense_optimizer)
  groups = zip(recipe.tables.groups, layouts, strict=True)
  update_rows = [
    _row_update(recipe, group, layout, number)
    for number, (group, layout) in enumerate(groups)
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
    key = jax.random.wrap_key_data(state.rng)
    dense_grads, row_grads, loss, model_state = gradients(
      state.params,
      state.model_state,
      before,
      inverses,
      batch,
      jax.random.fold_in(key, state.step),
    )
    with running_optimizer(_DENSE):
      updates, dense_state = dense_optimizer.update(
        dense_grads,
        state.dense_state,
        state.params,
        batches_seen=batches_seen,
        example_weight=_mean_weight(batch.weights),
        value=loss,
      )
    params = optax.apply_updates(state.params, updates)
    per_group = zip(
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
        update_group(*values, batches_seen, loss, state.step)
        for update_group, *values in per_group
      ),
      strict=True,
    )
    new_state = TrainState(
      state.step + 1, params, model_state, dense_state, row_globals, state.rng
    )
    return new_state, new_blocks, loss, touched

  return functools.partial(jax.jit, donate_argnums=(0, 1))(update)


def _row_update(
  recipe: Recipe, group: Group, layout: RowStateLayout, number: int
) -> Callable[..., tuple[RowBlock, tuple[jax.Array, ...], jax.Array]]:
  """What a step does to the rows of one group, the `number`th."""
  optimizer = optax.with_extra_args_support(recipe.optimizer_of(group))

  def update(
    block: RowBlock,
    before: Rows,
    gradients: Rows,
    row_globals: tuple[jax.Array, ...],
    row_weights: Float[jax.Array, ' P'],
    still: Bool[jax.Array, ' P'],
    batches_seen: Float[jax.Array, ''],
    loss: Float[jax.Array, ''],
    step: Int[jax.Array, ''],
  ) -> tuple[RowBlock, tuple[jax.Array, ...], Bool[jax.Array, ' P']]:
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


def make_init(
  recipe: Recipe,
  layouts: tuple[RowStateLayout, ...],
  dense_features: int,
  seed: int,
) -> Callable[[], TrainState]:
  """What makes the state before the first step, jitted.

  Args:
    recipe: model, tables and optimizers.
    layouts: of the row state of each group.
    dense_features: I, columns of `Batch.dense`.
    seed: of the model's parameters and of dropout.
  """
  features, groups = recipe.tables.features, recipe.tables.groups
  lengths = {name: feature.max_length for name, feature in features.items()}

  def embedding(name: str) -> jax.Array:
    feature = features[name]
    dim = recipe.tables.tables[feature.table].dim
    steps = (lengths[name],) if feature.pooling == 'none' else ()
    return jnp.zeros((1, *steps, dim), jnp.float32)

  def init() -> TrainState:
    key = jax.random.key(seed)
    dense = named_dense(recipe, jnp.zeros((1, dense_features), jnp.float32))
    keywords = {
      'train': False,
      'weights': jnp.ones(1, jnp.float32),
      'real': {name: jnp.ones((1, n), bool) for name, n in lengths.items()},
      'rng': None,
    }
    embeddings = {name: embedding(name) for name in features}
    model = adapt(recipe.model)
    try:
      params, model_state = model.init(key, dense, embeddings, keywords)
    except ZeroDivisionError as error:  # of flax: a kernel without inputs
      if dense_features:
        raise
      raise UserError(
        'a model that uses dense features needs examples that have some',
        got='none',
        where=model.name,
        hint='give dense features, or take embeddings alone: the model gets'
        ' dense features only if it names them',
      ) from error
    row_states = [
      recipe.optimizer_of(group).init(jnp.zeros((1, group.dim), jnp.float32))
      for group in groups
    ]
    with running_optimizer(_DENSE):
      dense_state = recipe.dense_optimizer.init(params)
    return TrainState(
      jnp.zeros((), jnp.int32),
      params,
      model_state,
      dense_state,
      tuple(split(*pair)[1] for pair in zip(layouts, row_states, strict=True)),
      jax.random.key_data(key),
    )

  return jax.jit(init)


def untrained(
  recipe: Recipe,
  group: Group,
  layout: RowStateLayout,
  judge: Judge | None,
) -> tuple[np.ndarray, ...]:
  """The row state of a row of a group before its first step, by row leaf.

  Args:
    recipe: whose optimizer it is of.
    group: whose rows.
    layout: of their state.
    judge: of its hot rows, if one keeps what it knows of them.

  Raises:
    UserError: it depends on the row's values.
  """
  optimizer = recipe.optimizer_of(group)

  def init() -> list[tuple[Any, ...]]:
    # Two unlike rows, to find out whether a chain copies them into its state.
    states = [
      optimizer.init(jnp.full((1, group.dim), value, jnp.float32))
      for value in (0.0, 1.0)
    ]
    leaves = [split(layout, state)[0] for state in states]
    if judge is not None:
      return [without_entries(layout, one)[0] for one in leaves]
    return leaves

  zero, one = to_host(jax.jit(init)())
  for a, b in zip(zero, one, strict=True):
    if not np.array_equal(a, b):
      raise UserError(
        'the row optimizer must start every row from the same state',
        got=f'a state {a.dtype}{list(a.shape[1:])} that copies the row',
        where=recipe.where(group),
        hint='leave out the transformation that stores parameters',
      )
  return tuple(np.asarray(leaf[0]) for leaf in zero)
