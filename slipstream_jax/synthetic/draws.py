"""Draws for synthetic streams, and the drift of popularity.

Draws are approximately normal, or from power laws.

Under drift, half of the ranks always keep their holder. Each other rank changes
its holder every `drift_examples` examples, at its own time, so that the stream
drifts smoothly. The next holder is a random, less popular one. The holder is a
hash of rank and time, so nothing is stored, and each position of a stream can
be computed by itself.
"""

from typing import no_type_check

import numpy as np

from slipstream_jax.hashing import hashed, kernel, unit

REACH = 64
"""How far down the list, as a factor, a rank's next holder may come from. Large
enough that a former top holder is cold."""
_TIME = (1 << 40) - 1


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


@kernel
@no_type_check
def time_of(position: int) -> int:
  """Returns the examples since the start. Higher bits number stream parts."""
  return position & _TIME


@kernel
@no_type_check
def holder(
  key: np.uint64, rank: int, ranks: int, time: int, drift_examples: int
) -> int:
  """Returns who has this rank at this time, as its own rank at time 0.

  Args:
    key: key of the list.
    rank: in [1, ranks].
    ranks: length of the list.
    time: examples since the start.
    drift_examples: how long a rank is held; 0 means forever.
  """
  if drift_examples <= 0:
    return rank
  bits = hashed(key, rank)
  if bits & np.uint64(1):
    return rank
  # Each rank has its own phase, so that ranks do not all change together.
  phase = np.int64((bits >> np.uint64(1)) % np.uint64(drift_examples))
  epoch = (time + phase) // drift_examples
  if epoch == 0:
    return rank
  # This is not a permutation: two ranks may share a holder, whose rows then get
  # the lookups of both. Otherwise each rank would depend on all others, and a
  # position could not be computed by itself.
  below = min((REACH - 1) * rank, ranks - rank)
  return rank + np.int64(unit(hashed(bits, epoch)) * (below + 1))
