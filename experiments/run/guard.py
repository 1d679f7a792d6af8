"""Handles losses that are not finite, and warns of other signs of trouble."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common import report
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
"""Kind of the metrics' lines about a loss that is not finite."""
_POINTS = 5  # points of the learning curve that must differ
_SAME = 1e-9  # relative
_MOST_DROPPED = 0.99
_GROWTH = 100.0


class Guard:
  """Applies `config.train.on_bad_loss`, and warns once of each kind of trouble.

  It has no state to save. It depends on the losses alone, so a resumed run
  does the same again.
  """

  def __init__(self, run: Run, meter: Meter) -> None:
    """Watches a run from here on."""
    self._run, self._meter = run, meter
    self._bad = 0
    self._left_out: dict[int, int] = {}  # step to batches left out after it
    self._largest: float | None = None
    self._counters = run.trainer.engine.counters
    self._warned: set[str] = set()

  def ends(self, step: int) -> list[int]:
    """Returns the later steps after which batches are left out."""
    return [end for end in self._left_out if end > step]

  def records(self, records: Iterator[StepRecord]) -> Iterator[StepRecord]:
    """Yields the same records, and reports each step that was skipped.

    Raises:
      UserError: too many steps were skipped.
    """
    for at in records:
      if not math.isfinite(at.loss):
        seen = at.counters.examples_seen
        self._count(BadLoss(at.step, seen, at.loss), 'it changed nothing')
        self._record(at.step, seen)
      yield at

  def leave_out(self, step: int) -> None:
    """Leaves out the batches after a step whose loss was bad before.

    Raises:
      UserError: a batch cannot be left out.
    """
    run = self._run
    for _ in range(self._left_out.get(step, 0)):
      leave_out(run.trainer, run.batches)
      self._record(step, run.trainer.engine.counters.examples_seen)

  def go_back(self, error: BadLoss, restore: Callable[[], int]) -> int:
    """Returns to the last checkpoint, and returns its step.

    Args:
      error: what happened.
      restore: restores the last checkpoint, and returns its step.

    Raises:
      UserError: the run must stop instead.
    """
    run = self._run
    saved = run.checkpoints.newest()
    if run.config.train.on_bad_loss != 'rollback' or saved is None:
      raise _with_checkpoint(error, saved) from error
    self._count(error, f'back to step {saved}, and past its batch')
    step = restore()
    after = error.step - 1
    self._left_out[after] = self._left_out.get(after, 0) + 1
    self._counters = run.trainer.engine.counters
    run.recorder.go_back(step)
    self._meter.go_back(step, self._counters)
    return step

  def _record(self, step: int, seen: int) -> None:
    line = {'step': step, 'kind': BAD_LOSS, 'examples_seen': seen}
    self._run.recorder.write(line)

  def _count(self, error: BadLoss, action: str) -> None:
    self._bad += 1
    run, most = self._run, self._run.config.train.most_bad_losses
    if self._bad > most:
      stopped = _with_checkpoint(error, run.checkpoints.newest())
      raise UserError(
        f'no more than {most} losses may be bad',
        got=self._bad,
        where=stopped.where,
        hint=f'{stopped.hint}, or raise config.train.most_bad_losses',
      )
    report.warn(
      run.screen, f'the loss is {error.loss} ({error.where}): {action}'
    )

  def look(self, step: int) -> None:
    """Looks for signs of trouble after a step."""
    run = self._run
    config, counters = run.config, run.trainer.engine.counters
    self._warn('constant', constant_loss(run.recorder.lines))
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
    self._warn('rows', exploding(self._largest, largest, most))

  def _warn(self, kind: str, words: str | None) -> None:
    if words is not None and kind not in self._warned:
      self._warned.add(kind)
      report.warn(self._run.screen, words)


def _with_checkpoint(error: BadLoss, saved: int | None) -> UserError:
  """Returns the same error, with the step of the last checkpoint."""
  kept = 'no checkpoint yet' if saved is None else f'step {saved} is saved'
  return UserError(
    error.rule, got=error.got, where=f'{error.where}; {kept}', hint=error.hint
  )


def constant_loss(lines: Sequence[Mapping[str, Any]]) -> str | None:
  """Returns a warning if the log loss no longer changes.

  Args:
    lines: the run's metrics.
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
  """Returns a warning if nearly all examples are left out.

  Args:
    before: counters some time ago.
    now: counters by now.
    batch_size: examples of a batch.
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
  """Returns a warning if rows have grown too large.

  Args:
    first: the largest element at the first look.
    now: the largest element by now.
    most: an element that is never too large.
  """
  if now <= max(most, _GROWTH * first):
    return None
  return (
    f'an element of a row is {now:.4g}, and the largest was {first:.4g}: rows'
    ' explode, so lower the learning rate of the rows (config.optimizer.rows)'
  )


def largest_element(trainer: TrainerParts, batch: Batch) -> float:
  """Returns the largest absolute value in the rows that a batch looks up.

  Raises:
    UserError: the trainer could not train on the batch.
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
