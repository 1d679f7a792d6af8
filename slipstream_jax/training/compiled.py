"""What is compiled of a recipe: shared by its trainers, and gone with them."""

from collections.abc import Callable, Sequence
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.engine.frozen import Windows
from slipstream_jax.training import first, judging, watch
from slipstream_jax.training.forward import (
  GroupRows,
  Inverses,
  make_forward,
)
from slipstream_jax.training.host_rows import host_rows, HostRows
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.training.score import make_loss
from slipstream_jax.training.sharing import shared
from slipstream_jax.training.step import (
  Blocks,
  make_step,
  RowIndices,
  RowWeights,
)
from slipstream_jax.transforms.row_state import (
  RowStateLayout,
)
from slipstream_jax.types import Batch

RenewedRows = tuple[Int[jax.Array, ' _n'] | None, ...] | None
"""Per group, places of hot rows that get another id; None: none does."""


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
    self._loss = jax.jit(make_loss(recipe))
    self._host_rows: dict[str, HostRows] = {}
    self._inits: dict[int, Callable[[jax.Array], TrainState]] = {}
    self._no_row = functools.cache(watch.of_no_row)  # every step wants one

  @functools.cached_property
  def layouts(self) -> tuple[RowStateLayout, ...]:
    """How each group's row state splits between rows and device."""
    return tuple(map(self.recipe.layout, self.recipe.tables.groups))

  @functools.cached_property
  def judges(self) -> tuple[judging.Judge | None, ...]:
    """Per group, what judges its hot rows; None where nothing does."""
    recipe, pairs = (
      self.recipe,
      zip(self.recipe.tables.groups, self.layouts, strict=True),
    )
    return tuple(
      judging.judge_of(recipe.optimizer_of(group), layout, group.dim)
      if layout.skips and recipe.watched == 'hot'
      else None
      for group, layout in pairs
    )

  def entries(self, hot: Sequence[int]) -> judging.EntriesOfGroups:
    """What is known of so many hot rows per group before the first step."""
    if not any(self.judges):
      return ()
    pairs = zip(self.judges, hot, strict=True)
    return tuple(
      None if judge is None else judge.start(rows) for judge, rows in pairs
    )

  def windows(self, state: TrainState) -> tuple[Windows | None, ...]:
    """Per group, when its hot rows are judged, by the state of its chain.

    Raises:
      UserError: arrays that are no such numbers.
    """
    pairs = zip(self.judges, state.row_globals, strict=True)
    return tuple(
      None if judge is None else judge.windows(row_globals)
      for judge, row_globals in pairs
    )

  def update(
    self,
    state: TrainState,
    blocks: Blocks,
    inverses: Inverses,
    batch: Batch,
    batches_seen: Float[jax.Array, ''],
    row_weights: RowWeights,
    row_index: RowIndices | None = None,
    renewed: RenewedRows = None,
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
      row_index: where the state has a watch or entries, the place i32[P] of
        each row among the group's hot ones; H_g if it is cold.
      renewed: where it has entries, per group the places i32[n] of hot rows
        that get another id with this step, padded with H_g; None: none does.

    Returns:
      The next state, the changed rows, and the loss to report, f32[].
    """
    # Also without a watch there is a mask, of no row: one program trains every
    # run, so no bit can depend on whether rows are watched, nor on what XLA
    # would fuse if they were.
    watched, entries = state.watch, state.entries
    if row_index is not None and entries:
      entries = self._renewed(state, renewed)
      blocks, still = judging.beside(self.layouts, blocks, entries, row_index)
    elif row_index is not None and watched is not None:
      still = watch.still(watched, row_index)
    else:
      still = tuple(self._no_row(len(block.rows)) for block in blocks)
    state, blocks, loss, touched = self.step(
      state._replace(watch=None, entries=()),
      blocks,
      inverses,
      batch,
      batches_seen,
      row_weights,
      still,
    )
    if row_index is not None and entries:
      blocks, entries = judging.apart(self.layouts, blocks, entries, row_index)
    elif row_index is not None and watched is not None:
      watched = watch.touched(watched, row_index, touched)
    return state._replace(watch=watched, entries=entries), blocks, loss

  def _renewed(
    self, state: TrainState, renewed: RenewedRows
  ) -> judging.EntriesOfGroups:
    if renewed is None:
      return state.entries
    groups = zip(
      self.judges, state.entries, state.row_globals, renewed, strict=True
    )
    return tuple(
      one
      if judge is None or rows is None
      else judge.renew(one, row_globals, rows)
      for judge, one, row_globals, rows in groups
    )

  def score(
    self,
    state: TrainState,
    rows: GroupRows,
    inverses: Inverses,
    batch: Batch,
  ) -> Float[jax.Array, '']:
    """The weighted mean loss of examples, not in training; see `predict`."""
    loss: jax.Array = self._loss(
      state.params, state.model_state, rows, inverses, batch
    )
    return loss

  def host_rows(self, rows: str) -> HostRows | None:
    """The programs of steps whose rows are updated on the host, by `ROWS`."""
    if rows not in self._host_rows and rows != 'stream':
      self._host_rows[rows] = host_rows(self.recipe, self.layouts, rows)
    return self._host_rows.get(rows)

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
    # One program for all seeds: compiling it takes longer than all the rest.
    if dense_features not in self._inits:
      init = first.make_init(self.recipe, self.layouts, dense_features)
      self._inits[dense_features] = init
    return self._inits[dense_features](first.key_data(seed))

  @functools.cached_property
  def untrained_row_state(self) -> tuple[tuple[np.ndarray, ...], ...]:
    """The row state of a row before its first step, by row leaf.

    Raises:
      UserError: it depends on the row's values, so that it cannot be laid
        beside the table before the row is used.
    """
    groups = zip(
      self.recipe.tables.groups, self.layouts, self.judges, strict=True
    )
    return tuple(first.untrained(self.recipe, *group) for group in groups)

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
    return self._by_table(self.row_bytes)

  @property
  def hot_row_bytes_by_table(self) -> list[int]:
    """The same with what is known of a hot row on the device."""
    pairs = zip(self.recipe.tables.groups, self.judges, strict=True)
    # Its snapshot, touches, staleness, and as of when that is.
    known = [0 if judge is None else 4 * g.dim + 9 for g, judge in pairs]
    sizes = zip(self.row_bytes, known, strict=True)
    return self._by_table([a + b for a, b in sizes])

  def _by_table(self, of_groups: Sequence[int]) -> list[int]:
    tables = self.recipe.tables
    groups = zip(tables.groups, of_groups, strict=True)
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
