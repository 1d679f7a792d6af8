"""Means over seeds have the intervals of the textbook."""

import math

from hypothesis import assume, given
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import stats

from experiments.common import estimates

values = st.lists(st.floats(0.1, 1e3), min_size=2, max_size=8)


@given(values)
def test_a_mean_has_students_interval(values):
  estimate = estimates.mean(values)
  half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
  low, high = np.mean(values) - half, np.mean(values) + half
  assert estimate.mean == pytest.approx(np.mean(values))
  assert estimate.low == pytest.approx(low, rel=1e-6, abs=1e-9)
  assert estimate.high == pytest.approx(high, rel=1e-6, abs=1e-9)


@given(values, st.randoms(use_true_random=False))
def test_a_ratio_the_other_way_round_is_its_inverse(tops, random):
  bottoms = [random.uniform(0.1, 10) for _ in tops]
  one, other = estimates.ratio(tops, bottoms), estimates.ratio(bottoms, tops)
  assert one.mean == pytest.approx(stats.gmean(np.array(tops) / bottoms))
  assert math.log(one.mean) == pytest.approx(-math.log(other.mean), abs=1e-9)
  if one.high < 1e300 and other.high < 1e300:
    assert math.log(one.low) == pytest.approx(-math.log(other.high), abs=1e-6)


pairs_of_five = st.lists(
  st.tuples(st.floats(-1, 2), st.floats(0.5, 1.5)), min_size=5, max_size=5
)


@given(pairs_of_five, st.floats(0.01, 0.99))
def test_a_share_has_the_ratios_that_a_paired_test_leaves(pairs, part):
  """At the bounds the test is just at its quantile, between them below it."""
  tops, bottoms = np.array(pairs).T

  quantile = stats.t.ppf(0.975, 4)

  def statistic(share):
    rest = tops - share * bottoms
    error = rest.std(ddof=1) / math.sqrt(5)
    return abs(rest.mean()) / error

  share = estimates.share(tops, bottoms)
  assert share.mean == pytest.approx(tops.mean() / bottoms.mean())
  assume(share.low is not None)
  assume(share.high - share.low > 1e-3)
  assert share.low <= share.mean <= share.high
  for bound in (share.low, share.high):
    assert statistic(bound) == pytest.approx(quantile, rel=1e-4)
  inside = share.low + part * (share.high - share.low)
  assert statistic(inside) < quantile


def test_a_share_of_nothing_is_not_known():
  assert estimates.share([], []) is None
  assert estimates.share([1.0], [0.0]) is None
  assert estimates.share([1.0], [4.0]) == estimates.Estimate(0.25)
  unsure = estimates.share([1.0, 1.0], [4.0, -3.0])  # a bottom that may be 0
  assert (unsure.low, unsure.high) == (None, None)


rises = st.lists(st.floats(0.01, 1), min_size=2, max_size=8)


@given(rises, st.floats(0.001, 0.999), st.data())
def test_a_rising_curve_has_an_auc_where_it_crosses_it(steps, part, data):
  curve = [(float(n), float(auc)) for n, auc in enumerate(np.cumsum(steps))]
  at = data.draw(st.integers(0, len(curve) - 2))
  auc = (1 - part) * curve[at][1] + part * curve[at + 1][1]
  assert estimates.seconds_to(curve, auc) == pytest.approx(at + part, abs=1e-6)
  assert estimates.seconds_to(curve, curve[-1][1] + 0.1) is None
  assert estimates.seconds_to(curve, -1.0) == curve[0][0]
  assert estimates.seconds_to([], 0.5) is None
  assert estimates.seconds_to(curve, math.nan) is None


def test_too_few_values_have_no_interval():
  assert estimates.mean([]) is None
  assert estimates.mean([2.0]) == estimates.Estimate(2.0, None, None, 1)
  assert estimates.ratio([], []) is None
  assert estimates.ratio([3.0], [2.0]).mean == pytest.approx(1.5)
  assert estimates.ratio([3.0, 0.0], [2.0, 1.0]) is None
  assert estimates.of_test_set(0.8, 0, 10) is None
  assert estimates.of_test_set(0.8, 10, 10) is None


@pytest.mark.parametrize('rate', [1.0, 2.5])
def test_an_auc_spreads_as_hanley_and_mcneil_say(rate):
  """Their formula is exact for scores of exponential laws: draw many."""
  rng = np.random.default_rng(0)
  positives, negatives = 60, 90
  above = rng.exponential(rate, (4000, positives))
  below = rng.exponential(1.0, (4000, negatives))
  aucs = (above[:, :, None] > below[:, None, :]).mean((1, 2))
  expected = rate / (1 + rate)
  estimate = estimates.of_test_set(expected, positives, positives + negatives)
  half = estimate.high - estimate.mean
  assert aucs.mean() == pytest.approx(expected, abs=0.005)
  assert half == pytest.approx(1.96 * aucs.std(), rel=0.05)


def test_estimates_are_written_with_a_dash_for_what_is_unknown():
  known = estimates.mean([1.0, 2.0, 3.0])
  assert estimates.middle(known, estimates.times) == '2.00'
  assert estimates.interval(known, estimates.times) == '-0.48 to 4.48'
  assert estimates.interval(estimates.mean([1.0]), estimates.times) == '-'
  assert estimates.middle(None, estimates.times) == '-'
  assert estimates.change(-1e-9) == '+0.0000'
