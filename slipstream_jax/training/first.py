"""What training starts from: the state and the row state before any step."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slipstream_jax.engine.buffers import to_host
from slipstream_jax.errors import running_optimizer, UserError
from slipstream_jax.models.adapters import adapt
from slipstream_jax.tables import Group
from slipstream_jax.training.forward import named_dense
from slipstream_jax.training.judging import Judge
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.training.step import DENSE
from slipstream_jax.transforms.row_state import (
  RowStateLayout,
  split,
  without_entries,
)


@functools.partial(jax.jit, static_argnums=0)
def key_data(seed: int) -> jax.Array:
  """The data of the seed's random key, u32[2]."""
  data: jax.Array = jax.random.key_data(jax.random.key(seed))
  return data


def make_init(
  recipe: Recipe,
  layouts: tuple[RowStateLayout, ...],
  dense_features: int,
) -> Callable[[jax.Array], TrainState]:
  """What makes the state before the first step of the data of a key, jitted.

  Args:
    recipe: model, tables and optimizers.
    layouts: of the row state of each group.
    dense_features: I, columns of `Batch.dense`.
  """
  features, groups = recipe.tables.features, recipe.tables.groups
  lengths = {name: feature.max_length for name, feature in features.items()}

  def embedding(name: str) -> jax.Array:
    feature = features[name]
    dim = recipe.tables.tables[feature.table].embedding_dim
    steps = (lengths[name],) if feature.combiner == 'none' else ()
    return jnp.zeros((1, *steps, dim), jnp.float32)

  def init(data: jax.Array) -> TrainState:
    key = jax.random.wrap_key_data(data)
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
