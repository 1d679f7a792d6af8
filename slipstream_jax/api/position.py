"""Position of each source of a trainer, and how training on it is resumed."""

from collections.abc import Iterator
import contextlib
import sys
from typing import Any, NamedTuple
import weakref

from slipstream_jax.data.source import BatchSource, CheckpointableIterator
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.stream import Unused
from slipstream_jax.schedules.base import State
from slipstream_jax.schedules.settings import check_settings, Skip
from slipstream_jax.training.trainer_parts import (
  planned,
  slipstream,
  TrainerParts,
)

_SEVERAL = 'sources'  # key of the positions of several sources in a checkpoint


class SourceState(NamedTuple):
  """State of a source that is not being trained on now."""

  position: State
  """Position of the planned batches, empty if there were none."""
  skip: Skip | None = None
  """The skip that it was trained with. None also if it is `restored`."""
  unused: Unused | None = None
  """Batches and items that an iterator gave and training did not use."""
  ended: bool = False
  """Whether it has no more batches."""
  restored: bool = False
  """Whether it comes from a checkpoint."""
  interleaved: bool = False
  """Whether a schedule was given up because another source was trained."""


class ActiveSource(NamedTuple):
  """A source that is being trained on."""

  source: object
  """The user's object."""
  skip: Skip | None
  bound: BatchSource
  """Its batches in global rows."""
  planned: PlannedBatches
  restored: bool = False
  """Whether it begins at the position of a checkpoint."""

  @property
  def position(self) -> State:
    """The source's own position after the last batch trained."""
    return own_position(self.planned.get_state())

  def pause(self, parts: TrainerParts) -> None:
    """Ends the threads and sets the source back to the last batch trained."""
    self.planned.pause()
    # A user's source may refuse. The threads have ended in any case.
    with contextlib.suppress(UserError):
      _set_state(parts, self.bound, self.position)

  def end(self, parts: TrainerParts, closes: bool) -> SourceState:
    """Ends threads and source, and returns the state of the source.

    If it was interrupted, calling it again has the same result. A source of
    batches that the user holds is only closed if `closes`.
    """
    ended = self.planned.ended
    self.planned.end()
    bound, unused = self.bound, None
    held_by_user = isinstance(self.source, CheckpointableIterator)
    if bound.is_lent or held_by_user:
      self.pause(parts)
      unused = bound.unused()
    # Reading ahead of training has grown the vocabularies.
    bound.set_vocabularies(parts.grown)
    if closes or not held_by_user:
      self.planned.close()
    return SourceState(self.planned.get_state(), self.skip, unused, ended)


def check_skip(skip: object) -> None:
  """Raises a `UserError` unless these are valid settings, or None."""
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


@contextlib.contextmanager
def _hint_at_resume(restored: bool) -> Iterator[None]:
  """Adds to the hint of an error that a source may begin anew."""
  try:
    yield
  except UserError as error:
    if not restored:
      raise
    raise UserError(
      error.rule,
      got=error.got,
      where=error.where,
      hint=f'{error.hint}, or restore with resume=False to begin anew',
    ) from error


def resume(
  parts: TrainerParts,
  source: object,
  bound: BatchSource,
  skip: Skip | None,
  ahead: tuple[int, int],
  state: SourceState,
) -> ActiveSource:
  """Begins to read a source from the state in which training left it.

  Args:
    parts: parts of the trainer.
    source: the user's object.
    bound: its batches.
    skip: what to leave out of training.
    ahead: depth and workers, as in `planned`.
    state: state of the source.

  Raises:
    UserError: an invalid skip, another source, or a schedule that other sources
      ended. Nothing has changed.
  """
  position, skips = state.position, 'settings' in state.position
  resumes_schedule = skips and (state.restored or state.skip == skip)
  watches, probe = parts.state.watch, parts.probe

  def batches() -> PlannedBatches:
    if skip is None:
      return planned(parts, bound, *ahead)
    return slipstream(parts, bound, skip, None, *ahead)

  with _hint_at_resume(state.restored):
    _check_resumable(state, skip)
    if state.unused is not None:
      bound.put_back(state.unused, own_position(position))
    if position and not resumes_schedule:
      _set_state(parts, bound, own_position(position))
    bound.keep_from(bound.get_state())
    try:
      begun = parts.turns.run(batches)
      if resumes_schedule:
        if watches is not None and parts.state.watch is not None:
          # The new schedule has started a new watch. The old one continues.
          parts.state = parts.state._replace(watch=watches)
          parts.probe.put(probe.window, parts.moved())
        if parts.probe is not probe:
          parts.probe.take_over(probe)
        begun.set_state(position)
    except BaseException:
      if resumes_schedule:
        parts.state, parts.probe = parts.state._replace(watch=watches), probe
      raise
  return ActiveSource(source, skip, bound, begun, state.restored)


def _check_resumable(state: SourceState, skip: Skip | None) -> None:
  if 'settings' in state.position and state.restored and skip is None:
    raise UserError(
      'a run that was saved while skipping is resumed with the same skip',
      got='none',
      where='Trainer.train, skip',
      hint='give it',
    )
  if state.interleaved and state.skip == skip:
    raise UserError(
      'a schedule that compares rows, is scored by the model, or skips while a'
      ' vocabulary grows is trained without another source in between',
      got='another source since',
      where='Trainer.train, skip',
      hint='train this source without skip, or with another skip, from where'
      ' it is',
    )


def own_position(position: State) -> State:
  """Returns the source's own position after the last batch trained."""
  if 'settings' not in position:  # no schedule around it
    return position
  own: State = position.get('behind') or position['source']
  return own


def _set_state(parts: TrainerParts, bound: BatchSource, own: State) -> None:
  """Sets a source to a position, and its vocabularies to those of training."""
  states = own.get('vocabularies')
  if states:
    trained = {table: parts.grown.get(table, p) for table, p in states.items()}
    own = own | {'vocabularies': trained}
  bound.set_state(own)


class _Reference:
  """Reference to a source, weak if the source allows it."""

  def __init__(self, source: object) -> None:
    self._strong: object = None
    try:
      self._weak: weakref.ref[Any] | None = weakref.ref(source)
    except TypeError:  # lists, and iterators that are made in C
      self._weak, self._strong = None, source

  def is_of(self, source: object) -> bool:
    return source is (self._weak() if self._weak else self._strong)

  @property
  def users(self) -> int:
    """References to the source, 0 if it is gone."""
    if self._weak is not None:
      return 0 if self._weak() is None else sys.maxsize
    return sys.getrefcount(self._strong)


_ALONE = _Reference([]).users  # references to a source without users


class SourceStates:
  """The state of each source that training has left, by its identity."""

  def __init__(self, saved: State | None = None) -> None:
    """Starts with no source, and with saved positions of sources to come."""
    self._states: list[tuple[_Reference, SourceState]] = []
    self._saved = [] if not saved else list(saved.get(_SEVERAL, [saved]))
    self._resumed = False  # whether one of the saved positions was used
    self._last: tuple[object, SourceState] | None = None

  def leave(self, source: object, state: SourceState) -> None:
    """Keeps the state of a source that training leaves."""
    # The last one stays alive, because it may be saved next.
    self._last = source, state
    others = [
      (reference, one)
      for reference, one in self._states
      if reference.users > _ALONE and not reference.is_of(source)
    ]
    self._states = [*others, (_Reference(source), state)]

  def forget(self, source: object) -> None:
    """Forgets the state of a source, which then begins again."""
    self._states = [one for one in self._states if not one[0].is_of(source)]
    if self._last is not None and self._last[0] is source:
      self._last = None

  def go_back(self, source: object, position: State, skip: Skip | None) -> None:
    """Sets a source that was left to a position from before.

    An iterator that the user holds cannot go back. It continues where it is,
    and a schedule begins anew.
    """
    (state,) = [one for known, one in self._states if known.is_of(source)]
    if state.unused is None:
      state = SourceState(position, skip)
    else:
      state = state._replace(position=own_position(state.position))
    self.leave(source, state)

  def find(self, source: object, bound: BatchSource) -> SourceState:
    """Returns the state in which training left the source, empty if it is new.

    A saved position is recognized by the batches. Only the first source after
    a restore must have one.

    Raises:
      UserError: that source fits none or several of the saved positions.
    """
    for reference, state in self._states:
      if reference.is_of(source) and (state.position or not self._saved):
        return state
    if not self._saved:
      return SourceState({})
    position: State | None = self._saved[0]
    if self._resumed or len(self._saved) > 1:
      position = _matching(self._saved, bound, needed=not self._resumed)
    if position is None:
      return SourceState({})
    return SourceState(position, restored=True)

  def begin(self, source: object, state: SourceState, alone: bool) -> None:
    """Updates the states when training on a source begins.

    Args:
      source: the user's object.
      state: its state from `find`.
      alone: whether a schedule follows steps, or did, so that schedules of
        other sources end.
    """
    rest = [one for one in self._saved if one is not state.position]
    self._resumed = self._resumed or len(rest) < len(self._saved)
    self._saved = [own_position(one) for one in rest] if alone else rest
    self._states = [
      (reference, _without_void_schedule(one))
      for reference, one in self._states
      if not reference.is_of(source)
    ]

  def saved(
    self, source: object = None, position: State | None = None
  ) -> State:
    """Returns the positions for a checkpoint.

    They are those of the source that is being trained on, or else of the last
    one, and of all others that have not ended.

    Args:
      source: the source that is being trained on, if there is one.
      position: the position of its batches.
    """
    if position is None and self._last is not None:
      source, state = self._last
      position = state.position
    others = [
      state.position
      for reference, state in self._states
      if reference.users > _ALONE
      and not (state.ended or reference.is_of(source))
    ]
    positions = [one for one in [position, *others, *self._saved] if one]
    if len(positions) > 1:
      return {_SEVERAL: positions}
    return positions[0] if positions else {}

  def restored(self, saved: State) -> 'SourceStates':
    """Returns states with a checkpoint's positions, and keeps unused items."""
    new = SourceStates(saved)
    new._states = [
      (reference, SourceState({}, unused=state.unused))
      for reference, state in self._states
      if state.unused is not None and reference.users > _ALONE
    ]
    return new


def _without_void_schedule(state: SourceState) -> SourceState:
  """Drops the schedule of a source if steps of other sources void it."""
  position, skip = state.position, state.skip
  if skip is None or 'settings' not in position:
    return state
  if skip.follows_steps or position['source'].get('vocabularies'):
    return state._replace(position=own_position(position), interleaved=True)
  return state


def _matching(
  saved: list[State], bound: BatchSource, needed: bool
) -> State | None:
  """Returns the one saved position that the source can be set to, or None.

  Raises:
    UserError: there are several, or none although one is needed.
  """
  names = bound.get_state().keys()
  fits, unknown = [], []
  for position in saved:
    own = own_position(position)
    if own.keys() != names:
      continue
    if own.get('order') is None and own.get('last') is None:
      unknown.append(position)
      continue
    try:
      bound.set_state(own)
    except UserError:
      continue
    fits.append(position)
  fits = fits or unknown
  if len(fits) == 1:
    return fits[0]
  if not (fits or needed):
    return None
  raise UserError(
    f'a source after a restore must be one of the {len(saved)} that are to be'
    ' resumed',
    got=f'one that fits {len(fits)} of them' if fits else 'none of them',
    where='Trainer.train, source',
    hint='give the same examples, batch size and seed, or restore with'
    ' resume=False to begin anew',
  )
