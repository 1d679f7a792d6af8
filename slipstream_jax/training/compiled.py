"""Compiled functions of a recipe, which all trainers of equal recipes share."""

import atexit
from collections.abc import (
  Callable,
  Hashable,
  Iterable,
  MutableMapping,
  Sequence,
)
import dataclasses
import functools
from typing import Any
import weakref

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.engine.buffers import to_cpu, to_host
from slipstream_jax.engine.planner import Windows
from slipstream_jax.errors import UserError
from slipstream_jax.models.adapters import adapt
from slipstream_jax.models.towers import is_over_batch, side_of
from slipstream_jax.tables import Group
from slipstream_jax.training import watch
from slipstream_jax.training.forward import forward, mean_loss
from slipstream_jax.training.parts import PartsStep
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.training.step import (
  Blocks,
  initial_state,
  make_host_update,
  step,
)
from slipstream_jax.training.tower_parts import TowersStep
from slipstream_jax.transforms.row_state import (
  RowStateLayout,
  split,
  without_entries,
)
from slipstream_jax.types import Array, Batch

ReassignedRows = tuple[Int[jax.Array, ' _n'] | None, ...] | None
"""Per group, places of hot rows that are reassigned to another id. None: none
is."""


class CompiledFunctions:
  """The compiled functions of a recipe.

  Values of rows are tuples with one entry per group of tables.

  Attributes:
    recipe: model, tables and optimizers.
    step: the jitted part of `update`, which does not know of watched rows. It
      donates state and rows.
    forward: `forward`, jitted.
    loss: `mean_loss`, jitted.
    side: name of a side of a two-tower model to `forward` of its vectors,
      cached.
    over: devices and `Slices` to their `PartsStep`, cached.
    host_update: `make_host_update`, cached.
  """

  def __init__(self, recipe: Recipe) -> None:
    """Compiles nothing yet.

    Raises:
      UserError: no model, an optimizer that cannot train rows, or microbatches
        of a model whose loss is over the batch.
    """
    self.recipe = recipe
    if recipe.microbatches > 1 and is_over_batch(recipe.model):
      raise UserError(
        'a loss over the whole batch cannot be computed from parts of it',
        got=f'{recipe.microbatches} microbatches',
        where='Trainer, microbatches',
        hint='use 1, and smaller batches if memory is short',
      )
    # Once, because a change of the model's object must not reach a later trace.
    model, recipe = recipe.model, recipe._replace(model=adapt(recipe.model))
    parts = recipe, self.layouts
    self.step = jax.jit(functools.partial(step, *parts), donate_argnums=(0, 1))
    self.forward = jax.jit(functools.partial(forward, recipe))
    self.loss = jax.jit(functools.partial(mean_loss, recipe))
    self.side = functools.cache(
      lambda side: jax.jit(
        functools.partial(forward, recipe._replace(model=side_of(model, side)))
      )
    )
    self.over = functools.cache(
      lambda devices, over: (
        TowersStep(model, *parts, devices, over)
        if over.towers is not None
        else PartsStep(*parts, devices, over)
      )
    )
    self.host_update = functools.cache(
      functools.partial(make_host_update, *parts)
    )
    self._init = jax.jit(
      functools.partial(initial_state, *parts), static_argnums=0
    )
    self._no_row = functools.cache(watch.no_row)  # every step needs one

  @functools.cached_property
  def layouts(self) -> tuple[RowStateLayout, ...]:
    """Per group, how row state splits between rows and device."""
    return tuple(map(self.recipe.layout, self.recipe.tables.groups))

  @functools.cached_property
  def judges(self) -> tuple[watch.Judge | None, ...]:
    """Per group, the judge of its hot rows. None where no chain judges them."""
    recipe = self.recipe
    return tuple(
      watch.judge_of(recipe.optimizer_of(group), layout, group.dim)
      if layout.skips and recipe.watched == 'hot'
      else None
      for group, layout in zip(recipe.tables.groups, self.layouts, strict=True)
    )

  def entries(self, hot: Sequence[int]) -> watch.EntriesOfGroups:
    """Returns the entries before the first step, for numbers of hot rows."""
    if not any(self.judges):
      return ()
    pairs = zip(self.judges, hot, strict=True)
    return tuple(judge and judge.start(rows) for judge, rows in pairs)

  def windows(self, state: TrainState) -> tuple[Windows | None, ...]:
    """Returns per group when its hot rows are judged. See `Judge.windows`."""
    pairs = zip(self.judges, state.row_globals, strict=True)
    return tuple(judge and judge.windows(leaves) for judge, leaves in pairs)

  def update(
    self,
    state: TrainState,
    blocks: Blocks,
    inverses: tuple[Int[Array, 'B _K'], ...],
    batch: Batch,
    batches_seen: Float[Array, ''],
    row_weights: tuple[Float[Array, ' _P'], ...],
    row_index: watch.RowIndices | None = None,
    reassigned: ReassignedRows = None,
    rows: str = 'stream',
  ) -> tuple[TrainState, Blocks, Float[jax.Array, '']]:
    """Takes one step. It donates state and rows that are on the device.

    It minimizes sum(weight * loss) / B, and reports sum(weight * loss) /
    sum(weight).

    Args:
      state: before the step.
      blocks: the batch's unique rows with their row state, [P, ...].
      inverses: the index into them of each of the group's lookups, [B, K_g].
      batch: an admitted batch. Its lookups are not read.
      batches_seen: batches that the source has delivered so far, f32[].
      row_weights: mean weight f32[P] of the examples that use each row.
      row_index: place i32[P] of each row among the group's hot ones, H_g if it
        is cold. Only where the state has a watch or entries.
      reassigned: per group, places i32[n] of hot rows that are reassigned with
        this step, padded with H_g. Only where the state has entries.
      rows: a member of `ROWS`. If it is not 'stream', rows are on the host.

    Returns:
      The next state, the changed rows, and the loss to report, f32[].
    """
    # Without a watch the mask is of no row. So one program trains every run,
    # and no bit depends on whether rows are watched.
    watched, entries = state.watch, state.entries
    if row_index is not None and entries:
      entries = self._reset_entries(state, reassigned)
      blocks, frozen = watch.attach(self.layouts, blocks, entries, row_index)
    elif row_index is not None and watched is not None:
      if rows != 'stream':  # where the rows are
        watched, row_index = to_cpu((watched, row_index))
      own = tuple(block.rows for block in blocks)
      snapshots, frozen = watch.before(watched, row_index, own)
    else:
      no_row: Callable[[int], Any] = self._no_row
      if rows != 'stream':  # the host needs the mask
        no_row = functools.partial(np.zeros, dtype=bool)
      frozen = tuple(no_row(len(block.rows)) for block in blocks)
    take: Callable[..., Any] = self.step
    if rows != 'stream':
      take = self.host_update(rows).step
    state, blocks, loss, touched = take(
      state._replace(watch=None, entries=()),
      blocks,
      inverses,
      batch,
      batches_seen,
      row_weights,
      frozen,
    )
    if row_index is not None and entries:
      blocks, entries = watch.detach(self.layouts, blocks, entries, row_index)
    elif row_index is not None and watched is not None:
      own = tuple(block.rows for block in blocks)
      watched = watch.after(watched, row_index, snapshots, own, touched)
    return state._replace(watch=watched, entries=entries), blocks, loss

  def _reset_entries(
    self, state: TrainState, reassigned: ReassignedRows
  ) -> watch.EntriesOfGroups:
    if reassigned is None:
      return state.entries
    groups = zip(
      self.judges, state.entries, state.row_globals, reassigned, strict=True
    )
    return tuple(
      entries
      if judge is None or places is None
      else judge.reset(entries, row_globals, places)
      for judge, entries, row_globals, places in groups
    )

  def init_state(self, dense_features: int, seed: int) -> TrainState:
    """Returns the state before the first step.

    The seed is of dropout, and of the model's parameters unless it has its own.

    Raises:
      UserError: the model does not fit the tables or the dense features.
    """
    # The seed is an argument: compiling takes longer than everything else.
    state: TrainState = self._init(dense_features, _key_data(seed))
    return state

  @functools.cached_property
  def untrained_row_state(self) -> tuple[tuple[np.ndarray, ...], ...]:
    """Per group, the leaves of a row's state before its first step.

    Raises:
      UserError: the state depends on the row's values.
    """
    groups = self.recipe.tables.groups
    return tuple(map(self._untrained, groups, self.layouts, self.judges))

  def _untrained(
    self, group: Group, layout: RowStateLayout, judge: watch.Judge | None
  ) -> tuple[np.ndarray, ...]:
    """Returns the leaves of a row's state before its first step."""
    optimizer = self.recipe.optimizer_of(group)

    def init() -> list[tuple[Any, ...]]:
      # Two different rows, to find out whether a chain copies them into its
      # state.
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
          where=self.recipe.where(group),
          hint='leave out the transformation that stores parameters',
        )
    return tuple(np.asarray(leaf[0]) for leaf in zero)

  @property
  def row_bytes(self) -> tuple[int, ...]:
    """Per group, bytes of a row with its row state, wherever it is stored."""
    groups, states = self.recipe.tables.groups, self.untrained_row_state
    return tuple(
      group.dim * np.dtype(group.dtype).itemsize
      + sum(leaf.nbytes for leaf in state)
      for group, state in zip(groups, states, strict=True)
    )

  def row_bytes_by_table(self) -> list[int]:
    """Per table, bytes of a row with its row state."""
    tables, sizes = self.recipe.tables, dict[str, int]()
    for group, size in zip(tables.groups, self.row_bytes, strict=True):
      sizes |= dict.fromkeys(group.tables, size)
    return [sizes[name] for name in tables.tables]

  def heads(self, state: TrainState, dense_features: int) -> int | None:
    """Returns T if logits are [B, T], or None if they are [B]."""
    tables = self.recipe.tables
    number = jnp.float32
    shape = jax.ShapeDtypeStruct
    logits, *_ = jax.eval_shape(
      self.forward,
      state.params,
      state.model_state,
      tuple(shape((2, group.dim), group.dtype) for group in tables.groups),
      tuple(shape((2, len(g.columns)), jnp.int32) for g in tables.groups),
      shape((2, dense_features), number),
      shape((2, tables.num_columns), number) if tables.is_weighted else None,
    )
    return logits.shape[1] if logits.ndim == 2 else None


@functools.partial(jax.jit, static_argnums=0)
def _key_data(seed: int) -> jax.Array:
  """Returns the data of the seed's random key, u32[2]."""
  data: jax.Array = jax.random.key_data(jax.random.key(seed))
  return data


CACHE: MutableMapping[Hashable, CompiledFunctions] = (
  weakref.WeakValueDictionary()
)
"""The compiled recipes that are in use."""


@atexit.register
def _clear_cache() -> None:
  # Otherwise entries are removed at exit, which hashes keys whose modules may
  # be gone.
  CACHE.clear()


def compiled_of(recipe: Recipe) -> CompiledFunctions:
  """Returns the compiled functions of the recipe, or of an equal one in use.

  Only users of the result keep it alive. An unhashable field, such as a model's
  `sizes=[64, 32]`, is compared by its values.

  Raises:
    UserError: as `CompiledFunctions`, or a field can neither be hashed nor
      compared.
  """
  key = _key(recipe, 'Recipe')
  result = CACHE.get(key)
  if result is None:
    result = CACHE[key] = CompiledFunctions(recipe)
  return result


def _key(value: Any, where: str) -> Hashable:
  """Returns a key that can be hashed and is equal for equal values."""
  try:
    hash(value)
    return value
  except TypeError:
    kind = type(value)
  if isinstance(value, set):
    return kind, frozenset(value)
  if isinstance(value, np.ndarray):
    return kind, value.dtype.str, value.shape, value.tobytes()
  return kind, frozenset(
    (name, _key(part, f'{where}.{name}')) for name, part in _parts(value, where)
  )


def _parts(value: Any, where: str) -> Iterable[tuple[Any, Any]]:
  """Returns the contents of an unhashable value by name."""
  if isinstance(value, list | tuple):
    return zip(getattr(value, '_fields', range(len(value))), value, strict=True)
  if isinstance(value, dict):
    return value.items()
  if dataclasses.is_dataclass(value):
    names = (f.name for f in dataclasses.fields(value) if f.compare)
    return [(name, getattr(value, name, None)) for name in names]
  raise UserError(
    'a recipe must be made of values that can be compared, so that equal '
    'ones share a compiled step',
    got=f'a {type(value).__name__}',
    where=where,
    hint='give a tuple, or a value that can be hashed',
  )
