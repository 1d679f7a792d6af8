"""The scorer of pairs against float64 numpy, and its promises."""

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import GOLDEN, mix
from slipstream_jax.scoring import pairs as module
from slipstream_jax.scoring.pairs import PairScorer
from tests.scoring.conftest import BAG, KEPT, TRIAL

N, F, I = 40, 4, 3  # noqa: E741


def drawn(seed, examples, length=None, features=F):
  rng = np.random.default_rng(seed)
  shape = (
    (examples, features) if length is None else (examples, features, length)
  )
  lookups = rng.integers(-1, N, shape)
  dense = rng.normal(size=(examples, I)).astype(np.float32)
  dense[rng.random(dense.shape) < 0.2] = -0.0
  labels = (rng.random(examples) < 0.3).astype(np.float32)
  return lookups, dense, labels


def scorer_of(features=F, weights=256):
  return PairScorer.create(features, I, weights)


def hashed(key, number):
  with np.errstate(over='ignore'):
    return mix(np.uint64(key) + np.uint64(number + 1) * GOLDEN)


class Table:
  """Weights with Adagrad, in float64; by any key."""

  def __init__(self, rate, start):
    self.rate, self.start = rate, start
    self.weight, self.squares = {}, {}

  def sum(self, keys):
    return sum(self.weight.get(key, 0.0) for key in keys)

  def move(self, keys, values, slope):
    """All weights feel the squares of this example first, then they move."""
    gradients = [slope * value for value in values]
    for key, gradient in zip(keys, gradients, strict=True):
      self.squares[key] = self.squares.get(key, 0.0) + gradient**2
    # A key that comes twice moves twice, by the sums as they then stood.
    sums = {}
    for key, gradient in zip(keys, gradients, strict=True):
      sums.setdefault(key, []).append(gradient)
    for key, parts in sums.items():
      rest = self.squares[key] - sum(g**2 for g in parts)
      for gradient in parts:
        rest += gradient**2
        step = self.rate * gradient / np.sqrt(self.start + rest)
        self.weight[key] = self.weight.get(key, 0.0) - step


class Oracle:
  """The same model in float64, with dictionaries for tables."""

  def __init__(self, features, length, weights=256):
    self.features, self.weights = features, weights
    in_bags = features * min(length - 1, BAG)
    tried = module._tried(features, I, in_bags < KEPT).tolist()
    self.tried, self.in_bags = [tuple(pair) for pair in tried], in_bags
    self.useful = dict.fromkeys(self.tried, 0.0)
    self.rows = Table(module.RATE, module.START)
    self.dense = Table(module.RATE, module.START)
    self.pairs = Table(None, module.PAIRS_START)
    self.mix = Table(module._MIX_RATE, 1.0)
    self.mix.weight[0] = 1.0
    self.bins = Table(module.BIN_RATE, module.START)
    self.bins.weight, self.bins.squares = self.rows.weight, self.rows.squares
    self.means, self.variances = np.zeros(I), np.zeros(I)
    self.seen = 0

  def place(self, bits):
    return int(bits >> np.uint64(32)) & (self.weights - 1)

  def active(self):
    if len(self.tried) <= KEPT or self.seen < TRIAL:
      return self.tried
    best = sorted(self.tried, key=lambda pair: -self.useful[pair])[:KEPT]
    return [pair for pair in self.tried if pair in best]

  def standardized(self, values):
    """By mean and variance so far, these values included."""
    before, share = self.means, 1 / (self.seen + 1)
    self.means = before + share * (values - before)
    left = values - self.means
    self.variances += share * ((values - before) * left - self.variances)
    known = self.variances > 1e-9 * (1 + self.means**2)
    deviation = np.sqrt(np.where(known, self.variances, 1))
    return np.where(known, np.clip(left / deviation, -8, 8), 0)

  def learn(self, lookups, dense, label):
    last, rows, bins, pairs = {}, [], [], []
    for f, bag in enumerate(lookups.reshape(self.features, -1)):
      hashes = [hashed(0, row) for row in bag if row >= 0]
      rows += [self.place(bits) for bits in hashes]
      if hashes:
        last[f] = hashes[-1]
        for bits in hashes[:-1][-BAG:]:
          pairs.append(self.place(bits ^ last[f] ^ hashed(1, f)))
    for j, value in enumerate(dense):
      bits = np.float32(value + np.float32(0)).view(np.uint32) >> 21
      last[self.features + j] = hashed(2 + j, int(bits))
      bins.append(self.place(last[self.features + j]))
    active = self.active()
    here = [p for p in active if p[0] in last and p[1] in last]
    between = [self.place(last[one] ^ last[other]) for one, other in here]
    self.pairs.rate = module._pair_rate(len(active) + self.in_bags)
    squashed = [*self.standardized(dense.astype(np.float64)), 1.0]
    numbers = range(len(squashed))
    alone = self.rows.sum(rows + bins) + sum(
      self.dense.weight.get(j, 0.0) * squashed[j] for j in numbers
    )
    added = self.pairs.sum(pairs + between)
    limit = float(module.LIMIT)
    parts = [*np.clip([alone, added], -limit, limit), 1.0]
    score = probability(
      sum(self.mix.weight.get(k, 0.0) * parts[k] for k in range(3))
    )
    self.mix.move(range(3), parts, score - label)
    slope = probability(alone) - label
    if self.seen < TRIAL and len(self.tried) > KEPT:
      for pair, place in zip(here, between, strict=True):
        self.useful[pair] -= slope * self.pairs.weight.get(place, 0.0)
    self.rows.move(rows, [1.0] * len(rows), slope)
    self.bins.move(bins, [1.0] * len(bins), slope)
    self.dense.move(numbers, squashed, slope)
    slope = probability(alone + added) - label
    self.pairs.move(pairs + between, [1.0] * len(pairs + between), slope)
    self.seen += 1
    return score


def probability(logit):
  limit = float(module.LIMIT)
  return 1 / (1 + np.exp(-np.clip(logit, -limit, limit)))


@given(
  st.integers(0, 99), st.sampled_from([None, 1, 4]), st.sampled_from([1, 4])
)
def test_scores_equal_float64(seed, length, features):
  scorer, oracle = scorer_of(features), Oracle(features, length or 1)
  examples = drawn(seed, 60, length, features)
  expected = [oracle.learn(*one) for one in zip(*examples, strict=True)]
  scores = scorer.learn(*examples)
  assert scores.dtype == np.float32
  np.testing.assert_allclose(scores, expected, rtol=2e-4)


def test_the_state_is_as_large_for_any_data():
  sizes = {
    sum(array.nbytes for array in PairScorer.create(*of).get_state().values())
    for of in ((2, 0), (26, 0), (300, 0))
  }
  assert sizes == {4 * 2**20 + 8 + 24 + 8 + 8 * module.PAIRS}


@given(
  st.lists(
    st.sampled_from([0.0, -0.0, 1.0, -1e30, 3.4e38, 1e-45, np.inf, np.nan]),
    min_size=I * 30,
    max_size=I * 30,
  ),
  st.integers(0, 9),
)
def test_no_feature_is_too_large(values, seed):
  lookups, _, labels = drawn(seed, 30)
  dense = np.array(values, np.float32).reshape(30, I)
  scorer = scorer_of()
  scores = np.concatenate([scorer.learn(lookups, dense, labels) for _ in 'abc'])
  assert ((scores > 0) & (scores < 1)).all()
  assert all(np.isfinite(part).all() for part in scorer.get_state().values())


def test_labels_that_never_change_keep_scores_within_the_limit():
  lookups, dense, _ = drawn(0, 500)
  scorer = scorer_of()
  for _ in range(20):
    scores = scorer.learn(lookups, dense, np.ones(500, np.float32))
  assert 0.99 < scores.min() <= scores.max() < 1
  assert np.isfinite(np.log1p(-scores.astype(np.float64))).all()


def test_it_learns_what_no_linear_model_can():
  """A click where two of the ids agree in parity; the others are noise."""
  rng = np.random.default_rng(0)
  lookups = rng.integers(0, 8, (20_000, F)) + 8 * np.arange(F)
  agree = (lookups[:, 1] + lookups[:, 3]) % 2 == 0
  labels = agree.astype(np.float32)
  scorer = scorer_of(weights=1 << 12)
  scores = scorer.learn(lookups, np.zeros((20_000, I), np.float32), labels)
  last = slice(15_000, None)
  assert scores[last][agree[last]].min() > 0.6
  assert scores[last][~agree[last]].max() < 0.4


def test_the_pairs_that_help_stay():
  rng = np.random.default_rng(0)
  lookups = rng.integers(0, 8, (6000, 6)) + 8 * np.arange(6)
  dense = np.zeros((6000, 0), np.float32)
  labels = ((lookups[:, 1] + lookups[:, 4]) % 2).astype(np.float32)
  scorer = PairScorer.create(6, 0, 1 << 12, most=1)
  with mock.patch.object(module, 'TRIAL', 3000):
    scorer.learn(lookups, dense, labels)
    assert scorer._kept(module._tried(6, 0, False)).tolist() == [[1, 4]]


def test_a_list_knows_how_often_it_has_its_last_row():
  rng = np.random.default_rng(0)
  lookups = rng.integers(0, 30, (8000, 1, 5))
  again = (lookups[:, 0, :-1] == lookups[:, 0, -1:])[:, -BAG:].any(axis=1)
  labels = again.astype(np.float32)
  scorer = PairScorer.create(1, 0)
  scores = scorer.learn(lookups, np.zeros((8000, 0), np.float32), labels)
  assert scores[6000:][again[6000:]].min() > scores[6000:][~again[6000:]].max()


@pytest.mark.parametrize('features', [1, 2, 30, 33, 400, 5000])
def test_pairs_that_are_tried(features):
  pairs = module._tried(features, 2, False)
  assert len(pairs) == min(features * (features - 1) // 2, module.PAIRS)
  assert (pairs[:, 0] < pairs[:, 1]).all()
  assert (pairs < features).all()
  assert len(np.unique(pairs, axis=0)) == len(pairs)


def test_weights_are_a_power_of_two():
  with pytest.raises(UserError, match='power of two'):
    scorer_of(weights=100)
