"""What a step does with hot rows that are watched, and at the edges of windows.

Either a schedule has the windows, and then the rule is in `Edge`, or a chain
that judges its rows itself, and then it is in `Judgement`.
"""

from collections.abc import Iterator
import contextlib
import time
from typing import Any

import jax
import numpy as np

from slipstream_jax.engine.buffers import to_device
from slipstream_jax.engine.engine import Plans
from slipstream_jax.engine.planner import PlannedBatch
from slipstream_jax.placement import bucket
from slipstream_jax.schedules.base import Edge
from slipstream_jax.training import judging, watch
from slipstream_jax.training.parts import TrainerParts
from slipstream_jax.types import Batch, RowBlock


def row_index(
  trainer: TrainerParts, plans: Plans, blocks: tuple[RowBlock, ...]
) -> tuple[np.ndarray, ...] | None:
  """Per group the place of each row among its hot ones, if they are watched."""
  if not (trainer.state.watch or trainer.state.entries):
    return None
  indices = []
  for plan, block, hot in zip(
    plans, blocks, trainer.engine.hot_of_groups, strict=True
  ):
    assert hot is not None
    assert plan.hot is not None
    # Padding counts as cold: what it does is dropped.
    index = np.full(len(block.rows), len(hot.rows), np.int32)
    index[: len(plan.hot)] = plan.hot
    indices.append(index)
  return tuple(indices)


def renewed(
  trainer: TrainerParts, item: PlannedBatch
) -> tuple[np.ndarray | None, ...] | None:
  """Per group the places of hot rows that get another id, padded with H."""
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


def refreeze(trainer: TrainerParts, edge: Edge) -> None:
  """Before the step: other rows stand still, or a window opens.

  All of it may be done once more, should the step fail and be tried again.
  """
  engine, watched = trainer.engine, trainer.state.watch
  assert watched is not None  # whoever gives edges has it started
  engine.freeze(edge.stale)
  with _timed(trainer):
    if edge.stale is None:
      change, argument = watch.opened, engine.hot_rows_now()
    else:
      change, argument = watch.frozen, to_device(edge.stale)
    with trainer.changing('the edge of a window'):  # the watch is donated
      trainer.state = trainer.state._replace(watch=change(watched, argument))


def judge(trainer: TrainerParts, item: PlannedBatch) -> None:
  """Before the step: what the chain judges itself, if a window ends or opens.

  As `refreeze`, all of it may be done once more.
  """
  engine, (frozen, closes, opens) = trainer.engine, item.judgement
  engine.freeze_groups(frozen)
  if not (closes or opens):
    return
  with _timed(trainer), trainer.changing('the edge of a window'):
    state, entries = trainer.state, list(trainer.state.entries)
    for group in (*closes, *opens):
      judge = trainer.judges[group]
      assert judge is not None
      rows = engine.groups[group].hot_rows_now() if group in closes else None
      entries[group] = judge.judge(
        entries[group], state.row_globals[group], rows
      )
    trainer.state = state._replace(entries=tuple(entries))
    if closes:
      stale = judging.stale_rows_of(trainer.state.entries)
      trainer.judgements.put(item.step, stale)


def compare(trainer: TrainerParts, window: int) -> None:
  """After the step: a window closes, and the schedule may ask for it."""
  watched = trainer.state.watch
  assert watched is not None
  with _timed(trainer):
    watched, moved = watch.closed(watched, trainer.engine.hot_rows_now())
    trainer.state = trainer.state._replace(watch=watched)
    trainer.probe.put(window, moved)


def on_device(batch: Batch) -> Batch:
  """The batch without what is of the host alone."""
  without: Any = batch
  without = without._replace(lookups=None, fresh=None)
  columns: Batch = without
  return columns


def score(trainer: TrainerParts, number: int) -> None:
  """After the step: leaves the loss of the held-out examples for the schedule.

  Nothing waits for it, and what it moves is not counted, as of evaluation.
  """
  engine, batch = trainer.engine, trainer.held_out
  assert batch is not None  # whoever asks for losses gives some
  plans = engine.plan(batch.lookups)
  # Loaded and never stored: the turn stays.
  rows = tuple(block.rows for block in engine.load(plans))
  inverses = tuple(plan.inverse for plan in plans)
  # Without an offset, which is of training.
  inputs = to_device((inverses, on_device(batch)._replace(offset=None)))
  trainer.probe.put_loss(number, trainer.score(trainer.state, rows, *inputs))


@contextlib.contextmanager
def _timed(trainer: TrainerParts) -> Iterator[None]:
  """Counts the seconds of the block, and waits for the device to know them."""
  jax.block_until_ready(trainer.state)
  started = time.perf_counter()
  yield
  jax.block_until_ready(trainer.state)
  trainer.seconds_watching += time.perf_counter() - started
