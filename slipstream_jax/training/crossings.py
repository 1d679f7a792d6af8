"""Values that cross the link in a step: rows, gradients or embeddings.

| rows | host to device | device to host | rows are updated on |
| --- | --- | --- | --- |
| `stream` | rows, row state | rows, row state | the device |
| `parameter_server` | rows | gradients of rows | the host |
| `pooled` | embeddings | gradients of embeddings | the host |
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.profiler import TraceAnnotation
import numpy as np

from slipstream_jax.engine import counters
from slipstream_jax.engine.buffers import (
  from_cpu,
  to_device,
  to_step,
)
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.engine import Engine, Plans
from slipstream_jax.engine.planner import PlannedBatch
from slipstream_jax.placement import bucket
from slipstream_jax.tables import TableSet
from slipstream_jax.training import watch
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.training.recipe import TrainState
from slipstream_jax.training.step import Blocks
from slipstream_jax.types import Batch

Updated = tuple[TrainState, Blocks, jax.Array]
"""The next state, the changed rows, and the loss."""


class Crossing(NamedTuple):
  """Functions of a step that decide what crosses the link."""

  update: Callable[[TrainerParts, PlannedBatch, Blocks], Updated]
  """Takes one step. If it loses the trainer's state, it marks the trainer as
  inconsistent."""
  counts: Callable[[Engine, PlannedBatch, int], Sequence[Counters]]
  """Returns per group what crosses for a number of trained examples."""
  on_host: bool = False
  """Whether rows are updated on the host."""


def row_index(
  trainer: TrainerParts, plans: Plans, blocks: Blocks
) -> tuple[np.ndarray, ...] | None:
  """Returns per group the place of each row among its hot ones, H_g if cold.

  None if no row is watched.
  """
  if not (trainer.state.watch or trainer.state.entries):
    return None
  indices = []
  for plan, block, hot in zip(
    plans, blocks, trainer.engine.hot_of_groups, strict=True
  ):
    assert hot is not None
    assert plan.hot is not None
    # Padding counts as cold, so that its values are dropped.
    index = np.full(len(block.rows), len(hot.rows), np.int32)
    index[: len(plan.hot)] = plan.hot
    indices.append(index)
  return tuple(indices)


def _reassigned(
  trainer: TrainerParts, item: PlannedBatch
) -> tuple[np.ndarray | None, ...] | None:
  """Returns per group the places of reassigned hot rows, padded with H_g."""
  if item.reassigned is None or not trainer.state.entries:
    return None
  places = []
  for rows, hot in zip(
    item.reassigned, trainer.engine.hot_of_groups, strict=True
  ):
    assert hot is not None
    own = hot.places(rows)
    own = own[own < len(hot.rows)]
    padded = np.full(bucket(len(own), 16), len(hot.rows), np.int32)
    padded[: len(own)] = own
    places.append(padded if len(own) else None)
  return tuple(places)


def on_device(batch: Batch) -> Batch:
  """Returns the batch without the fields that only the host needs."""
  without: Any = batch
  columns: Batch = without._replace(lookups=None, fresh=None)
  return columns


def _stream(
  trainer: TrainerParts, item: PlannedBatch, blocks: Blocks
) -> Updated:
  # These arrays belong to the planner or to admitted batches. They are not
  # written again.
  arguments = to_step(
    (
      tuple(plan.inverse for plan in item.plans),
      on_device(item.batch),
      _batches_seen(trainer, item),
      item.row_weights,
      row_index(trainer, item.plans, blocks),
      _reassigned(trainer, item),
    )
  )
  return _update(
    trainer, lambda: trainer.update(trainer.state, blocks, *arguments)
  )


def _on_host(
  trainer: TrainerParts, item: PlannedBatch, blocks: Blocks
) -> Updated:
  watched: Any = trainer.state.watch
  index: Any = None
  frozen: Any = tuple(np.zeros(len(block.rows), bool) for block in blocks)
  if watched is not None:
    index = to_device(row_index(trainer, item.plans, blocks))
    frozen = watch.frozen(watched, index)

  def update() -> Updated:
    programs = trainer.programs.host_update(trainer.rows)
    state, changed, loss, touched = programs.step(
      trainer.state._replace(watch=None),
      blocks,
      tuple(plan.inverse for plan in item.plans),
      on_device(item.batch),
      _batches_seen(trainer, item),
      item.row_weights,
      frozen,
    )
    if watched is not None:
      new = watch.touched(watched, index, from_cpu(touched))
      state = state._replace(watch=new)
    return state, changed, loss

  return _update(trainer, update)


def _batches_seen(trainer: TrainerParts, item: PlannedBatch) -> np.float32:
  seen, scheduled = trainer.engine.counters.examples_seen, item.scheduled
  size = scheduled.batch_size or len(scheduled.batch.labels)
  return np.float32(seen / size)


def _update(trainer: TrainerParts, update: Callable[[], Updated]) -> Updated:
  """Calls `update`; if it fails too late, the trainer is inconsistent."""
  # The call may donate the state before it fails.
  trainer.inconsistent = 'a step'
  try:
    with TraceAnnotation('step'):
      return update()
  except BaseException:
    # A failure to compile does not touch the state.
    if not any(leaf.is_deleted() for leaf in jax.tree.leaves(trainer.state)):
      trainer.inconsistent = None
    raise


def _rows(engine: Engine, item: PlannedBatch, trained: int) -> list[Counters]:
  return list(map(counters.moved, item.plans, engine.row_bytes))


def _rows_and_gradients(
  engine: Engine, item: PlannedBatch, trained: int
) -> list[Counters]:
  groups = zip(
    _rows(engine, item, trained), engine.tables.groups, item.plans, strict=True
  )
  return [
    moved._replace(
      bytes_loaded=len(plan.load) * group.dim * np.dtype(group.dtype).itemsize,
      bytes_stored=len(plan.store) * group.dim * 4,  # in f32
    )
    for moved, group, plan in groups
  ]


def _embeddings(
  engine: Engine, item: PlannedBatch, trained: int
) -> list[Counters]:
  sizes = embedding_bytes(engine.tables)
  return [
    moved._replace(
      rows_loaded=0,
      rows_stored=0,
      bytes_loaded=trained * size,
      bytes_stored=trained * size,
    )
    for moved, size in zip(_rows(engine, item, trained), sizes, strict=True)
  ]


def embedding_bytes(tables: TableSet) -> tuple[int, ...]:
  """Returns per group the bytes of an example's embeddings, in f32.

  They are 4 F D for F pooled features. A feature that is not pooled has an
  embedding for each of its L lookups.
  """
  lengths = {
    name: feature.max_length if feature.combiner == 'none' else 1
    for name, feature in tables.features.items()
  }
  return tuple(
    4 * group.dim * sum(lengths[name] for name in group.features)
    for group in tables.groups
  )


STREAM = Crossing(_stream, _rows)
CROSSINGS: dict[str, Crossing] = {
  'stream': STREAM,
  'parameter_server': Crossing(_on_host, _rows_and_gradients, on_host=True),
  'pooled': Crossing(_on_host, _embeddings, on_host=True),
}
"""Every crossing by its name, a member of `ROWS`."""
