"""Training in passes over a source, with validations in between.

Steps are taken in chunks, up to the next validation or the end of a pass. They
overlap within a chunk. Between two chunks no step is on its way. So a
validation is of exactly the steps before it, and changes none.
"""

from collections.abc import Callable, Iterator
import contextlib
import importlib.util
import math
import sys
import tempfile
import time
from typing import Any, NamedTuple, NoReturn

import numpy as np

from slipstream_jax.api.callbacks import Callbacks
from slipstream_jax.api.history import History, Validation
from slipstream_jax.api.making import opened, Source
from slipstream_jax.api.position import ActiveSource, own_position
from slipstream_jax.checkpoint.checkpoint import Checkpoints, Saving
from slipstream_jax.data.numbered import NumberedBatches
from slipstream_jax.data.source import (
  BatchSource,
  bound_in_order,
  CheckpointableIterator,
  ColumnNames,
  is_endless,
  SourceWrapper,
  Widths,
)
from slipstream_jax.engine.clock import Payoff
from slipstream_jax.engine.counters import Counters
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.inputs.arrays import ArrayExamples, UnboundExamples
from slipstream_jax.inputs.fields import orders_of
from slipstream_jax.inputs.stream import StreamExamples
from slipstream_jax.tables import TableSet
from slipstream_jax.training.evaluate import frozen_vocabularies
from slipstream_jax.training.loop import StepRecord
from slipstream_jax.training.metrics import Metrics, watched

WHERE = 'Trainer.train'
MANY = 1 << 62
"""More steps than any run takes."""


Monitor = Callable[[Metrics], float | int | None]
"""Maps metrics to the number that early stopping wants to be low."""


class Passes:
  """Says where passes over a source of numbered batches end.

  Attributes:
    ended: passes that have ended.
    stopped: whether the last steps ended there.
  """

  def __init__(self, stops: bool = True) -> None:
    """Begins with the pass that the source is in.

    `stops`: whether steps end at the end of a pass. Else they are counted.
    """
    self._stops = stops
    self.ended, self.stopped = 0, False
    # Batches of the source: when training began, now, of a pass, and of all.
    self._began = self._read = 0
    self._size: int | None = None
    self._most: int | None = None
    self._first: int | None = None  # the pass in which training began

  def over(self, current: ActiveSource) -> bool:
    """Whether the next step reads a batch of the next pass."""
    self.stopped = False
    bound, now = current.bound, current.position
    size = bound.batches_per_epoch
    if size is None or 'delivered' not in now:
      return False
    self._read = now['delivered']
    if self._size is None:
      self._began, self._size = self._read, size
      epochs = bound.epochs if isinstance(bound, NumberedBatches) else None
      self._most = None if epochs is None else epochs * size
    item = current.planned.peek() if self._stops else None
    if item is None:
      return False
    # What is read for the next step decides: a schedule may hold examples of
    # this pass, or need the next one to fill a batch.
    read = own_position(item.scheduled.state)['delivered']
    if self._first is None:
      self._first = (read - 1) // size
    self.stopped = read > (self._first + self.ended + 1) * size
    return self.stopped

  def reach(self, epochs: int | None) -> tuple[int, int | None]:
    """Returns the batches read since training began, and how many will be.

    The second is None if that is not known.
    """
    most = self._most
    if epochs is not None and self._size and self._first is not None:
      most = (self._first + epochs) * self._size
    return self._read - self._began, most and most - self._began


class Plan(NamedTuple):
  """Numbers that `Trainer.train` was given. None as there."""

  steps: int | None
  epochs: int | None
  every: int | None
  patience: int | None
  monitor: Monitor | None = None

  def check(self, validates: bool) -> None:
    """Checks the numbers, and that `monitor` is a function.

    Raises:
      UserError: a number is out of range, or needs a validation.
    """
    if self.monitor is not None and not callable(self.monitor):
      raise UserError(
        'monitor must be a function of metrics to the number that is to be low',
        got=repr(self.monitor),
        where=f'{WHERE}, monitor',
        hint='give one such as lambda metrics: -metrics.auc',
      )
    hint = 'leave it out, or give a number such as 3'
    if self.steps is not None:
      check_whole(self.steps, 0, f'{WHERE}, steps', hint)
    for name in 'epochs', 'every', 'patience':
      value = getattr(self, name)
      if value is not None:
        check_whole(value, 1, f'{WHERE}, {name}', hint)
      if value is not None and name != 'epochs' and not validates:
        raise UserError(
          f'{name} is about validations',
          got='no examples to validate on',
          where=f'{WHERE}, {name}',
          hint='give validation=, a source of held-out examples',
        )

  def watched(self, metrics: Metrics) -> float:
    """Returns the number that is to be low, or NaN.

    Raises:
      UserError: `monitor` fails.
    """
    if self.monitor is None:
      return watched(metrics)
    try:
      value = self.monitor(metrics)
      return math.nan if value is None else float(value)
    except Exception as error:
      raise UserError(
        'monitor must map the metrics of a validation to a number, or to None',
        got=f'{type(error).__name__}: {error}',
        where=f'{WHERE}, monitor',
        hint='give one such as lambda metrics: metrics.log_loss; a metric is'
        ' None where the examples do not define it',
      ) from error


def begins_again(source: UnboundExamples | CheckpointableIterator) -> bool:
  """Whether each pass over a source is over an iterator made anew."""
  return isinstance(source, StreamExamples) and source.begins_again


def check_passes(
  source: UnboundExamples | CheckpointableIterator, epochs: int | None
) -> None:
  """Checks that a source can be read so many times.

  Raises:
    UserError: it cannot.
  """
  if epochs is None or begins_again(source):
    return
  most: int | None = 1
  if (
    isinstance(source, UnboundExamples)
    and not isinstance(source, StreamExamples)
  ) or (isinstance(source, NumberedBatches) and source.batches_per_epoch):
    most = source.epochs
  elif is_endless(source):
    raise UserError(
      'epochs are passes over a source that has an end',
      got=f'{type(source).__name__} without one',
      where=f'{WHERE}, epochs',
      hint='give steps',
    )
  if most is not None and epochs > most:
    raise UserError(
      f'epochs must be at most the {most} that the source can be read',
      got=epochs,
      where=f'{WHERE}, epochs',
      hint='leave epochs out of batches(...), or give a list or a function that'
      ' makes the iterator in place of the iterator',
    )


class _KeptOpen(SourceWrapper):
  """A source that is scored again later, so it is not closed."""

  def arrange(self, known: ColumnNames, widths: Widths) -> ColumnNames:
    """Puts columns in the order of a trainer's names."""
    if isinstance(self._source, BatchSource):
      known = self._source.arrange(known, widths)
    return known

  def close(self) -> None:
    """Does nothing."""


def draws_bar(progress: bool | None) -> bool:
  """Whether somebody sees a bar, for `Trainer.train(progress=...)`.

  Raises:
    UserError: one is asked for, and rich is not installed.
  """
  if progress is not None and not isinstance(progress, bool):
    raise UserError(
      'progress must be True, False, or None',
      got=repr(progress),
      where=f'{WHERE}, progress',
      hint='leave it out for a bar on terminals and in notebooks',
    )
  installed = importlib.util.find_spec('rich') is not None
  if progress and not installed:
    raise UserError(
      'a progress bar needs rich',
      got='an environment without it',
      where=f'{WHERE}, progress',
      hint="install it with pip install 'slipstream_jax[fit]'",
    )
  if not installed or progress is False:
    return False
  if sys.stderr is not None and sys.stderr.isatty():
    return True
  from rich.console import Console

  return 'IPython' in sys.modules and Console().is_jupyter


class HeldOut:
  """Examples to validate on, each time from the same one."""

  def __init__(self, source: Source, trained: Source, tables: TableSet) -> None:
    """Checks them before any step, and the ids of those in memory.

    Args:
      source: the examples.
      trained: the source to train on.
      tables: of the trainer.

    Raises:
      UserError: they have no end or no labels, can be read only once, or have
        an id that no table has.
    """
    self._source: Any = opened(source)
    self._start: Any = None
    got = None
    if is_endless(self._source):
      got, hint = 'one without end', 'make it with epochs=1'
    elif isinstance(self._source, CheckpointableIterator):
      if source is trained:
        got, hint = 'the one to train on', 'make another one'
      self._start = self._source.get_state()
    elif isinstance(self._source, StreamExamples) and not begins_again(
      self._source
    ):
      got = 'an iterator'
      hint = 'give a list, or a function that makes the iterator'
    elif not self._source.form.has_labels:
      got, hint = 'examples without labels', 'give labels'
    if got is not None:
      raise UserError(
        'a source to validate on must have labels and an end, and be read more'
        ' than once',
        got=got,
        where=f'{WHERE}, validation',
        hint=hint,
      )
    if isinstance(self._source, ArrayExamples):
      # Its rows are kept for the validations, so this is done once.
      bound_in_order(self._source, tables, frozen_vocabularies({})).close()

  def check(self, trained: UnboundExamples | BatchSource) -> None:
    """Checks that the columns are those of the examples to train on.

    Examples that come in batches are checked when they come.

    Raises:
      UserError: other names, or another number of dense features or labels.
    """
    where = f'{WHERE}, validation'
    if not isinstance(trained, UnboundExamples):
      return
    if not isinstance(self._source, UnboundExamples):
      return
    form, wanted = self._source.form, trained.form
    orders_of(wanted.names, form.names, where, absent=not form.dense_features)
    for what, own, other in (
      ('dense features', form.dense_features, wanted.dense_features),
      ('labels', form.labels, wanted.labels),
    ):
      if own != other:
        raise UserError(
          f'examples to validate on must have the {what} of those to train on',
          got=f'{own} in place of {other}',
          where=where,
          hint='give the same columns',
        )

  def score(self, evaluate: Callable[[Source], Metrics]) -> Metrics:
    """Returns their metrics, by `Trainer.evaluate`."""
    if self._start is None:
      return evaluate(self._source)
    self._source.set_state(self._start)
    return evaluate(_KeptOpen(self._source))


class Actions(NamedTuple):
  """Calls that a `Fit` makes of its trainer."""

  take: Callable[[int, Passes | None], Iterator[StepRecord]]
  """Takes up to so many steps, and none of the next pass."""
  begin_again: Callable[[], None]
  """Begins the next pass of a source that is made anew."""
  evaluate: Callable[[Source], Metrics]
  save: Callable[[Checkpoints], None]
  """Saves rows, parameters and position. Writes in the background."""
  go_back: Callable[[str], None]
  """Restores what was saved into the folder."""
  totals: Callable[[], tuple[Counters, Payoff | None, float | None]]
  """Returns fields of a `History`: counters, payoff and what was asked for."""
  refuse_end: Callable[[], NoReturn]
  """Raises the error for a source without a batch."""


class Fit:
  """One call of `Trainer.train`."""

  def __init__(
    self,
    plan: Plan,
    held_out: HeldOut | None,
    again: bool,
    actions: Actions,
    callbacks: Callbacks,
    bar: bool,
  ) -> None:
    """Begins no step.

    Args:
      plan: how long to train, and when to validate.
      held_out: examples to validate on, if any.
      again: whether the source `begins_again`.
      actions: what the trainer does.
      callbacks: are told what happens.
      bar: whether to draw one.
    """
    self._plan, self._held_out, self._again = plan, held_out, again
    self._actions, self._callbacks, self._bar = actions, callbacks, bar
    # Passes are only counted for who asks for them.
    per_pass = held_out is not None and plan.every is None
    stops = plan.epochs is not None or per_pass
    self._passes = Passes(stops) if stops or bar else None
    self._taken = self._since = self._of_pass = 0
    self._losses: list[float] = []
    self._steps: list[int] = []
    self._events: list[dict[str, Any]] = []
    self._validations: list[Validation] = []
    self._best, self._worse = math.inf, 0
    # Whether the next step begins a pass of a source that is made anew. None:
    # that is not known.
    self._begins_again: bool | None = None
    self._folder: str | None = None
    self._checkpoints: Checkpoints | None = None

  def run(self) -> History:
    """Takes all steps and returns their results."""
    with contextlib.ExitStack() as files:
      if self._bar:
        self._draw(files)
      while not self._chunk(files):
        pass
      counters, payoff, asked = self._actions.totals()
      if self._checkpoints is not None and not self._validations[-1].best:
        self._checkpoints.wait()
        self._actions.go_back(self._folder or '')
        counters, *_ = self._actions.totals()
    history = History(
      np.array(self._losses, np.float32),
      counters,
      tuple(self._events),
      payoff,
      np.array(self._steps, np.int64),
      tuple(self._validations),
      asked,
    )
    self._callbacks.tell('on_end', history)
    return history

  def _draw(self, files: contextlib.ExitStack) -> None:
    """Draws a bar until the block of `files` ends."""
    from rich.console import Console

    from slipstream_jax.api.progress import TrainingBar

    bar = TrainingBar(Console(stderr=True), self._reach)
    self._callbacks.add(files.enter_context(bar))

  def _reach(self, steps: int) -> tuple[int, int | None]:
    """Returns batches done, and how many there are, None if not known."""
    plan, passes = self._plan, self._passes
    assert passes is not None
    batches, most = passes.reach(plan.epochs)
    if most is None or (plan.steps is not None and plan.steps < most):
      return steps, plan.steps
    return batches, most

  def _chunk(self, files: contextlib.ExitStack) -> bool:
    """Takes steps up to a validation or the end of a pass. True at the end."""
    plan = self._plan
    left = MANY if plan.steps is None else plan.steps - self._taken
    if plan.every is not None:
      left = min(left, plan.every - self._since)
    if self._begins_again:
      self._actions.begin_again()
      self._begins_again = False
    pass_ended = self._take(left) < left
    over = self._taken == plan.steps
    if pass_ended:
      over = self._end_pass() or over
    due = over or self._since == plan.every
    due = due or (pass_ended and plan.every is None)
    if self._held_out is not None and self._since and due:
      over = self._validate(self._held_out, over, files) or over
    return over

  def _take(self, most: int) -> int:
    """Takes up to `most` steps of this pass, and returns how many."""
    taken = 0
    for record in self._actions.take(most, self._passes):
      taken += 1
      self._steps.append(record.step)
      self._losses.append(record.loss)
      if record.event is not None:
        self._events.append(record.event)
      self._callbacks.tell('on_step', record)
    self._taken += taken
    self._since += taken
    self._of_pass += taken
    return taken

  def _end_pass(self) -> bool:
    """Counts the pass that has ended. Whether it was the last one.

    Raises:
      UserError: the source has no batch.
    """
    empty, self._of_pass = not self._of_pass, 0
    passes, epochs = self._passes, self._plan.epochs
    if passes is not None and passes.stopped:
      passes.ended += 1
      return passes.ended == epochs
    if passes is None or epochs is None or not self._again:
      if not self._taken:
        self._actions.refuse_end()
      return True
    # An earlier call may have stopped behind the last batch of a pass.
    if not empty:
      passes.ended += 1
    elif self._begins_again is not None:
      self._actions.refuse_end()
    self._begins_again = True
    return passes.ended == epochs

  def _validate(
    self, held_out: HeldOut, over: bool, files: contextlib.ExitStack
  ) -> bool:
    """Scores the held-out examples. Whether training stops early."""
    started = time.perf_counter()
    metrics = held_out.score(self._actions.evaluate)
    value, seconds = self._plan.watched(metrics), time.perf_counter() - started
    self._since, best = 0, value < self._best
    self._worse = 0 if best else self._worse + 1
    record = Validation(self._steps[-1], metrics, best, seconds)
    self._validations.append(record)
    patience = self._plan.patience
    if best:
      self._best = value
      if patience is not None and not over:
        self._save(files)
    self._callbacks.tell('on_validation', record)
    return patience is not None and self._worse >= patience

  def _save(self, files: contextlib.ExitStack) -> None:
    """Saves the best state so far, in place of the one before."""
    if self._checkpoints is None:
      folder = tempfile.TemporaryDirectory(
        prefix='slipstream-best-', ignore_cleanup_errors=True
      )
      self._folder = files.enter_context(folder)
      self._checkpoints = Checkpoints(self._folder, Saving(keep=1))
      files.callback(self._checkpoints.close)
    self._actions.save(self._checkpoints)
