"""Looks after a run: losses that are not finite, and signs of other trouble."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common.meter import Meter
from experiments.run.summary import Run
from slipstream_jax.data.admission import admit
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.engine.counters import Counters
from slipstream_jax.errors import UserError
from slipstream_jax.training.loop import BadLoss, leave_out, StepRecord
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import Batch

BAD_LOSS = 'bad_loss'
"""Kind of the lines of metrics that tell of one."""

_POINTS = 5  # of the learning curve, that must not all be one
_SAME = 1e-9  # relative
_MOST_DROPPED = 0.99
_GROWTH = 100.0


class Guard:
  """What a run does about bad losses, and what it was warned of already.

  Nothing of it is saved: what it does follows from the losses, so that a run
  that goes on does it again.
  """

  def __init__(self, run: Run, meter: Meter) -> None:
    """Nothing has happened yet."""
    self._run, self._meter = run, meter
    self._bad = 0
    self._left_out: dict[int, int] = {}  # batches to leave out after a step
    self._largest: float | None = None
    self._counters = run.trainer.engine.counters
    self._said: set[str] = set()

  def ends(self, step: int) -> list[int]:
    """Steps from here on after which batches are left out."""
    return [end for end in self._left_out if end > step]

  def records(self, records: Iterator[StepRecord]) -> Iterator[StepRecord]:
    """The same, where each step that was skipped is told of.

    Raises:
      UserError: too many were.
    """
    for at in records:
      if not math.isfinite(at.loss):
        seen = at.counters.examples_seen
        error = BadLoss(at.step, seen, at.loss)
        self._count(error, 'it changed nothing')
        self._run.recorder.write(
          {'step': at.step, 'kind': BAD_LOSS, 'examples_seen': seen}
        )
      yield at

  def leave_out(self, step: int) -> None:
    """Goes past the batches whose loss was bad, if they come next.

    Raises:
      UserError: something depends on one of them.
    """
    run = self._run
    for _ in range(self._left_out.get(step, 0)):
      leave_out(run.trainer, run.batches)
      seen = run.trainer.engine.counters.examples_seen
      run.recorder.write(
        {'step': step, 'kind': BAD_LOSS, 'examples_seen': seen}
      )

  def go_back(self, error: BadLoss, restore: Callable[[], int]) -> int:
    """The step to go on from, of the last checkpoint.

    Args:
      error: what happened.
      restore: puts the last checkpoint into the trainer, and returns its step.

    Raises:
      UserError: the run stops instead.
    """
    run = self._run
    saved = run.checkpoints.newest()
    if run.config.train.on_bad_loss != 'rollback' or saved is None:
      raise _at_checkpoint(error, saved) from error
    self._count(error, f'back to step {saved}, and past its batch')
    step = restore()
    after = error.step - 1
    self._left_out[after] = self._left_out.get(after, 0) + 1
    self._counters = run.trainer.engine.counters
    run.recorder.go_back(step)
    self._meter.go_back(step, self._counters)
    return step

  def _count(self, error: BadLoss, done: str) -> None:
    self._bad += 1
    run, most = self._run, self._run.config.train.most_bad_losses
    if self._bad > most:
      stopped = _at_checkpoint(error, run.checkpoints.newest())
      raise UserError(
        f'no more than {most} losses may be bad',
        got=self._bad,
        where=stopped.where,
        hint=f'{stopped.hint}, or raise config.train.most_bad_losses',
      )
    run.screen.print(
      f'the loss is {error.loss} ({error.where}): {done}', style='bold red'
    )

  def look(self, step: int) -> None:
    """Warns of what bodes ill; once of each kind."""
    run = self._run
    config, counters = run.config, run.trainer.engine.counters
    self._warn('still', standing_still(run.recorder.lines))
    size = config.data.batch_size
    self._warn('all', dropping_all(self._counters, counters, size))
    self._counters = counters
    source = run.data.test(config.eval.batch_size)
    try:
      largest = largest_element(run.trainer, next(source))
    finally:
      source.close()
    if self._largest is None:
      self._largest = largest
    most = config.train.largest_element
    self._warn('rows', exploding(self._largest, largest, most), step)

  def _warn(self, kind: str, words: str | None, step: int = 0) -> None:
    if words is not None and kind not in self._said:
      self._said.add(kind)
      self._run.screen.print(words, style='bold red')


def _at_checkpoint(error: BadLoss, saved: int | None) -> UserError:
  """The same error, which says where the last whole state is."""
  kept = 'no checkpoint yet' if saved is None else f'step {saved} is saved'
  return UserError(
    error.rule, got=error.got, where=f'{error.where}; {kept}', hint=error.hint
  )


def largest_element(trainer: TrainerParts, batch: Batch) -> float:
  """Returns the largest absolute value in the rows that a batch looks up.

  Raises:
    UserError: a batch that the trainer could not train on.
  """

  def largest() -> float:
    trainer.check_consistent()
    lookups = admit(batch, trainer.shape, labelled=False).lookups
    return float(to_host(_largest(trainer.engine.look_up(lookups)[0])))

  return trainer.turns.run(largest)


@jax.jit
def _largest(rows: tuple[jax.Array, ...]) -> jax.Array:
  of_groups = [jnp.abs(block.astype(jnp.float32)).max() for block in rows]
  return jnp.stack(of_groups).max()


def standing_still(lines: Sequence[Mapping[str, Any]]) -> str | None:
  """Whether a metric no longer moves, in words; None if all do.

  Args:
    lines: of the run's metrics.
  """
  points = [line for line in lines if line['kind'] == 'eval'][-_POINTS:]
  if len(points) < _POINTS:
    return None
  values = [point['log_loss'] for point in points]
  if max(values) - min(values) > _SAME * max(map(abs, values)):
    return None
  return (
    f'the log loss has been {values[-1]:.6g} at the last {_POINTS} points of'
    ' the curve: nothing is learned any more, so look at the learning rates'
    ' (config.optimizer)'
  )


def dropping_all(
  before: Counters, now: Counters, batch_size: int
) -> str | None:
  """Whether next to nothing is trained any more, in words.

  Args:
    before: what was counted some time ago.
    now: by now.
    batch_size: of the run.
  """
  seen = now.examples_seen - before.examples_seen
  dropped = now.examples_dropped - before.examples_dropped
  if seen < 10 * batch_size or dropped <= _MOST_DROPPED * seen:
    return None
  return (
    f'{dropped:,} of the last {seen:,} examples were left out: next to nothing'
    ' is trained any more, so look at config.skip.drop and'
    ' config.skip.threshold'
  )


def exploding(first: float, now: float, most: float) -> str | None:
  """Whether rows have grown beyond measure, in words.

  Args:
    first: the largest element when it was first looked at.
    now: by now.
    most: what is none of anybody's concern.
  """
  if now <= max(most, _GROWTH * first):
    return None
  return (
    f'an element of a row is {now:.4g}, and the largest was {first:.4g}: rows'
    ' explode, so lower the learning rate of the rows (config.optimizer.rows)'
  )
