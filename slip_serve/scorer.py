"""Scores examples with an export: ids to rows, rows to logits."""

import collections
from collections.abc import Iterable, Iterator
from concurrent import futures
import os

import numpy as np

from slip_serve.errors import ServeError
from slip_serve.fetching import Fetcher, Memory, Part, Stats
from slip_serve.manifest import check_file, read_layout
from slip_serve.program import Programs
from slip_serve.queries import Door, Query
from slip_serve.reading import DEPTH

_AHEAD = 2  # queries whose rows are read at a time, so that no disk idles
_MEMORY = ('dram', 'mmap', 'ssd')


class Scorer:
  """An export, ready to score; `with` closes it. Threads may share one.

    with slip_serve.load('export', memory='ssd', cache=0.1) as scorer:
      scorer.probabilities(dense, ids)

  Attributes:
    layout: what there is.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    memory: Memory = 'dram',
    cache: float = 0.1,
    check: bool = True,
    depth: int = DEPTH,
    direct: bool = True,
  ) -> None:
    """Opens an export.

    Args:
      folder: of it.
      memory: where rows are: 'dram', all of them; 'mmap', as the system pages
        them in; 'ssd', in their file, popular ones in a cache.
      cache: of 'ssd', rows that are kept in memory: up to 1 a share of all,
        above it a number of each group's.
      check: whether all checksums are looked at, which reads everything.
      depth: of 'ssd', reads under way at a time.
      direct: of 'ssd', whether to go round the page cache.

    Raises:
      ServeError: no whole export, or arguments that cannot be.
    """
    if memory not in _MEMORY:
      raise ServeError(
        f'memory must be one of {", ".join(_MEMORY)}',
        got=repr(memory),
        where='load, memory',
        hint='pick one of them',
      )
    if not (0 <= cache < float('inf') and depth >= 1):
      raise ServeError(
        'cache must be a share of the rows up to 1 or a number of rows, and'
        ' depth at least 1',
        got=f'{cache} and {depth}',
        where='load, cache and depth',
        hint=f'give 0.1 and {DEPTH}',
      )
    self.layout = layout = read_layout(folder)
    for file in layout.files if check else ():
      check_file(folder, file)
    self._door = Door(folder, layout)
    self._programs = Programs(folder, layout)
    reads = memory, cache, depth, direct
    self._fetcher = Fetcher(folder, layout, self._door.firsts, *reads)
    self._ahead = futures.ThreadPoolExecutor(_AHEAD, 'slip-serve-ahead')

  def __enter__(self) -> 'Scorer':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def query(
    self,
    dense: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray | None = None,
  ) -> Query:
    """Examples by their raw ids.

    Args:
      dense: dense features [n, I], as a model gets them.
      ids: raw ids [n, K] as the format of the data trained on gives them; -1
        where one is missing, -2 where a list has ended.
      weights: of the lookups [n, K], where they have some; None: all 1.

    Raises:
      ServeError: other shapes or types, or ids that are rows and are none.
    """
    return self._door.query(dense, ids, weights)

  def probabilities(
    self,
    dense: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray | None = None,
  ) -> np.ndarray:
    """Of clicks, f32[n] or f32[n, T]; arguments as of `query`."""
    logits = self.logits(self.query(dense, ids, weights)).astype(np.float64)
    # 1 / (1 + e^-x) in a form that no logit makes overflow.
    return np.exp(-np.logaddexp(0.0, -logits)).astype(np.float32)

  def logits(self, query: Query) -> np.ndarray:
    """Log odds of clicks, f32[n], or f32[n, T] of T heads.

    Examples are scored by as many at a time as there are programs for; those of
    one size have, with rows in float32, the bits of the trainer's for a batch
    of that size.

    Raises:
      ServeError: other shapes, rows that there are not, or a disk that fails.
    """
    sizes = self._programs.sizes
    return self._scored(self._fetcher.parts(self._door.checked(query), sizes))

  def stream(
    self, queries: Iterable[Query], ahead: int = 2
  ) -> Iterator[np.ndarray]:
    """Logits of each query; rows of the next ones are read meanwhile.

    Args:
      queries: as of `logits`.
      ahead: how many of them are read before it is their turn, at least 1.

    Raises:
      ServeError: as `logits`, once it is the turn of such a query.
    """
    jobs = collections.deque[futures.Future[list[Part]]]()
    try:
      for query in queries:
        jobs.append(self._ahead.submit(self._fetched, query))
        if len(jobs) > ahead:
          yield self._scored(jobs.popleft().result())
      while jobs:
        yield self._scored(jobs.popleft().result())
    finally:  # who stops in between leaves nothing under way
      for job in jobs:
        job.cancel()
      futures.wait(jobs)

  def warm(self, queries: Iterable[Query]) -> None:
    """Reads the rows of queries without scoring, so that a cache has them."""
    for query in queries:
      self._fetched(query)

  @property
  def stats(self) -> Stats:
    """What was asked so far, and what of it was in memory."""
    return self._fetcher.stats

  def close(self) -> None:
    """Gives back files and threads; may be called again."""
    self._ahead.shutdown()
    self._fetcher.close()

  def _fetched(self, query: Query) -> list[Part]:
    sizes = self._programs.sizes
    return list(self._fetcher.parts(self._door.checked(query), sizes))

  def _scored(self, parts: Iterable[Part]) -> np.ndarray:
    return np.concatenate(
      [self._programs(*part[1:])[: part.real] for part in parts]
    )
