"""The loop that trains: dispatch step t, then read what step t-1 produced.

A step is taken whole or not at all, and the batches' position is behind the
last one taken. A Ctrl-C waits for the end of the step; what fails before the
update leaves the batch to be tried again; what fails after it leaves the
trainer torn, and it says so.
"""

from collections.abc import Callable, Iterator
import math
from typing import Any, NamedTuple

import jax
from jax.profiler import StepTraceAnnotation, TraceAnnotation
import numpy as np

from slipstream_jax.data.interrupts import held
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.engine.counters import Counters, merge, of_step
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.engine.planner import PlannedBatch
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.training import edges
from slipstream_jax.training.crossings import CROSSINGS, STREAM
from slipstream_jax.training.parts import TrainerParts


class BadLoss(UserError):
  """The loss of a step is not finite: what the step changed is of no use.

  Attributes:
    step: which.
    examples_seen: of the source, up to its batch.
    loss: NaN, or infinite.
  """

  def __init__(self, step: int, examples_seen: int, loss: float):
    """Says so."""
    self.step, self.examples_seen, self.loss = step, examples_seen, loss
    super().__init__(
      'the loss must stay finite',
      got=loss,
      where=f'step {step}, after {examples_seen:,} examples of the source',
      hint='lower the learning rates or look for bad values in the data',
    )

  def __reduce__(self) -> tuple:  # keeps the error whole across processes
    return BadLoss, (self.step, self.examples_seen, self.loss)


class StepRecord(NamedTuple):
  """What one step did."""

  step: int
  """Steps taken since the start of training, this one included."""
  loss: float
  """Weighted mean loss of the batch before the step. Finite, unless the recipe
  skips bad steps and this one was: then the step changed nothing."""
  counters: Counters
  """Totals since the start of training, this step included."""
  event: dict[str, Any] | None = None
  """What the schedule decided before this step."""


def train(
  trainer: TrainerParts,
  batches: PlannedBatches,
  steps: int,
  stop: Callable[[], bool] = bool,
  ahead: bool = True,
) -> Iterator[StepRecord]:
  """Takes up to `steps` steps, yielding a record of each.

  Args:
    trainer: takes the steps.
    batches: planned for it.
    steps: to take at most.
    stop: asked before each step. If it says so, the last record is yielded and
      no more steps are taken.
    ahead: whether a record is yielded once the step after it is dispatched, so
      that the device never waits for the host. Else a step is taken when its
      record is asked for.

  Raises:
    UserError: the loss of a step is not finite, a batch does not fit, or the
      trainer is torn or follows another schedule by now.
  """
  trainer.check_whole()
  _check(batches, steps)
  # The last step, and its loss, which may still be on its way.
  last: tuple[StepRecord, jax.Array] | None = None
  first = int(to_host(trainer.state.step))
  for step in range(first + 1, first + steps + 1):
    if stop():
      break
    item = _next(trainer, batches)
    if item is None:
      counters = _count_rest(trainer, batches)
      last = last and (last[0]._replace(counters=counters), last[1])
      break
    before = last
    named = StepTraceAnnotation('train', step_num=step)
    with named, trainer.engine.helped(batches.helpers):
      loss = take_step(trainer, item, batches.advance)
    event = item.scheduled.event
    last = StepRecord(step, math.nan, trainer.engine.counters, event), loss
    if not ahead:
      before, last = last, None
    # Only now is a loss waited for. If `ahead`, the device has the next step
    # to do meanwhile.
    if before is not None:
      yield _with_loss(trainer, *before)
  if last is not None:
    yield _with_loss(trainer, *last)


def _check(batches: object, steps: object) -> None:
  if not hasattr(batches, 'peek'):
    raise UserError(
      'train takes planned batches',
      got=type(batches).__name__,
      where='train, batches',
      hint='make them with planned(trainer, source)',
    )
  hint = 'give the most steps to take, such as 1000'
  check_whole(steps, 0, 'train, steps', hint)


def _next(
  trainer: TrainerParts, batches: PlannedBatches
) -> PlannedBatch | None:
  """The next batch, planned for the rows where they are now."""
  if batches.probe is not trainer.probe:
    raise UserError(
      'a trainer follows one schedule, the last one made for it',
      got='batches of an earlier one',
      where='train, batches',
      hint='make them anew with planned or slipstream',
    )
  engine = trainer.engine
  if batches.skipped(engine.step):
    raise UserError(
      'a schedule that compares rows must see each of its batches trained',
      got='one that opens or ends a window, or decides, and was not',
      where='train, batches',
      hint='train what next(batches) gives, or set_state to a position before',
    )
  item = batches.peek()
  if item is not None and item.step != engine.step:
    if engine.restored_since(item.step):
      raise UserError(
        'batches go on from the position of the checkpoint',
        got='a trainer that was restored, and batches that were not',
        where='train, batches',
        hint='call batches.set_state(position.schedule_state)',
      )
    # Other batches were trained since these were planned.
    batches.set_state(batches.get_state())
    item = batches.peek()
  return item


def _count_rest(trainer: TrainerParts, batches: PlannedBatches) -> Counters:
  """Counts what was read after the last batch; the totals then."""
  with held():
    seen, dropped = batches.unreported()
    rest = Counters(examples_seen=seen, examples_dropped=dropped)
    trainer.engine.count(rest)
    trainer.rest = merge(trainer.rest, rest)
  return trainer.engine.counters


def take_step(
  trainer: TrainerParts,
  item: PlannedBatch,
  done: Callable[[], None] = lambda: None,
) -> jax.Array:
  """Loads, updates, stores; returns the loss f32[], still on the device.

  Args:
    trainer: takes the step.
    item: what to train; still to be trained if this raises.
    done: called as the last part of the step, to move on to the next batch.

  Raises:
    UserError: the trainer is torn, or the batch was planned for other rows on
      the device; nothing has changed.
  """
  with held():
    return trainer.turns.run(lambda: _take_step(trainer, item, done))


def _take_step(
  trainer: TrainerParts, item: PlannedBatch, done: Callable[[], None]
) -> jax.Array:
  scheduled = item.scheduled
  trainer.check_whole()
  engine, crossing = trainer.engine, CROSSINGS[trainer.rows]
  engine.check_step(item.step)
  if scheduled.edge.hot_here is not None:
    engine.swap_hot(scheduled.edge.hot_here)  # done, and counted, only once
    if scheduled.edge.hot_here:
      crossing = STREAM
  counted = engine.counters
  try:
    if scheduled.edge.refreezes:  # the rule is in `Edge`
      edges.refreeze(trainer, scheduled.edge)
    edges.judge(trainer, item)
    blocks = crossing.load(engine, item)
    updated = crossing.update(trainer, item, blocks)
  except BaseException:
    engine.counters = counted  # what was loaded will be loaded again
    raise
  # The old state is donated, so there is no way back: all of this, or torn.
  with trainer.changing('a step'):
    trainer.state, blocks, loss = updated
    crossing.store(engine, item, blocks)
    if scheduled.edge.closes is not None:
      edges.compare(trainer, scheduled.edge.closes)
    if scheduled.edge.scores is not None:
      edges.score(trainer, scheduled.edge.scores)
    trained = int(np.count_nonzero(scheduled.batch.weights))
    seen, dropped = scheduled.seen, scheduled.dropped
    crossed = crossing.counts(engine, item, trained)
    plans, sizes = item.plans, engine.row_bytes
    engine.count(of_step(plans, sizes, seen, trained, dropped, crossed))
    trainer.rest = Counters()
    trainer.grown = {**trainer.grown, **scheduled.grown}
    done()  # in here, so that no Ctrl-C parts the step from its position
  return loss


def _with_loss(
  trainer: TrainerParts, record: StepRecord, loss: jax.Array
) -> StepRecord:
  """The record of a step with its loss, which it waits for."""
  try:
    with TraceAnnotation('loss'):
      value = float(to_host(loss))
  except Exception:  # the device failed at the step, and at those after it
    trainer.torn = f'step {record.step}'
    raise
  if not (math.isfinite(value) or trainer.recipe.skips_bad_steps):
    raise BadLoss(record.step, record.counters.examples_seen, value)
  return record._replace(loss=value)


def leave_out(trainer: TrainerParts, batches: PlannedBatches) -> bool:
  """Goes past the next batch without training it; False if there is none.

  Its examples count as dropped. What is planned next is planned anew.

  Raises:
    UserError: the schedule counts on its step, or rows get another id with it.
  """
  trainer.check_whole()
  item = _next(trainer, batches)
  if item is None:
    return False
  scheduled = item.scheduled
  if scheduled.edge.must_train or item.reassigned is not None:
    raise UserError(
      'a batch is left out only where nothing else depends on its step',
      got='one with which rows are compared, freeze, thaw or get another id',
      where='train, batches',
      hint='lower the learning rates or look for bad values in the data',
    )
  real = int(np.count_nonzero(scheduled.batch.weights))
  with held():
    batches.advance()
    trainer.engine.count(
      Counters(
        examples_seen=scheduled.seen,
        examples_dropped=scheduled.dropped + real,
      )
    )
    trainer.grown = {**trainer.grown, **scheduled.grown}
  return True
