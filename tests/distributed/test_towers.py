"""Towers of features: balance, planted groups, and brute force."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.distributed.towers import affinity, partition, within


def tower_of(towers):
  tower = np.empty(sum(map(len, towers)), int)
  for number, own in enumerate(towers):
    tower[list(own)] = number
  return tower


def adjusted_rand(one, other):
  """Agreement of two partitions: 1 if they are equal, 0 by chance."""

  def pairs(counts):
    return (counts * (counts - 1) / 2).sum()

  table = np.histogram2d(one, other, (one.max() + 1, other.max() + 1))[0]
  a, b = pairs(table.sum(0)), pairs(table.sum(1))
  by_chance = a * b / pairs(table.sum(keepdims=True))
  return (pairs(table) - by_chance) / ((a + b) / 2 - by_chance)


@settings(max_examples=15)
@given(st.integers(0, 999), st.sampled_from([2, 4]))
def test_planted_groups_are_found(seed, count):
  rng = np.random.default_rng(seed)
  planted = rng.permutation(np.arange(24) % count)
  centers = np.linalg.qr(rng.normal(size=(8, 8)))[0][:count]
  signs = rng.choice([-1, 1], 24)[:, None]
  vectors = signs * centers[planted] + 0.15 * rng.normal(size=(24, 8))
  towers = partition(affinity(vectors), count)
  assert adjusted_rand(tower_of(towers), planted) > 0.9


@settings(max_examples=15)
@given(st.integers(0, 999), st.integers(2, 5), st.booleans())
def test_towers_are_balanced_and_better_than_random(seed, count, coherent):
  rng = np.random.default_rng(seed)
  features = 16
  between = affinity(rng.normal(size=(features, 6)))
  loads = rng.uniform(0.5, 1.5, features)
  towers = partition(between, count, loads, coherent)
  assert sorted(itertools.chain(*towers)) == list(range(features))
  sizes = [*map(len, towers)]
  assert max(sizes) - min(sizes) <= 1
  if features % count == 0:
    sums = np.array([loads[list(own)].sum() for own in towers])
    assert sums.max() <= 1.1 * sums.mean()
  sign = 1 if coherent else -1
  free = within(partition(between, count, None, coherent), between)
  for _ in range(100):
    parts = np.array_split(rng.permutation(features), count)
    other = within(tuple(tuple(own.tolist()) for own in parts), between)
    assert sign * free >= sign * other - 1e-9
  assert partition(between, count, loads, coherent) == towers


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('coherent', [True, False])
def test_no_towers_are_better_by_brute_force(seed, coherent):
  rng = np.random.default_rng(seed)
  between = affinity(rng.normal(size=(8, 3)))
  values = [
    within((one, tuple(sorted({*range(8)} - {*one}))), between)
    for one in itertools.combinations(range(8), 4)
  ]
  value = within(partition(between, 2, None, coherent), between)
  assert value == pytest.approx(max(values) if coherent else min(values))


def test_a_load_that_cannot_be_shared():
  """The largest feature alone is more than 1.1 times the mean."""
  between = affinity(np.eye(4))
  towers = partition(between, 2, np.array([9.0, 1, 1, 1]))
  assert sorted(map(len, towers)) == [2, 2]
  assert affinity(np.zeros((2, 3))).tolist() == [[0, 0], [0, 0]]
