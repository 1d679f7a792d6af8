"""The scorer that goes on is the one whose loss is lower, if that is sure."""

import numpy as np
import pytest

from slipstream_jax.scoring.best import BestScorer
from slipstream_jax.scoring.linear import LinearScorer
from slipstream_jax.scoring.pairs import PairScorer

TRIAL = 8000
CHOSEN = {'linear': LinearScorer, 'pairs': PairScorer}


def clicks(seed, kind):
  """Clicks that follow one id, or whether two ids are alike, or chance."""
  rng = np.random.default_rng(seed)
  lookups = rng.integers(0, 4, (2 * TRIAL, 3)) + [0, 4, 8]
  alike = lookups[:, 0] % 2 == lookups[:, 1] % 2
  likely = {'one id': lookups[:, 0] < 2, 'two ids': alike, 'chance': 0}[kind]
  labels = rng.random(2 * TRIAL) < np.where(likely, 0.8, 0.2)
  dense = np.ones((2 * TRIAL, 1), np.float32)
  return lookups, dense, labels.astype(np.float32)


@pytest.mark.parametrize(
  ('kind', 'name'),
  [('one id', 'linear'), ('chance', 'linear'), ('two ids', 'pairs')],
)
@pytest.mark.parametrize('seed', range(3))
def test_pairs_go_on_only_where_ids_go_together(kind, name, seed):
  scorer, examples = BestScorer(3, 1, TRIAL), clicks(seed, kind)
  alone = CHOSEN[name].create(3, 1)
  expected = alone.learn(*examples)
  tried = scorer.learn(*(c[: TRIAL - 1] for c in examples))
  assert scorer.chosen is scorer.frozen() is None
  last = scorer.learn(*(c[TRIAL - 1 :] for c in examples))
  assert scorer.chosen == name
  np.testing.assert_array_equal(last[1:], expected[TRIAL:])
  if name == 'linear':  # it scores from the start
    np.testing.assert_array_equal(tried, expected[: TRIAL - 1])
    columns = examples[:2]
    frozen = scorer.frozen()
    np.testing.assert_array_equal(
      frozen.score(*columns), alone.frozen().score(*columns)
    )
  else:
    assert scorer.frozen() is None
  # What is not used any more takes no room in a position.
  assert not any(
    key.startswith(n) for n in {*CHOSEN} - {name} for key in scorer.get_state()
  )


def test_one_for_fewer_examples_chooses_after_as_large_a_part():
  fewer = BestScorer(3, 1, TRIAL).of_fewer(4)
  examples = [c[::4] for c in clicks(0, 'two ids')]
  fewer.learn(*(c[: TRIAL // 4 - 1] for c in examples))
  assert fewer.chosen is None
  fewer.learn(*(c[TRIAL // 4 - 1 :] for c in examples))
  assert fewer.chosen == 'pairs'
