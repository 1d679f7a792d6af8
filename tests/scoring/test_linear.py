"""The linear scorer against float64 numpy, and its promises."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np

from slipstream_jax.scoring.linear import LinearScorer, RATE, START
from slipstream_jax.selection.hot import hot_rows

N, HOT, F, I = 40, 12, 4, 3  # noqa: E741


def made(seed, examples, length=None):
  """A scorer, and examples with cold rows and padding for it."""
  rng = np.random.default_rng(seed)
  hot = hot_rows(rng.permutation(N)[:HOT], N)
  shape = (examples, F) if length is None else (examples, F, length)
  lookups = rng.integers(-1, N, shape)
  dense = rng.normal(size=(examples, I)).astype(np.float32)
  labels = (rng.random(examples) < 0.3).astype(np.float32)
  return LinearScorer.create(hot, F, I), (lookups, dense, labels)


class Oracle:
  """The same model in float64, as a sum over one-hot features."""

  def __init__(self):
    self.weight = np.zeros(HOT + F + I + 1)
    self.squares = np.full(HOT + F + I + 1, START)

  def features(self, places, dense):
    """Indices and values of what an example adds up, in any order."""
    tables = np.broadcast_to(
      np.arange(F).reshape(-1, *[1] * (places.ndim - 1)), places.shape
    )
    rows = np.where(places == HOT, HOT + tables, places)[places >= 0]
    index = np.concatenate([rows, HOT + F + np.arange(I + 1)])
    values = np.concatenate([np.ones(len(rows)), dense, [1]])
    return index.astype(int), values.astype(np.float64)

  def score(self, places, dense):
    index, values = self.features(places, dense)
    return 1 / (1 + np.exp(-self.weight[index] @ values))

  def learn(self, places, dense, label):
    score = self.score(places, dense)
    for i, value in zip(*self.features(places, dense), strict=True):
      gradient = (score - label) * value
      self.squares[i] += gradient**2
      self.weight[i] -= RATE * gradient / np.sqrt(self.squares[i])
    return score


@given(st.integers(0, 99), st.sampled_from([None, 1, 3]))
def test_scores_and_updates_equal_float64(seed, length):
  scorer, examples = made(seed, 60, length)
  oracle, places = Oracle(), scorer.hot.places(examples[0])
  by_place = zip(places, *examples[1:], strict=True)
  expected = [oracle.learn(*one) for one in by_place]
  scores = scorer.learn(*examples)
  assert scores.dtype == np.float32
  np.testing.assert_allclose(scores, expected, rtol=2e-5)
  learned = np.concatenate(scorer[:2])
  np.testing.assert_allclose(learned[:, 0], oracle.weight, atol=1e-5)
  np.testing.assert_allclose(learned[:, 1], oracle.squares, rtol=1e-5)


def test_it_learns_which_rows_are_clicked():
  scorer, (lookups, dense, _) = made(3, 4000)
  places = scorer.hot.places(lookups)
  clicked = (places >= 0) & (places < HOT // 2)
  labels = clicked.any(axis=1).astype(np.float32)
  scores = scorer.learn(lookups, dense, labels)[3000:]
  clicks = labels[3000:] > 0
  assert scores[clicks].mean() > 0.65 > 0.35 > scores[~clicks].mean()
