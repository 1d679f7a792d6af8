"""Threads that share loops over rows with the calling thread."""

from collections.abc import Callable, Sequence
from concurrent import futures
import itertools

_LEAST_BYTES = 1 << 19  # smallest part worth handing to a thread


def slices_of(count: int, parts: int) -> list[slice]:
  """Splits a range of `count` items into slices of about equal length."""
  ends = [count * number // parts for number in range(parts + 1)]
  return [slice(*pair) for pair in itertools.pairwise(ends)]


def run_parts(
  pool: futures.Executor,
  work: Callable[[slice], object],
  parts: Sequence[slice],
) -> None:
  """Runs the work on all parts, on the first in the calling thread.

  Returns, or raises an error of the work, once no thread works any more.
  """
  first, *others = parts
  waiting = [pool.submit(work, part) for part in others]
  try:
    work(first)
  finally:
    futures.wait(waiting)
  for future in waiting:
    future.result()


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

    One thread handles rows of few bytes alone.
    """
    parts = min(self.workers, nbytes // _LEAST_BYTES)
    if parts < 2:
      work(slice(0, rows))
      return
    if self._pool is None:
      self._pool = futures.ThreadPoolExecutor(
        self.workers - 1, 'slipstream-helper'
      )
    run_parts(self._pool, work, slices_of(rows, parts))

  def close(self) -> None:
    """Ends the threads. Idempotent."""
    if self._pool is not None:
      self._pool.shutdown()
      self._pool = None


ALONE = Helpers()
"""Runs everything in the caller's thread."""
