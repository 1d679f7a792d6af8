"""Numbers in text, decimal or hexadecimal; stays out of jaxtyping's hook."""

from typing import no_type_check

import numpy as np

from slipstream_jax.hashing import kernel

_DIGITS = np.full(256, 99)
for _value, _digit in enumerate('0123456789abcdef'):
  _DIGITS[[ord(_digit), ord(_digit.upper())]] = _value


@kernel
@no_type_check
def number(characters: np.ndarray, at: int, base: int) -> tuple[int, int]:
  """Value of the digits of u8[n] from `at` on, and the place where they end.

  Of more digits than i64 holds the value wraps around: count them first.
  """
  value = 0
  while _DIGITS[characters[at]] < base:
    value = value * base + _DIGITS[characters[at]]
    at += 1
  return value, at
