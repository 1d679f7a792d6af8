"""The position of each source of a trainer, by the source's identity."""

import sys
from typing import Any, NamedTuple
import weakref

from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.stream import Unused
from slipstream_jax.schedules.base import State
from slipstream_jax.schedules.settings import Skip

_SEVERAL = 'sources'  # where a checkpoint has the positions of several


class Left(NamedTuple):
  """The state of a source that training has left."""

  position: State
  """Position of the planned batches; empty if there were none."""
  skip: Skip | None = None
  """The skip that it was trained with; None also if it is `restored`."""
  unused: Unused | None = None
  """Batches and items that an iterator gave and training did not use."""
  ended: bool = False
  """Whether it has no more batches."""
  restored: bool = False
  """Whether it comes from a checkpoint."""
  interleaved: bool = False
  """Whether a schedule was given up because another source was trained."""


def own_position(position: State) -> State:
  """Returns the source's own position after the last batch trained."""
  if 'settings' not in position:  # of a source alone
    return position
  own: State = position.get('behind') or position['source']
  return own


class _Reference:
  """Refers to a source, weakly if the source allows it."""

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
    """References to the source; 0 if it is gone."""
    if self._weak is not None:
      return 0 if self._weak() is None else sys.maxsize
    return sys.getrefcount(self._strong)


_ALONE = _Reference([]).users  # references to a source that nobody else has


class Places:
  """Keeps the state of each source that training has left."""

  def __init__(self, saved: State | None = None) -> None:
    """Starts with no source.

    Args:
      saved: of `saved`: positions of sources that are yet to come.
    """
    self._left: list[tuple[_Reference, Left]] = []
    self._saved = [] if not saved else list(saved.get(_SEVERAL, [saved]))
    self._resumed = False  # whether one of the saved positions was used
    self._last: tuple[object, Left] | None = None

  def leave(self, source: object, left: Left) -> None:
    """Keeps the state of a source that training leaves."""
    # The last one stays alive: it may be saved next.
    self._last = source, left
    others = [
      (held, one)
      for held, one in self._left
      if held.users > _ALONE and not held.is_of(source)
    ]
    self._left = [*others, (_Reference(source), left)]

  def find(self, source: object, bound: BatchSource) -> Left:
    """Returns the state in which training left the source; empty if it is new.

    The first source after a restore must be one of the run's. Later ones may
    be new.

    Args:
      source: as the user holds it.
      bound: its batches, by which a saved position is recognized.

    Raises:
      UserError: positions were restored, the source is the first one since and
        fits none of them; or it cannot be told which one it fits.
    """
    for held, left in self._left:
      if held.is_of(source) and (left.position or not self._saved):
        return left
    if not self._saved:
      return Left({})
    if self._resumed or len(self._saved) > 1:
      position = _matching(self._saved, bound, needed=not self._resumed)
    else:
      position = self._saved[0]
    return Left({}) if position is None else Left(position, restored=True)

  def begin(self, source: object, left: Left, alone: bool) -> None:
    """Notes that a source is trained from here on.

    Args:
      source: as the user holds it.
      left: where it was, from `find`.
      alone: whether rows are compared, or were, for one source at a time.
    """
    rest = [one for one in self._saved if one is not left.position]
    self._resumed = self._resumed or len(rest) < len(self._saved)
    self._saved = rest
    if alone:
      self._saved = [own_position(one) for one in self._saved]
    self._left = [
      (held, _give_up(one))
      for held, one in self._left
      if not held.is_of(source)
    ]

  def saved(
    self, source: object = None, position: State | None = None
  ) -> State:
    """Returns the positions of sources to resume, for a checkpoint.

    These are the last one trained, and all others that are still there and
    have not ended.

    Args:
      source: the one that is being trained on.
      position: of its batches.
    """
    positions = [] if position is None else [position]
    last = None
    if position is None and self._last is not None:
      last, left = self._last
      positions.append(left.position)
    positions += [
      left.position
      for held, left in self._left
      if held.users > _ALONE and not (left.ended or held.is_of(source or last))
    ]
    positions = [one for one in [*positions, *self._saved] if one]
    if len(positions) > 1:
      return {_SEVERAL: positions}
    return positions[0] if positions else {}

  def restored(self, saved: State) -> 'Places':
    """Returns places with a checkpoint's positions; keeps unused items."""
    places = Places(saved)
    for held, left in self._left:
      if left.unused is not None and held.users > _ALONE:
        places._left.append((held, Left({}, unused=left.unused)))
    return places


def _give_up(left: Left) -> Left:
  """Drops the schedule of a source if steps of other sources void it."""
  position, skip = left.position, left.skip
  if skip is None or 'settings' not in position:
    return left
  if skip.compares_rows or position['source'].get('vocabularies'):
    return left._replace(position=own_position(position), interleaved=True)
  return left


def _matching(
  saved: list[State], bound: BatchSource, needed: bool
) -> State | None:
  """Returns the one position that the source can be set to.

  Args:
    saved: the positions.
    bound: batches of the source.
    needed: whether to refuse a source that fits none. Else the result is None.

  Raises:
    UserError: there is none and one is needed, or there are several.
  """
  names = bound.get_state().keys()
  fits, untold = [], []
  for position in saved:
    own = own_position(position)
    if own.keys() != names:
      continue
    if own.get('order') is None and own.get('last') is None:
      untold.append(position)
      continue
    try:
      bound.set_state(own)
    except UserError:
      continue
    fits.append(position)
  fits = fits or untold
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
