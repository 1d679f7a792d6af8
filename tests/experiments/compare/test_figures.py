"""Figures of a comparison, beside sums done by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.compare.figures import figures_of, mean_curve
from experiments.compare.results import Cell, PLAIN
from tests.experiments.compare import drawn

SMALL = drawn.cells(('random', 'surprise'), (0.5,))


def by_hand(*runs):
  """Runs of (cell's number, seed, trained, AUC); a second per 10 examples."""
  rng = np.random.default_rng(0)
  return [
    drawn.run(SMALL[number], seed, rng)[0]._replace(
      examples_trained=trained,
      examples_dropped=1000 - trained,
      examples_seen=1000,
      seconds=trained / 10,
      auc=auc,
      log_loss=1 - auc,
    )
    for number, seed, trained, auc in runs
  ]


BY_HAND = by_hand(
  (0, 0, 1000, 0.80),
  (1, 0, 600, 0.76),
  (2, 0, 800, 0.79),
  (0, 1, 1000, 0.82),
  (1, 1, 600, 0.78),
  (2, 1, 800, 0.79),
)


def test_losses_are_paired_and_laid_beside_those_of_random():
  plain, random, surprise = figures_of(BY_HAND, [])
  assert 'AUC lost' not in plain
  assert plain['AUC'].mean == pytest.approx(0.81)
  assert random['AUC lost'][:3] == pytest.approx([0.04] * 3)  # in both seeds
  # With 800 examples random would have lost half of its 0.04.
  half = stats.t.ppf(0.975, 1) * 0.02 / math.sqrt(2) / math.sqrt(2)
  assert surprise['AUC lost'].high == pytest.approx(0.02 + half)
  expected = {
    **{'AUC lost': 0.02, 'log loss added': 0.02, "over random's": 1},
    **{
      "over random's in equal seconds": 1,
      "over random's in log loss": 1,
      "AUC less random's": 0,
    },
    **{'dropped': 0.2, 'saved': 0.2, 'saved over dropped': 1},
    **{'examples trained': 800, 'seconds': 80},
  }
  found = {key: surprise[key].mean for key in expected}
  assert found == pytest.approx(expected, abs=1e-12)
  assert random["over random's"].mean == pytest.approx(1)


@pytest.mark.parametrize(
  'runs',
  [
    by_hand((0, 0, 1000, 0.8), (2, 0, 9, 0.7)),  # without random
    by_hand((0, 0, 1000, 0.8), (1, 0, 600, 0.7), (2, 0, 1000, 0.7)),
    [run._replace(auc=math.nan) for run in BY_HAND],
  ],
)
def test_a_share_of_randoms_loss_may_be_unknown(runs):
  surprise = figures_of(runs, [])[-1]
  assert surprise["over random's"] is None
  assert surprise['log loss added'] is not None


def test_a_seed_without_its_plain_run_is_ignored():
  assert figures_of(BY_HAND[1:3], []) == []
  assert [row['seeds'] for row in figures_of(BY_HAND[:5], [])] == [2, 2, 1]


def test_a_policy_that_learns_faster_is_sooner_there():
  runs, curve = drawn.comparison(4, SMALL)
  faster = [
    point._replace(auc=point.auc + 0.1, seconds=point.seconds / 2)
    if point.policy == 'surprise'
    else point
    for point in curve
  ]
  _, random, surprise = figures_of(runs, faster)
  assert surprise['reached'] == '4 of 4'
  assert surprise['times as fast'].mean > 2
  assert surprise['seconds to reach'].mean < 1
  assert random['reached'] < '4'


def test_a_mean_curve_ends_where_the_plain_run_ends():
  runs, curve = drawn.comparison(3, SMALL)
  line = mean_curve(runs, curve, Cell(PLAIN, 0.0), 'examples_seen')
  assert len(line) == 10
  assert line[-1] == pytest.approx((drawn.SEEN, 0))
  assert mean_curve(runs, curve[:5], SMALL[1], 'seconds') == []
