"""Hashes as random draws: pure functions of a key and a number.

splitmix64 (Steele et al., 2014) stands behind every draw of the library: of
rows, streams, orders and samples. Any of them can be computed alone, and is
the same on every machine.
"""

from typing import no_type_check

import numba
import numpy as np

# Marked no_type_check because numba cannot compile what jaxtyping's hook wraps.
# numpy's error model: a test for division by 0 would keep loops from SIMD.
kernel = numba.njit(cache=True, nogil=True, error_model='numpy')
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: its multiples are far apart."""


@kernel
@no_type_check
def mix(x: np.uint64) -> np.uint64:
  """Finaliser of splitmix64, a bijection: u64, or an array of them."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


@kernel
@no_type_check
def hashed(key: np.uint64, number: int) -> np.uint64:
  """64 bits that depend on both."""
  # As splitmix64's state after `number` + 1 steps from the key. From 1 on, for
  # `mix` leaves 0 alone, and number 0 must not give the key's own hash.
  return mix(key + np.uint64(number + 1) * GOLDEN)


@kernel
@no_type_check
def unit(bits: np.uint64) -> float:
  """Uniform in [0, 1)."""
  # 53 bits, as many as a double holds: 64 could be rounded up to 1.0.
  return np.float64(bits >> np.uint64(11)) * (1.0 / (1 << 53))
