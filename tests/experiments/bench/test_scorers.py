"""The bench of scorers, over a config of seconds."""

import numpy as np

from experiments.bench.tried import scorers
from experiments.common import datasets
from slipstream_jax.scoring.base import SCORERS
from tests.support.runs import smoke


def test_every_scorer_has_its_figures():
  config = smoke(**{'skip.mode': 'examples'})
  frame = scorers.figures(config, datasets.dataset(config), 2000)
  assert [line['scorer'] for line in frame] == [*scorers.TRIED]
  assert set(SCORERS) <= set(scorers.TRIED)
  for line in frame:
    assert 0.4 < line['AUC'] < 1
    assert 0 < line['log loss'] < 1
    assert line['us per example'] > 0
    assert line['state bytes'] > 0


def test_factors_are_restored():
  rng = np.random.default_rng(0)
  columns = (
    rng.integers(0, 50, (40, 3)),
    np.ones((40, 1), np.float32),
    (rng.random(40) < 0.5).astype(np.float32),
  )
  machine, other = (scorers.TRIED['factors'](None, 3, 1) for _ in range(2))
  machine.learn(*columns)
  other.set_state(machine.get_state())
  np.testing.assert_array_equal(machine.learn(*columns), other.learn(*columns))
