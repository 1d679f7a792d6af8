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
      mend='give the size of a step, e.g. 0.01, or a schedule',
    )
