"""Hashes as random draws: pure functions of a key and a number.

Every draw of the library uses splitmix64 (Steele et al., 2014): rows, streams,
orders and samples. Any draw can be computed by itself, and is the same on every
machine.
"""

from typing import no_type_check

import numba
import numpy as np

# Kernels are marked no_type_check because numba cannot compile what jaxtyping's
# hook wraps. With numpy's error model, no test for division by 0 prevents SIMD.
kernel = numba.njit(cache=True, nogil=True, error_model='numpy')
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio. Its multiples are far apart."""


@kernel
@no_type_check
def mix(x: np.uint64) -> np.uint64:
  """Applies splitmix64's finalizer, a bijection, to a u64 or to an array."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


@kernel
@no_type_check
def hashed(key: np.uint64, number: int) -> np.uint64:
  """Returns 64 bits that depend on the key and the number."""
  # splitmix64's state after `number` + 1 steps from the key. At least one step,
  # because number 0 must not give the key's own hash.
  return mix(key + np.uint64(number + 1) * GOLDEN)


@kernel
@no_type_check
def unit(bits: np.uint64) -> float:
  """Converts 64 random bits to a uniform float in [0, 1)."""
  # 53 bits, because 64 could be rounded up to 1.0 in a double.
  return np.float64(bits >> np.uint64(11)) * (1.0 / (1 << 53))
