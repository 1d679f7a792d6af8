"""A source that is being trained on, and how training on it goes on."""

from typing import NamedTuple

from slipstream_jax.data.base import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.stream.pipeline import PlannedBatches
from slipstream_jax.training.parts import planned, slipstream, TrainerParts


class Reading(NamedTuple):
  """A source that is being trained on."""

  source: object
  """As the user holds it."""
  skip: Skip | None
  bound: BatchSource
  """Its batches in global rows."""
  planned: PlannedBatches

  def end(self, following: object) -> State | None:
    """Stops reading.

    Args:
      following: the source that is trained on next.

    Returns:
      Where it goes on if it is this one; else None.
    """
    position = None
    if following is self.source:
      # Back to what was used: what is planned ahead was read, but not used.
      self.planned.set_state(self.planned.get_state())
      position = self.bound.get_state()
    self.planned.close()
    return position


def begin(
  parts: TrainerParts, bound: BatchSource, skip: Skip | None, depth: int
) -> PlannedBatches:
  """Batches of the source for the trainer, from where the source is.

  Raises:
    UserError: settings that cannot be.
  """
  if skip is None:
    return planned(parts, bound, depth)
  return slipstream(parts, bound, skip, depth=depth)


def go_on(
  bound: BatchSource, position: State | None, skip: Skip | None
) -> bool:
  """Whether planned batches are to be set to `position`.

  If not, the source is set to it, where it is one of a source alone.

  Raises:
    UserError: it is of a run that skipped, and this one does not.
  """
  if position is None:
    return False
  skipped = 'settings' in position
  if skipped and skip is None:
    raise UserError(
      'what was saved while skipping goes on with the same skip',
      got='none',
      where='Trainer.train, skip',
      hint='give it, or restore with resume=False',
    )
  if skipped or skip is None:
    return True
  bound.set_state(position)
  return False
