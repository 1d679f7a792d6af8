"""The one error a user can cause, and checks that raise it."""

from collections.abc import Iterator, Mapping
import contextlib
import operator
import os
from typing import Any, SupportsIndex, TypeVar

import numpy as np

T = TypeVar('T')


class UserError(ValueError):
  """Reports bad input in one sentence. Programs print it and exit with 1.

  Example: "alpha must be in [1, 26] for 26 lookups, got 30 (Skip.alpha);
  count the lookups of one example, at most all of them."
  """

  def __init__(self, rule: str, *, got: object, where: str, hint: str):
    """Builds the sentence.

    Args:
      rule: what must hold, as a clause without its full stop.
      got: the offending value; shown as text.
      where: file, line and column, or the argument: 'function, argument' or
        'Type.argument'.
      hint: what to do about it, as an imperative clause.
    """
    self.rule, self.got, self.where, self.hint = rule, got, where, hint
    super().__init__(f'{rule}, got {got} ({where}); {hint}.')

  def __reduce__(self) -> tuple:  # keeps the error whole across processes
    return _rebuild, (self.rule, self.got, self.where, self.hint)


def _rebuild(rule: str, got: object, where: str, hint: str) -> UserError:
  return UserError(rule, got=got, where=where, hint=hint)


def is_whole(value: object, low: int, below: int | None = None) -> bool:
  """Whether a value is a whole number in [low, below). No end if that is None.

  Python's and numpy's integers pass. Fractions, text, bools and NaN do not.
  """
  # Not `int(value)`, which takes 2.5 and '3' as well.
  if isinstance(value, bool) or not isinstance(value, SupportsIndex):
    return False
  try:
    number = operator.index(value)
  except TypeError:  # numpy's arrays have the method, whatever they hold
    return False
  return low <= number and (below is None or number < below)


def _named(where: str) -> str:
  """Returns the argument that `where` ends with."""
  return where.replace('.', ' ').split()[-1]


def check_whole(value: object, least: int, where: str, hint: str) -> None:
  """Checks that an argument is a whole number of at least `least`.

  Raises:
    UserError: it is not. `where` ends with the argument's name.
  """
  if not is_whole(value, least):
    raise UserError(
      f'{_named(where)} must be a whole number, at least {least}',
      got=repr(value),
      where=where,
      hint=hint,
    )


def check_seed(seed: object, where: str) -> None:
  """Checks that a seed is a whole number in [0, 2**63).

  Raises:
    UserError: it is not.
  """
  if not is_whole(seed, 0, 1 << 63):
    raise UserError(
      'a seed must be a whole number in [0, 2**63)',
      got=repr(seed),
      where=where,
      hint='pick another one, such as 0',
    )


def check_by_name(value: object, where: str, hint: str) -> None:
  """Checks that an argument is a mapping whose keys are text.

  Raises:
    UserError: it is not. `where` ends with the argument's name.
  """
  names = value if isinstance(value, Mapping) else [None]
  if not all(isinstance(name, str) for name in names):
    raise UserError(
      f'{_named(where)} must be given by name: a mapping whose keys are text',
      got=repr(value),
      where=where,
      hint=hint,
    )


def check_path(value: object, where: str) -> None:
  """Checks that an argument is a path: a text or an `os.PathLike`.

  Raises:
    UserError: it is not. `where` ends with the argument's name.
  """
  path = value.__fspath__() if isinstance(value, os.PathLike) else value
  if not isinstance(path, str) or value == '':
    raise UserError(
      f'{_named(where)} must be a path, or a text that is one',
      got=repr(value),
      where=where,
      hint='give the name of a file or a folder',
    )


def check_optimizer(value: object, where: str) -> None:
  """Checks that a value is an optimizer in the form of optax.

  Raises:
    UserError: it has no `init` and `update`.
  """
  parts = (getattr(value, name, None) for name in ('init', 'update'))
  if isinstance(value, type) or not all(map(callable, parts)):
    raise UserError(
      'an optimizer must have the functions init and update',
      got=repr(value),
      where=where,
      hint='give one of optax, such as optax.adam(1e-3)',
    )


@contextlib.contextmanager
def running_optimizer(where: str) -> Iterator[None]:
  """Turns errors of an optimizer that cannot run into one sentence.

  Raises:
    UserError: the optimizer or a schedule of it takes other arguments than
      optax gives, or was made of something that is no number.
  """
  try:
    yield
  except UserError:
    raise
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    first = next(iter(str(error).splitlines()), '')
    raise UserError(
      'an optimizer must be init(params) and update(updates, state, params),'
      ' and its schedules functions of a count',
      got=f'{type(error).__name__}: {first}',
      where=where,
      hint='look at the arguments that it was made of',
    ) from error


def choose(
  members: Mapping[str, T], name: object, where: str, beside: str = ''
) -> T:
  """Returns the member of a name.

  Args:
    members: by name.
    name: what the user gave.
    where: 'function, argument'.
    beside: other values of the argument, in words.

  Raises:
    UserError: there is none, or it is no name.
  """
  # Not everything can be looked up: lists have no hash.
  if not isinstance(name, str) or name not in members:
    names = ', '.join([*members, beside] if beside else members)
    raise UserError(
      f'{where.rpartition(", ")[2]} must be one of {names}',
      got=repr(name),
      where=where,
      hint='pick one of them',
    )
  return members[name]


def as_array(values: Any, where: str) -> np.ndarray:
  """Returns any array, or evenly nested lists, as a numpy array.

  Raises:
    UserError: the lists are uneven, or values are masked.
  """
  # `np.asarray` would drop the mask and expose the masked values.
  if isinstance(values, np.ma.MaskedArray):
    raise UserError(
      'values must not be masked',
      got='a masked array',
      where=where,
      hint='fill what is missing, e.g. values.filled(0)',
    )
  try:
    return np.asarray(values)
  except (TypeError, ValueError) as error:
    raise UserError(
      'values must be an array, or lists that make one',
      got=str(error),
      where=where,
      hint='give rows of equal length',
    ) from error
