"""A whole trainer in a folder: its checkpoint, and the facts beside it."""

from collections.abc import Callable
import os

import numpy as np

from slipstream_jax.saving.checkpoint import Checkpoints, Position
from slipstream_jax.saving.facts import Facts, keep_facts, read_facts
from slipstream_jax.schedules.base import State
from slipstream_jax.stream.buffers import to_host
from slipstream_jax.training.parts import start_watch, TrainerParts

Path = str | os.PathLike[str]


def facts_of(parts: TrainerParts) -> Facts:
  """What the parts were made of."""
  hot, columns = parts.engine.hot, parts.recipe.dense_columns
  return Facts(
    parts.shape.dense_features,
    None if columns is None else dict(columns),
    None if hot is None else hot.rows,
    parts.state.watch is not None,
  )


def save(path: Path, parts: TrainerParts, position: State) -> int:
  """Saves everything; returns the steps taken.

  Raises:
    UserError: as `Checkpoints.save`.
  """
  folder = Checkpoints(path)
  facts, step = facts_of(parts), int(to_host(parts.state.step))
  try:
    if folder.newest() == step:
      # It is there, or something else is, whose facts must stay.
      folder.save(parts, position)
      keep_facts(path, step, facts)
      return step
    # Else first: a checkpoint could not be opened without them. Those of the
    # one before stay until it is gone.
    keep_facts(path, step, facts)
    folder.save(parts, position)
    keep_facts(path, step, facts, alone=True)
    return step
  finally:
    folder.close()


def restore(
  path: Path,
  parts: TrainerParts | None,
  make: Callable[[Facts], TrainerParts],
) -> tuple[TrainerParts, Position]:
  """The parts with everything that was saved.

  Args:
    path: of the folder.
    parts: to put it into, if they were made of the same facts; unchanged if
      this fails.
    make: makes others.

  Raises:
    UserError: as `Checkpoints.restore`, or facts that are damaged.
  """
  folder = Checkpoints(path)
  try:
    facts = read_facts(path, folder.step_to_restore())
    if parts is None or not _same(facts_of(parts), facts):
      parts = make(facts)
    watches = parts.state.watch
    if not facts.watched:
      parts.state = parts.state._replace(watch=None)
    elif watches is None:
      start_watch(parts)
    try:
      position = folder.restore(parts)
    except BaseException:
      parts.state = parts.state._replace(watch=watches)
      raise
  finally:
    folder.close()
  if not facts.watched:
    parts.engine.freeze(None)  # what stood still before moves again
  return parts, position


def _same(own: Facts, saved: Facts) -> bool:
  """Whether parts of the one can hold what was saved of the other."""
  if own.hot is None or saved.hot is None:
    return own.hot is saved.hot and own[:2] == saved[:2]
  return own[:2] == saved[:2] and np.array_equal(own.hot, saved.hot)
