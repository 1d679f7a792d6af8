"""The trainer that a user holds: three statements from arrays to a model.

Its parts are made when the first source comes: only then is it known how many
dense features there are, and which rows are popular. A loop of one's own uses
them (`Trainer.parts`) with `planned`, `slipstream` and `train`.
"""

from collections.abc import Callable, Iterator, Mapping
import os
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np
import optax

from slipstream_jax.api.reading import begin, go_on, Reading
from slipstream_jax.api.sources import (
  dense_form,
  DenseForm,
  opened,
  popular,
  Source,
)
from slipstream_jax.data.base import BatchSource
from slipstream_jax.errors import check_seed, check_whole, choose, UserError
from slipstream_jax.named.sources import Unbound
from slipstream_jax.placement.by_group import placements_of, Placing
from slipstream_jax.saving.checkpoint import Checkpoints
from slipstream_jax.saving.facts import Facts, keep_facts, read_facts
from slipstream_jax.schedules.base import State
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.stream.counters import Counters
from slipstream_jax.table_set import TableSet
from slipstream_jax.tables import Feature, Table
from slipstream_jax.training import evaluate, loop
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.loop import StepRecord
from slipstream_jax.training.metrics import Metrics
from slipstream_jax.training.parts import (
  make_parts,
  start_watch,
  TrainerParts,
)
from slipstream_jax.training.recipe import LossFn, Recipe
from slipstream_jax.transforms.rowwise import rowwise_adagrad
from slipstream_jax.types import Array, HotRows

_MOST_STEPS = 1 << 62


class History(NamedTuple):
  """What `Trainer.train` did."""

  losses: Float[np.ndarray, ' steps']
  """Weighted mean loss of each step's batch, f32."""
  counters: Counters
  """Totals since the start of training."""
  events: tuple[dict[str, Any], ...]
  """What the schedule decided, in order."""


class Trainer:
  """Trains a model on tables in host memory; `with` closes its threads.

    trainer = slip.Trainer(model, {'item': slip.Table(10**7, dim=16)})
    trainer.train(source, steps=1000)
    trainer.evaluate(held_out).auc

  Attributes:
    tables: all tables, and the features that look them up.
  """

  def __init__(
    self,
    model: Any,
    tables: Mapping[str, Table] | TableSet,
    *,
    features: Mapping[str, Feature] | None = None,
    rows: optax.GradientTransformation | None = None,
    dense: optax.GradientTransformation | None = None,
    loss: LossFn | tuple[LossFn, ...] = optax.sigmoid_binary_cross_entropy,
    placement: Placing = 'streamed',
    hot_bytes: int = 1 << 28,
    microbatches: int = 1,
    prefetch: int = 2,
    seed: int = 0,
  ) -> None:
    """A trainer before its first step.

    Args:
      model: a Flax module, linen or nnx, or two functions; see
        docs/how-to/own-model.md.
      tables: by name.
      features: by name; None: one of each table, of its name.
      rows: optimizer of the rows of tables without one of their own; None:
        `rowwise_adagrad(0.05)`.
      dense: optimizer of the model; None: `optax.adam(1e-3)`.
      loss: of logits and labels, per example; one per head if there are more.
      placement: of `PLACEMENTS`, or its name, or one made by `cached`; or one
        for each table by its name.
      hot_bytes: device memory for the hot rows and their state, where a
        placement or skipping needs some.
      microbatches: parts into which a step's batch is cut, to save memory.
      prefetch: batches prepared ahead; 0 prepares each when it is asked for.
      seed: of parameters, rows and dropout; at least 0.

    Raises:
      UserError: what can be judged before the first batch.
    """
    if not isinstance(tables, TableSet):
      tables = TableSet(tables, features or {})
    elif features is not None:
      raise UserError(
        'a table set has its features already',
        got='features beside it',
        where='Trainer, features',
        hint='leave them out, or give tables by name',
      )
    self.tables = tables
    self._recipe = Recipe(
      model,
      tables,
      rowwise_adagrad(0.05) if rows is None else rows,
      optax.adam(1e-3) if dense is None else dense,
      loss,
      microbatches=microbatches,
    )
    self._placing = placements_of(placement, tables)
    check_seed(seed, 'Trainer, seed')
    check_whole(hot_bytes, 1, 'Trainer, hot_bytes', 'such as 1 << 28')
    check_whole(prefetch, 0, 'Trainer, prefetch', 'use 2, or 0')
    self._hot_bytes, self._prefetch, self._seed = hot_bytes, prefetch, seed
    self._parts: TrainerParts | None = None
    self._reading: Reading | None = None
    # Of a checkpoint, for the source that goes on with it.
    self._position: State | None = None
    self._restored: str | os.PathLike[str] | None = None

  def __enter__(self) -> 'Trainer':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def parts(self) -> TrainerParts:
    """What it is made of, for a loop of one's own.

    Raises:
      UserError: no source has come yet.
    """
    if self._parts is None:
      raise UserError(
        'a trainer is made when its first source comes',
        got='none so far',
        where='Trainer',
        hint='call train, evaluate, predict or restore first',
      )
    return self._parts

  def train(
    self,
    source: Source,
    steps: int | None = None,
    *,
    skip: Skip | None = None,
    on_step: Callable[[StepRecord], Any] | None = None,
  ) -> History:
    """Takes up to `steps` steps, and returns when they are taken.

    The same source goes on where it was left, also after `restore`, and where
    `skip` changes; but what an iterator gave that cannot be set back, and no
    step used, is lost then.

    Args:
      source: from `batches`; or a `BatchSource`, or what `batches` takes as its
        only argument.
      steps: to take at most; None: until the source ends.
      skip: what to leave out, and when; None: nothing.
      on_step: called with the record of each step.

    Raises:
      UserError: a batch that cannot be trained on, an endless source and no
        `steps`, a source that has ended, or a loss that is not finite.
    """
    losses, events, counters = [], [], Counters()
    for record in self.steps(source, steps, skip=skip):
      losses.append(record.loss)
      counters = record.counters
      if record.event is not None:
        events.append(record.event)
      if on_step is not None:
        on_step(record)
    return History(np.array(losses, np.float32), counters, tuple(events))

  def steps(
    self,
    source: Source,
    steps: int | None = None,
    *,
    skip: Skip | None = None,
  ) -> Iterator[StepRecord]:
    """As `train`, but a step is taken when its record is asked for."""
    reading = self._read(source, skip)
    if steps is None and getattr(reading.bound, 'endless', False):
      raise UserError(
        'training on a source without end needs an end',
        got='no steps',
        where='Trainer.train, steps',
        hint='give the steps to take, or epochs to batches(...)',
      )
    most = _MOST_STEPS if steps is None else steps
    record = None
    for record in loop.train(self.parts, reading.planned, most):
      yield record
    if record is None and most:
      raise UserError(
        'there must be a batch to train on',
        got='a source that has ended',
        where='Trainer.train, source',
        hint='make it anew, or leave epochs out',
      )

  def evaluate(self, source: Source, max_batches: int | None = None) -> Metrics:
    """Metrics of the predictions on the source, from its beginning.

    Args:
      source: as of `train`, with labels; it must end.
      max_batches: the most to score; None: all.

    Raises:
      UserError: a batch that cannot be scored, no labels, or a pass that would
        not end.
    """
    bound = self._bound(source)
    return evaluate.evaluate(self.parts, bound, max_batches)

  def predict(
    self, source: Source, max_batches: int | None = None
  ) -> Float[np.ndarray, '...']:
    """Logits f32[n], or [n, T], of the source's examples; needs no labels.

    Args:
      source: as of `train`; it must end.
      max_batches: the most to score; None: all.

    Raises:
      UserError: as `evaluate`, but for labels.
    """
    bound = self._bound(source)
    return evaluate.predict(self.parts, bound, max_batches).logits

  def rows(self, table: str) -> Array:
    """The rows of a table as they are now, [R, D] of its dtype; a copy.

    Raises:
      UserError: there is no such table.
    """
    choose(self.tables.tables, table, 'Trainer.rows, table')
    return self.parts.engine.rows_of(table)

  def save(self, path: str | os.PathLike[str]) -> int:
    """Saves everything into a folder, of which the newest step is kept.

    Returns:
      The steps taken.

    Raises:
      UserError: as `Checkpoints.save`.
    """
    parts = self.parts
    folder = Checkpoints(path)
    # First, and whole: a checkpoint without it could not be opened alone.
    keep_facts(path, _facts(parts))
    state = self._position or {}
    if self._reading is not None:
      state = self._reading.planned.get_state()
    try:
      return folder.save(parts, state)
    finally:
      folder.close()

  def restore(
    self, path: str | os.PathLike[str], *, resume: bool = True
  ) -> int:
    """Puts the newest checkpoint of a folder in the place of everything.

    Args:
      path: what was given to `save`.
      resume: whether the source that is trained on next goes on where the run
        was; it must hold the same examples. Else it begins where it is.

    Returns:
      The steps taken when it was saved.

    Raises:
      UserError: as `Checkpoints.restore`; the trainer is then as it was.
    """
    facts = read_facts(path)
    if self._parts is None:
      hot = facts.hot
      self._make(
        DenseForm(facts.dense_features, facts.dense_columns),
        None if hot is None else hot_rows(hot, self.tables.num_rows),
      )
    if facts.watched:
      start_watch(self.parts)
    step = self._load(path)
    self._restored = path if facts.watched else None
    if not resume:
      self._position = self._restored = None
    return step

  def close(self) -> None:
    """Ends the threads; what comes next starts others."""
    reading, self._reading = self._reading, None
    if reading is not None:
      self._position = reading.planned.get_state()
      reading.planned.close()

  def _load(self, path: str | os.PathLike[str]) -> int:
    folder = Checkpoints(path)
    try:
      position = folder.restore(self.parts)
    finally:
      folder.close()
    reading, self._reading = self._reading, None
    if reading is not None:
      reading.planned.close()
    self._position = position.schedule_state
    return position.step

  def _read(self, source: Source, skip: Skip | None) -> Reading:
    """The planned batches of a source, from where it was left."""
    old, self._reading = self._reading, None
    if old is not None and old.source is source and old.skip == skip:
      self._reading = old
      return old
    position, restored = self._position, self._restored
    if old is not None:
      position = old.end(source)
    bound = self._bound(source, needs_hot=skip is not None)
    planned = begin(self.parts, bound, skip, self._prefetch)
    goes_on = go_on(bound, position, skip)
    if restored is not None and goes_on:
      # Making a schedule starts a watch anew, so its state comes once more.
      self._load(restored)
    if position is not None and goes_on:
      planned.set_state(position)
    self._position = self._restored = None
    self._reading = Reading(source, skip, bound, planned)
    return self._reading

  def _bound(self, source: Source, needs_hot: bool = False) -> BatchSource:
    """Batches of the source; the first one tells what the parts must be."""
    source = opened(source)
    needs_hot = needs_hot or any(one.needs_hot for one in self._placing)
    if self._parts is None:
      self._make(dense_form(source), self._hot(source) if needs_hot else None)
    elif needs_hot and self._parts.engine.hot is None:
      self._parts.engine.choose_hot(self._hot(source))
    return source.bind(self.tables) if isinstance(source, Unbound) else source

  def _hot(self, source: Unbound | BatchSource) -> HotRows:
    sizes = compiled_of(self._recipe).row_bytes_by_table
    return popular(source, self.tables, self._hot_bytes, sizes)

  def _make(self, dense: DenseForm, hot: HotRows | None) -> None:
    self._recipe = self._recipe._replace(dense_columns=dense.columns)
    self._parts = make_parts(
      self._recipe, self._placing, dense.features, self._seed, hot
    )


def _facts(parts: TrainerParts) -> Facts:
  hot, columns = parts.engine.hot, parts.recipe.dense_columns
  return Facts(
    parts.shape.dense_features,
    None if columns is None else dict(columns),
    None if hot is None else hot.rows,
    parts.state.watch is not None,
  )
