"""The trainer that a user holds: three statements from arrays to a model.

Its parts are made when the first source comes: only then is it known how many
dense features there are, and which rows are popular. A loop of one's own uses
them (`Trainer.parts`) with `planned`, `slipstream` and `train`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import os
from typing import Any, TypeVar

from jaxtyping import Float
import numpy as np
import optax

from slipstream_jax.api import keeping, reading
from slipstream_jax.api.history import History
from slipstream_jax.api.making import Learned, Maker, table_set
from slipstream_jax.api.places import Places
from slipstream_jax.api.sources import opened, Source
from slipstream_jax.data.interrupts import held, Turns
from slipstream_jax.data.source import BatchSource, is_endless
from slipstream_jax.errors import check_seed, check_whole, choose, UserError
from slipstream_jax.export.folder import (
  BATCH_SIZES,
  check_arguments,
  write_export,
)
from slipstream_jax.export.source import facts_of
from slipstream_jax.placement.groups import placements_of, Placing
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.store.memory import MEMORY, Storage
from slipstream_jax.tables import Feature, Table, TableSet
from slipstream_jax.training import evaluate, loop
from slipstream_jax.training.loop import StepRecord
from slipstream_jax.training.metrics import Metrics
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.training.recipe import LossFn, Recipe, Watched
from slipstream_jax.transforms.rowwise import rowwise_adagrad
from slipstream_jax.types import Array
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.history import frozen_at

T = TypeVar('T')


class Trainer:
  """Trains a model on tables in host memory; `with` closes its threads.

    trainer = slip.Trainer(model, {'item': slip.Table(10**7, dim=16)})
    trainer.train(source, steps=1000)
    trainer.evaluate(held_out).auc

  Calls from several threads take turns between steps. What a trainer calls (a
  source, a model) may predict and save, but not train, restore or close it.

  Attributes:
    tables: all tables, and the features that look them up.
  """

  def __init__(
    self,
    model: Any,
    tables: Mapping[str, Table] | TableSet,
    *,
    features: Mapping[str, Feature] | None = None,
    row_optimizer: optax.GradientTransformation | None = None,
    dense_optimizer: optax.GradientTransformation | None = None,
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
      row_optimizer: optimizer of tables without one. None:
        `rowwise_adagrad(0.05)`.
      dense_optimizer: optimizer of the model. None: `optax.adam(1e-3)`.
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
      rowwise_adagrad(0.05) if row_optimizer is None else row_optimizer,
      optax.adam(1e-3) if dense_optimizer is None else dense_optimizer,
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
    self._places = Places()
    # Of what changes which batches are trained. `Maker.turns` is of what is
    # done with the rows, and is never waited for by who has it already.
    self._turns = Turns()

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

    Each source is resumed after its last batch that was trained, also if other
    sources were trained in between, after `restore`, and if `skip` changes. A
    skip that compares rows cannot be resumed after another source. A
    generator that raised an error cannot be resumed; give a function that
    makes one.

    Args:
      source: from `batches`; or a `BatchSource`, or what `batches` takes as its
        only argument.
      steps: to take at most; None: until the source ends.
      skip: what to leave out, and when; None: nothing.
      on_step: called with the record of each step, before the next step is
        taken. So each step waits for its loss.

    Raises:
      UserError: a batch that cannot be trained on, an endless source and no
        `steps`, a source that has ended, or a loss that is not finite.
    """
    losses, events = [], []
    ahead = on_step is None
    for record in self._steps(source, steps, skip, ahead):
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
    """Trains as `train`, but takes a step only when its record is asked for.

    So each step waits for its loss. Who stops has taken the steps of which
    there are records, and no more.
    """
    return self._steps(source, steps, skip, False)

  def _steps(
    self, source: Source, steps: int | None, skip: Skip | None, ahead: bool
  ) -> Iterator[StepRecord]:
    if steps is None and is_endless(source):
      raise UserError(
        'training on a source without end needs an end',
        got='no steps',
        where='Trainer.train, steps',
        hint='give the steps to take, or epochs to batches(...)',
      )
    most = 1 << 62 if steps is None else steps  # or more than any run takes
    taken, learned = 0, self._maker.learned()
    try:
      while True:
        rest = most - taken
        begin = functools.partial(self._begin, source, skip, rest, ahead)
        current, records = self._alone('train', begin)
        take = functools.partial(_next, current, records)
        while record := self._alone('train', take):
          taken += 1
          yield record
        # Else another thread came in between, and this source is resumed.
        if taken == most or self._reading is current:
          break
    except Exception:
      if self._maker.has_learned_only_names(learned):
        self._alone('train', functools.partial(self._forget, learned))
      raise
    if not taken and most:
      raise _no_batch(current.restored)

  def evaluate(self, source: Source, max_batches: int | None = None) -> Metrics:
    """Returns metrics of the predictions on the source's examples.

    Args:
      source: as of `train`, with labels; it must end. Examples by name are
        read from the first one in the order in which they were given, even if
        training shuffles them.
      max_batches: the most to score; None: all.

    Raises:
      UserError: a batch that cannot be scored, no labels, or no end.
    """
    return self._maker.score(
      source, lambda parts, bound: evaluate.evaluate(parts, bound, max_batches)
    )

  def predict(
    self, source: Source, max_batches: int | None = None
  ) -> Float[np.ndarray, '...']:
    """Returns logits f32[n], or [n, T], of the source's examples.

    They come in the order of the examples as they were given, epoch by epoch.

    Args:
      source: as of `evaluate`, but it needs no labels.
      max_batches: the most to score; None: all.

    Raises:
      UserError: as `evaluate`, but for labels.
    """
    return self._maker.score(
      source,
      lambda parts, bound: evaluate.predict(parts, bound, max_batches).logits,
    )

  def rows(self, table: str) -> Array:
    """The rows of a table as they are now, [R, D] of its dtype; a copy.

    Raises:
      UserError: there is no such table.
    """
    choose(self.tables.tables, table, 'Trainer.rows, table')
    return self._maker.turns.run(lambda: self.parts.engine.rows_of(table))

  def vocabulary(self, table: str) -> Vocabulary:
    """The ids of a table's rows as trained, where a growing one gave them.

    Raises:
      UserError: there is no such table, or its rows have no such ids.
    """
    choose(self.tables.tables, table, 'Trainer.vocabulary, table')

    def frozen() -> Vocabulary:
      grown = self.parts.grown
      if table not in grown:
        raise UserError(
          'only a table whose vocabulary grew while training has one',
          got=repr(table),
          where='Trainer.vocabulary, table',
          hint='give slip.batches(..., vocabularies={...:'
          ' GrowingVocabulary(...)}), or ask the one that was fitted',
        )
      return frozen_at(grown[table])

    return self._maker.turns.run(frozen)

  def save(self, path: str | os.PathLike[str]) -> int:
    """Saves everything into a folder, of which the newest step is kept.

    Returns:
      The steps taken.

    Raises:
      UserError: no source has come yet, or as `Checkpoints.save`.
    """

    def save() -> int:
      current = self._reading
      if current is None:
        position = self._places.saved()
      else:
        now = current.planned.get_state()
        position = self._places.saved(current.source, now)
      return keeping.save(path, self.parts, position)

    return self._maker.turns.run(save)

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
      resume: whether sources are resumed where the run was. The one that is
        trained next must hold the same examples as one of the run's; later
        ones may be new. Else all begin where they are.
      step: of another checkpoint than the newest, which is still there.

    Returns:
      The steps taken when it was saved.

    Raises:
      UserError: as `Checkpoints.restore`; the trainer is then as it was.
    """
    maker = self._maker
    if step is not None:
      check_whole(step, 0, 'Trainer.restore, step', 'or leave it out')

    def replace() -> int:
      parts, position = keeping.restore(path, maker.parts, maker.of_facts, step)
      maker.parts = parts
      saved = position.schedule_state if resume else {}
      self._places = self._places.restored(saved)
      return position.step

    def restore() -> int:
      self._end()
      return maker.turns.run(replace)

    return self._alone('restore', restore)

  def export(
    self,
    path: str | os.PathLike[str],
    source: Source | None = None,
    *,
    dtype: str = 'float32',
    batch_sizes: Sequence[int] = BATCH_SIZES,
    platforms: Sequence[str] = ('cpu',),
  ) -> None:
    """Exports model, rows and vocabularies into a folder for `slip_serve`.

    The folder is complete, or absent. It does not change afterwards.

    Args:
      path: a new or empty folder.
      source: says by its vocabularies which raw id has which row, and how
        dense features are made. None: the source that was trained last.
      dtype: of rows, 'float32', 'float16' or 'int8'. In float32 scores have
        the bits of `predict` for batches of the exported sizes.
      batch_sizes: examples that one program scores at once.
      platforms: what the programs run on: 'cpu', 'cuda', 'rocm', 'tpu'.

    Raises:
      UserError: no source has come yet, something that cannot be exported, or
        no room.
    """
    check_arguments(path, dtype, batch_sizes, platforms)

    def write() -> None:
      given = self._maker.last_trained() if source is None else opened(source)
      if given is None:
        raise UserError(
          'an export needs the source that the trainer was trained on',
          got='none since the trainer was made',
          where='export, source',
          hint='give one with the same vocabularies',
        )
      self.parts.check_consistent()
      facts = facts_of(given, self.parts)
      how = dtype, batch_sizes, platforms
      write_export(self.parts, path, facts, *how)

    self._maker.turns.run(write)

  def close(self) -> None:
    """Ends the threads; what comes next starts others."""
    with held():
      self._alone('close', self._end)

  def _alone(self, what: str, call: Callable[[], T]) -> T:
    """Calls what changes the batches that are trained, in its turn.

    Raises:
      UserError: the caller is called by the trainer itself.
    """
    reading = self._reading
    within = reading is not None and reading.planned.reads_here
    if within or self._turns.mine or self._maker.turns.mine:
      raise UserError(
        'a source or a model must not train, restore or close the trainer'
        ' that calls it',
        got=f'{what} within its call',
        where=f'Trainer.{what}',
        hint='do it after the call, or in on_step',
      )
    return self._turns.run(call)

  def _end(self, *, closes: bool = True) -> None:
    """Ends the reading under way; called again, it ends what was cut off.

    Args:
      closes: whether to close a source of batches that the user holds.
    """
    reading = self._reading
    if reading is None:
      return
    left = reading.end(self.parts, closes)

    def leave() -> None:
      self._places.leave(reading.source, left)
      self._reading = None

    self._maker.turns.run(leave)

  def _forget(self, learned: Learned) -> None:
    """Forgets the names of a source on which no step was taken."""
    with held():
      self._end(closes=False)
      self.parts.names = learned.names

  def _begin(
    self, source: Source, skip: Skip | None, steps: int, ahead: bool
  ) -> tuple[reading.Reading, Iterator[StepRecord]]:
    """Reads a source, and takes steps on it until another one is read."""
    current = self._read(source, skip)

    def stop() -> bool:
      return self._reading is not current

    return current, loop.train(self.parts, current.planned, steps, stop, ahead)

  def _read(self, source: Source, skip: Skip | None) -> reading.Reading:
    """The planned batches of a source, from where it was left."""
    old = self._reading
    if old is not None and old.planned.closed:  # something cut its end off
      self._end()
      old = None
    if old is not None and old.source is source:
      if old.skip == skip:
        return old
      reading.check_skip(skip)
      old.pause(self.parts)  # so that nobody reads while it is looked into
    reading.check_skip(skip)
    # While a new one is bound, the old one could go on.
    bound = self._maker.bind(source, skip is not None)
    with held():
      self._end(closes=False)
      return self._resume(source, bound, skip)

  def _resume(
    self, source: Source, bound: BatchSource, skip: Skip | None
  ) -> reading.Reading:
    left, parts = self._places.find(source, bound), self.parts
    watched = parts.state.watch is not None
    new = reading.resume(parts, source, bound, skip, self._ahead, left)
    watched = watched or parts.state.watch is not None

    def begin() -> None:
      self._places.begin(source, left, alone=watched)
      self._reading = new

    self._maker.turns.run(begin)
    return new


def _no_batch(restored: bool) -> UserError:
  """The error of a source that has no more batches."""
  if restored:
    return UserError(
      'there must be a batch to train on',
      got='a checkpoint that is at the end of these examples',
      where='Trainer.train, source',
      hint='make the source anew for another pass, or restore with'
      ' resume=False',
    )
  return UserError(
    'there must be a batch to train on',
    got='a source that has ended',
    where='Trainer.train, source',
    hint='make it anew, or leave epochs out',
  )


def _next(
  current: reading.Reading, records: Iterator[StepRecord]
) -> StepRecord | None:
  """The record of the next step, if one is taken."""
  record = next(records, None)
  current.trained()
  return record
