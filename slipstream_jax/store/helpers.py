"""Threads that copy rows together with whoever asks them to."""

from collections.abc import Callable
from concurrent import futures

import numpy as np

_LEAST_BYTES = 1 << 19  # of a part: below, handing it over takes as long


class Helpers:
  """Up to `workers` threads for one loop over rows, the caller's among them."""

  def __init__(self, workers: int = 1) -> None:
    """Starts no thread before there is a loop to share."""
    self.workers = workers
    self._pool: futures.ThreadPoolExecutor | None = None

  def run(
    self, work: Callable[[slice], object], rows: int, nbytes: int
  ) -> None:
    """Does the work on all rows, in parts that no two threads share.

    Args:
      work: on some rows; what it writes belongs to these rows alone.
      rows: how many there are.
      nbytes: what they take; of few, one thread does all.
    """
    parts = min(self.workers, nbytes // _LEAST_BYTES)
    if parts < 2:
      work(slice(0, rows))
      return
    if self._pool is None:
      self._pool = futures.ThreadPoolExecutor(
        self.workers - 1, 'slipstream-helper'
      )
    ends = np.linspace(0, rows, parts + 1).astype(int).tolist()
    own, *others = (slice(*ends[i : i + 2]) for i in range(parts))
    waiting = [self._pool.submit(work, part) for part in others]
    try:
      work(own)
    finally:
      futures.wait(waiting)  # nobody writes rows once this returns
    for future in waiting:
      future.result()

  def close(self) -> None:
    """Ends the threads; may be called again."""
    if self._pool is not None:
      self._pool.shutdown()
      self._pool = None


ALONE = Helpers()
"""No thread but the caller's."""
