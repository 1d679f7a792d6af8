"""Popularity that wanders: who holds a rank, and what cools down."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.synthetic.clicks import examples_at
from slipstream_jax.synthetic.draws import holder, REACH
from slipstream_jax.synthetic.spec import SyntheticSpec


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
