"""Popularity that wanders: who holds a rank, and what cools down."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.synthetic.clicks import examples_at
from slipstream_jax.synthetic.draws import holder, REACH
from slipstream_jax.synthetic.proxies import PROXIES
from slipstream_jax.synthetic.spec import SyntheticSpec
from slipstream_jax.synthetic.stream import TEST_START
from tests.synthetic.test_proxies import examples_of

DRIFT = 20_000
ITEM = 1  # the field of a shop log


@settings(max_examples=40)
@given(
  st.integers(1, 10**6),
  st.integers(0, 10**6),
  st.integers(1, 10**5),
  st.integers(0, 2**32),
)
def test_a_rank_is_held_by_one_further_down_and_changes_hands(
  rank, below, drift_examples, time
):
  key, ranks = np.uint64(17), rank + below
  held = holder(key, rank, ranks, time, drift_examples)
  assert rank <= held <= min(ranks, REACH * rank)
  assert holder(key, rank, ranks, time, 0) == rank
  if time < drift_examples:  # at most one change so far
    between = {
      holder(key, rank, ranks, t, drift_examples)
      for t in np.linspace(0, time, 50).astype(int)
    }
    assert between <= {rank, held}


def test_half_of_the_ranks_change_hands_and_smoothly():
  def held(time):
    return np.array(
      [holder(np.uint64(5), r, 10**9, time, 1000) for r in range(1, 4001)]
    )

  start, ranks = held(0), np.arange(1, 4001)
  np.testing.assert_array_equal(start, ranks)
  for time, share in ((100, 0.05), (500, 0.25), (1000, 0.5), (9000, 0.5)):
    assert (held(time) != ranks).mean() == pytest.approx(share, abs=0.03)


def share_of(hot, lookups):
  return np.isin(lookups, hot).mean()


@pytest.mark.parametrize(
  ('name', 'field', 'rows'),
  [
    ('kaggle', 2, PROXIES['kaggle'].spec.rows),
    ('avazu', 9, PROXIES['avazu'].spec.rows),
    ('taobao', ITEM, (3000, 8000, 20)),  # of 4 M items none is met often
  ],
)
def test_what_was_hot_cools_down(name, field, rows):
  def lookups_at(time, drift):
    examples = examples_of(
      name, TEST_START + time, DRIFT, drift_examples=drift, rows=rows
    )
    return examples.columns.lookups[:, field].ravel()

  # A drift that has hardly begun: the first examples are those without drift.
  slow = lookups_at(0, (1 << 32) - 1)
  assert (slow == lookups_at(0, 0)).mean() > 0.99
  seen, counts = np.unique(slow, return_counts=True)
  counts[seen < 0] = 0  # padding
  hot = seen[np.argsort(-counts, kind='stable')[:300]]
  still = share_of(hot, lookups_at(8 * DRIFT, 0))
  begun = share_of(hot, lookups_at(0, 10 * DRIFT))
  cooled = share_of(hot, lookups_at(80 * DRIFT, DRIFT))
  # Chosen by their counts in one sample, they have fewer in any other.
  assert still > 0.7 * share_of(hot, slow)
  assert begun > 0.85 * still
  assert cooled < 0.8 * still
  # One by one: many are as good as gone.
  later = lookups_at(80 * DRIFT, DRIFT)
  before = np.array([(slow == row).mean() for row in hot[:100]])
  after = np.array([(later == row).mean() for row in hot[:100]])
  assert 0.25 < (after < 0.25 * before).mean() < 0.65


def test_effects_stay_with_the_row():
  spec = SyntheticSpec(
    rows=(500,), dense_features=1, signal=(0, 1, 0), drift_examples=1000
  )
  early = examples_at(spec, np.arange(3000))
  late = examples_at(spec, np.arange(10**6, 10**6 + 3000))
  chance = {}
  for columns, probabilities in (early, late):
    for row, p in zip(columns.lookups[:, 0], probabilities, strict=True):
      assert chance.setdefault(row, p) == p
  seen = [set(np.unique(part.columns.lookups)) for part in (early, late)]
  assert len(seen[0] & seen[1]) > 20


def test_base_rate_holds_while_popularity_drifts():
  rates = []
  for epoch in range(8):
    part = examples_of(
      'kaggle', TEST_START + epoch * 10**6, 1 << 14, drift_examples=10**6
    )
    rates.append(part.probabilities.mean())
  assert np.ptp(rates) > 1e-3  # else nothing drifted
  assert np.mean(rates) == pytest.approx(0.25, abs=0.03)
