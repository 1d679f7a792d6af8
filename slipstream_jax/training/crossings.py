"""Values that cross the link in a step: rows, gradients or embeddings.

| rows | host to device | device to host | rows are updated on |
| --- | --- | --- | --- |
| `stream` | rows, row state | rows, row state | the device |
| `parameter_server` | rows | gradients of rows | the host |
| `pooled` | embeddings | gradients of embeddings | the host |
"""

from typing import Any

import jax
from jax.profiler import TraceAnnotation
import numpy as np

from slipstream_jax.engine import counters
from slipstream_jax.engine.buffers import to_step
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.engine import Engine, Plans
from slipstream_jax.engine.planner import PlannedBatch
from slipstream_jax.placement import bucket
from slipstream_jax.tables import TableSet
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.training.recipe import TrainState
from slipstream_jax.training.step import Blocks
from slipstream_jax.types import Batch

Updated = tuple[TrainState, Blocks, jax.Array]
"""The next state, the changed rows, and the loss."""


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


def _places(
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


def update(
  trainer: TrainerParts, item: PlannedBatch, blocks: Blocks, rows: str
) -> Updated:
  """Takes a step on loaded blocks, given what crosses the link.

  If it loses the trainer's state, it marks the trainer as inconsistent.
  """
  scheduled, seen = item.scheduled, trainer.engine.counters.examples_seen
  size = scheduled.batch_size or len(scheduled.batch.labels)
  inputs: Any = (
    tuple(plan.inverse for plan in item.plans),
    on_device(item.batch),
    np.asarray(seen / size, np.float32),
    item.row_weights,
  )
  watched: Any = row_index(trainer, item.plans, blocks), _places(trainer, item)
  # These arrays belong to the planner or to admitted batches. They are not
  # written again.
  if rows == 'stream':
    inputs, watched = to_step((inputs, watched))
  else:
    watched = to_step(watched)
  # The call may donate the state before it fails.
  trainer.inconsistent = 'a step'
  try:
    with TraceAnnotation('step'):
      updated: Updated = trainer.update(
        trainer.state, blocks, *inputs, *watched, rows
      )
  except BaseException:
    # A failure to compile does not touch the state.
    if not any(leaf.is_deleted() for leaf in jax.tree.leaves(trainer.state)):
      trainer.inconsistent = None
    raise
  return updated


def moved(
  engine: Engine, item: PlannedBatch, trained: int, rows: str
) -> list[Counters]:
  """Counts per group what crosses for a number of trained examples."""
  counts = list(map(counters.moved, item.plans, engine.row_bytes))
  if rows == 'parameter_server':
    groups = zip(counts, engine.tables.groups, item.plans, strict=True)
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
    sizes = [trained * size for size in embedding_bytes(engine.tables)]
    return [
      count._replace(
        rows_loaded=0, rows_stored=0, bytes_loaded=size, bytes_stored=size
      )
      for count, size in zip(counts, sizes, strict=True)
    ]
  return counts


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
