"""Popularity drift: which entity holds a rank at a given time.

Half of the ranks always keep their holder. Each other rank changes its holder
every `drift_examples` examples, at its own time, so that the stream drifts
smoothly. The next holder is a random, less popular one. The holder is a hash of
rank and time, so nothing is stored, and each position of a stream can be
computed by itself.
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
