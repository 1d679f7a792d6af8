"""What training is made of: a recipe that never changes, a state that does."""

from collections.abc import Callable, Hashable
import dataclasses
import functools
import inspect
from typing import Any, NamedTuple, ParamSpec, TypeVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np
import optax

from slipstream_jax.errors import UserError
from slipstream_jax.stream.buffers import to_host
from slipstream_jax.table_set import TableSet
from slipstream_jax.training.watch import Watch
from slipstream_jax.transforms.row_state import (
  row_state_layout,
  RowStateLayout,
  split,
)

LossFn = Callable[
  [Float[jax.Array, ' B'], Float[jax.Array, ' B']], Float[jax.Array, ' B']
]
"""Logits and labels to the loss of each example."""


class Recipe(NamedTuple):
  """Everything about training that stays the same from step to step."""

  model: nn.Module
  """Called as model(dense f32[B, I], embeddings f32[B, F, D]) -> f32[B], and
  with the keywords of `model_keywords` that its `__call__` names. Of sequences
  it gets embeddings f32[B, F, L, D]."""
  tables: TableSet
  """The tables whose rows the model's embeddings are."""
  row_optimizer: optax.GradientTransformation
  """Any chain; sees the batch's unique rows f32[U, D], whatever the dtype
  that the tables keep them in."""
  dense_optimizer: optax.GradientTransformation
  """Any chain; sees the model's parameters."""
  loss: LossFn = optax.sigmoid_binary_cross_entropy
  """Per example; weighted and averaged over the batch by the step."""

  def layout(self) -> RowStateLayout:
    """How the row optimizer's state splits between rows and device."""
    return row_state_layout(self.row_optimizer, self.tables.groups[0].dim)


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
  row_globals: tuple[jax.Array, ...]
  """Leaves of the row optimizer's state without a row axis."""
  watch: Watch | None = None
  """Of the hot rows, where something depends on how far they move."""

  @property
  def variables(self) -> dict[str, Any]:
    """All the model's collections: what it is applied with."""
    return {**self.model_state, 'params': self.params}


KeywordsFn = Callable[
  [bool, Float[jax.Array, ' B'], Bool[jax.Array, '...']], dict[str, Any]
]
"""Whether this is training, the examples' weights, and which lookups are real,
to the keywords."""


def model_keywords(model: nn.Module) -> KeywordsFn:
  """What to give a call of the model beside its two arguments, by name.

  A model that behaves otherwise in training asks for it by naming, beyond the
  two arguments, `train` (bool) or `weights` (f32[B], each example's weight in
  the loss; all 1 where there is no loss) in its `__call__`. One that tells
  padding from rows of zeros names `real` (bool[B, F] or [B, F, L]).
  """
  signature = inspect.signature(type(model).__call__)
  # Bound first, so that the two arguments may have any name.
  bound = signature.bind_partial(model, None, None).arguments
  named = signature.parameters.keys() - bound.keys()

  def keywords(
    train: bool,
    weights: Float[jax.Array, ' B'],
    real: Bool[jax.Array, '...'],
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
  tables, dim = recipe.tables, recipe.tables.groups[0].dim
  poolings = {feature.pooling for feature in tables.features.values()}
  lookups = (1, len(tables.features))
  if 'none' in poolings:
    lookups = (1, *tables.example_shape)
  layout = recipe.layout()

  def init() -> TrainState:
    variables = recipe.model.init(
      jax.random.key(seed),
      jnp.zeros((1, dense_features), jnp.float32),
      jnp.zeros((*lookups, dim), jnp.float32),
      **model_keywords(recipe.model)(
        False, jnp.ones(1, jnp.float32), jnp.ones(lookups, bool)
      ),
    )
    model_state = dict(variables)
    params = model_state.pop('params', {})
    row_state = recipe.row_optimizer.init(jnp.zeros((1, dim), jnp.float32))
    return TrainState(
      jnp.zeros((), jnp.int32),
      params,
      model_state,
      recipe.dense_optimizer.init(params),
      split(layout, row_state)[1],
    )

  return jax.jit(init)


def row_bytes(recipe: Recipe) -> int:
  """Bytes of one row with its row state, wherever it is kept."""
  state = untrained_row_state(recipe)
  row = (
    recipe.tables.groups[0].dim
    * np.dtype(recipe.tables.groups[0].dtype).itemsize
  )
  return row + sum(leaf.nbytes for leaf in state)


@shared  # compiling it would double what a trainer costs
def untrained_row_state(recipe: Recipe) -> tuple[np.ndarray, ...]:
  """The row state of a row before its first step, one array per row leaf.

  Raises:
    UserError: it depends on the row's values, so that it cannot be laid
      beside the table before the row is used.
  """
  layout, dim = recipe.layout(), recipe.tables.groups[0].dim

  def init() -> list[tuple[jax.Array, ...]]:
    # Two unlike rows, to find out whether a chain copies them into its state.
    states = [
      recipe.row_optimizer.init(jnp.full((1, dim), value, jnp.float32))
      for value in (0.0, 1.0)
    ]
    return [split(layout, state)[0] for state in states]

  zero, one = to_host(jax.jit(init)())
  for a, b in zip(zero, one, strict=True):
    if not np.array_equal(a, b):
      raise UserError(
        'the row optimizer must start every row from the same state',
        got=f'a state {a.dtype}{list(a.shape[1:])} that copies the row',
        where='Recipe.row_optimizer',
        hint='leave out the transformation that stores parameters',
      )
  return tuple(np.asarray(leaf[0]) for leaf in zero)
