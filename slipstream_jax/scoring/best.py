"""The better one of two scorers, found by their losses on the first examples.

`PairScorer` knows which ids go together, and takes several times as long as
`LinearScorer`. So it must be worth its time. In the second half of the trial
its loss must be lower by two standard errors, and by a tenth of what the linear
one gains on the base rate. Each loss is of a score from before the example was
learned from (progressive validation, Blum et al., COLT 1999).
"""

import math
from typing import Any

from jaxtyping import Float
import numpy as np

from slipstream_jax.scoring.linear import LinearScorer
from slipstream_jax.scoring.pairs import PairScorer
from slipstream_jax.types import Lookups

TRIAL = 1 << 16
"""Examples that both scorers learn from."""
_EDGE = 1e-6  # a chance that no loss is infinite at
_SURE = 2.0  # standard errors by which the loss of pairs must be lower
_WORTH = 0.1  # share of the linear one's gain by which it must be lower


class BestScorer:
  """Scores by `LinearScorer` first, then by the one with the smaller loss.

  Attributes:
    chosen: 'linear', 'pairs', or None during the trial.
  """

  def __init__(
    self, features: int, dense_features: int, trial: int | None = None
  ) -> None:
    """Starts with both, untrained.

    Args:
      features: F, columns of the lookups.
      dense_features: I, columns of `Batch.dense`.
      trial: examples that both learn from. None: `TRIAL`.
    """
    self._features, self._dense = features, dense_features
    self._scorers: dict[str, LinearScorer | PairScorer] = {
      'linear': LinearScorer.create(features, dense_features),
      'pairs': PairScorer.create(features, dense_features),
    }
    self._trial = TRIAL if trial is None else trial
    # Labels, and the scores of both, until one is chosen.
    self._tried = np.zeros((3, 0), np.float32)

  def of_fewer(self, factor: int) -> 'BestScorer':
    """Returns an untrained one for one example in that many."""
    fewer = BestScorer(self._features, self._dense, self._trial // factor)
    linear = fewer._scorers['linear']
    assert isinstance(linear, LinearScorer)
    fewer._scorers['linear'] = linear.of_fewer(factor)
    return fewer

  @property
  def chosen(self) -> str | None:
    """Name of the scorer that goes on alone."""
    return next(iter(self._scorers)) if len(self._scorers) == 1 else None

  def learn(
    self,
    lookups: Lookups,
    dense: Float[np.ndarray, 'n I'],
    labels: Float[np.ndarray, ' n'],
  ) -> Float[np.ndarray, ' n']:
    """Returns click probabilities f32[n]. See `Scorer.learn`.

    Raises:
      UserError: the shapes do not match the scorer's features.
    """
    columns, scores = (lookups, dense, labels), []
    if self.chosen is None:
      left = self._trial - self._tried.shape[1]
      scores.append(self._try(lookups[:left], dense[:left], labels[:left]))
      columns = lookups[left:], dense[left:], labels[left:]
    if len(columns[2]) or not scores:
      (scorer,) = self._scorers.values()
      scores.append(scorer.learn(*columns))
    return np.concatenate(scores)

  def _try(
    self, lookups: Lookups, dense: np.ndarray, labels: np.ndarray
  ) -> Float[np.ndarray, ' n']:
    linear, pairs = (
      scorer.learn(lookups, dense, labels) for scorer in self._scorers.values()
    )
    tried = np.stack([labels, linear, pairs]).astype(np.float32)
    self._tried = np.concatenate([self._tried, tried], axis=1)
    if self._tried.shape[1] == self._trial:
      self._keep(_better(*self._tried[:, self._trial // 2 :]))
    return linear

  def _keep(self, name: str) -> None:
    self._scorers, self._tried = {name: self._scorers[name]}, self._tried[:, :0]

  def teach(
    self,
    lookups: Lookups,
    dense: Float[np.ndarray, 'n I'],
    labels: Float[np.ndarray, ' n'],
  ) -> None:
    """Learns as `learn` does, where `frozen` scores: by the linear one."""
    scorer = self._scorers['linear']
    assert isinstance(scorer, LinearScorer)
    scorer.teach(lookups, dense, labels)

  def frozen(self) -> Any:
    """Returns the linear scorer's copy, or None while it is not the choice."""
    if self.chosen != 'linear':
      return None
    scorer = self._scorers['linear']
    assert isinstance(scorer, LinearScorer)
    return scorer.frozen()

  def get_state(self) -> dict[str, Any]:
    """Returns copies of what those in use have learned."""
    learned = {
      f'{name} {key}': value
      for name, scorer in self._scorers.items()
      for key, value in scorer.get_state().items()
    }
    return {'tried': self._tried.copy(), **learned}

  def set_state(self, state: dict[str, Any]) -> None:
    """Copies a state from `get_state`, into one that has not chosen."""
    learned: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
      name, _, of = key.partition(' ')
      if of:
        learned.setdefault(name, {})[of] = value
    if len(learned) == 1:
      self._keep(*learned)
    self._tried = state['tried']
    for name, own in learned.items():
      self._scorers[name].set_state(own)


def _better(labels: np.ndarray, linear: np.ndarray, pairs: np.ndarray) -> str:
  """Returns the name of the scorer to go on with, by its chances f32[n]."""
  rate = np.full(len(labels), labels.mean())
  base, one, other = (_losses(labels, x) for x in (rate, linear, pairs))
  less = one - other
  deviation = float(np.std(less)) / math.sqrt(len(less))
  worth = _WORTH * max(float(np.mean(base - one)), 0.0)
  return 'pairs' if np.mean(less) > max(_SURE * deviation, worth) else 'linear'


def _losses(labels: np.ndarray, chances: np.ndarray) -> np.ndarray:
  """Returns log losses, f64[n]."""
  chances = np.clip(chances.astype(np.float64), _EDGE, 1 - _EDGE)
  return -(labels * np.log(chances) + (1 - labels) * np.log1p(-chances))
