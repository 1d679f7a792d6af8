"""What can be checked of an argument when a transformation is made."""

from typing import Any

import numpy as np

from slipstream_jax.errors import UserError


def is_plain(value: Any) -> bool:
  """Whether it is a number now: arrays may be traced or on a device."""
  return isinstance(value, int | float | np.number)


def check_learning_rate(value: Any, of: str) -> None:
  """Checks the learning rate of the optimizer `of`, if it is a plain number.

  Raises:
    UserError: it is negative, infinite or NaN, or no number at all.
  """
  finite = not is_plain(value) or 0 <= value < np.inf  # so that NaN is caught
  if isinstance(value, str) or value is None or not finite:
    raise UserError(
      'a learning rate must be a finite number of at least 0',
      got=repr(value),
      where=f'{of}, learning_rate',
      hint='give the size of a step, e.g. 0.01, or a schedule',
    )


def check_windows(
  threshold: Any, every: Any, window: Any, min_touches: Any
) -> None:
  """Checks those arguments of `skip_stale` that are plain numbers.

  Raises:
    UserError: one is out of range.
  """
  if is_plain(threshold) and not threshold >= 0:  # so that NaN is caught
    raise UserError(
      'threshold must be at least 0',
      got=threshold,
      where='skip_stale, threshold',
      hint='give the movement below which a row counts as still, e.g. 1e-3',
    )
  longest = every if is_plain(every) else np.inf
  for name, steps, low, high in (
    ('every', every, 1, np.inf),
    ('window', window, 1, longest),
    ('min_touches', min_touches, 0, np.inf),
  ):
    if is_plain(steps) and not (low <= steps <= high and steps % 1 == 0):
      raise UserError(
        f'{name} must be a whole number in [{low}, {high}]',
        got=steps,
        where=f'skip_stale, {name}',
        hint='give a number of steps within that range',
      )
