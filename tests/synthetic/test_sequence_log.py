"""The shop log: sequences, interests, and what they tell of a click."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from slipstream_jax.synthetic.stream import (
  bayes_auc,
  TEST_START,
)
from tests.synthetic.test_proxies import examples_of

USER, ITEM, CATEGORY = range(3)


@pytest.fixture(scope='module')
def shop():
  """Examples of Taobao's proxy."""
  return examples_of('taobao', TEST_START + (1 << 30), 1 << 16)


def test_a_sequence_is_past_steps_then_padding_then_the_candidate(shop):
  lookups, dense = shop.columns.lookups, shop.columns.dense
  assert lookups.shape == (1 << 16, 3, 21)
  there = lookups >= 0
  assert (there == there[:, :1]).all()  # in all three tables alike
  assert there[:, :, -1].all()
  past = there[:, 0, :-1].sum(axis=1)
  np.testing.assert_array_equal(there[:, 0, :-1], np.arange(20) < past[:, None])
  np.testing.assert_allclose(dense[:, 0], np.log1p(past), rtol=1e-6)
  assert past.min() == 1
  assert (past < 20).mean() == pytest.approx(0.2, abs=0.02)
  users = np.where(there[:, USER], lookups[:, USER], lookups[:, USER, -1:])
  assert (users == users[:, :1]).all()


def test_an_item_has_one_category(shop):
  items = shop.columns.lookups[:, ITEM].ravel()
  categories = shop.columns.lookups[:, CATEGORY].ravel()
  pairs = np.unique(np.stack([items, categories]), axis=1)
  assert len(np.unique(pairs[0])) == pairs.shape[1] > 50_000


def test_the_past_predicts_the_click(shop):
  lookups, labels = shop.columns.lookups, shop.columns.labels
  categories, items = lookups[:, CATEGORY], lookups[:, ITEM]
  met = (categories[:, :-1] == categories[:, -1:]).sum(axis=1)
  auc = roc_auc_score(labels, met)
  assert 0.85 < auc < bayes_auc(shop.probabilities)
  others = np.roll(categories[:, :-1], 1, axis=0)
  foreign = (others == categories[:, -1:]).sum(axis=1)
  assert roc_auc_score(labels, foreign) == pytest.approx(0.5, abs=0.01)
  # The candidate alone tells nothing.
  assert roc_auc_score(labels, items[:, -1]) == pytest.approx(0.5, abs=0.02)
