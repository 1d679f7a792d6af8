"""The training loop: dispatches step t, then reads the results of step t-1.

A step is taken completely or not at all, and the position of the batches is
behind the last step taken. A Ctrl-C waits for the end of the step. A failure
before the update leaves the batch to be tried again. A failure after it leaves
the trainer inconsistent, and later calls say so.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import hashlib
import math
import time
from typing import Any, NamedTuple

import jax
from jax.profiler import StepTraceAnnotation, TraceAnnotation
import numpy as np

from slipstream_jax.data.interrupts import held
from slipstream_jax.distributed.exchange import EXCHANGES
from slipstream_jax.engine import apply
from slipstream_jax.engine.buffers import (
  handing_over,
  to_device,
  to_host,
  to_step,
)
from slipstream_jax.engine.counters import Counters, merge, moved
from slipstream_jax.engine.engine import Plans
from slipstream_jax.engine.lane_rows import block_places
from slipstream_jax.engine.mesh import on_first
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.engine.planner import PlannedBatch, Slices
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.placement import bucket
from slipstream_jax.schedules.base import Edge, Predictions
from slipstream_jax.selection.hot import stale_by_group
from slipstream_jax.tables import TableSet
from slipstream_jax.training import watch
from slipstream_jax.training.evaluate import logits_of
from slipstream_jax.training.recipe import TrainState
from slipstream_jax.training.step import Blocks
from slipstream_jax.training.trainer_parts import TrainerParts
from slipstream_jax.types import Array, Batch

_COMPARED = 1024
"""Steps from one at which processes compare their batches to the next. The
engine's first number is a multiple of it."""


class BadLoss(UserError):
  """A step's loss is not finite, so its changes are useless."""

  def __init__(self, step: int, examples_seen: int, loss: float):
    """Builds the sentence."""
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
  """Results of one step."""

  step: int
  """Steps taken since the start of training, including this one."""
  loss: float
  """Weighted mean loss of the batch before the step. It is finite, unless the
  recipe skips bad steps and this was one, which changed nothing."""
  counters: Counters
  """Totals since the start of training, including this step."""
  event: dict[str, Any] | None = None
  """What the schedule decided before this step."""


def train(
  trainer: TrainerParts,
  batches: PlannedBatches,
  steps: int,
  stop: Callable[[], bool] = bool,
  ahead: bool = True,
) -> Iterator[StepRecord]:
  """Takes up to `steps` steps and yields a record of each.

  Args:
    trainer: takes the steps.
    batches: planned for it.
    steps: the most to take.
    stop: called before each step. If it returns true, the last record is
      yielded and no more steps are taken.
    ahead: whether a record is yielded after the next step is dispatched, so
      that the device never waits for the host. Otherwise a step is taken when
      its record is asked for.

  Raises:
    UserError: the loss of a step is not finite, a batch does not fit, or the
      trainer is inconsistent or follows another schedule.
  """
  trainer.check_consistent()
  if not hasattr(batches, 'peek'):
    raise UserError(
      'train takes planned batches',
      got=type(batches).__name__,
      where='train, batches',
      hint='make them with planned(trainer, source)',
    )
  hint = 'give the most steps to take, such as 1000'
  check_whole(steps, 0, 'train, steps', hint)
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
    wait = functools.partial(_wait_for_device, trainer)
    timed = batches.clock.timed(item.spent, item.scheduled, wait)
    with named, trainer.engine.helped(batches.helpers), timed:
      loss = take_step(trainer, item, batches.advance)
    event = item.scheduled.event
    last = StepRecord(step, math.nan, trainer.engine.counters, event), loss
    if not ahead:
      before, last = last, None
    # This waits for the loss. If `ahead`, the device has the next step to do
    # meanwhile.
    if before is not None:
      yield _with_loss(trainer, *before)
  if last is not None:
    yield _with_loss(trainer, *last)


def _wait_for_device(trainer: TrainerParts) -> None:
  kept = [group.kept.block for group in trainer.engine.groups]
  try:
    jax.block_until_ready((trainer.state, kept))
  except Exception:  # the device failed at an earlier step
    trainer.inconsistent = 'a step'
    raise


def _next(
  trainer: TrainerParts, batches: PlannedBatches
) -> PlannedBatch | None:
  """Returns the next batch, planned for where the rows are now."""
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
        'batches resume from the position of the checkpoint',
        got='a trainer that was restored, and batches that were not',
        where='train, batches',
        hint='call batches.set_state(position.schedule_state)',
      )
    # Other batches were trained since these were planned.
    batches.set_state(batches.get_state())
    item = batches.peek()
  return item


def _count_rest(trainer: TrainerParts, batches: PlannedBatches) -> Counters:
  """Counts the examples read after the last batch and returns the totals."""
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
  """Loads rows, updates and stores them; returns the loss f32[] on the device.

  If it raises, the batch is still to be trained. `done` is called as the last
  part of the step, to advance to the next batch.

  Raises:
    UserError: the trainer is inconsistent, or the batch was planned for other
      rows on the device. Nothing has changed.
  """
  with held():
    return trainer.turns.run(lambda: _take_step(trainer, item, done))


def _take_step(
  trainer: TrainerParts, item: PlannedBatch, done: Callable[[], None]
) -> jax.Array:
  scheduled = item.scheduled
  trainer.check_consistent()
  engine, rows = trainer.engine, trainer.rows
  engine.check_step(item.step)
  _check_same(trainer, item)
  if scheduled.edge.hot_here is not None:
    engine.swap_hot(scheduled.edge.hot_here)  # repeating it does nothing
    if scheduled.edge.hot_here:
      rows = 'stream'
  counted = engine.counters
  try:
    if scheduled.edge.refreezes:
      _refreeze(trainer, scheduled.edge)
    _judge(trainer, item)
    predicted, for_them = predict(trainer, item)
    on_host = rows != 'stream'
    blocks = engine.load(item.plans, item.reassigned, on_host, item.vectors)
    updated = update_step(trainer, item, blocks, rows)
  except BaseException:
    engine.counters = counted  # the rows will be loaded again
    raise
  # The old state is donated. So this either completes, or leaves the trainer
  # inconsistent.
  with trainer.changing('a step'):
    trainer.state, blocks, loss = updated
    engine.store(item.plans, blocks, item.reassigned, rows != 'stream')
    if scheduled.edge.closes is not None:
      _compare(trainer, scheduled.edge.closes)
    if scheduled.edge.scores is not None:
      score_held_out(trainer, scheduled.edge.scores)
    if scheduled.edge.tells is not None:
      trainer.probe.losses.put(scheduled.edge.tells, loss)
    _put_predicted(trainer, scheduled.edge.predicts, predicted)
    trained = int(np.count_nonzero(scheduled.batch.weights))
    count = Counters(scheduled.seen, trained, scheduled.dropped)
    form = engine.tables, engine.row_bytes, trainer.over
    if trainer.over is not None:
      vectors = trainer.over.bytes_between_hosts(len(scheduled.batch.labels))
      count = count._replace(bytes_between_hosts=vectors)
    if rows == 'parameter_server':
      params = jax.tree.leaves(trainer.state.params)
      both_ways = 2 * sum(leaf.nbytes for leaf in params)
      count = count._replace(bytes_of_parameters=both_ways)
    moves = moved_by_group(item, *form, trained, rows)
    engine.count(functools.reduce(merge, moves, merge(count, for_them)))
    trainer.rest = Counters()
    trainer.grown = {**trainer.grown, **scheduled.grown}
    done()  # here, so that no Ctrl-C comes between the step and its position
  return loss


def _check_same(trainer: TrainerParts, item: PlannedBatch) -> None:
  """Checks that all processes plan the same step on the same examples."""
  engine, devices = trainer.engine, trainer.engine.devices
  if devices is None or devices.alone or engine.step % _COMPARED:
    return
  batch, seen = item.batch, item.scheduled.seen
  digest = hashlib.blake2b(b'%d' % seen, digest_size=8)
  rows = [array for plan in item.plans for array in (plan.rows, plan.load)]
  for array in (batch.dense, batch.lookups, batch.labels, *rows):
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
  others = {*devices.exchanged(digest.digest())}
  if len(others) > 1:
    step = int(to_host(on_first(trainer.state.step))) + 1
    raise UserError(
      'every process must read the same examples in the same order',
      got=f'{len(others)} unlike batches for step {step}',
      where='Trainer.train, source',
      hint='give each the whole source, with the same seed and position',
    )


def _row_index(
  trainer: TrainerParts, plans: Plans, blocks: Blocks
) -> tuple[np.ndarray, ...] | None:
  """Returns per group the place of each row among its hot ones, H_g if cold.

  It is the place among those of its lane where several devices have entries.
  None if no row is watched.
  """
  if not (trainer.state.watch or trainer.state.entries):
    return None
  indices = []
  for number, (plan, block, hot) in enumerate(
    zip(plans, blocks, trainer.engine.hot_of_groups, strict=True)
  ):
    assert hot is not None
    # Padding counts as cold, so that its values are dropped.
    index = np.full(len(block.rows), len(hot.rows), np.int32)
    places = hot.places(plan.rows) if plan.hot is None else plan.hot
    if plan.lanes is None:
      index[: len(places)] = places
    else:
      index[block_places(plan.lanes, len(index))] = places
    if trainer.hot_of_lanes is not None:
      index = trainer.hot_of_lanes.index(number, index)
    indices.append(index)
  return tuple(indices)


def _places(
  trainer: TrainerParts, item: PlannedBatch
) -> tuple[np.ndarray | None, ...] | None:
  """Returns per group the places of reassigned hot rows, None if none is."""
  if item.reassigned is None or not trainer.state.entries:
    return None
  places = []
  for rows, hot in zip(
    item.reassigned, trainer.engine.hot_of_groups, strict=True
  ):
    assert hot is not None
    own = hot.places(rows)
    own = own[own < len(hot.rows)].astype(np.int32)
    places.append(own if len(own) else None)
  return tuple(places)


def _padded_places(
  trainer: TrainerParts, item: PlannedBatch
) -> tuple[np.ndarray | None, ...] | None:
  """Returns the same, padded with H_g."""
  places = _places(trainer, item)
  if places is None:
    return None
  hot = trainer.engine.hot_of_groups
  return tuple(
    own
    if own is None or one is None
    else apply.padded(own, len(one.rows), bucket(len(own), 16))
    for own, one in zip(places, hot, strict=True)
  )


def on_device(batch: Batch) -> Batch:
  """Returns the batch without the fields that only the host needs."""
  without: Any = batch
  host = {'lookups': None, 'fresh': None, 'fresh_vectors': None}
  columns: Batch = without._replace(**host)
  return columns


def update_step(
  trainer: TrainerParts, item: PlannedBatch, blocks: Blocks, rows: str
) -> tuple[TrainState, Blocks, jax.Array]:
  """Takes a step on loaded blocks. If it loses the state, it marks that.

  | rows | host to device | device to host | rows are updated on |
  | --- | --- | --- | --- |
  | `stream` | rows, row state | rows, row state | the device |
  | `parameter_server` | rows, parameters | their gradients | the host |
  | `pooled` | embeddings | gradients of embeddings | the host |
  """
  scheduled, seen = item.scheduled, trainer.engine.counters.examples_seen
  size = scheduled.batch_size or len(scheduled.batch.labels)
  batches_seen = np.asarray(seen / size, np.float32)
  if trainer.over is not None:
    update: Any = functools.partial(_over_parts, trainer, item, blocks)
    return _guarded(trainer, lambda: update(batches_seen))
  inputs: Any = (
    tuple(plan.inverse for plan in item.plans),
    on_device(item.batch),
    batches_seen,
    item.row_weights,
  )
  # Several programs read them.
  watched: Any = (
    _row_index(trainer, item.plans, blocks),
    _padded_places(trainer, item),
  )
  if watched != (None, None):
    watched = to_step(watched)

  def update_all() -> tuple[TrainState, Blocks, jax.Array]:
    # The inputs belong to the planner or to admitted batches. They are not
    # written again.
    with handing_over():
      updated: tuple[TrainState, Blocks, jax.Array] = trainer.update(
        trainer.state, blocks, *inputs, *watched, rows
      )
    return updated

  return _guarded(trainer, update_all)


def _over_parts(
  trainer: TrainerParts,
  item: PlannedBatch,
  blocks: Blocks,
  batches_seen: np.ndarray,
) -> tuple[TrainState, Blocks, jax.Array]:
  """Takes a step that is divided into parts. See `PartsStep`."""
  devices = trainer.engine.devices
  assert devices is not None
  assert trainer.over is not None
  step = trainer.programs.over(devices, trainer.over)
  inputs = step.inputs(item, on_device(item.batch))
  state = _reset_entries(trainer, trainer.settled(), item)
  seen = devices.whole(batches_seen)
  watched, entries, frozen = state.watch, state.entries, None
  hot, layouts = trainer.hot_of_lanes, trainer.programs.layouts
  index: Any = _row_index(trainer, item.plans, blocks)
  if index is not None:
    index = devices.split(index)
  if entries:
    blocks, frozen = watch.attach(layouts, blocks, entries, index, hot)
  elif watched is not None:
    own = tuple(block.rows for block in blocks)
    snapshots, frozen = devices.run(watch.before, watched, index, own)
  state, blocks, loss, touched = step(
    state._replace(watch=None, entries=()), blocks, inputs, seen, frozen
  )
  if entries:
    blocks, entries = watch.detach(layouts, blocks, entries, index, hot)
  elif watched is not None:
    assert hot is not None
    own = tuple(block.rows for block in blocks)
    watched = hot.call(watch.after, watched, index, snapshots, own, touched)
  return state._replace(watch=watched, entries=entries), blocks, loss


def _reset_entries(
  trainer: TrainerParts, state: TrainState, item: PlannedBatch
) -> TrainState:
  """Resets the entries of rows that are reassigned, on several devices."""
  hot, places = trainer.hot_of_lanes, _places(trainer, item)
  if hot is None or places is None:
    return state
  entries = list(state.entries)
  for group, own in enumerate(places):
    judge, known = trainer.programs.judges[group], entries[group]
    if own is not None and judge is not None and known is not None:
      row_globals = state.row_globals[group]
      entries[group] = hot.reset(group, judge, known, row_globals, own)
  return state._replace(entries=tuple(entries))


def _guarded(
  trainer: TrainerParts,
  update: Callable[[], tuple[TrainState, Blocks, jax.Array]],
) -> tuple[TrainState, Blocks, jax.Array]:
  # The call may donate the state before it fails.
  trainer.inconsistent = 'a step'
  try:
    with TraceAnnotation('step'):
      updated = update()
  except BaseException:
    # A failure to compile does not touch the state.
    if not any(leaf.is_deleted() for leaf in jax.tree.leaves(trainer.state)):
      trainer.inconsistent = None
    raise
  return updated


def moved_by_group(
  item: PlannedBatch,
  tables: TableSet,
  row_bytes: Sequence[int],
  over: Slices | None,
  trained: int,
  rows: str = 'stream',
) -> list[Counters]:
  """Counts per group what crosses in a step.

  Args:
    item: the step's batch.
    tables: that it looks up.
    row_bytes: per group, of a row with its state.
    over: how the step is divided. None: it is not.
    trained: its examples with a weight.
    rows: a member of `ROWS`.
  """
  counts = list(map(moved, item.plans, row_bytes))
  if over is not None:
    element = EXCHANGES[over.exchange]
    of_groups = zip(counts, tables.groups, item.exchanges, strict=True)
    return [
      count._replace(
        bytes_exchanged=int(sum(map(np.sum, one.traffic.sent(group, element)))),
        bytes_between_hosts=one.traffic.between_hosts(group, element),
      )
      for count, group, one in of_groups
    ]
  if rows == 'parameter_server':
    groups = zip(counts, tables.groups, item.plans, strict=True)
    return [
      count._replace(
        bytes_loaded=len(plan.load)
        * group.dim
        * np.dtype(group.dtype).itemsize,
        bytes_stored=len(plan.store) * group.dim * 4,  # in f32
      )
      for count, group, plan in groups
    ]
  if rows == 'pooled':
    sizes = [trained * size for size in embedding_bytes(tables)]
    return [
      count._replace(
        rows_loaded=0, rows_stored=0, bytes_loaded=size, bytes_stored=size
      )
      for count, size in zip(counts, sizes, strict=True)
    ]
  return counts


def embedding_bytes(tables: TableSet) -> tuple[int, ...]:
  """Returns per group the bytes of an example's embeddings, in f32.

  A feature that is not pooled has an embedding for each of its L lookups.
  """
  lengths = {
    name: feature.max_length if feature.combiner == 'none' else 1
    for name, feature in tables.features.items()
  }
  return tuple(
    4 * group.dim * sum(lengths[name] for name in group.features)
    for group in tables.groups
  )


def _refreeze(trainer: TrainerParts, edge: Edge) -> None:
  """Opens a window, or freezes other rows, before the step. Can be repeated."""
  engine = trainer.engine
  engine.freeze(edge.stale)
  with _timed(trainer):
    if edge.stale is None:
      _watch(trainer, watch.opened)
      return
    masks = stale_by_group(edge.stale, engine.hot_of_groups)
    hot, state = trainer.hot_of_lanes, trainer.settled()
    stale = to_device(tuple(masks)) if hot is None else hot.masks(masks)
    assert state.watch is not None  # a schedule with edges has started it
    frozen = watch.freeze(state.watch, stale)
    trainer.state = state._replace(watch=frozen)


def _watch(
  trainer: TrainerParts, change: Callable[[watch.Watches], watch.Watches]
) -> None:
  """Changes the watches, which are donated, at the edge of a window."""
  with trainer.changing('the edge of a window'):
    hot, state = trainer.hot_of_lanes, trainer.settled()
    assert state.watch is not None
    one = change if hot is None else functools.partial(hot.call, change)
    trainer.state = state._replace(watch=one(state.watch))


def _judge(trainer: TrainerParts, item: PlannedBatch) -> None:
  """Lets chains judge rows at the edges of windows. Can be repeated."""
  engine, (frozen, closes, opens) = trainer.engine, item.judgement
  for group, mask in frozen.items():
    engine.groups[group].freeze(mask)
  if not (closes or opens):
    return
  with _timed(trainer), trainer.changing('the edge of a window'):
    hot, state = trainer.hot_of_lanes, trainer.settled()
    entries = list(state.entries)
    for group in (*closes, *opens):
      judge = trainer.programs.judges[group]
      assert judge is not None
      judged = judge.closed if group in closes else judge.opened
      if hot is not None:
        judged = functools.partial(hot.judge, judged)
      entries[group] = judged(entries[group], state.row_globals[group])
    trainer.state = state._replace(entries=tuple(entries))
    if closes:
      stale = watch.stale_rows(trainer.state.entries)
      if hot is not None:
        stale = hot.collected(stale)
      trainer.judgements.put(item.step, stale)


def _compare(trainer: TrainerParts, window: int) -> None:
  """Closes a window after the step and puts its changes for the schedule."""
  with _timed(trainer):
    _watch(trainer, watch.closed)
    trainer.probe.put(window, trainer.moved())


@contextlib.contextmanager
def _timed(trainer: TrainerParts) -> Iterator[None]:
  """Counts the seconds of the block; waits for the device before and after."""
  jax.block_until_ready(trainer.state)
  started = time.perf_counter()
  yield
  jax.block_until_ready(trainer.state)
  trainer.seconds_watching += time.perf_counter() - started


def score_held_out(trainer: TrainerParts, number: int) -> None:
  """Puts the loss of the held-out examples for the schedule, under a number.

  Waits for nothing, and does not count what it moves, as in evaluation.
  """
  engine, batch = trainer.engine, trainer.held_out
  assert batch is not None  # a schedule that asks for losses has some
  rows, inverses = engine.look_up(batch.lookups)
  state = trainer.state
  variables = state.params, state.model_state, rows
  # Offsets are for training only.
  inputs = to_device((inverses, on_device(batch)._replace(offset=None)))
  loss = trainer.programs.loss(*on_first(variables), *inputs)
  trainer.probe.losses.put(number, loss)


def predict(
  trainer: TrainerParts, item: PlannedBatch
) -> tuple[list[Array], Counters]:
  """Predicts the batches that a step's edge names.

  It waits for no step, except where several devices share the examples.

  Returns:
    Their logits, and counts of the rows that were loaded for them.
  """
  predicted, loaded, engine = list[Array](), Counters(), trainer.engine
  asked = item.scheduled.edge.predicts
  batches = () if asked is None else asked.batches
  for (_, batch), uniques in zip(batches, item.predicted, strict=True):
    plans = engine.plan_found(uniques)
    for plan, row_bytes in zip(plans, engine.row_bytes, strict=True):
      rows = len(plan.load)
      move = Counters(rows_loaded=rows, bytes_loaded=rows * row_bytes)
      loaded = merge(loaded, move)
    predicted.append(logits_of(trainer, batch, plans))
  return predicted, loaded


def _put_predicted(
  trainer: TrainerParts, asked: Predictions | None, predicted: list[Array]
) -> None:
  """Puts the logits of `predict` for the schedule."""
  if asked is None:
    return
  for (number, _), logits in zip(asked.batches, predicted, strict=True):
    trainer.probe.logits.put(number, logits)
  trainer.probe.logits.forget(asked.since)


def _with_loss(
  trainer: TrainerParts, record: StepRecord, loss: jax.Array
) -> StepRecord:
  """Waits for the loss of a step and returns the record with it."""
  try:
    with TraceAnnotation('loss'):
      value = float(to_host(loss))
  except Exception:  # the device failed at this step, and at later ones
    trainer.inconsistent = f'step {record.step}'
    raise
  if not (math.isfinite(value) or trainer.recipe.skips_bad_steps):
    raise BadLoss(record.step, record.counters.examples_seen, value)
  return record._replace(loss=value)


def leave_out(trainer: TrainerParts, batches: PlannedBatches) -> bool:
  """Advances past the next batch without training; False if there is none.

  Its examples count as dropped. Later batches are planned anew.

  Raises:
    UserError: the schedule needs its step, or it reassigns rows to other ids.
  """
  trainer.check_consistent()
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
  predicted, loaded = predict(trainer, item)
  with held():
    batches.advance()
    if scheduled.edge.tells is not None:
      trainer.probe.losses.put(scheduled.edge.tells, math.nan)
    _put_predicted(trainer, scheduled.edge.predicts, predicted)
    left_out = Counters(
      examples_seen=scheduled.seen, examples_dropped=scheduled.dropped + real
    )
    trainer.engine.count(merge(left_out, loaded))
    trainer.grown = {**trainer.grown, **scheduled.grown}
  return True
