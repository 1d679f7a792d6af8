"""The loop that trains: dispatch step t, then read what step t-1 produced."""

from collections.abc import Iterator
import dataclasses
import math
from typing import NamedTuple

import jax

from slipstream_jax.data.batches import BatchSource, InputShape
from slipstream_jax.errors import UserError
from slipstream_jax.placement import Placement
from slipstream_jax.store import host_table
from slipstream_jax.stream.buffers import to_device, to_host
from slipstream_jax.stream.counters import Counters
from slipstream_jax.stream.engine import Engine
from slipstream_jax.stream.pipeline import PlannedBatch, PlannedBatches
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
  """

  recipe: Recipe
  engine: Engine
  state: TrainState
  update: UpdateFn
  predict: PredictFn
  shape: InputShape


class StepRecord(NamedTuple):
  """What one step did."""

  step: int
  """Steps taken since the start of training, this one included."""
  loss: float
  """Weighted mean loss of the batch before the step."""
  counters: Counters
  """Totals since the start of training, this step included."""


def create_trainer(
  recipe: Recipe, placement: Placement, dense_features: int, seed: int = 0
) -> Trainer:
  """A trainer before its first step, with freshly initialised tables.

  Args:
    recipe: model, tables and optimizers.
    placement: a member of `PLACEMENTS`.
    dense_features: I, columns of `Batch.dense`.
    seed: of the model's parameters and the rows' initial values.

  Raises:
    UserError: the model does not fit the tables' dim.
  """
  state = init_state(recipe, dense_features, seed)
  table = host_table.create(recipe.tables, untrained_row_state(recipe), seed)
  return Trainer(
    recipe,
    Engine(placement, table),
    state,
    make_update(recipe),
    make_predict(recipe),
    InputShape(recipe.tables.num_rows, len(recipe.tables), dense_features),
  )


def planned(
  trainer: Trainer, source: BatchSource, depth: int = 2
) -> PlannedBatches:
  """Batches of `source` planned for the trainer, `depth` of them ahead."""
  return PlannedBatches(source, trainer.engine.placement, trainer.shape, depth)


def train(
  trainer: Trainer, batches: PlannedBatches, steps: int
) -> Iterator[StepRecord]:
  """Takes up to `steps` steps, yielding a record of each.

  A record is yielded once the step after it was dispatched, or at the end;
  the trainer is then one step ahead of the record, except at the last.

  Raises:
    UserError: the loss of a step is not finite.
  """
  pending: tuple[int, jax.Array, Counters] | None = None
  first = int(to_host(trainer.state.step))
  for step in range(first + 1, first + steps + 1):
    item = next(batches, None)
    if item is None:
      break
    loss = take_step(trainer, item)
    if pending is not None:
      yield _read(*pending)
    pending = step, loss, trainer.engine.counters
  if pending is not None:
    yield _read(*pending)


def take_step(trainer: Trainer, item: PlannedBatch) -> jax.Array:
  """Loads, updates, stores; returns the loss f32[], still on the device."""
  batch, plan, _ = item
  block = trainer.engine.load(plan)
  inverse, on_device = to_device((plan.inverse, batch))
  trainer.state, block, loss = trainer.update(
    trainer.state, block, inverse, on_device
  )
  trainer.engine.store(plan, block, len(batch.labels))
  return loss


def _read(step: int, loss: jax.Array, counters: Counters) -> StepRecord:
  value = float(to_host(loss))
  if not math.isfinite(value):
    raise UserError(
      'the loss must stay finite',
      got=value,
      where=f'step {step}',
      mend='lower the learning rates or look for bad values in the data',
    )
  return StepRecord(step, value, counters)
