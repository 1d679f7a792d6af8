"""What crosses the link in a step: rows, rows and gradients, or embeddings.

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
  to_host,
  to_step,
)
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.engine import Engine
from slipstream_jax.engine.planner import PlannedBatch
from slipstream_jax.tables import TableSet
from slipstream_jax.training import edges, watch
from slipstream_jax.training.recipe import TrainState
from slipstream_jax.types import RowBlock

Updated = tuple[TrainState, tuple[RowBlock, ...], jax.Array]
"""The next state, the changed rows, and the loss."""


class Crossing(NamedTuple):
  """What crosses the link, and where rows are updated."""

  name: str
  """Its key in `CROSSINGS`."""
  load: Callable[[Engine, PlannedBatch], tuple[RowBlock, ...]]
  """The batch's rows, as `update` takes them; changes nothing for good."""
  update: Callable[[Any, PlannedBatch, tuple[RowBlock, ...]], Updated]
  """One step of a trainer, which is torn if its state is lost."""
  store: Callable[[Engine, PlannedBatch, tuple[RowBlock, ...]], None]
  """Puts the changed rows back."""
  counts: Callable[[Engine, PlannedBatch, int], Sequence[Counters] | None]
  """Per group what crosses, with so many examples trained; None: rows with
  their state, as planned."""
  on_host: bool = False
  """Rows are updated there, so no row may be elsewhere."""


def _stream(
  trainer: Any, item: PlannedBatch, blocks: tuple[RowBlock, ...]
) -> Updated:
  # Of the planner's, and of admitted batches: nobody writes any of it.
  arguments = to_step(
    (
      tuple(plan.inverse for plan in item.plans),
      edges.on_device(item.batch),
      _seen(trainer, item),
      item.row_weights,
      edges.row_index(trainer, item.plans, blocks),
      edges.renewed(trainer, item),
    )
  )
  return _kept_whole(
    trainer, lambda: trainer.update(trainer.state, blocks, *arguments)
  )


def _on_host(
  trainer: Any, item: PlannedBatch, blocks: tuple[RowBlock, ...]
) -> Updated:
  watched: Any = trainer.state.watch
  index: Any = None
  still: Any = tuple(np.zeros(len(block.rows), bool) for block in blocks)
  if watched is not None:
    index = to_device(edges.row_index(trainer, item.plans, blocks))
    still = watch.still(watched, index)

  def update() -> Updated:
    state, changed, loss, touched = trainer.host.step(
      trainer.state._replace(watch=None),
      blocks,
      tuple(plan.inverse for plan in item.plans),
      edges.on_device(item.batch),
      _seen(trainer, item),
      item.row_weights,
      still,
    )
    if watched is not None:
      touched = watch.touched(watched, index, from_cpu(touched))
      state = state._replace(watch=touched)
    return state, changed, loss

  return _kept_whole(trainer, update)


def _seen(trainer: Any, item: PlannedBatch) -> np.float32:
  seen, scheduled = trainer.engine.counters.examples_seen, item.scheduled
  size = scheduled.batch_size or len(scheduled.batch.labels)
  return np.float32(seen / size)


def _kept_whole(trainer: Any, update: Callable[[], Updated]) -> Updated:
  """What `update` returns; the trainer is torn if that fails too late."""
  # Until it is known that the call has not donated the state before it failed.
  trainer.torn = 'a step'
  try:
    with TraceAnnotation('step'):
      return update()
  except BaseException:
    # What fails while it is compiled has not touched the state.
    if not any(leaf.is_deleted() for leaf in jax.tree.leaves(trainer.state)):
      trainer.torn = None
    raise


def _scatter(
  engine: Engine, item: PlannedBatch, blocks: tuple[RowBlock, ...]
) -> None:
  engine.scatter_on_host(item.plans, to_host(blocks), item.reassigned)


def _rows_and_gradients(
  engine: Engine, item: PlannedBatch, trained: int
) -> list[Counters]:
  groups = zip(engine.tables.groups, item.plans, engine.row_bytes, strict=True)
  return [
    counters.moved(plan, size)._replace(
      bytes_loaded=len(plan.load) * group.dim * np.dtype(group.dtype).itemsize,
      bytes_stored=len(plan.store) * group.dim * 4,  # in f32
    )
    for group, plan, size in groups
  ]


def _embeddings(
  engine: Engine, item: PlannedBatch, trained: int
) -> list[Counters]:
  groups = zip(
    embedding_bytes(engine.tables), item.plans, engine.row_bytes, strict=True
  )
  return [
    counters.moved(plan, size)._replace(
      rows_loaded=0,
      rows_stored=0,
      bytes_loaded=trained * nbytes,
      bytes_stored=trained * nbytes,
    )
    for nbytes, plan, size in groups
  ]


def embedding_bytes(tables: TableSet) -> tuple[int, ...]:
  """Per group, bytes of an example's embeddings: 4 F D, where all are pooled.

  In f32; a feature that is not pooled has one for each of its L lookups.
  """
  lengths = {
    name: feature.max_length if feature.combiner == 'none' else 1
    for name, feature in tables.features.items()
  }
  return tuple(
    4 * group.dim * sum(lengths[name] for name in group.features)
    for group in tables.groups
  )


STREAM = Crossing(
  'stream',
  lambda engine, item: engine.load(item.plans, item.reassigned),
  _stream,
  lambda engine, item, blocks: engine.store(
    item.plans, blocks, item.reassigned
  ),
  lambda engine, item, trained: None,
)
CROSSINGS: dict[str, Crossing] = {
  'stream': STREAM,
  **{
    name: Crossing(
      name,
      lambda engine, item: engine.gather_on_host(item.plans, item.reassigned),
      _on_host,
      _scatter,
      count,
      on_host=True,
    )
    for name, count in (
      ('parameter_server', _rows_and_gradients),
      ('pooled', _embeddings),
    )
  },
}
"""Every crossing by its name."""
