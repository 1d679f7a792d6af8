"""The linear scorer against float64 numpy, and its promises."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.scoring.linear import EVERY, LinearScorer, RATE, START, UNIT

N, F, I, BITS = 40, 4, 3, 5  # noqa: E741


def made(seed, examples, length=None, first=0, full=1000):
  """A scorer, and examples with padding for it, of rows from `first` on."""
  rng = np.random.default_rng(seed)
  shape = (examples, F) if length is None else (examples, F, length)
  lookups = rng.integers(0, N, shape) + first
  lookups[rng.random(shape) < 0.1] = -1
  dense = rng.normal(size=(examples, I)).astype(np.float32)
  labels = (rng.random(examples) < 0.3).astype(np.float32)
  return LinearScorer.create(F, I, BITS, full), (lookups, dense, labels)


def hashed(rows):
  """Places of rows, by the words of 32 bits that make up a row."""
  low, high = (rows & 0xFFFFFFFF).astype(object), (rows >> 32).astype(object)
  bits = (low * 0x9E3779B9 + high * 0x61C88647) % (1 << 32)
  return (bits >> (32 - BITS)).astype(int)


class Oracle:
  """The same model in float64, as a sum over one-hot features."""

  def __init__(self):
    self.weight = np.zeros((1 << BITS) + I + 1)
    self.squares = np.full((1 << BITS) + I + 1, START)

  def features(self, rows, dense):
    """Indices and values of what an example adds up, in any order."""
    places = hashed(rows[rows >= 0])
    index = np.concatenate([places, (1 << BITS) + np.arange(I + 1)])
    values = np.concatenate([np.ones(len(places)), dense, [1]])
    return index.astype(int), values.astype(np.float64)

  def score(self, rows, dense):
    index, values = self.features(rows, dense)
    return 1 / (1 + np.exp(-self.weight[index] @ values))

  def learn(self, rows, dense, label):
    score = self.score(rows, dense)
    for i, value in zip(*self.features(rows, dense), strict=True):
      gradient = (score - label) * value
      self.squares[i] += gradient**2
      self.weight[i] -= RATE * gradient / np.sqrt(self.squares[i])
    return score


@given(
  st.integers(0, 99),
  st.sampled_from([None, 1, 3]),
  st.sampled_from([0, 1 << 31, 1 << 33]),
  st.sampled_from([0, 10, 1000]),
  st.integers(0, 60),
)
def test_scores_and_updates_equal_float64(seed, length, first, full, cut):
  scorer, examples = made(seed, 60, length, first, full)
  oracle = Oracle()
  expected = [
    oracle.learn(*one) if i < full or i % EVERY == 0 else oracle.score(*one[:2])
    for i, one in enumerate(zip(*examples, strict=True))
  ]
  before = scorer.learn(*(column[:cut] for column in examples))
  resumed = LinearScorer.create(F, I, BITS, full)
  resumed.set_state(scorer.get_state())
  scorer = resumed
  after = scorer.learn(*(column[cut:] for column in examples))
  scores = np.concatenate([before, after])
  assert scores.dtype == np.float32
  np.testing.assert_allclose(scores, expected, rtol=2e-5)
  weight = np.concatenate([scorer.rows, scorer.dense[:, 0]])
  np.testing.assert_allclose(weight, oracle.weight, atol=1e-5)
  squares = np.concatenate([scorer.squares, scorer.dense[:, 1]])
  np.testing.assert_allclose(squares, oracle.squares, rtol=1e-5)


@given(
  st.integers(0, 99),
  st.sampled_from([None, 1, 3]),
  st.sampled_from([0, 1 << 31, 1 << 33]),
)
def test_frozen_weights_score_as_the_scorer_does(seed, length, first):
  scorer, examples = made(seed, 60, length, first)
  scorer.learn(*examples)
  frozen, known = scorer.frozen(), scorer.get_state()
  scores = frozen.score(*examples[:2])
  assert scores.dtype == np.float32
  # Weights are rounded to `UNIT`. Frozen ones do not learn.
  oracle = Oracle()
  oracle.weight = np.concatenate([known['rows'], known['dense'][:, 0]])
  expected = [oracle.score(*one) for one in zip(*examples[:2], strict=True)]
  np.testing.assert_allclose(scores, expected, atol=F * UNIT)
  scorer.learn(*examples)
  np.testing.assert_array_equal(scores, frozen.score(*examples[:2]))


def test_teaching_learns_what_learning_does():
  one, examples = made(1, 60, full=10)
  other, _ = made(1, 60, full=10)
  one.learn(*examples)
  other.teach(*examples)
  for name, array in one.get_state().items():
    np.testing.assert_array_equal(array, other.get_state()[name])


@pytest.mark.parametrize('dtype', [np.int32, np.int64])
def test_rows_of_both_widths_have_the_same_scores(dtype):
  scorer, (lookups, *rest) = made(1, 60)
  other, _ = made(1, 60)
  np.testing.assert_array_equal(
    scorer.learn(lookups, *rest), other.learn(lookups.astype(dtype), *rest)
  )


def test_it_learns_which_rows_are_clicked():
  _, (lookups, dense, _) = made(3, 4000)
  scorer = LinearScorer.create(F, I)  # with room for each row
  clicked = (lookups >= 0) & (lookups < N // 8)
  labels = clicked.any(axis=1).astype(np.float32)
  scores = scorer.learn(lookups, dense, labels)[3000:]
  clicks = labels[3000:] > 0
  assert scores[clicks].mean() > 0.65 > 0.35 > scores[~clicks].mean()


def test_a_state_of_weights_of_hot_rows_is_refused():
  scorer, _ = made(0, 1)
  with pytest.raises(UserError, match='the version that began it'):
    scorer.set_state({'rows': np.zeros((9, 2)), 'dense': np.zeros((4, 2))})
