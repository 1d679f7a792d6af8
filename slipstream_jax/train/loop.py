"""The loop that trains: dispatch step t, then read what step t-1 produced."""

from collections.abc import Callable, Iterator
import dataclasses
import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from slipstream_jax.data.batches import BatchSource, InputShape
from slipstream_jax.data.scheduled import Schedule, Scheduled
from slipstream_jax.errors import UserError
from slipstream_jax.placement import Placement
from slipstream_jax.schedules.choosing import Settings
from slipstream_jax.schedules.plain import Plain
from slipstream_jax.schedules.slipstream import Slipstream
from slipstream_jax.store import host_table
from slipstream_jax.stream import counters
from slipstream_jax.stream.buffers import to_device, to_host
from slipstream_jax.stream.counters import Counters
from slipstream_jax.stream.engine import Engine
from slipstream_jax.stream.pipeline import PlannedBatch, PlannedBatches
from slipstream_jax.stream.probe import StepProbe
from slipstream_jax.train import watch
from slipstream_jax.train.state import (
  init_state,
  Recipe,
  TrainState,
  untrained_row_state,
)
from slipstream_jax.train.step import (
  make_predict,
  make_update,
  PredictFn,
  UpdateFn,
)
from slipstream_jax.types import HotRows


@dataclasses.dataclass
class Trainer:
  """A recipe under way: its state, its rows, and its compiled functions.

  Attributes:
    recipe: model, tables and optimizers.
    engine: owns the tables' rows.
    state: on the device; replaced by every step.
    update: the jitted step.
    predict: the jitted forward pass.
    shape: what every batch must fit.
    probe: where windows leave what rows did in them.
    seconds_watching: spent on snapshots and comparisons so far.
  """

  recipe: Recipe
  engine: Engine
  state: TrainState
  update: UpdateFn
  predict: PredictFn
  shape: InputShape
  probe: StepProbe
  seconds_watching: float = 0.0


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


def create_trainer(
  recipe: Recipe,
  placement: Placement,
  dense_features: int,
  seed: int = 0,
  hot: HotRows | None = None,
) -> Trainer:
  """A trainer before its first step, with freshly initialised tables.

  Args:
    recipe: model, tables and optimizers.
    placement: a member of `PLACEMENTS`.
    dense_features: I, columns of `Batch.dense`.
    seed: of the model's parameters and the rows' initial values.
    hot: rows that may be watched and pinned, from `hot_rows`.

  Raises:
    UserError: the model does not fit the tables' dim, or the placement needs
      hot rows.
  """
  state = init_state(recipe, dense_features, seed)
  table = host_table.create(recipe.tables, untrained_row_state(recipe), seed)
  return Trainer(
    recipe,
    Engine(placement, table, hot),
    state,
    make_update(recipe),
    make_predict(recipe),
    InputShape(
      recipe.tables.num_rows,
      len(recipe.tables),
      dense_features,
      recipe.tables.series,
    ),
    StepProbe(),
  )


def planned(
  trainer: Trainer, source: BatchSource, depth: int = 2
) -> PlannedBatches:
  """Batches of `source`, planned for the trainer `depth` of them ahead."""
  _end_watch(trainer)
  return _planned(trainer, Plain(source), depth)


def _end_watch(trainer: Trainer) -> None:
  """Forgets what an earlier schedule watched; its stale rows move again."""
  trainer.probe.forget()
  if trainer.state.watch is not None:
    trainer.engine.freeze(None)
    trainer.state = trainer.state._replace(watch=None)


def slipstream(
  trainer: Trainer,
  source: BatchSource,
  settings: Settings,
  batches: int | None = None,
  depth: int = 2,
) -> PlannedBatches:
  """The same, but skipping what no longer learns (arXiv 2404.04270).

  It starts anew: restore a checkpoint after this call, not before.

  Args:
    trainer: with hot rows; watches them from here on if settings need it.
    source: what to train on.
    settings: what to skip, and when.
    batches: of the source to read at most; None: all.
    depth: batches prepared ahead.

  Raises:
    UserError: settings that cannot be, or no hot rows.
  """
  hot = trainer.engine.hot
  if hot is None:
    raise UserError(
      'skipping needs hot rows to watch',
      got='none',
      where='create_trainer, hot',
      mend='give it hot_rows(popular_rows(...).rows, num_rows)',
    )
  _check_look_ahead(trainer.engine.placement.look_ahead, settings)
  schedule = Slipstream(source, hot, trainer.probe, settings, batches)
  _end_watch(trainer)
  if settings.compares_rows:
    rows = trainer.engine.hot_rows_now()
    trainer.state = trainer.state._replace(watch=watch.start(rows))
  return _planned(trainer, schedule, depth)


def _check_look_ahead(held: int, settings: Settings) -> None:
  """A decision waits for a window's end, which must not wait to be planned."""
  settle = settings.phases.settle
  if settings.compares_rows and held and settle <= held:
    raise UserError(
      f'settle must be more than the {held} batches held to look ahead',
      got=settle,
      where='config.skip.settle',
      mend='lengthen it, or look less far ahead',
    )


def _planned(
  trainer: Trainer, schedule: Schedule, depth: int
) -> PlannedBatches:
  engine = trainer.engine
  return PlannedBatches(
    schedule,
    engine.placement,
    trainer.shape,
    depth,
    engine.hot,
    trainer.probe,
    # Rows that no step has changed yet need not be stored when they leave.
    lambda: engine.contents if engine.changed else None,
  )


def train(
  trainer: Trainer,
  batches: PlannedBatches,
  steps: int,
  stop: Callable[[], bool] = bool,
) -> Iterator[StepRecord]:
  """Takes up to `steps` steps, yielding a record of each.

  A record comes once the step after it was dispatched, or at the end. `stop`
  is asked before each step, and ends them: no record is lost.

  Raises:
    UserError: the loss of a step is not finite.
  """
  pending: tuple[int, jax.Array, Counters, dict[str, Any] | None] | None = None
  first = int(to_host(trainer.state.step))
  for step in range(first + 1, first + steps + 1):
    if stop():
      break
    item = next(batches, None)
    if item is None:
      seen, dropped = batches.unreported()
      trainer.engine.count(Counters(inputs_seen=seen, inputs_dropped=dropped))
      if pending is not None:
        pending = (*pending[:2], trainer.engine.counters, pending[3])
      break
    loss = take_step(trainer, item)
    if pending is not None:
      yield _read(*pending)
    pending = step, loss, trainer.engine.counters, item.scheduled.event
  if pending is not None:
    yield _read(*pending)


def take_step(trainer: Trainer, item: PlannedBatch) -> jax.Array:
  """Loads, updates, stores; returns the loss f32[], still on the device."""
  scheduled, plan, row_weights = item
  engine = trainer.engine
  _before(trainer, scheduled)
  block = engine.load(plan)
  row_index = None
  if trainer.state.watch and engine.hot is not None and plan.hot is not None:
    row_index = np.full(len(block.rows), len(engine.hot.rows), np.int32)
    row_index[: len(plan.hot)] = plan.hot
  seen = np.float32(engine.counters.inputs_seen / len(scheduled.batch.labels))
  on_device = to_device(
    (plan.inverse, scheduled.batch, seen, row_weights, row_index)
  )
  trainer.state, block, loss = trainer.update(trainer.state, block, *on_device)
  engine.store(plan, block)
  _after(trainer, scheduled)
  trained = int(np.count_nonzero(scheduled.batch.weights))
  engine.count(
    counters.count(
      plan, scheduled.seen, trained, scheduled.dropped, engine.row_bytes
    )
  )
  return loss


def _before(trainer: Trainer, scheduled: Scheduled) -> None:
  """Opens a window, or makes stale rows stand still, where it is due."""
  watched = trainer.state.watch
  if watched is None or not (scheduled.opens or scheduled.stale is not None):
    return
  started = _now(trainer)
  trainer.engine.freeze(scheduled.stale)
  if scheduled.stale is None:
    watched = watch.opened(watched, trainer.engine.hot_rows_now())
  else:
    watched = watch.frozen(watched, to_device(scheduled.stale))
  trainer.state = trainer.state._replace(watch=watched)
  trainer.seconds_watching += _now(trainer) - started


def _after(trainer: Trainer, scheduled: Scheduled) -> None:
  """Closes a window where it is due, and tells the schedule of it."""
  watched = trainer.state.watch
  if watched is None or scheduled.closes is None:
    return
  started = _now(trainer)
  watched, moved = watch.closed(watched, trainer.engine.hot_rows_now())
  trainer.state = trainer.state._replace(watch=watched)
  trainer.probe.put(scheduled.closes, moved)
  trainer.seconds_watching += _now(trainer) - started


def _now(trainer: Trainer) -> float:
  """The clock once the device is idle; only asked at the edges of windows."""
  jax.block_until_ready(trainer.state)
  return time.perf_counter()


def _read(
  step: int, loss: jax.Array, counters: Counters, event: dict[str, Any] | None
) -> StepRecord:
  value = float(to_host(loss))
  if not math.isfinite(value):
    raise UserError(
      'the loss must stay finite',
      got=value,
      where=f'step {step}',
      mend='lower the learning rates or look for bad values in the data',
    )
  return StepRecord(step, value, counters, event)
