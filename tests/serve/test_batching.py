"""Requests that wait are scored together, and each gets its own scores."""

from concurrent import futures
import threading

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slip_serve.batching import Batcher, best_size, Examples


class Scores:
  """A scorer whose scores are sums; it can be stopped before it scores."""

  def __init__(self):
    self.batches, self.go = [], threading.Event()
    self.at_work = threading.Semaphore(0)

  def compile(self):
    return {}

  def predictions(self, dense, ids, weights=None):
    self.at_work.release()
    assert self.go.wait(60)
    self.batches.append(len(ids))
    if (ids == 13).any():
      raise OSError('a broken disk')
    weights = 1 if weights is None else weights
    return dense.sum(axis=1) + (ids * weights).sum(axis=1)


def request(first, count, weighted=False):
  numbers = np.arange(first, first + count, dtype=np.float32)
  weights = np.full((count, 1), 2, np.float32) if weighted else None
  return Examples(numbers[:, None], numbers[:, None].astype(np.int64), weights)


def expected(one):
  weights = 1 if one.weights is None else one.weights
  return one.dense[:, 0] + (one.ids * weights)[:, 0]


SIZES = st.lists(
  st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12
)


@given(SIZES, st.sampled_from([0, 1, 8, 100]))
def test_each_request_gets_its_own_scores(sizes, most):
  scorer = Scores()
  requests = [request(100 * i, n, w) for i, (n, w) in enumerate(sizes, 1)]
  with Batcher(scorer, most) as batcher:
    head = batcher.submit(request(0, 1))
    scorer.at_work.acquire()  # all others wait
    scores = [batcher.submit(one) for one in requests]
    scorer.go.set()
    for one, own in zip(requests, scores, strict=True):
      np.testing.assert_array_equal(own.result(60), expected(one))
    assert head.result(60) == [0]
  counts, together = [n for n, _ in sizes], scorer.batches[1:]
  assert sum(together) == sum(counts)
  assert batcher.requests == len(sizes) + 1
  assert batcher.batches == len(together) + 1
  for size in together:  # in order, as many as fit
    joined = counts.pop(0)
    while counts and joined + counts[0] <= most:
      joined += counts.pop(0)
    assert size == joined


def test_a_batch_has_the_size_that_is_fastest():
  seconds = {1: 0.3, 64: 0.9, 1024: 7.0}
  sizes = [best_size(seconds, n) for n in (1, 2, 4, 64, 65, 300, 600, 9999)]
  assert sizes == [1, 1, 64, 64, 64, 64, 1024, 1024]
  scorer = Scores()
  scorer.compile = lambda: {1: 0.3, 4: 0.9}
  with Batcher(scorer, 100) as batcher:
    batcher.submit(request(0, 1))
    scorer.at_work.acquire()
    scores = [batcher.submit(request(n, 1)) for n in range(1, 11)]
    scorer.go.set()
    assert [one.result(60) for one in scores] == [[2 * n] for n in range(1, 11)]
  assert scorer.batches == [1, 4, 4, 1, 1]


def test_a_failure_is_that_of_one_request():
  scorer = Scores()
  with Batcher(scorer, 100) as batcher:
    batcher.submit(request(0, 1))
    scorer.at_work.acquire()
    good, bad, last = (batcher.submit(request(n, 1)) for n in (1, 13, 2))
    gone = batcher.submit(request(3, 1))
    assert gone.cancel()
    scorer.go.set()
    assert (good.result(60), last.result(60)) == ([2], [4])
    with pytest.raises(OSError, match='broken disk'):
      bad.result(60)
  assert scorer.batches == [1, 3, 1, 1, 1]


def test_closing_scores_what_was_submitted():
  scorer = Scores()
  with Batcher(scorer, 2) as batcher:
    scores = [batcher.submit(request(n, 1)) for n in range(5)]
    scorer.go.set()
  assert [one.result(0) for one in scores] == [[0], [2], [4], [6], [8]]
  batcher.close()
  assert not batcher.ready


def test_a_program_that_does_not_compile_fails_requests_only(monkeypatch):
  scorer = Scores()
  scorer.go.set()
  monkeypatch.setattr(scorer, 'compile', lambda: 1 / 0)
  with Batcher(scorer, 2) as batcher:
    assert batcher.submit(request(1, 1)).result(60) == [2]
    assert not batcher.ready


def test_threads_may_submit_at_once():
  scorer = Scores()
  scorer.go.set()
  requests = [request(20 * n, 1 + n % 3) for n in range(1, 200)]
  with Batcher(scorer, 8) as batcher, futures.ThreadPoolExecutor(16) as pool:
    scores = [*pool.map(lambda one: batcher.submit(one).result(60), requests)]
  for one, own in zip(requests, scores, strict=True):
    np.testing.assert_array_equal(own, expected(one))
