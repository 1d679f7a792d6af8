"""The model's losses beside the scorer's, by brute force."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.schedules.beside import Beside
from slipstream_jax.types import Batch

LATE = 3


def batch_of(rng, count):
  """Examples with weights and offsets, scores, and which are kept."""
  labels = (rng.random(count) < 0.3).astype(np.float32)
  weights, offset = rng.random((2, count)).astype(np.float32) + 0.5
  dense, lookups = np.zeros((count, 1), np.float32), np.zeros((count, 1), int)
  batch = Batch(dense, lookups, labels, weights, offset=offset)
  scores = rng.uniform(0.01, 0.99, count).astype(np.float32)
  index = np.flatnonzero(rng.random(count) < 0.6)
  return batch, None if len(index) == count else index, scores


def steps_of(rng, size, count):
  """Yields for each step what came before it: batches put, and how many."""
  waiting = 0
  for _ in range(count):
    put = []
    while waiting < size:
      put.append(batch_of(rng, size))
      index = put[-1][1]
      waiting += size if index is None else len(index)
    waiting -= size
    yield put


@given(st.integers(0, 99), st.sampled_from([1, 5, 16]))
def test_each_step_is_compared_on_its_own_examples(seed, size):
  rng = np.random.default_rng(seed)
  losses = rng.random(40)
  beside = Beside(LATE, 1)
  asked, examples, states = [], [], []

  def loss(number):
    asked.append(number)
    return losses[number - 1]

  for step, put in enumerate(steps_of(rng, size, len(losses)), 1):
    for batch, index, scores in put:
      beside.put(batch, index, scores)
      chances = np.clip(scores.astype(np.float64), 1e-9, 1 - 1e-9)
      logits = np.log(chances / (1 - chances)) + batch.offset
      each = np.log1p(np.exp(logits)) - batch.labels * logits
      kept = range(len(scores)) if index is None else index
      examples += [(batch.weights[i], each[i]) for i in kept]
    assert beside.cut(size) == step
    beside.ask(loss)
    assert asked == [*range(1, step - LATE + 1)]
    again = Beside(LATE, 1)
    again.set_state(beside.get_state())
    states.append((beside.get_state(), again.get_state()))
  for one, other in states:
    np.testing.assert_equal(one, other)
  of_steps = np.array(examples[: size * len(asked)]).reshape(-1, size, 2)
  weight = of_steps[..., 0].sum(axis=1)
  theirs = of_steps.prod(axis=2).sum(axis=1) / weight
  apart = losses[: len(asked)] - theirs
  every = [*beside.segments, beside._segment]
  ends = np.cumsum([one.batches for one in every])
  assert ends[-1] == len(asked)
  for one, end in zip(every, ends, strict=True):
    part = slice(end - one.batches, end)
    assert one.before == pytest.approx(weight[: part.start].sum())
    assert one.weight == pytest.approx(weight[part].sum())
    mean = (weight * apart)[part].sum()
    assert one.apart == pytest.approx(mean, rel=1e-4, abs=1e-4)


def test_what_is_unknown_is_left_out():
  """Steps that were not taken, and examples without a score."""
  beside = Beside(0, 1)
  rng = np.random.default_rng(0)
  batch, _, scores = batch_of(rng, 4)
  for known, loss in ((scores, np.nan), (None, 0.5), (scores, 0.5)):
    beside.put(batch, None, known)
    beside.cut(4)
    beside.ask(lambda number, loss=loss: loss)
  beside.ask(lambda number: pytest.fail(f'asked for {number}'))
  assert sum(one.batches for one in beside.segments) == 1
