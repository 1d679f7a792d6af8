"""Scores concurrent requests together, in one thread.

Requests that arrive while others are scored wait. Then they are joined into one
batch, scored, and the scores are cut apart. Nobody waits for a batch to fill.
A caller with the only request may score it in its own thread.

A batch has the size whose program scores most of the waiting examples in a
second. With sizes 1, 64 and 1024, 2 examples may be scored one by one, 10 or
70 by the program for 64, and only more by the one for 1024.
"""

import collections
from collections.abc import Callable, Mapping
from concurrent import futures
import contextlib
import threading
from typing import NamedTuple

import numpy as np

from slip_serve.scorer import Scorer

QUICK_S = 0.005
"""Seconds for which a caller may score and do nothing else."""


class Examples(NamedTuple):
  """Examples of one request, the arguments of `Scorer.predictions`."""

  dense: np.ndarray
  """Dense features f32[n, I], as the model gets them."""
  ids: np.ndarray
  """Raw ids i64[n, K]."""
  weights: np.ndarray | None = None
  """Weights of the lookups f32[n, K]. None: all are 1."""


class _Job(NamedTuple):
  examples: Examples
  scores: futures.Future[np.ndarray]


class Batcher:
  """Scores requests of any thread. Use it in `with` to end its own thread.

  Whoever submits bounds how many requests wait.

  Attributes:
    batches: the number of batches that were scored.
    requests: the number of requests in them.
  """

  def __init__(
    self,
    scorer: Scorer,
    most: int,
    on_ready: Callable[[], None] = lambda: None,
  ) -> None:
    """Starts the thread, which compiles all programs first.

    Args:
      scorer: what scores. It is not closed.
      most: examples of several requests that are scored at once. 0: each
        request is scored alone.
      on_ready: called once, after that.
    """
    self.batches = self.requests = 0
    self._scorer, self._most, self._on_ready = scorer, most, on_ready
    self._seconds: dict[int, float] = {}
    self._jobs = collections.deque[_Job]()
    self._changed = threading.Condition()
    self._ready, self._closed = threading.Event(), False
    self._thread = threading.Thread(target=self._run, name='slip-serve-score')
    self._thread.start()

  def __enter__(self) -> 'Batcher':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def ready(self) -> bool:
    """Whether all programs are compiled and the thread is at work."""
    return self._ready.is_set() and self._thread.is_alive()

  def submit(self, examples: Examples) -> futures.Future[np.ndarray]:
    """Returns the future predictions f32[n] or f32[n, T] of a request.

    They are what `Scorer.predictions` returns for the examples, up to the
    rounding of another batch size. So are errors.
    """
    job = _Job(examples, futures.Future())
    with self._changed:
      self._jobs.append(job)
      self._changed.notify()
    return job.scores

  def is_quick(self, count: int) -> bool:
    """Returns whether the scores of so many examples take at most `QUICK_S`."""
    return any(
      count <= size and seconds <= QUICK_S
      for size, seconds in self._seconds.items()
    )

  def scored(self, examples: Examples) -> np.ndarray:
    """Returns what `submit` does, but scores in the thread of the caller."""
    scores = self._scorer.predictions(*examples)
    self._count(1)
    return scores

  def close(self) -> None:
    """Scores what was submitted, and ends the thread. Idempotent."""
    with self._changed:
      self._closed = True
      self._changed.notify()
    self._thread.join()

  def _run(self) -> None:
    with contextlib.suppress(Exception):  # each request will fail alike
      self._seconds = self._scorer.compile()
      self._on_ready()
      self._ready.set()
    while jobs := self._next():
      own = [one for one in jobs if one.scores.set_running_or_notify_cancel()]
      if own:
        self._score(own)

  def _next(self) -> list[_Job]:
    """Waits for requests, and takes those of the next batch. [] at the end."""
    with self._changed:
      self._changed.wait_for(lambda: self._jobs or self._closed)
      waiting = sum(len(job.examples.ids) for job in self._jobs)
      most = min(self._most, best_size(self._seconds, waiting))
      jobs: list[_Job] = []
      count = 0
      while self._jobs:
        count += len(self._jobs[0].examples.ids)
        if jobs and count > most:
          break
        jobs.append(self._jobs.popleft())
      return jobs

  def _score(self, jobs: list[_Job]) -> None:
    given = [job.examples for job in jobs]
    try:
      scores = self._scorer.predictions(*joined(given))
    except Exception as error:
      if len(jobs) == 1:
        jobs[0].scores.set_exception(error)
      else:  # for example, one of them has a row on a broken disk
        for job in jobs:
          self._score([job])
      return
    self._count(len(jobs))
    ends = np.cumsum([len(one.ids) for one in given])
    for job, own in zip(jobs, np.split(scores, ends[:-1]), strict=True):
      job.scores.set_result(own)

  def _count(self, requests: int) -> None:
    with self._changed:
      self.batches, self.requests = self.batches + 1, self.requests + requests


def best_size(seconds: Mapping[int, float], waiting: int) -> int:
  """Returns the batch size that scores most of the waiting examples a second.

  Args:
    seconds: the time of a batch by its size. If none is known, all examples
      are one batch.
    waiting: the number of examples, at least 1.
  """
  if not seconds:
    return waiting
  return max(seconds, key=lambda size: min(waiting, size) / seconds[size])


def joined(requests: list[Examples]) -> Examples:
  """Returns the examples of at least one request, one after the other."""
  if len(requests) == 1:
    return requests[0]
  weights = None
  if any(one.weights is not None for one in requests):
    weights = np.concatenate(
      [
        np.ones(one.ids.shape, np.float32)
        if one.weights is None
        else one.weights
        for one in requests
      ]
    )
  return Examples(
    np.concatenate([one.dense for one in requests]),
    np.concatenate([one.ids for one in requests]),
    weights,
  )
