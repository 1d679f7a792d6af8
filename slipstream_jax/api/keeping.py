"""A whole trainer in a folder: its checkpoints, and what it was made of."""

from collections.abc import Callable
import contextlib
import os

import numpy as np

from slipstream_jax.checkpoint.checkpoint import Checkpoints, Position
from slipstream_jax.checkpoint.state import Facts, facts_of
from slipstream_jax.schedules.base import State
from slipstream_jax.training.parts import start_watch, TrainerParts

Path = str | os.PathLike[str]


def save(path: Path, parts: TrainerParts, position: State) -> int:
  """Saves everything; returns the steps taken.

  Raises:
    UserError: as `Checkpoints.save`.
  """
  with contextlib.closing(Checkpoints(path)) as checkpoints:
    return checkpoints.save(parts, position)


def restore(
  path: Path,
  parts: TrainerParts | None,
  make: Callable[[Facts], TrainerParts],
  step: int | None = None,
) -> tuple[TrainerParts, Position]:
  """The parts with everything that was saved.

  Args:
    path: of the folder.
    parts: to put it into, if they were made of the same facts; unchanged if
      this fails.
    make: makes others.
    step: of the checkpoint; None: the newest.

  Raises:
    UserError: as `Checkpoints.restore`, or facts that are damaged.
  """
  with contextlib.closing(Checkpoints(path)) as checkpoints:
    facts = checkpoints.facts(step)
    if parts is None or not _same(facts_of(parts), facts):
      parts = make(facts)
    watches = parts.state.watch
    if not facts.watched:
      parts.state = parts.state._replace(watch=None)
    elif watches is None:
      start_watch(parts)
    try:
      position = checkpoints.restore(parts, step=step)
    except BaseException:
      parts.state = parts.state._replace(watch=watches)
      raise
  if not facts.watched:
    parts.engine.freeze(None)  # what stood still before moves again
  return parts, position


def _same(own: Facts, saved: Facts) -> bool:
  """Whether parts of the one can hold what was saved of the other."""
  columns = own.dense_columns, saved.dense_columns
  # Dicts are equal in any order, but here the order counts.
  one, other = (None if c is None else [*c.items()] for c in columns)
  if own.dense_features != saved.dense_features or one != other:
    return False
  if own.hot is None or saved.hot is None:
    return own.hot is saved.hot
  return np.array_equal(own.hot, saved.hot)
