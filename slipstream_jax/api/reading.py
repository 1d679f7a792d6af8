"""A source that is being trained on, and how training on it goes on."""

import contextlib
from typing import NamedTuple

from slipstream_jax.data.base import BatchSource
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.schedules.settings import check_settings, Skip
from slipstream_jax.stream.pipeline import PlannedBatches, workers_of
from slipstream_jax.training import watch
from slipstream_jax.training.parts import planned, slipstream, TrainerParts


class Ahead(NamedTuple):
  """What is prepared before it is asked for."""

  depth: int
  """Batches; 0: none."""
  workers: int
  """Threads that find their unique rows."""


def ahead_of(prefetch: int, workers: int | None) -> Ahead:
  """As a user says it; no `workers`: as many as there are cores, at most 8.

  Raises:
    UserError: no such numbers.
  """
  check_whole(prefetch, 0, 'Trainer, prefetch', 'use 2, or 0')
  return Ahead(prefetch, workers_of(workers, 'Trainer, workers'))


class Left(NamedTuple):
  """Where training was left, for the source that goes on with it."""

  position: State
  """Of the planned batches; empty if there were none."""
  source: object | None = None
  """Whose it is, as the user holds it; None: that of whatever comes next."""
  skip: Skip | None = None
  """With which it was trained, if `source` is known."""


class Reading(NamedTuple):
  """A source that is being trained on."""

  source: object
  """As the user holds it."""
  skip: Skip | None
  bound: BatchSource
  """Its batches in global rows."""
  planned: PlannedBatches

  def pause(self) -> None:
    """Ends the thread; the source stays open, back where training was."""
    # An iterator that cannot be set back goes on where it is: what it gave
    # ahead of the steps is lost. Its thread has ended all the same.
    with contextlib.suppress(UserError):
      self.planned.set_state(self.planned.get_state())

  def close(self, parts: TrainerParts) -> Left:
    """Ends thread and source; says where it goes on."""
    left = Left(self.planned.get_state(), self.source, self.skip)
    if getattr(self.bound, 'is_lent', False):
      self.pause()  # whoever lent it finds it where training was
    self.planned.close()
    # What was read ahead of training has grown them, for nobody.
    getattr(self.bound, 'rewind', lambda grown: None)(parts.grown)
    return left


def begin(
  parts: TrainerParts,
  source: object,
  bound: BatchSource,
  skip: Skip | None,
  ahead: Ahead,
) -> Reading:
  """Reads a source from where it is.

  Raises:
    UserError: settings that cannot be.
  """
  if skip is None:
    batches = planned(parts, bound, **ahead._asdict())
  else:
    batches = slipstream(parts, bound, skip, **ahead._asdict())
  return Reading(source, skip, bound, batches)


def go_on(
  parts: TrainerParts,
  source: object,
  bound: BatchSource,
  skip: Skip | None,
  ahead: Ahead,
  left: Left,
) -> Reading:
  """Reads a source from where training on it was left.

  Raises:
    UserError: `begin`'s, or it is another source, or was trained with another
      `skip` than the one that comes after a restore; nothing has changed.
  """
  try:
    return _go_on(parts, source, bound, skip, ahead, left)
  except UserError as error:
    if left.source is not None or not left.position:
      raise
    raise UserError(
      error.rule,
      got=error.got,
      where=error.where,
      hint=f'{error.hint}, or restore with resume=False to begin anew',
    ) from error


def _go_on(
  parts: TrainerParts,
  source: object,
  bound: BatchSource,
  skip: Skip | None,
  ahead: Ahead,
  left: Left,
) -> Reading:
  position = left.position
  if 'settings' not in position:  # of a source alone
    if position:
      bound.set_state(position)
    return begin(parts, source, bound, skip, ahead)
  if left.source is not None and left.skip != skip:
    # What it had read ahead is not to be lost: first to where it was.
    check_skip(skip)
    resumed = _resumed(parts, source, bound, left.skip, Ahead(0, 1), position)
    resumed.pause()
    return begin(parts, source, bound, skip, ahead)
  if skip is None:
    raise UserError(
      'what was saved while skipping goes on with the same skip',
      got='none',
      where='Trainer.train, skip',
      hint='give it',
    )
  return _resumed(parts, source, bound, skip, ahead, position)


def check_skip(skip: Skip | None) -> None:
  """Looks at settings before anything is given up for them.

  Raises:
    UserError: settings that cannot be.
  """
  if skip is None:
    return
  if not isinstance(skip, Skip):
    raise UserError(
      'skip must be the settings of what to skip, or None',
      got=repr(skip),
      where='Trainer.train, skip',
      hint='give slip.Skip(drop=0.3)',
    )
  check_settings(skip)


def _resumed(
  parts: TrainerParts,
  source: object,
  bound: BatchSource,
  skip: Skip | None,
  ahead: Ahead,
  position: State,
) -> Reading:
  watches, probe = parts.state.watch, parts.probe
  try:
    reading = begin(parts, source, bound, skip, ahead)
    if watches is not None and parts.state.watch is not None:
      # Beginning starts a watch anew: here is the one that goes on.
      parts.state = parts.state._replace(watch=watches)
      parts.probe.put(probe.window, watch.moved(watches))
    reading.planned.set_state(position)
  except BaseException:
    parts.state, parts.probe = parts.state._replace(watch=watches), probe
    raise
  return reading
