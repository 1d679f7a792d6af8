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
import numpy as np

from slipstream_jax.data.interrupts import held
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.stream.buffers import to_device, to_host
from slipstream_jax.stream.counters import Counters, merge
from slipstream_jax.stream.pipeline import PlannedBatches
from slipstream_jax.stream.planner import PlannedBatch
from slipstream_jax.training import edges
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.training.recipe import TrainState
from slipstream_jax.types import RowBlock


class StepRecord(NamedTuple):
  """What one step did."""

  step: int
  """Steps taken since the start of training, this one included."""
  loss: float
  """Weighted mean loss of the batch before the step."""
  counters: Counters
  """Totals since the start of training, this step included."""
  event: dict[str, Any] | None = None
  """What the schedule decided before this step."""


def train(
  trainer: TrainerParts,
  batches: PlannedBatches,
  steps: int,
  stop: Callable[[], bool] = bool,
) -> Iterator[StepRecord]:
  """Takes up to `steps` steps, yielding a record of each.

  A record comes once the step after it was dispatched, or at the end. `stop`
  is asked before each step, and ends them: no record is lost.

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
    loss = take_step(trainer, item, batches.advance)
    event = item.scheduled.event
    last = StepRecord(step, math.nan, trainer.engine.counters, event), loss
    # Only now is the last loss waited for: the device has the next step to do.
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
  if batches.skipped(engine.turn):
    raise UserError(
      'a schedule that compares rows must see each of its batches trained',
      got='one that opens or ends a window, or decides, and was not',
      where='train, batches',
      hint='train what next(batches) gives, or set_state to a position before',
    )
  item = batches.peek()
  if item is not None and item.turn != engine.turn:
    if engine.restored_since(item.turn):
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
  scheduled = item.scheduled
  with held():
    trainer.check_whole()
    engine, counted = trainer.engine, trainer.engine.counters
    try:
      engine.check_turn(item.turn)
      if scheduled.edge.refreezes:  # the rule is in `Edge`
        edges.refreeze(trainer, scheduled.edge)
      edges.judge(trainer, item)
      blocks = engine.load(item.plans, item.fresh)
      updated = _update(trainer, item, blocks)
    except BaseException:
      engine.counters = counted  # what was loaded will be loaded again
      raise
    # The old state is donated, so there is no way back: all of this, or torn.
    with trainer.changing('a step'):
      trainer.state, blocks, loss = updated
      engine.store(item.plans, blocks, item.fresh)
      if scheduled.edge.closes is not None:
        edges.compare(trainer, scheduled.edge.closes)
      trained = int(np.count_nonzero(scheduled.batch.weights))
      seen, dropped = scheduled.seen, scheduled.dropped
      engine.count_step(item.plans, seen, trained, dropped)
      trainer.rest = Counters()
      trainer.grown = {**trainer.grown, **scheduled.grown}
      done()  # in here, so that no Ctrl-C parts the step from its position
  return loss


def _update(
  trainer: TrainerParts, item: PlannedBatch, blocks: tuple[RowBlock, ...]
) -> tuple[TrainState, tuple[RowBlock, ...], jax.Array]:
  """The next state, the changed rows and the loss; the old state is gone."""
  scheduled, engine = item.scheduled, trainer.engine
  batch: Any = scheduled.batch
  seen = np.float32(engine.counters.examples_seen / len(scheduled.batch.labels))
  arguments = to_device(
    (
      tuple(plan.inverse for plan in item.plans),
      batch._replace(lookups=None, fresh=None),  # of the host alone
      seen,
      item.row_weights,
      edges.row_index(trainer, item.plans, blocks),
      edges.renewed(trainer, item),
    )
  )
  # Until it is known that the call has not donated the state before it failed.
  trainer.torn = 'a step'
  try:
    return trainer.update(trainer.state, blocks, *arguments)
  except BaseException:
    # What fails while it is compiled has not touched the state.
    if not any(leaf.is_deleted() for leaf in jax.tree.leaves(trainer.state)):
      trainer.torn = None
    raise


def _with_loss(
  trainer: TrainerParts, record: StepRecord, loss: jax.Array
) -> StepRecord:
  """The record of a step with its loss, which it waits for."""
  try:
    value = float(to_host(loss))
  except Exception:  # the device failed at the step, and at those after it
    trainer.torn = f'step {record.step}'
    raise
  if not math.isfinite(value):
    raise UserError(
      'the loss must stay finite',
      got=value,
      where=f'step {record.step}',
      hint='lower the learning rates or look for bad values in the data',
    )
  return record._replace(loss=value)
