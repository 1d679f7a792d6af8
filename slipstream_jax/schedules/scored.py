"""Runs a scorer, and reports what its scores are worth: `selection/gain.py`."""

from collections.abc import Sequence
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.schedules.base import State
from slipstream_jax.scoring.base import (
  FreezableScorer,
  FrozenScorer,
  Scorer,
  ScorerFn,
)
from slipstream_jax.scoring.best import BestScorer
from slipstream_jax.scoring.linear import LinearScorer
from slipstream_jax.selection import gain
from slipstream_jax.selection.base import ExampleFacts, fit, Policy, select
from slipstream_jax.types import Batch, HotRows

FIRST = 1 << 14
"""Examples before the first report."""


EARLY = 1 << 17
"""First examples, each of which is scored once all before it were learned from.
A scorer learns most from them, so old weights would cost most."""


class Scored(NamedTuple):
  """Scores of a batch, from weights that were frozen before it."""

  scores: Float[np.ndarray, ' n']
  """Click probabilities, f32."""
  counted: gain.Counts
  """Counts of one example in `gain.FEWER`."""
  lag: Float[np.ndarray, '3']
  """`gain.lag` of these, or zeros where there is no second scorer."""


class BatchScorer:
  """A scorer that scores each batch of the source once and learns from it.

  A scorer that can be frozen scores a batch by the weights of the last
  refresh, which have learned from earlier batches only. Refreshes follow the
  batches' numbers. So `score` may run in any thread, once all batches before
  `refreshed_at` were added. Another scorer scores as it learns, in `add`, and
  so does every scorer for the first `EARLY` examples.

  One example in `gain.FEWER` is counted. That tells as much in less time.
  If the drop target is found while training, a second one learns from fewer
  examples.
  """

  def __init__(
    self,
    make: ScorerFn | None,
    hot: HotRows,
    auto_cost: float | None,
    every: int = 10,
  ) -> None:
    """Starts without a scorer, which is made when the first batch comes.

    Args:
      make: makes a scorer. None: there is none, and `count` gets scores.
      hot: the hot rows.
      auto_cost: share of the log loss that dropping may cost. None: the cost is
        not estimated.
      every: batches from one refresh of frozen weights to the next.
    """
    self._make, self._hot, self._auto_cost = make, hot, auto_cost
    self._every = every
    self._reset()

  def _reset(self) -> None:
    self._shape: tuple[int, int] | None = None
    self._scorers: tuple[Scorer, ...] = ()
    self._freezable: tuple[FreezableScorer, ...] = ()  # the same, if they are
    self._frozen: tuple[FrozenScorer, ...] = ()
    self._seen, self._batches, self._reported = 0, 0, 0
    self._whole = self._recent = gain.NO_COUNTS
    self._lag = np.zeros(3)

  def refreshed_at(self, number: int, size: int) -> int:
    """Returns the batch before which the weights for a batch were refreshed.

    Args:
      number: of the batch in the source, from 0.
      size: examples of a batch, with its padding.
    """
    first = -(-EARLY // size)  # batch that frozen weights score
    return max(number - number % self._every, first) if number >= first else 0

  def learn(self, batch: Batch) -> Float[np.ndarray, ' n']:
    """Returns click probabilities, and learns from every example.

    It must be called once for each batch of the source, in every phase, before
    examples are left out. Else its scores would depend on the choice.

    Raises:
      UserError: a user's scorer returned no chances.
    """
    self.begin(batch)
    size = len(batch.labels)
    return self.add(batch, self.score(batch, self._batches, size), size)

  def begin(self, batch: Batch) -> None:
    """Makes the scorer for batches like this one, unless there is one."""
    if self._shape is None:
      self._begin((batch.lookups.shape[1], batch.dense.shape[1]))

  def score(self, batch: Batch, number: int, size: int) -> Scored | None:
    """Scores a batch by frozen weights. None if it is scored in order.

    Args:
      batch: without padding.
      number: as for `refreshed_at`, like the next.
      size: examples of a batch, with its padding.

    Raises:
      UserError: a user's scorer returned no chances.
    """
    if not self._frozen or number * size < EARLY:
      return None
    columns = batch.lookups, batch.dense, batch.labels
    some = [column[:: gain.FEWER] for column in columns]
    scores = _checked(self._frozen[0].score(*columns[:2]), len(batch.labels))
    few, lag = scores[:: gain.FEWER], np.zeros(3)
    if len(self._frozen) > 1:
      fewer = _checked(self._frozen[1].score(*some[:2]), len(few))
      lag = gain.lag(some[-1], few, fewer)
    counted = np.zeros_like(gain.NO_COUNTS)
    _tally(some[-1], few, gain.LIMIT, counted)
    return Scored(scores, counted, lag)

  def add(
    self, batch: Batch, scored: Scored | None, size: int
  ) -> Float[np.ndarray, ' n']:
    """Learns from a batch, and returns its click probabilities.

    Args:
      batch: the next one of the source, without padding.
      scored: its `score`.
      size: its examples, with padding.

    Raises:
      UserError: a user's scorer returned no chances.
    """
    if scored is None:
      scored = self._score_and_learn(batch)
    else:
      self._teach(batch)
    self._count(scored)
    if self.refreshed_at(self._batches, size) == self._batches:
      self._freeze()
    return scored.scores

  def count(
    self, labels: Float[np.ndarray, ' n'], scores: Float[np.ndarray, ' n']
  ) -> None:
    """Counts a batch that something else than a scorer has scored.

    Args:
      labels: of the next batch of the source, without padding.
      scores: click probabilities, or NaN where they are not known.
    """
    every = slice(-self._seen % gain.FEWER, None, gain.FEWER)
    counted = gain.tally(labels[every], scores[every])
    self._count(Scored(scores, counted, np.zeros(3)))

  def _count(self, scored: Scored) -> None:
    self._whole = self._whole + scored.counted
    recent = self._recent + scored.counted
    self._recent = gain.faded(recent, recent.sum() * gain.FEWER)
    lagging = self._lag + scored.lag
    self._lag = gain.faded(lagging, lagging[0] * gain.FEWER)
    self._seen += len(scored.scores)
    self._batches += 1

  def _teach(self, batch: Batch) -> None:
    columns = batch.lookups, batch.dense, batch.labels
    strides = 1, gain.FEWER
    for scorer, stride in zip(self._freezable, strides, strict=False):
      scorer.teach(*(column[::stride] for column in columns))

  def _score_and_learn(self, batch: Batch) -> Scored:
    columns = batch.lookups, batch.dense, batch.labels
    scores = _checked(self._scorers[0].learn(*columns), len(batch.labels))
    # By their numbers in the source, not in the batch.
    every = slice(-self._seen % gain.FEWER, None, gain.FEWER)
    some, few, lag = [c[every] for c in columns], scores[every], np.zeros(3)
    if len(self._scorers) > 1:
      fewer = _checked(self._scorers[1].learn(*some), len(some[0]))
      lag = gain.lag(some[-1], few, fewer)
    return Scored(scores, gain.tally(some[-1], few), lag)

  def _begin(self, shape: tuple[int, int]) -> None:
    self._shape = shape
    if self._make is None:
      return
    of_all = _complete(self._make(self._hot, *shape))
    self._scorers = (of_all,)
    if self._auto_cost is not None:
      fewer = _complete(self._make(self._hot, *shape))
      if isinstance(fewer, LinearScorer | BestScorer):
        # So that it learns from a quarter of what the other one does.
        fewer = fewer.of_fewer(gain.FEWER)
      self._scorers = of_all, fewer
    self._freezable = tuple(
      scorer for scorer in self._scorers if isinstance(scorer, FreezableScorer)
    )
    self._freeze()

  def _freeze(self) -> None:
    frozen = [scorer.frozen() for scorer in self._freezable]
    known = tuple(one for one in frozen if one is not None)
    self._frozen = known if len(known) == len(frozen) else ()

  def due(self) -> bool:
    """Whether there are enough new examples for another report."""
    return self._seen >= max(FIRST, gain.GROWN * self._reported)

  def report(self, drop: float) -> dict[str, Any]:
    """Returns the quality of the scores, if this share of all is dropped."""
    self._reported = self._seen
    noise = gain.noise_of(self._recent)
    kept = min(max(1 - drop, 0.01), 1.0)
    best = self._scorers[0] if self._scorers else None
    chosen = best.chosen if isinstance(best, BestScorer) else None
    return {
      **({} if chosen is None else {'scorer_chosen': chosen}),
      'scorer_auc': gain.auc(self._whole),
      'scorer_log_loss': gain.log_loss(self._whole),
      'base_log_loss': gain.base_log_loss(self._whole),
      'noise': noise,
      'variance_bound': gain.bound(noise, kept),
      'verdict': gain.verdict(self._recent, kept),
    }

  def may_drop(
    self,
    policy: Policy,
    facts: ExampleFacts,
    segments: Sequence[gain.Segment],
    most: float,
  ) -> tuple[float, float]:
    """Returns the drop target that the cost allows, and its cost in log loss.

    Args:
      policy: which drops.
      facts: of examples drawn at random.
      segments: by how much the model's loss is above the scorer's.
      most: the largest target.
    """
    loss = gain.log_loss(self._recent)
    if facts.scores is None or loss is None or self._auto_cost is None:
      return 0.0, 0.0
    of_model = gain.cost_to_model(segments, loss)
    half = gain.cost_of_half(self._lag) + of_model.half
    if not np.isfinite(half) or not policy.thinned(facts).any():
      return 0.0, 0.0
    scores = facts.scores
    error = gain.errors(self._recent, facts.labels, scores)
    never = np.zeros(len(error), np.float32)

    def cost(drop: float) -> float:
      fitted = fit(policy, facts, drop, of_all=True)
      chances = select(policy, facts, fitted, never).probability
      noise = half * gain.extra_variance(error, chances)
      return noise + of_model.behind * drop / (1 - drop)

    drop = min(gain.affordable(cost, self._auto_cost * loss), most)
    if gain.verdict(self._recent, 1 - drop):
      return 0.0, 0.0
    return drop, cost(drop)

  def get_state(self) -> State | None:
    """Returns what was learned and counted, or None before the first batch."""
    if self._shape is None:
      return None
    return {
      'shape': list(self._shape),
      'scorers': [scorer.get_state() for scorer in self._scorers],
      'frozen': [scorer.get_state() for scorer in self._frozen],
      'seen': self._seen,
      'batches': self._batches,
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
    if 'frozen' not in state:
      raise UserError(
        'a position must have the weights that a scorer scores by',
        got='one of a version before it',
        where='BatchScorer.set_state',
        hint='finish the run with the version that began it, or begin anew',
      )
    features, dense = state['shape']
    self._begin((features, dense))
    for i, learned in enumerate(state['scorers']):
      self._scorers[i].set_state(learned)
    self._freeze()
    if not state['frozen']:
      self._frozen = ()
    for own, saved in zip(self._frozen, state['frozen'], strict=True):
      own.set_state(saved)
    self._seen, self._reported = state['seen'], state['told']
    self._batches = state['batches']
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


@kernel
@no_type_check
def _tally(
  labels: np.ndarray, scores: np.ndarray, limit: float, out: np.ndarray
) -> None:
  """Counts as `gain.tally` does, in one loop, into f64[bins, 2]."""
  edge, bins = 1 / (1 + np.exp(limit)), len(out)
  for i in range(len(scores)):
    chance = np.float64(scores[i])
    if chance == chance:
      chance = min(max(chance, edge), 1 - edge)
      logit = np.log(chance / (1 - chance))
      at = min(int((logit + limit) / (2 * limit / bins)), bins - 1)
      out[at, 1] += labels[i]
      out[at, 0] += 1 - labels[i]
