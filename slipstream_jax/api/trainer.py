"""The trainer that a user holds: three statements from arrays to a model.

Its parts are made when the first source comes: only then is it known how many
dense features there are, and which rows are popular. A loop of one's own uses
them (`Trainer.parts`) with `planned`, `slipstream` and `train`.
"""

from collections.abc import Callable, Iterator, Mapping
import os
from typing import Any

from jaxtyping import Float
import numpy as np
import optax

from slipstream_jax.api import keeping, reading
from slipstream_jax.api.history import History
from slipstream_jax.api.making import Maker, table_set
from slipstream_jax.api.sources import Source
from slipstream_jax.errors import check_seed, check_whole, choose, UserError
from slipstream_jax.placement.by_group import placements_of, Placing
from slipstream_jax.schedules.base import State
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.store.memory import MEMORY, Storage
from slipstream_jax.table_set import TableSet
from slipstream_jax.tables import Feature, Table
from slipstream_jax.training import evaluate, loop
from slipstream_jax.training.grown import as_trained
from slipstream_jax.training.loop import StepRecord
from slipstream_jax.training.metrics import Metrics
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.training.recipe import LossFn, Recipe, Watched
from slipstream_jax.transforms.rowwise import rowwise_adagrad
from slipstream_jax.types import Array
from slipstream_jax.vocabulary.fit import Vocabulary


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
    store: Storage = MEMORY,
    hot_bytes: int = 1 << 28,
    watched: Watched = 'hot',
    microbatches: int = 1,
    prefetch: int = 2,
    workers: int | None = None,
    seed: int = 0,
  ) -> None:
    """A trainer before its first step.

    Args:
      model: one of flax, or two functions; see docs/how-to/own-model.md.
      tables: by name.
      features: by name; None: one of each table, of its name.
      rows: optimizer of tables without one; None: `rowwise_adagrad(0.05)`.
      dense: optimizer of the model; None: `optax.adam(1e-3)`.
      loss: of logits and labels, per example; one per head if there are more.
      placement: of `PLACEMENTS`, its name, or `cached`; or one by table name.
      store: what keeps the rows that the device does not; or `tiered`.
      hot_bytes: device memory for hot rows and their state, where needed.
      watched: rows that `skip_stale` judges, 'hot' or 'all'; see `Recipe`.
      microbatches: parts into which a step's batch is cut, to save memory.
      prefetch: batches prepared ahead; 0 prepares each when it is asked for.
      workers: threads that prepare them; None: one per core, at most 8.
      seed: of parameters, rows and dropout; at least 0.

    Raises:
      UserError: what can be judged before the first batch.
    """
    self.tables = tables = table_set(tables, features)
    recipe = Recipe(
      model,
      tables,
      rowwise_adagrad(0.05) if rows is None else rows,
      optax.adam(1e-3) if dense is None else dense,
      loss,
      microbatches=microbatches,
      watched=watched,
    )
    placements = placements_of(placement, tables)
    check_seed(seed, 'Trainer, seed')
    check_whole(hot_bytes, 1, 'Trainer, hot_bytes', 'such as 1 << 28')
    check_whole(microbatches, 1, 'Trainer, microbatches', 'use 1, for none')
    self._maker = Maker(recipe, placements, hot_bytes, seed, store)
    self._ahead = reading.ahead_of(prefetch, workers)
    self._reading: reading.Reading | None = None
    self._left: reading.Left | None = None

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
    if self._maker.parts is None:
      raise UserError(
        'a trainer is made when its first source comes',
        got='none so far',
        where='Trainer',
        hint='call train, evaluate, predict or restore first',
      )
    return self._maker.parts

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
    losses, events = [], []
    for record in self.steps(source, steps, skip=skip):
      losses.append(record.loss)
      if record.event is not None:
        events.append(record.event)
      if on_step is not None:
        on_step(record)
    counters = self.parts.engine.counters
    return History(np.array(losses, np.float32), counters, tuple(events))

  def steps(
    self,
    source: Source,
    steps: int | None = None,
    *,
    skip: Skip | None = None,
  ) -> Iterator[StepRecord]:
    """As `train`, but a step is taken when its record is asked for."""
    if steps is None and getattr(source, 'endless', False):
      raise UserError(
        'training on a source without end needs an end',
        got='no steps',
        where='Trainer.train, steps',
        hint='give the steps to take, or epochs to batches(...)',
      )
    planned, record = self._read(source, skip).planned, None
    most = 1 << 62 if steps is None else steps  # or more than any run takes
    for record in loop.train(self.parts, planned, most):
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
      UserError: a batch that cannot be scored, no labels, or no end.
    """
    bound = self._maker.bind(source, needs_hot=False, trains=False)
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
    bound = self._maker.bind(source, needs_hot=False, trains=False)
    return evaluate.predict(self.parts, bound, max_batches).logits

  def rows(self, table: str) -> Array:
    """The rows of a table as they are now, [R, D] of its dtype; a copy.

    Raises:
      UserError: there is no such table.
    """
    choose(self.tables.tables, table, 'Trainer.rows, table')
    return self.parts.engine.rows_of(table)

  def vocabulary(self, table: str) -> Vocabulary:
    """The ids of a table's rows as trained, where a growing one gave them.

    Raises:
      UserError: there is no such table, or its rows have no such ids.
    """
    choose(self.tables.tables, table, 'Trainer.vocabulary, table')
    return as_trained(self.parts.grown, table)

  def save(self, path: str | os.PathLike[str]) -> int:
    """Saves everything into a folder, of which the newest step is kept.

    Returns:
      The steps taken.

    Raises:
      UserError: no source has come yet, or as `Checkpoints.save`.
    """
    current, left = self._reading, self._left
    position: State = {} if left is None else left.position
    if current is not None:
      position = current.planned.get_state()
    return keeping.save(path, self.parts, position)

  def restore(
    self,
    path: str | os.PathLike[str],
    *,
    resume: bool = True,
    step: int | None = None,
  ) -> int:
    """Puts the newest checkpoint of a folder in the place of everything.

    A damaged one is refused. No older one is taken in its place unasked.

    Args:
      path: what was given to `save`.
      resume: whether the source that is trained on next goes on where the run
        was; it must hold the same examples. Else it begins where it is.
      step: of another checkpoint than the newest, which is still there.

    Returns:
      The steps taken when it was saved.

    Raises:
      UserError: as `Checkpoints.restore`; the trainer is then as it was.
    """
    maker = self._maker
    if step is not None:
      check_whole(step, 0, 'Trainer.restore, step', 'or leave it out')
    parts, position = keeping.restore(path, maker.parts, maker.of_facts, step)
    self.close()
    maker.parts = parts
    self._left = reading.Left(position.schedule_state) if resume else None
    return position.step

  def close(self) -> None:
    """Ends the threads; what comes next starts others."""
    current, self._reading = self._reading, None
    if current is not None:
      self._left = current.close(self.parts)

  def _read(self, source: Source, skip: Skip | None) -> reading.Reading:
    """The planned batches of a source, from where it was left."""
    old, ahead = self._reading, self._ahead
    if old is not None and old.source is source and old.skip == skip:
      return old
    reading.check_skip(skip)
    # Until here, and while a new one is bound, the old one goes on.
    if old is not None and old.source is source:
      bound = self._maker.bind(source, skip is not None, old.bound)
      old.pause()
      self._reading = reading.begin(self.parts, source, bound, skip, ahead)
      return self._reading
    bound = self._maker.bind(source, skip is not None)
    left = self._left
    if old is not None or left is None or left.source not in (None, source):
      left = reading.Left({})
    self.close()
    self._reading = reading.go_on(self.parts, source, bound, skip, ahead, left)
    self._left = None
    return self._reading
