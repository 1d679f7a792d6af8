"""The user's trainer.

Its parts are made when the first source comes, because only then the number of
dense features and the popular rows are known. A user's own loop takes them from
`Trainer.parts` and uses `planned`, `slipstream` and `train` of
`slipstream_jax.training`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import os
from typing import Any, NoReturn, TypeVar

import jax
from jaxtyping import Float
import numpy as np
import optax

from slipstream_jax.api.callbacks import Callbacks
from slipstream_jax.api.fit import (
  Actions,
  begins_again,
  check_passes,
  draws_bar,
  Fit,
  HeldOut,
  MANY,
  Monitor,
  Passes,
  Plan,
)
from slipstream_jax.api.history import History
from slipstream_jax.api.making import Maker, opened, Source
from slipstream_jax.api.position import (
  ActiveSource,
  check_skip,
  resume,
  SourceStates,
)
from slipstream_jax.api.summary import describe, Summary, summary_of
from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.data.interrupts import held, TurnLock
from slipstream_jax.data.source import BatchSource, ColumnNames, is_endless
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.engine.clock import Payoff
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.pipeline import workers_of
from slipstream_jax.errors import check_seed, check_whole, choose, UserError
from slipstream_jax.export.folder import (
  BATCH_SIZES,
  check_arguments,
  write_export,
)
from slipstream_jax.export.source import facts_of
from slipstream_jax.placement.fixed import placements_of, Placing
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.store.memory import MEMORY, Storage
from slipstream_jax.tables import Feature, Table, TableSet
from slipstream_jax.training import evaluate, loop, retrieval
from slipstream_jax.training.divided import (
  check_one_process,
  divided,
  towers_of,
)
from slipstream_jax.training.loop import StepRecord
from slipstream_jax.training.metrics import (
  check_metrics,
  check_watched,
  Metric,
  Metrics,
)
from slipstream_jax.training.recipe import LossFn, Recipe, Watched
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.transforms.rowwise import rowwise_adagrad
from slipstream_jax.types import Array
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.growing import frozen_at

T = TypeVar('T')


class Trainer:
  """Trains a model on tables in host memory. `with` closes its threads.

    trainer = slip.Trainer(model, {'item': slip.Table(10**7)})
    trainer.train(source, steps=1000)
    trainer.evaluate(held_out).auc

  Calls from several threads take turns between steps. A source or a model that
  the trainer calls may predict with it and save it, but not train, restore or
  close it.

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
    metrics: Sequence[Metric | str] | None = None,
    placement: Placing = 'streamed',
    store: Storage = MEMORY,
    hot_bytes: int = 1 << 28,
    watched: Watched = 'hot',
    microbatches: int = 1,
    devices: int = 1,
    parts: int | None = None,
    exchange: str = 'float32',
    replicas: int = 1,
    hosts: int = 1,
    prefetch: int = 2,
    workers: int | None = None,
    seed: int = 0,
  ) -> None:
    """Makes a trainer before its first step.

    Args:
      model: a flax model, or two functions, that returns logits [B], or [B, 1],
        or [B, T] of T heads. See docs/how-to/own-model.md.
      tables: by name.
      features: by name. None: one per table, with its name.
      row_optimizer: optimizer of tables without one. None:
        `rowwise_adagrad(0.05)`.
      dense_optimizer: optimizer of the model. None: `optax.adam(1e-3)`. All
        optimizers get `weight_aware`, so that an example of weight w counts as
        w examples.
      loss: function of logits and labels to a loss per example, or one per
        head. Labels are in [0, 1] for a loss of clicks, as the default, and
        any numbers for others, such as `optax.squared_error`.
      metrics: what `evaluate` computes: functions of labels and logits, f64[n]
        both, to a number, or names in `METRICS`. None: those that fit the loss.
      placement: one of `PLACEMENTS`, its name, or made by `cached`, or these by
        table name.
      store: stores the rows that are not on the device: memory, or made by
        `tiered`.
      hot_bytes: device memory for hot rows and their state, where needed.
        `skip_stale` takes 4 * D + 13 bytes for each of them beside that.
      watched: rows that `skip_stale` judges, 'hot' or 'all'. See `Recipe`.
      microbatches: parts into which a step's batch is cut, to save memory.
      devices: how many share the rows and the examples, a power of two. See
        docs/how-to/devices.md.
      parts: equal parts of a batch, whose gradients are added as a tree. Runs
        with equal parts have equal bits for any number of devices, which
        divides them. None: 1 for one device that exchanges f32, else 8.
      exchange: in what devices exchange rows and their gradients, 'float32' or
        'bfloat16', which takes half the bytes.
      replicas: devices that have the same rows, such as one of each host. It
        divides the devices. More of them exchange less between hosts, keep more
        rows in all, and change no bit.
      hosts: equal groups of neighbouring devices, to each of which a row goes
        at most once in a step. It changes no bit. With a `DMT`, each has the
        tables of one tower, and only vectors of towers go between them.
      prefetch: batches prepared ahead. 0 prepares each when it is asked for.
      workers: threads that prepare them. None: one per core, at most 8.
      seed: of parameters, rows and dropout, at least 0.

    Raises:
      UserError: an argument that is wrong whatever the batches are.
    """
    if not isinstance(tables, TableSet):
      tables = TableSet(tables, {} if features is None else features)
    elif features is not None:
      raise UserError(
        'a table set has its features already',
        got='features beside it',
        where='Trainer, features',
        hint='leave them out, or give tables by name',
      )
    self.tables = tables
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
    self._metrics = check_metrics(metrics, 'Trainer, metrics')
    check_seed(seed, 'Trainer, seed')
    check_whole(hot_bytes, 1, 'Trainer, hot_bytes', 'such as 1 << 28')
    check_whole(microbatches, 1, 'Trainer, microbatches', 'use 1, for none')
    towers = towers_of(model, tables, hosts)
    over = divided(devices, parts, exchange, replicas, hosts, towers)
    self._maker = Maker(recipe, placements, hot_bytes, seed, store, over)
    self._made_of = recipe, placements
    check_whole(prefetch, 0, 'Trainer, prefetch', 'use 2, or 0')
    workers = workers_of(workers, 'Trainer, workers')
    self._ahead = prefetch, workers
    self._reading: ActiveSource | None = None
    self._states = SourceStates()
    # Taken by calls that change which batches are trained. `Maker.turns` are
    # for the rows. A thread takes these before those, never after.
    self._turns = TurnLock()

  def __repr__(self) -> str:
    return describe(*self._made_of, self._maker.parts)

  def __enter__(self) -> 'Trainer':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def parts(self) -> TrainerParts:
    """The trainer's parts, for a user's own loop.

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

  @property
  def params(self) -> Any:
    """The model's parameters as a copy, a tree of numpy arrays.

    Raises:
      UserError: no source has come yet.
    """
    return self._maker.turns.run(
      # Copies, because the next step may use their memory.
      lambda: jax.tree.map(np.array, to_host(self.parts.state.params))
    )

  def summary(self) -> Summary:
    """Returns a text of the tables, their sizes and places, and the model.

    Sizes include the state of the row optimizer. Before the first source, what
    depends on it is left open.
    """
    return self._maker.turns.run(
      lambda: summary_of(*self._made_of, self._maker.parts)
    )

  def train(
    self,
    source: Source,
    steps: int | None = None,
    *,
    epochs: int | None = None,
    skip: Skip | None = None,
    validation: Source | None = None,
    every: int | None = None,
    patience: int | None = None,
    monitor: Monitor | None = None,
    progress: bool | None = None,
    callbacks: Iterable[object] = (),
    on_step: Callable[[StepRecord], Any] | None = None,
  ) -> History:
    """Takes up to `steps` steps, or `epochs` passes, and returns the results.

    Each source is resumed after its last trained batch. This also holds if
    other sources were trained in between, after `restore`, and if `skip`
    changes. A skip that compares rows cannot be resumed after another source. A
    generator that raised an error cannot be resumed. Give a function that makes
    one instead.

    Validations change no number of the training.

    Args:
      source: from `batches`, or a `BatchSource`, or what `batches` takes as its
        only argument.
      steps: the most steps to take. None: until the passes or the source end.
      epochs: passes over the source to end. The first one may be under way. A
        pass over a source without end has `batches_per_epoch` batches: what a
        shuffled one leaves out of a pass is said at `batches`. None: until the
        source ends.
      skip: what to leave out, and when. None: nothing.
      validation: held-out examples, as `evaluate` takes them, that can be read
        again. They are scored every so often, and at the end.
      every: steps between validations. None: one after each pass.
      patience: validations in a row without a better metric that end the
        training. The trainer, and where the source is resumed, are then those
        of the best validation, also if training ended by itself. Only an
        iterator continues where it is. None: nothing ends or is restored.
      monitor: maps metrics to the number that is to be low, such as
        `lambda metrics: -metrics.auc`. None: the first of log loss, RMSE, MAE,
        AUC and accuracy that there is.
      progress: whether to draw a bar, on stderr if that is a terminal or in a
        notebook, and a table at the end. None: if rich is installed.
      callbacks: objects with methods `on_step(record)`, `on_validation(record)`
        or `on_end(history)`, such as `CSVLog` and `TensorBoard`. The record of
        a step comes while the next step may run. After a validation no step
        runs.
      on_step: called with the record of each step before the next step is
        taken, so that each step waits for its loss.

    Raises:
      UserError: a batch that does not fit, an endless source and neither
        `steps` nor `epochs`, a source that has ended or has not as many passes,
        examples that cannot be validated on, or a loss that is not finite.
    """
    plan = Plan(steps, epochs, every, patience, monitor)
    plan.check(validation is not None)
    if patience is not None and monitor is None:
      check_watched(self._metrics)
    if patience is not None:
      check_one_process('patience, whose best state is kept on one machine')
    again = False
    if epochs is None:
      self._check_end(source, steps)
    else:
      unbound = self._maker.open(source, trains=False)
      check_passes(unbound, epochs)
      again = begins_again(unbound)
    held_out = None
    if validation is not None:
      held_out = HeldOut(validation, source, self.tables)
      held_out.check(self._maker.open(source, trains=True))
    calls, bar = Callbacks(callbacks, on_step), draws_bar(progress)

    def take(most: int, passes: Passes | None) -> Iterator[StepRecord]:
      return self._take(source, most, skip, on_step is None, passes)

    actions = Actions(
      take,
      functools.partial(self._begin_again, source),
      self.evaluate,
      functools.partial(self._save_moment, source),
      functools.partial(self._go_back, source, skip),
      functools.partial(self._totals, skip),
      self._refuse_end,
    )
    return Fit(plan, held_out, again, actions, calls, bar).run()

  def steps(
    self,
    source: Source,
    steps: int | None = None,
    *,
    skip: Skip | None = None,
  ) -> Iterator[StepRecord]:
    """Takes a step whenever its record is asked for, as `train`.

    Each step waits for its loss. Exactly the steps with records are taken.
    """
    return self._steps(source, steps, skip, False)

  def _steps(
    self, source: Source, steps: int | None, skip: Skip | None, ahead: bool
  ) -> Iterator[StepRecord]:
    self._check_end(source, steps)
    most, taken = MANY if steps is None else steps, 0
    for record in self._take(source, most, skip, ahead):
      taken += 1
      yield record
    if not taken and most:
      self._refuse_end()

  def _check_end(self, source: Source, steps: int | None) -> None:
    if steps is None and is_endless(source):
      raise UserError(
        'training on a source without end needs an end',
        got='no steps',
        where='Trainer.train, steps',
        hint='give the steps to take, or epochs to train(...) or batches(...)',
      )

  def _refuse_end(self) -> NoReturn:
    """Raises the error for a source that has no more batches."""
    got, hint = 'a source that has ended', 'make it anew, or leave epochs out'
    if self._reading is not None and self._reading.restored:
      got = 'a checkpoint that is at the end of these examples'
      hint = (
        'make the source anew for another pass, or restore with resume=False'
      )
    raise UserError(
      'there must be a batch to train on',
      got=got,
      where='Trainer.train, source',
      hint=hint,
    )

  def _take(
    self,
    source: Source,
    most: int,
    skip: Skip | None,
    ahead: bool,
    passes: Passes | None = None,
  ) -> Iterator[StepRecord]:
    """Takes up to `most` steps, or fewer if the source or its pass ends."""
    taken, (names, examples) = 0, self._maker.learned
    try:
      while True:
        rest = most - taken
        begin = functools.partial(
          self._begin, source, skip, rest, ahead, passes
        )
        current, records = self._alone('train', begin)
        take = functools.partial(_next, current, records)
        while record := self._alone('train', take):
          taken += 1
          yield record
        # Otherwise another thread came in between. Resume this source.
        if taken == most or self._reading is current:
          break
    except Exception:
      new_names, seen = self._maker.learned
      if seen == examples and new_names != names:  # nothing was trained
        self._alone('train', functools.partial(self._forget, names))
      raise

  def evaluate(self, source: Source, max_batches: int | None = None) -> Metrics:
    """Returns metrics of the predictions on the source's examples.

    Args:
      source: as in `train`, with labels. It must end. Examples by name are
        read from the first one in their own order, even if training shuffles
        them.
      max_batches: the most batches to score. None: all.

    Raises:
      UserError: a batch that does not fit, no labels, or no end.
    """
    return self._maker.score(
      source,
      lambda parts, bound: evaluate.evaluate(
        parts, bound, max_batches, self._metrics
      ),
    )

  def predict(
    self,
    source: Source,
    max_batches: int | None = None,
    *,
    probabilities: bool = False,
  ) -> Float[np.ndarray, '...']:
    """Returns logits f32[n], or [n, T], of the source's examples.

    They come in the order of the examples, epoch by epoch.

    Args:
      source: as in `evaluate`, but it needs no labels.
      max_batches: the most batches to score. None: all.
      probabilities: whether to return probabilities of clicks instead, if the
        loss is of clicks.

    Raises:
      UserError: as `evaluate`, except for labels, or a loss that knows no
        probabilities.
    """

    def scores(parts: TrainerParts, bound: BatchSource) -> np.ndarray:
      if probabilities:
        return evaluate.probabilities(parts, bound, max_batches)
      return evaluate.predict(parts, bound, max_batches).logits

    return self._maker.score(source, scores)

  def vectors(
    self, side: str, source: Source | None = None
  ) -> Float[np.ndarray, 'n E']:
    """Returns the vectors of a two-tower model, f32[n, E] of length 1.

    The score of a user and an item is the product of their vectors, divided by
    the model's temperature. So an index of largest products serves them.

    Args:
      side: 'users' or 'items'.
      source: examples whose users, or items, are wanted. Their other columns
        are not used. None, for items alone: all rows of the items' table.

    Raises:
      UserError: as `predict`, the model has no towers, or all items are asked
        for and have several features.
    """
    if source is None and side == 'items':
      return self._maker.turns.run(lambda: retrieval.row_vectors(self.parts))
    if source is None:
      raise UserError(
        'vectors need examples, except those of all items',
        got=f'no source, for side {side!r}',
        where='Trainer.vectors, source',
        hint="give examples of the users, or side 'items'",
      )
    return self._maker.score(
      source, lambda parts, bound: evaluate.vectors(parts, bound, side)
    )

  def top_k(
    self,
    source: Source,
    k: int,
    *,
    items: Source | None = None,
    without: Any = None,
  ) -> retrieval.TopK:
    """Returns the k best items for the user of each example.

    Every item is compared with every user, on the host. `vectors` has what an
    index of one's own needs.

    Args:
      source: examples of the users, as for `vectors`.
      k: how many items to return, the best one first.
      items: examples of the items to choose from. Their numbers are returned.
        None: all rows of the items' table. A vocabulary's `ids(rows)` are then
        the raw ids, None for row 0, which unknown ids share.
      without: numbers of items that each user must not get, [n, L] padded with
        -1. None: there are no such items.

    Raises:
      UserError: as `vectors`, k is out of range, or `without` does not fit.
    """
    check_whole(k, 1, 'Trainer.top_k, k', 'such as 10')
    users, every = self.vectors('users', source), self.vectors('items', items)
    return retrieval.top_k(users, every, k, without)

  def rows(self, table: str) -> Array:
    """Returns the rows of a table as a copy, [R, D] of its dtype.

    Raises:
      UserError: there is no such table.
    """
    choose(self.tables.tables, table, 'Trainer.rows, table')
    return self._maker.turns.run(lambda: self.parts.engine.rows_of(table))

  def set_rows(
    self, table: str, ids: Any, values: Any, source: Source | None = None
  ) -> None:
    """Sets the rows of some ids between two steps. They keep their row state.

    Args:
      table: its name.
      ids: [n], each once: raw ids where the source has a vocabulary of them,
        else numbers of rows.
      values: [n, D] real numbers, rounded to the nearest of the table's dtype.
      source: says by its vocabularies which id has which row. None: the source
        that was trained last. Growing vocabularies are as trained.

    Raises:
      UserError: there is no such table, no source has come yet, an id has no
        row of its own, or the values do not fit. No row has changed.
    """
    choose(self.tables.tables, table, 'Trainer.set_rows, table')
    change = functools.partial(self._maker.set_rows, table, ids, values, source)
    self._alone('set_rows', change)

  def vocabulary(self, table: str) -> Vocabulary:
    """Returns the growing vocabulary of a table as trained.

    Raises:
      UserError: there is no such table, or it has no growing vocabulary.
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
    """Saves the trainer into a folder, which keeps the newest step.

    Returns:
      The number of steps taken.

    Raises:
      UserError: no source has come yet, or as `Checkpoints.save`.
    """

    def save() -> int:
      current = self._reading
      if current is None:
        position = self._states.saved()
      else:
        now = current.planned.get_state()
        position = self._states.saved(current.source, now)
      try:
        with contextlib.closing(Checkpoints(path)) as checkpoints:
          return checkpoints.save(self.parts, position)
      finally:
        self.parts.engine.meet()  # the others must find what is written

    return self._maker.turns.run(save)

  def restore(
    self,
    path: str | os.PathLike[str],
    *,
    resume: bool = True,
    step: int | None = None,
  ) -> int:
    """Restores the newest checkpoint of a folder.

    A damaged checkpoint is refused, and no older one is restored instead.

    Args:
      path: the folder that `save` wrote.
      resume: whether sources are resumed where the run was. The next source
        must have the same examples as one of the run's. Later ones may be new.
        If false, all sources begin where they are.
      step: of another checkpoint than the newest.

    Returns:
      The number of steps taken when it was saved.

    Raises:
      UserError: as `Checkpoints.restore`. The trainer has not changed.
    """
    maker = self._maker
    if step is not None:
      check_whole(step, 0, 'Trainer.restore, step', 'or leave it out')

    def replace() -> int:
      position = maker.restore(path, step)
      saved = position.schedule_state if resume else {}
      self._states = self._states.restored(saved)
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
      UserError: no source has come yet, the model or a vocabulary cannot be
        exported, or there is no room.
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
      how, engine = (dtype, batch_sizes, platforms), self.parts.engine
      if engine.is_first:
        try:
          write_export(self.parts, path, facts, *how)
        finally:
          engine.meet()
      else:
        engine.follow()

    self._maker.turns.run(write)

  def close(self) -> None:
    """Ends the threads. Later calls start others."""
    with held():
      self._alone('close', self._end)

  def _alone(self, what: str, call: Callable[[], T]) -> T:
    """Calls, in its turn, what changes which batches are trained.

    Refuses a call from a source or a model that the trainer calls.
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
    """Ends the current reading. If it was interrupted, call it again."""
    reading = self._reading
    if reading is None:
      return
    state = reading.end(self.parts, closes)

    def leave() -> None:
      self._states.leave(reading.source, state)
      self._reading = None

    self._maker.turns.run(leave)

  def _forget(self, names: ColumnNames) -> None:
    """Restores the names from before a source on which no step was taken."""
    with held():
      self._end(closes=False)
      self.parts.names = names

  def _begin_again(self, source: Source) -> None:
    """Lets a source that is made anew begin with its first batch."""

    def begin() -> None:
      self._end(closes=False)
      self._states.forget(source)

    self._alone('train', begin)

  def _save_moment(self, source: Source, checkpoints: Checkpoints) -> None:
    """Saves this moment and the position of the source being trained on."""

    def save() -> None:
      reading = self._reading
      if reading is None or reading.source is not source:
        raise UserError(
          'a trainer that may stop early is trained by one thread alone',
          got='another source since the last step',
          where='Trainer.train, patience',
          hint='leave patience out, or train the other source afterwards',
        )
      now = reading.planned.get_state()
      checkpoints.save(self.parts, now, wait=False)

    self._maker.turns.run(save)

  def _go_back(self, source: Source, skip: Skip | None, folder: str) -> None:
    """Restores what `_save_moment` saved of training on this source."""
    maker = self._maker

    def replace() -> None:
      position = maker.restore(folder)
      self._states.go_back(source, position.schedule_state, skip)

    def go_back() -> None:
      self._end(closes=False)
      maker.turns.run(replace)

    self._alone('train', go_back)

  def _totals(
    self, skip: Skip | None
  ) -> tuple[Counters, Payoff | None, float | None]:
    """Returns the counters, whether skipping saves time, and what it asks."""
    reading = self._reading
    payoff = None if reading is None else reading.planned.clock.payoff()
    asked = None if skip is None else skip.asked
    return self.parts.engine.counters, payoff, asked

  def _begin(
    self,
    source: Source,
    skip: Skip | None,
    steps: int,
    ahead: bool,
    passes: Passes | None,
  ) -> tuple[ActiveSource, Iterator[StepRecord]]:
    """Reads a source, and takes steps on it until another one is read."""
    current = self._read(source, skip)

    def stop() -> bool:
      if self._reading is not current:
        return True
      return passes is not None and passes.over(current)

    return current, loop.train(self.parts, current.planned, steps, stop, ahead)

  def _read(self, source: Source, skip: Skip | None) -> ActiveSource:
    """Returns the reading of a source, from where training left it."""
    check_skip(skip)
    old = self._reading
    if old is not None and old.planned.closed:  # its end was interrupted
      self._end()
      old = None
    if old is not None and old.source is source:
      if old.skip == skip:
        return old
      old.pause(self.parts)  # before `bind` reads it
    # If this fails, the old reading is still there.
    bound = self._maker.bind(source, skip is not None)
    with held():
      self._end(closes=False)
      state, parts = self._states.find(source, bound), self.parts
      follows = parts.state.watch is not None or any(
        one is not None and one.scores_by_model
        for one in (skip, old and old.skip)
      )
      new = resume(parts, source, bound, skip, self._ahead, state)
      follows = follows or parts.state.watch is not None

      def begin() -> None:
        self._states.begin(source, state, alone=follows)
        self._reading = new

      self._maker.turns.run(begin)
    return new


def _next(
  current: ActiveSource, records: Iterator[StepRecord]
) -> StepRecord | None:
  """Returns the record of the next step, if one is taken."""
  record = next(records, None)
  current.bound.keep_from(current.position)
  return record
