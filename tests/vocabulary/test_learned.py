"""Learned hash functions: which ids share a row, against their definition."""

from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.vocabulary.learned import cluster


def learned(count, size, text=False, seed=0, **how):
  """A pilot's vocabulary of `count` ids, counts of its rows, and the result."""
  rng = np.random.default_rng(seed)
  ids = rng.permutation(np.arange(-5, count - 5))
  words = slip.Vocabulary.fit(ids.astype(str) if text else ids)
  counts = rng.zipf(1.5, words.size).clip(1, 1000)
  vectors = rng.normal(size=(words.size, 3)).astype(np.float32)
  return words, counts, slip.learned_hash(words, counts, vectors, size, **how)


@settings(max_examples=60, deadline=None)
@given(
  st.integers(2, 80),
  st.integers(2, 90),
  st.floats(0, 1, exclude_max=True),
  st.booleans(),
)
def test_frequent_ids_have_rows_and_the_others_share_all_that_are_left(
  count, size, private, text
):
  words, counts, found = learned(count, size, text, private=private)
  if size >= words.size:
    assert found is words
    return
  own = int(private * (size - 1))
  order = np.argsort(-counts[1:], kind='stable')
  frequent, rare = words.known[order[:own]], words.known[order[own:]]
  new = np.arange(1000, 1500)
  new = new.astype(str).astype(object) if text else new
  copy = slip.Vocabulary.from_state(found.get_state())
  for one in found, copy:
    assert one.size == size
    assert one.rows(frequent).tolist() == [*range(size - own, size)]
    assert set(one.rows(rare).tolist()) == {*range(1, size - own)}
    assert set(one.rows(new).tolist()) <= {*range(1, size - own)}
    ids = one.ids(range(size)).tolist()
    assert ids == [None] * (size - own) + frequent.tolist()
    assert (one.known_rows == one.rows(one.known)).all()
  assert (found.rows(new) == copy.rows(new)).all()
  assert found.rows([None, None]).tolist() == [0, 0]


def test_texts_with_equal_hashes_keep_their_own_rows(monkeypatch):
  monkeypatch.setattr(
    'slipstream_jax.columns.ids.hash_texts',
    lambda data, ends, hashes: hashes.fill(5),
  )
  words = slip.Vocabulary.fit(['a', 'b', 'c', 'd', 'e', 'f'])
  vectors = np.array([[9], [0], [0], [0], [5], [5], [5]], np.float32)
  found = slip.learned_hash(words, np.ones(7, int), vectors, 3, private=0.0)
  rows = found.rows(['a', 'b', 'c', 'd', 'e', 'f']).tolist()
  assert rows in ([1, 1, 1, 2, 2, 2], [2, 2, 2, 1, 1, 1])


def test_rows_of_half_precision_are_taken():
  words = slip.Vocabulary.fit(np.arange(5))
  vectors = np.array([[0], [0], [0], [1], [1], [1]], 'bfloat16')
  found = slip.learned_hash(words, np.ones(6, int), vectors, 3, private=0.0)
  a, b, c, d, e = found.rows(np.arange(5))
  assert a == b != c == d == e


def alike(one, other):
  """Adjusted Rand index of two clusterings (Hubert and Arabie, 1985)."""
  table = np.zeros((one.max() + 1, other.max() + 1))
  np.add.at(table, (one, other), 1)
  pairs, a, b = (
    (x * (x - 1) / 2).sum() for x in (table, table.sum(0), table.sum(1))
  )
  chance = a * b / (len(one) * (len(one) - 1) / 2)
  return (pairs - chance) / ((a + b) / 2 - chance)


class Answers(nn.Module):
  """The vector of an id says how its clicks depend on the dense features."""

  @nn.compact
  def __call__(self, dense, embeddings):
    return (dense * embeddings['item']).sum(-1)


def test_a_pilot_model_recovers_planted_types():
  rng = np.random.default_rng(0)
  types = 3 * rng.normal(size=(5, 4)).astype(np.float32)
  type_of = rng.integers(0, 5, 200)
  ids = rng.integers(0, 200, 32_000)
  dense = rng.normal(size=(32_000, 4)).astype(np.float32)
  chance = 1 / (1 + np.exp(-(dense * types[type_of[ids]]).sum(1)))
  clicks = (rng.random(32_000) < chance).astype(np.float32)
  words = slip.Vocabulary.fit(ids)
  source = slip.batches(
    dense,
    {'item': ids},
    clicks,
    batch_size=64,
    seed=0,
    vocabularies={'item': words},
  )
  tables = {'item': slip.Table(words.size, 4)}
  with slip.Trainer(Answers(), tables) as trainer:
    trainer.train(source, steps=1000)
    vectors = trainer.rows('item')
  counts = np.bincount(words.rows(ids), minlength=words.size)
  found = slip.learned_hash(words, counts, vectors, 6, private=0.0)
  assert alike(type_of, found.rows(np.arange(200))) > 0.9
  random = rng.permutation(vectors)
  other = slip.learned_hash(words, counts, random, 6, private=0.0)
  assert alike(type_of, other.rows(np.arange(200))) < 0.1


@pytest.mark.parametrize('clusters', [7, 300, 1500])
def test_no_cluster_is_empty_and_all_are_closer_than_a_grid(clusters):
  """1,500 are found in two levels."""
  rng = np.random.default_rng(clusters)
  points = rng.normal(size=(4000, 2))
  points[:500] = points[0]  # equal ones can fill no cluster of their own
  weights = rng.integers(1, 9, 4000).astype(float)

  def cost(found):
    whole = np.bincount(found, weights)
    total = 0.0
    for axis in points.T:
      means = np.bincount(found, weights * axis) / whole
      total += weights @ np.square(axis - means[found])
    return total

  found, again = (
    cluster(points, weights, clusters, np.random.default_rng(0))
    for _ in range(2)
  )
  assert (found == again).all()
  assert np.bincount(found, minlength=clusters).min() > 0
  assert found.max() == clusters - 1
  side = int(clusters**0.5)
  x, y = (
    np.searchsorted(np.quantile(axis, np.linspace(0, 1, side + 1)[1:-1]), axis)
    for axis in points.T
  )
  _, grid = np.unique(x * side + y, return_inverse=True)
  assert cost(found) < cost(grid)


@pytest.mark.parametrize(
  ('given', 'said'),
  [
    ({'size': 1}, 'size must be a whole number, at least 2, got 1'),
    ({'private': 1.0}, r'in \[0, 1\), got 1.0'),
    ({'counts': np.ones(5, int)}, r'\[6\], .* got int64\[5\]'),
    ({'counts': np.full(6, -1)}, 'integers from 0 on'),
    ({'vectors': np.zeros((5, 2))}, r'\[6, D\], .* got float64\[5, 2\]'),
    ({'vectors': np.full((6, 2), np.nan)}, 'finite floats'),
    (
      {'words': slip.Vocabulary.fit(np.arange(5), hash_rows=2)},
      'a row for each id, got hash_rows 2',
    ),
  ],
)
def test_mistakes_are_told(given, said):
  words = slip.Vocabulary.fit(np.arange(5))
  good = {'counts': np.ones(6, int), 'vectors': np.zeros((6, 2)), 'size': 4}
  with pytest.raises(slip.UserError, match=said):
    slip.learned_hash(**{'words': words} | good | given)
