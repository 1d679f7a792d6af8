"""What training is made of: a recipe that never changes, a state that does."""

from collections.abc import Callable, Hashable
import dataclasses
import functools
import inspect
from typing import Any, NamedTuple, ParamSpec, TypeVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, UInt32
import numpy as np
import optax

from slipstream_jax.errors import UserError
from slipstream_jax.stream.buffers import to_host
from slipstream_jax.table_set import Group, TableSet
from slipstream_jax.training.watch import Watches
from slipstream_jax.transforms.row_state import (
  row_state_layout,
  RowStateLayout,
  split,
)
from slipstream_jax.types import RealLookups

LossFn = Callable[
  [Float[jax.Array, ' B'], Float[jax.Array, ' B']], Float[jax.Array, ' B']
]
"""Logits and labels to the loss of each example."""


class Recipe(NamedTuple):
  """Everything about training that stays the same from step to step."""

  model: nn.Module
  """Called as model(dense f32[B, I], embeddings) -> f32[B], with embeddings by
  feature name, f32[B, D] or, not pooled, f32[B, L, D], and with the keywords of
  `model_keywords` that its `__call__` names."""
  tables: TableSet
  """The tables whose rows the model's embeddings are."""
  row_optimizer: optax.GradientTransformation
  """Any chain, for the rows of all tables that have none of their own; sees the
  batch's unique rows f32[U, D] of a group, whatever dtype the tables keep."""
  dense_optimizer: optax.GradientTransformation
  """Any chain; sees the model's parameters."""
  loss: LossFn = optax.sigmoid_binary_cross_entropy
  """Per example; weighted and averaged over the batch by the step."""

  def optimizer_of(self, group: Group) -> optax.GradientTransformation:
    """The chain that trains the rows of the group."""
    if group.optimizer is None:
      return self.row_optimizer
    own: optax.GradientTransformation = group.optimizer
    return own

  def layout(self, group: Group) -> RowStateLayout:
    """How that chain's state splits between rows and device.

    Raises:
      UserError: it does not.
    """
    optimizer, where = self.optimizer_of(group), self.where(group)
    return row_state_layout(optimizer, group.dim, where)

  def where(self, group: Group) -> str:
    """The argument that the group's chain comes from."""
    if group.optimizer is None:
      return 'Recipe.row_optimizer'
    return f'Table {group.tables[0]!r}, optimizer'


class TrainState(NamedTuple):
  """What changes from step to step and stays on the device."""

  step: Int[jax.Array, '']
  """Steps taken, i32."""
  params: Any
  """The model's parameters: its collection 'params'."""
  model_state: dict[str, Any]
  """Its other collections, e.g. 'batch_stats'; {} if it has none."""
  dense_state: optax.OptState
  """State of the dense optimizer."""
  row_globals: tuple[tuple[jax.Array, ...], ...]
  """Per group, leaves of the row optimizer's state without a row axis."""
  rng: UInt32[jax.Array, ' words']
  """What dropout draws from, with the step; it never changes."""
  watch: Watches | None = None
  """Per group, of its hot rows, where something depends on how far they
  move."""

  @property
  def variables(self) -> dict[str, Any]:
    """All the model's collections: what it is applied with."""
    return {**self.model_state, 'params': self.params}


KeywordsFn = Callable[
  [bool, Float[jax.Array, ' B'], RealLookups], dict[str, Any]
]
"""Whether this is training, the examples' weights, and which lookups are real,
to the keywords."""


def model_keywords(model: nn.Module) -> KeywordsFn:
  """What to give a call of the model beside its two arguments, by name.

  A model that behaves otherwise in training asks for it by naming, beyond the
  two arguments, `train` (bool) or `weights` (f32[B], each example's weight in
  the loss; all 1 where there is no loss) in its `__call__`. One that tells
  padding from rows of zeros names `real` (bool[B, L] by feature name).
  """
  signature = inspect.signature(type(model).__call__)
  # Bound first, so that the two arguments may have any name.
  bound = signature.bind_partial(model, None, None).arguments
  named = signature.parameters.keys() - bound.keys()

  def keywords(
    train: bool,
    weights: Float[jax.Array, ' B'],
    real: RealLookups,
  ) -> dict[str, Any]:
    offered = {'train': train, 'weights': weights, 'real': real}
    return {name: offered[name] for name in offered if name in named}

  return keywords


_P = ParamSpec('_P')
_T = TypeVar('_T')


def shared(make: Callable[_P, _T]) -> Callable[_P, _T]:
  """`functools.cache`, for arguments whose fields may be lists, too.

  So that equal recipes share what is compiled for them. A model of
  `sizes=[64, 32]` cannot be hashed, though it never changes: what it holds is
  then compared instead.

  Raises:
    UserError: the call itself does, if an argument can be neither hashed nor
      compared.
  """
  results: dict[Hashable, _T] = {}

  @functools.wraps(make)
  def find(*args: _P.args, **keywords: _P.kwargs) -> _T:
    arguments = (*args, *keywords.items())
    key = tuple(_key(a, type(a).__name__) for a in arguments)
    if key not in results:
      results[key] = make(*args, **keywords)
    return results[key]

  return find


def _key(value: Any, where: str) -> Hashable:
  """What is equal for equal values, and can be hashed."""
  try:
    hash(value)
  except TypeError:
    return (type(value), _parts(value, where))
  return value


def _parts(value: Any, where: str) -> Hashable:
  """The key of a value that cannot be hashed, but for its type."""
  if isinstance(value, list | tuple):
    names = getattr(value, '_fields', range(len(value)))
    pairs = zip(names, value, strict=True)
    return tuple(_key(item, f'{where}.{name}') for name, item in pairs)
  if isinstance(value, dict):
    items = value.items()
    return frozenset((k, _key(item, f'{where}.{k}')) for k, item in items)
  if isinstance(value, set):
    return frozenset(value)
  if isinstance(value, np.ndarray):
    return (value.dtype.str, value.shape, value.tobytes())
  if dataclasses.is_dataclass(value):
    fields = [f.name for f in dataclasses.fields(value) if f.compare]
    return tuple(
      _key(getattr(value, name, None), f'{where}.{name}') for name in fields
    )
  raise UserError(
    'a recipe must be made of values that can be compared, so that equal '
    'ones share a compiled step',
    got=f'a {type(value).__name__}',
    where=where,
    hint='give a tuple, or a value that can be hashed',
  )


def init_state(recipe: Recipe, dense_features: int, seed: int) -> TrainState:
  """The state before the first step.

  Args:
    recipe: model and optimizers.
    dense_features: I, columns of `Batch.dense`.
    seed: of the model's parameters.

  Raises:
    UserError: the model does not fit the tables' dim.
  """
  return _make_init(recipe, dense_features, seed)()


@shared  # compiling takes longer than all the rest of a trainer
def _make_init(
  recipe: Recipe, dense_features: int, seed: int
) -> Callable[[], TrainState]:
  features, groups = recipe.tables.features, recipe.tables.groups
  layouts = [recipe.layout(group) for group in groups]
  lengths = {name: feature.max_length for name, feature in features.items()}

  def embedding(name: str) -> jax.Array:
    feature = features[name]
    dim = recipe.tables.tables[feature.table].dim
    steps = (lengths[name],) if feature.pooling == 'none' else ()
    return jnp.zeros((1, *steps, dim), jnp.float32)

  def init() -> TrainState:
    key = jax.random.key(seed)
    variables = recipe.model.init(
      key,
      jnp.zeros((1, dense_features), jnp.float32),
      {name: embedding(name) for name in features},
      **model_keywords(recipe.model)(
        False,
        jnp.ones(1, jnp.float32),
        {name: jnp.ones((1, length), bool) for name, length in lengths.items()},
      ),
    )
    model_state = dict(variables)
    params = model_state.pop('params', {})
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


def row_bytes(recipe: Recipe) -> tuple[int, ...]:
  """Per group, bytes of a row with its row state, wherever it is kept."""
  return tuple(
    group.dim * np.dtype(group.dtype).itemsize
    + sum(leaf.nbytes for leaf in state)
    for group, state in zip(
      recipe.tables.groups, untrained_row_state(recipe), strict=True
    )
  )


def row_bytes_by_table(recipe: Recipe) -> list[int]:
  """The same per table, in their order."""
  groups = zip(recipe.tables.groups, row_bytes(recipe), strict=True)
  sizes = {name: size for group, size in groups for name in group.tables}
  return [sizes[name] for name in recipe.tables.tables]


@shared  # compiling it would double what a trainer costs
def untrained_row_state(recipe: Recipe) -> tuple[tuple[np.ndarray, ...], ...]:
  """Per group, the row state of a row before its first step, by row leaf.

  Raises:
    UserError: it depends on the row's values, so that it cannot be laid
      beside the table before the row is used.
  """
  return tuple(_untrained(recipe, group) for group in recipe.tables.groups)


def _untrained(recipe: Recipe, group: Group) -> tuple[np.ndarray, ...]:
  optimizer, layout = recipe.optimizer_of(group), recipe.layout(group)

  def init() -> list[tuple[jax.Array, ...]]:
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
