"""Draws for synthetic streams: approximately normal, and from power laws."""

from typing import no_type_check

import numpy as np

from slipstream_jax.hashing import kernel


@kernel
@no_type_check
def quarter(bits: np.uint64, which: int) -> float:
  """Returns a uniform of mean 0 and variance 1, from 16 of the bits."""
  part = (bits >> np.uint64(16 * which)) & np.uint64(0xFFFF)
  # Subtracts the mean of k / 65536, and scales the variance of 1/12 to 1.
  return (np.float64(part) * (1 / 65536) - 0.49999237) * 3.4641016


@kernel
@no_type_check
def normal(bits: np.uint64) -> float:
  """Returns an approximate normal of mean 0 and variance 1."""
  # A sum of four uniforms: one hash, and no log, root or cosine. The variances
  # of 1 add up to 4, so half of the sum has variance 1.
  total = quarter(bits, 0) + quarter(bits, 1)
  return 0.5 * (total + quarter(bits, 2) + quarter(bits, 3))


@kernel
@no_type_check
def log_rank_at(u: float, a: float, mass: float) -> float:
  """Returns the log of a bounded power law's u-quantile, in [0, log(R + 1))."""
  return -np.log(1.0 - u * mass) / a


@kernel
@no_type_check
def rank_at(u: float, a: float, mass: float, whole: float) -> int:
  """Returns a bounded power law's u-quantile, in [1, R + 1), rounded down."""
  if whole <= 0.0:
    return np.int64(np.exp(log_rank_at(u, a, mass)))
  # (1 - u mass)^(1/a) by squaring, which needs neither log nor exp.
  base, power, left = 1.0 - u * mass, 1.0, np.int64(whole)
  while left:
    if left & 1:
      power *= base
    base *= base
    left >>= 1
  return np.int64(1.0 / power)
