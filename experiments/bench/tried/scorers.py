"""Scorers that were tried, and what each is worth on the same batches."""

import itertools
import time
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from experiments.bench.tried import factor_kernels
from experiments.common import build
from slipstream_jax.data.source import Dataset
from slipstream_jax.scoring.base import ScorerFn, SCORERS
from slipstream_jax.scoring.linear import RATE, START
from slipstream_jax.scoring.pairs import PAIRS, PairScorer, TRIAL, WEIGHTS
from slipstream_jax.training.metrics import auc
from slipstream_jax.types import Batch

_FACTORS = 8


class Factors(NamedTuple):
  """A factorization machine; `factor_kernels.learn` has the fields."""

  rows: np.ndarray
  factors: np.ndarray
  dense: np.ndarray

  def learn(
    self, lookups: np.ndarray, dense: np.ndarray, labels: np.ndarray
  ) -> np.ndarray:
    """Click probabilities f32[n], before each example was learned from."""
    lookups = lookups[..., None] if lookups.ndim == 2 else lookups
    out = np.empty(len(labels), np.float32)
    factor_kernels.learn(
      *(self.rows, self.factors, self.dense, lookups, dense, labels),
      np.float32(RATE),
      out,
    )
    return out

  def get_state(self) -> dict[str, Any]:
    """All that was learned."""
    return {name: array.copy() for name, array in self._asdict().items()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from it."""
    for name, array in self._asdict().items():
      array[:] = state[name]


def _factors(hot: Any, features: int, dense_features: int) -> Factors:
  del hot, features
  rows = np.full((WEIGHTS, 2), [0, START], np.float32)
  factors = np.full((WEIGHTS, _FACTORS + 1), START, np.float32)
  draws = np.random.default_rng(0).normal(0, 0.03, (WEIGHTS, _FACTORS))
  factors[:, :-1] = draws  # of equal ones, none would ever differ
  dense = np.full((dense_features + 1, 2), [0, START], np.float32)
  return Factors(rows, factors, dense)


def _pairs(most: int) -> ScorerFn:
  return lambda hot, features, dense: PairScorer.create(
    features, dense, most=most
  )


TRIED: dict[str, ScorerFn] = {
  'linear': SCORERS['linear'],
  'no pairs': _pairs(0),
  'factors': _factors,
  'all pairs': _pairs(PAIRS),
  'pairs': SCORERS['pairs'],
}
"""What is compared, by name."""


def figures(
  config: ml_collections.ConfigDict, data: Dataset, examples: int
) -> list[dict[str, Any]]:
  """A line for each scorer, on the same batches of one epoch at most."""
  most = min(examples, data.train_examples or examples)
  size = config.data.batch_size
  source = data.train(size)
  batches = [*itertools.islice(source, max(1, most // size))]
  source.close()
  hot = build.hot(config, data, build.recipe(config, data, 1))
  assert hot is not None  # as skipping looks for them
  frame = []
  for name, make in TRIED.items():
    shape = batches[0].lookups.shape[1], data.dense_features
    # Compiled, and forgotten.
    _scored(make(hot, *shape), batches[:1])
    scorer = make(hot, *shape)
    frame.append({'scorer': name, **_line(scorer, batches)})
  return frame


def _line(scorer: Any, batches: list[Batch]) -> dict[str, Any]:
  scores, spent = _scored(scorer, batches)
  labels = np.concatenate([batch.labels for batch in batches])
  chance = scores.astype(np.float64)
  losses = -np.log(np.where(labels > 0.5, chance, 1 - chance))
  half = len(labels) // 2
  sizes = np.array([len(batch.labels) for batch in batches])
  later = np.cumsum(sizes) > min(TRIAL, half)
  state = scorer.get_state().values()
  return {
    'AUC': auc(labels, scores),
    'AUC, second half': auc(labels[half:], scores[half:]),
    'log loss': float(losses.mean()),
    'calibration': float(chance.mean() / labels.mean()),
    'us per example': float(np.median((1e6 * spent / sizes)[later])),
    'us, all': float(1e6 * spent.sum() / sizes.sum()),
    'state bytes': sum(np.asarray(array).nbytes for array in state),
  }


def _scored(scorer: Any, batches: list[Batch]) -> tuple[np.ndarray, np.ndarray]:
  """Scores f32[n], and seconds of each batch."""
  scores, spent = [], []
  for batch in batches:
    started = time.thread_time()
    scores.append(scorer.learn(batch.lookups, batch.dense, batch.labels))
    spent.append(time.thread_time() - started)
  return np.concatenate(scores), np.array(spent)
