"""Threads that share loops over rows with the calling thread."""

from collections.abc import Callable
from concurrent import futures

import numpy as np

_LEAST_BYTES = 1 << 19  # smallest part worth handing to a thread


class Helpers:
  """Up to `workers` threads for one loop over rows, including the caller's."""

  def __init__(self, workers: int = 1) -> None:
    """Starts no thread until there is a loop to share."""
    self.workers = workers
    self._pool: futures.ThreadPoolExecutor | None = None

  def run(
    self, work: Callable[[slice], object], rows: int, nbytes: int
  ) -> None:
    """Runs the work on all rows, in parts that no two threads share.

    Args:
      work: processes a slice of the rows and writes only what belongs to them.
      rows: the number of rows.
      nbytes: their bytes. One thread handles small sizes alone.
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
      futures.wait(waiting)  # no thread writes after this returns
    for future in waiting:
      future.result()

  def close(self) -> None:
    """Ends the threads. Idempotent."""
    if self._pool is not None:
      self._pool.shutdown()
      self._pool = None


ALONE = Helpers()
"""Runs everything in the caller's thread."""
