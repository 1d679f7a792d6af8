"""A source that is being trained on, and how training on it is resumed."""

import contextlib
from typing import NamedTuple

from slipstream_jax.api.places import Left, own_position
from slipstream_jax.data.source import BatchSource, CheckpointableIterator
from slipstream_jax.engine.pipeline import PlannedBatches, workers_of
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.schedules.settings import check_settings, Skip
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


class Reading(NamedTuple):
  """A source that is being trained on."""

  source: object
  """As the user holds it."""
  skip: Skip | None
  bound: BatchSource
  """Its batches in global rows."""
  planned: PlannedBatches
  restored: bool = False
  """Whether it begins at the position of a checkpoint."""

  @property
  def position(self) -> State:
    """The source's position after the last batch trained."""
    return own_position(self.planned.get_state())

  def trained(self) -> None:
    """Frees batches that were kept until they were trained."""
    self.bound.keep_from(self.position)

  def pause(self, parts: TrainerParts) -> None:
    """Ends the threads and sets the source back to where training was."""
    self.planned.pause()
    # What is no source of ours may refuse. Its thread has ended all the same.
    with contextlib.suppress(UserError):
      _set_state(parts, self.bound, self.position)

  def end(self, parts: TrainerParts, closes: bool) -> Left:
    """Ends threads and source, and returns the state of the source.

    It can be called again after an interrupt, with the same result.

    Args:
      parts: of the trainer.
      closes: whether to close a source of batches that the user holds.
    """
    ended = self.planned.ended
    self.planned.end()
    bound, unused = self.bound, None
    held_by_user = isinstance(self.source, CheckpointableIterator)
    if bound.is_lent or held_by_user:
      self.pause(parts)  # whoever holds it finds it where training was
      unused = bound.unused()
    # What was read ahead of training has grown them, for nobody.
    bound.set_vocabularies(parts.grown)
    if closes or not held_by_user:
      self.planned.close()
    return Left(self.planned.get_state(), self.skip, unused, ended)


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
  bound.keep_from(bound.get_state())

  def batches() -> PlannedBatches:
    if skip is None:
      return planned(parts, bound, **ahead._asdict())
    return slipstream(parts, bound, skip, **ahead._asdict())

  return Reading(source, skip, bound, parts.turns.run(batches))


def resume(
  parts: TrainerParts,
  source: object,
  bound: BatchSource,
  skip: Skip | None,
  ahead: Ahead,
  left: Left,
) -> Reading:
  """Reads a source from where training on it was left.

  Raises:
    UserError: `begin`'s; or it is another source, or a schedule that cannot be
      resumed; nothing has changed.
  """
  try:
    new = _resume(parts, source, bound, skip, ahead, left)
    return new._replace(restored=left.restored)
  except UserError as error:
    if not left.restored:
      raise
    raise UserError(
      error.rule,
      got=error.got,
      where=error.where,
      hint=f'{error.hint}, or restore with resume=False to begin anew',
    ) from error


def _resume(
  parts: TrainerParts,
  source: object,
  bound: BatchSource,
  skip: Skip | None,
  ahead: Ahead,
  left: Left,
) -> Reading:
  position, skips = left.position, 'settings' in left.position
  if skips and left.restored and skip is None:
    raise UserError(
      'what was saved while skipping goes on with the same skip',
      got='none',
      where='Trainer.train, skip',
      hint='give it',
    )
  if left.interleaved and left.skip == skip:
    raise UserError(
      'a schedule that compares rows, or skips while a vocabulary grows, is'
      ' trained without another source in between',
      got='another source since',
      where='Trainer.train, skip',
      hint='train this source without skip, or with another skip, from where'
      ' it is',
    )
  if left.unused is not None:
    bound.put_back(left.unused, own_position(position))
  if skips and (left.restored or left.skip == skip):
    return _resumed(parts, source, bound, skip, ahead, position)
  if position:
    _set_state(parts, bound, own_position(position))
  return begin(parts, source, bound, skip, ahead)


def _set_state(parts: TrainerParts, bound: BatchSource, own: State) -> None:
  """Sets a source to a position; its vocabularies are those of training."""
  places = own.get('vocabularies')
  if places:
    trained = {table: parts.grown.get(table, p) for table, p in places.items()}
    own = own | {'vocabularies': trained}
  bound.set_state(own)


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
