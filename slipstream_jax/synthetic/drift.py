"""Popularity that wanders: who holds a rank at which time.

Half of the ranks are held by the same one for ever. Each of the others changes
hands every `drift_examples` examples, at a time of its own, so that a stream
drifts smoothly; its next holder comes from further down the list, at random. A
rank and a time tell the holder by hashing: nothing is stored, and any position
of a stream can be computed alone.
"""

from typing import no_type_check

import numpy as np

from slipstream_jax.hashing import hashed, kernel, unit

REACH = 64
"""How far down the list, as a factor, a rank looks for its next holder: far
enough that one who leaves the top is cold."""
_TIME = (1 << 40) - 1


@kernel
@no_type_check
def time_of(position: int) -> int:
  """Examples since the start; the bits above number the parts of a stream."""
  return position & _TIME


@kernel
@no_type_check
def holder(
  key: np.uint64, rank: int, ranks: int, time: int, drift_examples: int
) -> int:
  """Who has this rank at this time, as the rank that is its own at time 0.

  Args:
    key: of the list.
    rank: in [1, ranks].
    ranks: length of the list.
    time: examples since the start.
    drift_examples: how long a rank is held; 0 is for ever.
  """
  if drift_examples <= 0:
    return rank
  bits = hashed(key, rank)
  if bits & np.uint64(1):
    return rank
  # A phase of its own for each rank, or all would change hands together.
  phase = np.int64((bits >> np.uint64(1)) % np.uint64(drift_examples))
  epoch = (time + phase) // drift_examples
  if epoch == 0:
    return rank
  # No permutation: two ranks may have one holder, whose rows then get the
  # lookups of both. To rule that out, a rank would have to know what all the
  # others hold, and a position could no longer be computed alone.
  below = min((REACH - 1) * rank, ranks - rank)
  return rank + np.int64(unit(hashed(bits, epoch)) * (below + 1))
