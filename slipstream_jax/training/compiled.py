"""What is compiled of a recipe: shared by its trainers, and gone with them."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.models.adapters import adapt
from slipstream_jax.stream.buffers import to_device, to_host
from slipstream_jax.table_set import Group
from slipstream_jax.training import watch
from slipstream_jax.training.forward import (
  GroupRows,
  Inverses,
  make_forward,
  named_dense,
)
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.training.sharing import shared
from slipstream_jax.training.step import (
  Blocks,
  make_step,
  RowIndices,
  RowWeights,
)
from slipstream_jax.transforms.row_state import RowStateLayout, split
from slipstream_jax.types import Batch


class Compiled:
  """A recipe's programs; equal recipes of trainers that live share them.

  All that is of rows is a tuple with an entry per group of tables.

  Attributes:
    recipe: what it is of.
    step: the jitted part of `update`, which knows of no watch.
  """

  def __init__(self, recipe: Recipe) -> None:
    """Compiles nothing yet.

    Raises:
      UserError: no model, or an optimizer that cannot train rows.
    """
    self.recipe = recipe
    self.step = make_step(recipe, self.layouts)
    self._forward = jax.jit(make_forward(recipe))
    self._inits: dict[tuple[int, int], Callable[[], TrainState]] = {}

  @functools.cached_property
  def layouts(self) -> tuple[RowStateLayout, ...]:
    """How each group's row state splits between rows and device."""
    return tuple(map(self.recipe.layout, self.recipe.tables.groups))

  def update(
    self,
    state: TrainState,
    blocks: Blocks,
    inverses: Inverses,
    batch: Batch,
    batches_seen: Float[jax.Array, ''],
    row_weights: RowWeights,
    row_index: RowIndices | None = None,
  ) -> tuple[TrainState, Blocks, Float[jax.Array, '']]:
    """One step; state and rows are donated.

    Minimized is sum(weight * loss) / B, reported sum(weight * loss) /
    sum(weight).

    Args:
      state: before it.
      blocks: the batch's unique rows with their row state, [P, ...].
      inverses: place in them of each of the group's lookups, [B, K_g].
      batch: as it was admitted; its lookups are not read.
      batches_seen: how many the source has delivered so far, f32[].
      row_weights: mean weight f32[P] of the examples behind each row.
      row_index: where the state has a watch, the place i32[P] of each row among
        the group's hot ones.

    Returns:
      The next state, the changed rows, and the loss to report, f32[].
    """
    # Also without a watch there is a mask, of no row: one program trains every
    # run, so no bit can depend on whether rows are watched, nor on what XLA
    # would fuse if they were.
    watched = state.watch
    if watched is None or row_index is None:
      none = tuple(np.zeros(len(block.rows), bool) for block in blocks)
      still = to_device(none, owned=True)
    else:
      still = watch.still(watched, row_index)
    state, blocks, loss, touched = self.step(
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

  def predict(
    self,
    state: TrainState,
    rows: GroupRows,
    inverses: Inverses,
    dense: Float[jax.Array, 'B I'],
    lookup_weights: Float[jax.Array, 'B ...'] | None = None,
  ) -> Float[jax.Array, 'B ...']:
    """Logits f32[B] or f32[B, T], not in training; it changes no variable.

    Args:
      state: of the trainer.
      rows: the batch's unique rows [P, D].
      inverses: place in them of each of the group's lookups, [B, K_g].
      dense: dense features.
      lookup_weights: as in `Batch`.
    """
    logits: jax.Array = self._forward(
      state.params, state.model_state, rows, inverses, dense, lookup_weights
    )[0]
    return logits

  def init_state(self, dense_features: int, seed: int) -> TrainState:
    """The state before the first step.

    Args:
      dense_features: I, columns of `Batch.dense`.
      seed: of the model's parameters, unless it brings them, and of dropout.

    Raises:
      UserError: the model does not fit the tables or the dense features.
    """
    key = dense_features, seed
    if key not in self._inits:  # compiling takes longer than all the rest
      self._inits[key] = _make_init(self.recipe, self.layouts, *key)
    return self._inits[key]()

  @functools.cached_property
  def untrained_row_state(self) -> tuple[tuple[np.ndarray, ...], ...]:
    """The row state of a row before its first step, by row leaf.

    Raises:
      UserError: it depends on the row's values, so that it cannot be laid
        beside the table before the row is used.
    """
    pairs = zip(self.recipe.tables.groups, self.layouts, strict=True)
    return tuple(_untrained(self.recipe, *pair) for pair in pairs)

  @property
  def row_bytes(self) -> tuple[int, ...]:
    """Bytes of a row with its row state, wherever it is kept."""
    groups, states = self.recipe.tables.groups, self.untrained_row_state
    return tuple(
      group.dim * np.dtype(group.dtype).itemsize
      + sum(leaf.nbytes for leaf in state)
      for group, state in zip(groups, states, strict=True)
    )

  @property
  def row_bytes_by_table(self) -> list[int]:
    """The same per table, in their order."""
    tables = self.recipe.tables
    groups = zip(tables.groups, self.row_bytes, strict=True)
    sizes = {name: size for group, size in groups for name in group.tables}
    return [sizes[name] for name in tables.tables]

  def heads(self, state: TrainState, dense_features: int) -> int | None:
    """T, of logits [B, T]; None: they are [B]."""
    tables = self.recipe.tables
    number = jnp.float32
    shape = jax.ShapeDtypeStruct
    logits, *_ = jax.eval_shape(
      self._forward,
      state.params,
      state.model_state,
      tuple(shape((2, group.dim), group.dtype) for group in tables.groups),
      tuple(shape((2, len(g.columns)), jnp.int32) for g in tables.groups),
      shape((2, dense_features), number),
      shape((2, tables.num_columns), number) if tables.is_weighted else None,
    )
    return logits.shape[1] if logits.ndim == 2 else None


@shared
def compiled_of(recipe: Recipe) -> Compiled:
  """What is compiled of the recipe, or of an equal one that somebody trains.

  Raises:
    UserError: as `Compiled`, or a recipe that cannot be compared.
  """
  return Compiled(recipe)


def _make_init(
  recipe: Recipe,
  layouts: tuple[RowStateLayout, ...],
  dense_features: int,
  seed: int,
) -> Callable[[], TrainState]:
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


def _untrained(
  recipe: Recipe, group: Group, layout: RowStateLayout
) -> tuple[np.ndarray, ...]:
  optimizer = recipe.optimizer_of(group)

  def init() -> list[tuple[Any, ...]]:
    # Two unlike rows, to find out whether a chain copies them into its state.
    states = [
      optimizer.init(jnp.full((1, group.dim), value, jnp.float32))
      for value in (0.0, 1.0)
    ]
    return [split(layout, state)[0] for state in states]

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
