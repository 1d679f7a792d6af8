"""Runs a scorer, and reports what its scores are worth: `selection/gain.py`."""

from typing import Any

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.scoring.base import Scorer, ScorerFn
from slipstream_jax.scoring.linear import LinearScorer
from slipstream_jax.selection import gain
from slipstream_jax.selection.base import ExampleFacts, fit, Policy, select
from slipstream_jax.types import Batch, HotRows

GROWN = 1.25
"""Factor by which examples grow from one report to the next."""
FIRST = 1 << 14
"""Examples before the first report."""


class BatchScorer:
  """A scorer that scores each batch of the source once and learns from it.

  One example in `gain.FEWER` is counted. That tells as much in less time.
  If the drop target is found while training, a second one learns from fewer
  examples.
  """

  def __init__(
    self, make: ScorerFn, hot: HotRows, auto_cost: float | None
  ) -> None:
    """Starts without a scorer, which is made when the first batch comes.

    Args:
      make: makes a scorer.
      hot: the hot rows.
      auto_cost: share of the log loss that dropping may cost. None: the cost is
        not estimated.
    """
    self._make, self._hot, self._auto_cost = make, hot, auto_cost
    self._reset()

  def _reset(self) -> None:
    self._shape: tuple[int, int] | None = None
    self._scorers: tuple[Scorer, ...] = ()
    self._seen, self._reported = 0, 0
    self._whole = self._recent = gain.NO_COUNTS
    self._lag = np.zeros(3)

  def learn(self, batch: Batch) -> Float[np.ndarray, ' n']:
    """Returns click probabilities, and learns from every example.

    It must be called once for each batch of the source, in every phase, before
    examples are left out. Else its scores would depend on the choice.

    Raises:
      UserError: a user's scorer returned no chances.
    """
    if self._shape is None:
      self._begin((batch.lookups.shape[1], batch.dense.shape[1]))
    columns = batch.lookups, batch.dense, batch.labels
    scores = _checked(self._scorers[0].learn(*columns), len(batch.labels))
    # By their numbers in the source, not in the batch.
    every = slice(-self._seen % gain.FEWER, None, gain.FEWER)
    some = [column[every] for column in columns]
    counted = gain.tally(some[-1], scores[every])
    self._whole = self._whole + counted
    recent = self._recent + counted
    self._recent = gain.faded(recent, recent.sum() * gain.FEWER)
    if len(self._scorers) > 1:
      fewer = _checked(self._scorers[1].learn(*some), len(some[0]))
      lagging = self._lag + gain.lag(some[-1], scores[every], fewer)
      self._lag = gain.faded(lagging, lagging[0] * gain.FEWER)
    self._seen += len(batch.labels)
    return scores

  def _begin(self, shape: tuple[int, int]) -> None:
    of_all = _complete(self._make(self._hot, *shape))
    self._shape, self._scorers = shape, (of_all,)
    if self._auto_cost is None:
      return
    fewer = _complete(self._make(self._hot, *shape))
    if isinstance(fewer, LinearScorer):
      # So that it learns from a quarter of what the other one does at any time.
      fewer = fewer._replace(full=fewer.full // gain.FEWER)
    self._scorers = of_all, fewer

  def due(self) -> bool:
    """Whether there are enough new examples for another report."""
    return self._seen >= max(FIRST, GROWN * self._reported)

  def report(self, drop: float) -> dict[str, Any]:
    """Returns the quality of the scores, if this share of all is dropped."""
    self._reported = self._seen
    noise = gain.noise_of(self._recent)
    kept = min(max(1 - drop, 0.01), 1.0)
    return {
      'scorer_auc': gain.auc(self._whole),
      'scorer_log_loss': gain.log_loss(self._whole),
      'base_log_loss': gain.base_log_loss(self._whole),
      'noise': noise,
      'variance_bound': gain.bound(noise, kept),
      'verdict': gain.verdict(self._recent, kept),
    }

  def may_drop(
    self, policy: Policy, facts: ExampleFacts
  ) -> tuple[float, float]:
    """Returns the drop target that the cost allows, and its cost in log loss.

    `facts` are of examples drawn at random.
    """
    loss, half = gain.log_loss(self._recent), gain.cost_of_half(self._lag)
    if facts.scores is None or loss is None or self._auto_cost is None:
      return 0.0, 0.0
    if not np.isfinite(half) or not policy.thinned(facts).any():
      return 0.0, 0.0
    scores = facts.scores
    error = gain.errors(self._recent, facts.labels, scores)
    never = np.zeros(len(error), np.float32)

    def extra(drop: float) -> float:
      fitted = fit(policy, facts, drop, of_all=True)
      chances = select(policy, facts, fitted, never).probability
      return gain.extra_variance(error, chances)

    most = self._auto_cost * loss / max(half, 1e-300)
    drop = gain.affordable(extra, most)
    if gain.verdict(self._recent, 1 - drop):
      return 0.0, 0.0
    return drop, half * extra(drop)

  def get_state(self) -> State | None:
    """Returns what was learned and counted, or None before the first batch."""
    if self._shape is None:
      return None
    return {
      'shape': list(self._shape),
      'scorers': [scorer.get_state() for scorer in self._scorers],
      'seen': self._seen,
      'told': self._reported,
      'whole': self._whole,
      'recent': self._recent,
      'lag': self._lag.tolist(),
    }

  def set_state(self, state: State | None) -> None:
    """Restores a state from `get_state`. Does not modify it."""
    self._reset()
    if state is None:
      return
    features, dense = state['shape']
    self._begin((features, dense))
    for i, learned in enumerate(state['scorers']):
      self._scorers[i].set_state(learned)
    self._seen, self._reported = state['seen'], state['told']
    self._whole, self._recent = state['whole'], state['recent']
    self._lag = np.array(state['lag'], np.float64)


def _complete(scorer: Any) -> Scorer:
  absent = [
    name
    for name in ('learn', 'get_state', 'set_state')
    if not callable(getattr(scorer, name, None))
  ]
  if absent:
    raise UserError(
      'a scorer must have learn, get_state and set_state',
      got=f'{type(scorer).__name__} without {", ".join(absent)}',
      where='Skip.scorer',
      hint='see Scorer in slipstream_jax/scoring/base.py',
    )
  return scorer


def _checked(scores: Any, examples: int) -> Float[np.ndarray, ' n']:
  scores = np.asarray(scores, np.float32)
  # NaN is an unknown score.
  good = scores.shape == (examples,)
  if good and examples:
    least, most = np.fmin.reduce(scores), np.fmax.reduce(scores)
    good = not (least < 0 or most > 1)
  if not good:
    raise UserError(
      f'a scorer must give a chance in [0, 1] for each of {examples} examples',
      got=f'{list(scores.shape)}, {scores.reshape(-1)[:3].tolist()} first',
      where='Skip.scorer',
      hint='return what it believed before it learned from each',
    )
  return scores
