"""Checks of arguments that are concrete when a transformation is made."""

import inspect
from typing import Any

import numpy as np

from slipstream_jax.errors import UserError

_MOST_STEPS = 2**31 - 1  # optax counts steps in i32


def is_plain(value: Any) -> bool:
  """Whether it is a concrete number. Arrays may be traced or on a device."""
  if isinstance(value, np.ndarray):
    return value.ndim == 0 and value.dtype.kind in 'iuf'
  return isinstance(value, int | float | np.number)


def check_learning_rate(value: Any, of: str) -> None:
  """Checks the learning rate of the optimizer `of`, if it is concrete.

  Raises:
    UserError: it is negative, infinite or NaN, or neither a scalar nor a
      schedule.
  """
  finite = not is_plain(value) or 0 <= value < np.inf  # also catches NaN
  if not (_is_scalar(value) or _is_schedule(value)) or not finite:
    raise UserError(
      'a learning rate must be a finite number of at least 0',
      got=repr(value),
      where=f'{of}, learning_rate',
      hint='give the size of a step, e.g. 0.01, or a schedule',
    )


def check_windows(
  threshold: Any,
  every: Any,
  window: Any,
  min_touches: Any,
  on_stale: Any = None,
) -> None:
  """Checks those arguments of `skip_stale` that are concrete.

  Raises:
    UserError: one is out of range or of a wrong type.
  """
  if on_stale is not None and not callable(on_stale):
    raise UserError(
      'on_stale must be a function of the mask of stale rows, or None',
      got=repr(on_stale),
      where='skip_stale, on_stale',
      hint='give one, or leave it out',
    )
  is_limit = _is_schedule(threshold) or _is_scalar(threshold)
  # Not `< 0`, which NaN would pass.
  if not is_limit or (is_plain(threshold) and not threshold >= 0):
    raise UserError(
      'threshold must be at least 0',
      got=threshold,
      where='skip_stale, threshold',
      hint='give the movement below which a row counts as stale, e.g. 1e-3, or '
      'a schedule',
    )
  longest = every if is_plain(every) else _MOST_STEPS
  for name, steps, low, high in (
    ('every', every, 1, _MOST_STEPS),
    ('window', window, 1, longest),
    ('min_touches', min_touches, 0, _MOST_STEPS),
  ):
    whole = _is_scalar(steps)
    if is_plain(steps):
      whole = low <= steps <= high and steps % 1 == 0
    if not whole:
      raise UserError(
        f'{name} must be a whole number in [{low}, {high}]',
        got=steps,
        where=f'skip_stale, {name}',
        hint='give a number of steps within that range; only the threshold may '
        'be a schedule',
      )


def _is_schedule(value: Any) -> bool:
  """Whether it can be called with one argument, the number of steps."""
  try:
    inspect.signature(value).bind(0)
  except TypeError:  # also of what cannot be called
    return False
  except ValueError:  # built-in functions have no signature
    return True
  return True


def _is_scalar(value: Any) -> bool:
  """Whether it is a number or an array of one, perhaps traced."""
  # bfloat16 has kind V.
  kind = getattr(getattr(value, 'dtype', None), 'kind', None)
  is_array = getattr(value, 'shape', None) == () and kind in tuple('iufV')
  return is_plain(value) or is_array
