"""What a recipe's variables and row state are before the first step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.models.adapters import adapt
from slipstream_jax.stream.buffers import to_host
from slipstream_jax.table_set import Group
from slipstream_jax.training.forward import named_dense
from slipstream_jax.training.judging import Judge
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.transforms.row_state import (
  RowStateLayout,
  split,
  without_entries,
)


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
    return TrainState(
      jnp.zeros((), jnp.int32),
      params,
      model_state,
      recipe.dense_optimizer.init(params),
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
