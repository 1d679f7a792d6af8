"""Meets a drop target while examples, scores and hot rows change.

A scale that is fitted once misses its target by more and more: a scorer that
learns is surprised less often, and where popularity drifts fewer examples are
hot. So the policy is fitted again every few batches to the latest examples. The
target of a fit makes up for what was dropped too little or too much since the
last one, within bounds. A policy that cannot drop as many, because it thins hot
examples only or because of its floor, drops what it can. What it misses is
reported.

Everything is a function of the examples and of what was dropped of them, batch
by batch. Only the facts of some thousand examples are kept.
"""

from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.selection.base import (
  ExampleFacts,
  Fit,
  fit,
  joined,
  Policy,
  select,
)

SAMPLED = 2048
"""Examples of one fit, taken from all batches since the last one. They suffice
for 1 % of them, and take less than 1 ms."""
LEAST = 512
"""Examples that a fit is made to, at least, older ones among them."""
OWED = 2.0
"""Largest deficit of a fit, as a multiple of what it is to drop."""
STRETCH = 100
"""Batches from one check of the target to the next."""
MISSED = 0.02
"""Share by which a stretch may miss its target without a report."""
FALLEN = 0.8
"""A hot share below this part of the last one reported is reported again."""


class ChoiceSums(NamedTuple):
  """Sums over consecutive batches from which examples were chosen."""

  batches: int = 0
  examples: int = 0
  hot: int = 0
  asked: float = 0.0
  dropped: int = 0


class DropTarget:
  """Fits a policy to its drop target again and again, and counts the deficit.

  Attributes:
    drop: the target, in [0, 1].
  """

  def __init__(
    self, policy: Policy, drop: float, of_all: bool, refit: int
  ) -> None:
    """Starts before the first decision.

    Args:
      policy: which drops the examples.
      drop: the target.
      of_all: whether it is a share of all examples, not of the hot ones.
      refit: batches from one fit to the next. 0: only decisions fit.
    """
    self.drop = drop
    self._policy, self._of_all, self._refit = policy, of_all, refit
    self._since = ChoiceSums()  # since the last fit
    self._owed = 0.0  # the deficit in examples, below 0 if too many went
    self._recent: list[ExampleFacts] = []
    self._unreported = ChoiceSums()  # since the last check
    self._hot = 0.0  # hot share in the last report, or the highest since

  def wanted(self, facts: ExampleFacts) -> float:
    """Returns how many of these examples to drop."""
    return self.drop * self._base(facts)

  def _base(self, facts: ExampleFacts) -> float:
    """Returns how many examples the target is a share of."""
    some = len(facts.hot) if self._of_all else np.count_nonzero(facts.hot)
    return float(some)

  def can_fit(self, sample: ExampleFacts) -> bool:
    """Whether the policy can be fitted to the sample."""
    thins = self._policy.thins_cold and self._of_all
    return bool((sample.hot | thins).any())

  def _knows(self, sample: ExampleFacts) -> bool:
    """Whether there is a score to fit to, if the policy needs scores.

    Without one, any scale fits, and would drop most examples that have one.
    """
    if not self._policy.scored or sample.scores is None:
      return True
    return not np.isnan(sample.scores).all()

  def fit(self, sample: ExampleFacts) -> tuple[Fit, float]:
    """Fits the policy to the sample of a decision.

    Returns:
      The fit, and the share of the sample that it drops too little. That share
      exceeds rounding if the policy cannot drop as many.
    """
    fitted = Fit(np.inf)
    if self._knows(sample):
      fitted = fit(self._policy, sample, self.drop, self._of_all)
    never = np.zeros(len(sample.hot), np.float32)
    chances = select(self._policy, sample, fitted, never).probability
    dropped = len(chances) - float(chances.sum(dtype=np.float64))
    of = max(self._base(sample), 1)
    return fitted, (self.wanted(sample) - dropped) / of

  def decided(self, hot_share: float) -> None:
    """Forgets earlier examples, after a decision on a sample of its own."""
    # The highest share, so that a slow fall is seen.
    self._hot = max(self._hot, hot_share)
    self._since, self._recent = ChoiceSums(), []

  def is_due(self) -> bool:
    """Whether the policy is to be fitted again before the next batch."""
    return bool(self._refit and self._since.batches >= self._refit)

  def latest(self) -> ExampleFacts:
    """Returns the examples that the next fit is made to."""
    return joined(self._recent)

  def fit_again(self, fitted: Fit) -> Fit:
    """Fits the policy to the latest examples, and makes up for the deficit.

    Returns:
      The fit, or the last one, `fitted`, if none of the examples may be
      dropped, or none has a score that the policy needs.
    """
    sample, asked = self.latest(), self._since.asked
    if asked:  # else none of them was of those that are asked for
      self._owed = min(max(self._owed, -OWED * asked), OWED * asked)
    if self.can_fit(sample) and self._knows(sample):
      drop = self.drop
      if asked:
        # Makes up for the deficit in as many batches again, but stays within
        # half of the distance from the target to 0, or to 1.
        drop = drop * (1 + self._owed / asked)
        drop = float(min(max(drop, self.drop / 2), (1 + self.drop) / 2))
      fitted = fit(self._policy, sample, drop, self._of_all)
    # Cut by examples, not by batches: resuming has them in one piece.
    last = slice(max(0, len(sample.hot) - LEAST), None)
    self._since, self._recent = ChoiceSums(), [_copied(sample, last)]
    return fitted

  def count(self, facts: ExampleFacts, dropped: int) -> dict[str, Any] | None:
    """Adds a batch, of which `dropped` examples were dropped.

    Returns:
      A report for the metrics once a stretch is over, if it missed its target
      or fewer examples are hot. Shares are of all or of the hot examples, as
      the target is:

      * asked, dropped, missed: share to drop, share dropped, and the difference
      * hot_share, hot_share_before: hot examples among all, now and then
    """
    wanted, hot = self.wanted(facts), int(np.count_nonzero(facts.hot))
    batch = ChoiceSums(1, len(facts.hot), hot, wanted, dropped)
    self._since = _sum(self._since, batch)
    self._unreported = _sum(self._unreported, batch)
    self._owed = self._owed + wanted - dropped
    if self._refit:
      # The first ones of every batch: as good as any, and from all of them.
      first = slice(0, -(-SAMPLED // self._refit))
      self._recent.append(_copied(facts, first))
    return self._check()

  def _check(self) -> dict[str, Any] | None:
    stretch = self._unreported
    if stretch.batches < STRETCH or not stretch.examples:
      return None
    self._unreported, before = ChoiceSums(), self._hot
    of = max(stretch.examples if self._of_all else stretch.hot, 1)
    dropped, hot = stretch.dropped / of, stretch.hot / stretch.examples
    missed = stretch.asked / of - dropped
    if abs(missed) <= MISSED and hot >= FALLEN * before:
      self._hot = max(hot, before)
      return None
    self._hot = hot
    return {
      'asked': self.drop,
      'dropped': dropped,
      'missed': missed,
      'hot_share': hot,
      'hot_share_before': before,
    }

  def get_state(self) -> dict[str, Any]:
    """Returns numbers and arrays for a position. The target is not in it."""
    recent = self.latest()._asdict() if self._recent else None
    return {
      'since': self._since._asdict(),
      'owed': self._owed,
      'recent': recent and {k: v for k, v in recent.items() if v is not None},
      'untold': self._unreported._asdict(),
      'hot': self._hot,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state from `get_state`."""
    recent = state['recent']
    self._since, self._owed = ChoiceSums(**state['since']), state['owed']
    self._recent = [] if recent is None else [ExampleFacts(**recent)]
    self._unreported, self._hot = ChoiceSums(**state['untold']), state['hot']


def _sum(one: ChoiceSums, other: ChoiceSums) -> ChoiceSums:
  sums: list[Any] = [a + b for a, b in zip(one, other, strict=True)]
  return ChoiceSums(*sums)


def _copied(facts: ExampleFacts, which: slice) -> ExampleFacts:
  """Copies some of the examples, so that the others are freed."""
  fields: list[Any] = [
    x[which].copy() if isinstance(x, np.ndarray) else x for x in facts
  ]
  return ExampleFacts(*fields)
