"""Holds a drop target while examples, scores and hot rows change.

A scale that is fitted once misses its target by more and more: a scorer that
learns is surprised less often, and where popularity drifts fewer examples are
hot. So the policy is fitted again every few batches, to the latest examples,
and what was dropped too little or too much since is paid back by the examples
to come, within bounds. Where a policy cannot drop as many, because it thins hot
examples only or for its floor, it drops what it can; how much that misses is
counted, and told.

Everything is a function of the examples and of what was dropped of them, batch
by batch: no clock, and no more to keep than some thousand examples' facts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
import numpy as np

from slipstream_jax.selection.base import (
  ExampleFacts,
  Fit,
  fit,
  Policy,
  select,
)
from slipstream_jax.selection.staleness import Places


class Sampled(NamedTuple):
  """Facts about n examples for a decision."""

  places: Places
  """`hot.places` of their lookups."""
  hot: Bool[np.ndarray, ' n']
  """They look up nothing but rows that are hot by now."""
  labels: Float[np.ndarray, ' n']
  """f32."""
  scores: Float[np.ndarray, ' n'] | None
  """Click probabilities, f32, where the policy asks for them."""


def only_hot(places: Places, number: int) -> Bool[np.ndarray, ' n']:
  """Returns which examples look up only hot rows, of `number` hot rows."""
  # H, of cold rows, is the largest place, and -1, of padding, the smallest.
  axes = tuple(range(1, places.ndim))
  hot: np.ndarray = places.max(axis=axes, initial=-1) < number
  return hot


def together(parts: Sequence[Sampled]) -> Sampled:
  """Concatenates the examples of at least one part."""
  places, hot, labels, scores = zip(*parts, strict=True)
  return Sampled(
    np.concatenate(places),
    np.concatenate(hot),
    np.concatenate(labels),
    None if scores[0] is None else np.concatenate(scores),
  )


SAMPLED = 2048
"""Examples of one fit, taken from all batches since the last one: enough for
1 % of them, and few enough for less than 1 ms."""
LEAST = 512
"""Examples that a fit is made to, at least, older ones among them."""
OWED = 2.0
"""Times what a fit is to drop, that may be owed to it; more is given up."""
STRETCH = 100
"""Batches after which it is looked whether the target was missed."""
MISSED = 0.02
"""Share by which a stretch may miss its target before that is told."""
FALLEN = 0.8
"""Of the hot share when it was last told: below that it is told again."""


class Target(NamedTuple):
  """How many examples to drop."""

  drop: float
  """The target, in [0, 1]."""
  of_all: bool
  """It is a share of all examples; else of the hot ones."""
  refit: int
  """Batches from one fit to the next; 0: there is only that of a decision."""

  def of(self, facts: ExampleFacts) -> float:
    """Returns how many of these examples to drop."""
    some = len(facts.hot) if self.of_all else np.count_nonzero(facts.hot)
    return self.drop * float(some)


class Stretch(NamedTuple):
  """Sums over consecutive batches from which examples were chosen."""

  batches: int = 0
  examples: int = 0
  hot: int = 0
  asked: float = 0.0
  dropped: int = 0

  def and_of(
    self, facts: ExampleFacts, asked: float, dropped: int
  ) -> 'Stretch':
    """Returns the sums with one more batch."""
    return Stretch(
      self.batches + 1,
      self.examples + len(facts.hot),
      self.hot + int(np.count_nonzero(facts.hot)),
      self.asked + asked,
      self.dropped + dropped,
    )


class Progress(NamedTuple):
  """Progress towards a target so far."""

  since: Stretch = Stretch()
  """Since the last fit."""
  owed: float = 0.0
  """Examples that are to be dropped, and were not; below 0: too many were."""
  recent: tuple[ExampleFacts, ...] = ()
  """Some of the latest examples."""
  untold: Stretch = Stretch()
  """What was not looked at yet."""
  hot: float = 0.0
  """The hot share when it was last told, or the highest since."""


class Shortfall(NamedTuple):
  """A report on a stretch that missed its target."""

  asked: float
  """Share of the examples that were to be dropped: of all, or of the hot."""
  dropped: float
  """Share that was."""
  missed: float
  """By how much it fell short; below 0: too many were dropped."""
  hot_share: float
  """Hot examples among all."""
  hot_share_before: float
  """The same when it was last told, or the highest since."""


def decided(held: Progress, hot_share: float) -> Progress:
  """Forgets earlier examples, after a decision on a sample of its own."""
  # Of a share that falls a little from one decision to the next, the highest.
  hot = max(held.hot, hot_share)
  return held._replace(since=Stretch(), recent=(), hot=hot)


def due(asked: Target, held: Progress) -> bool:
  """Whether the policy must be fitted again before the next batch."""
  return bool(asked.refit and held.since.batches >= asked.refit)


def latest(held: Progress) -> ExampleFacts:
  """Returns facts of some of the latest examples. Needs at least one batch."""
  return _joined(held.recent)


def fits(policy: Policy, asked: Target, sample: ExampleFacts) -> bool:
  """Whether a fit to this sample is possible.

  Not if no example counts towards the target: the sample is empty, or none of
  its examples looks up hot rows only and the policy leaves out no others.
  """
  may = policy.thinned(sample) if asked.of_all else sample.hot
  return bool(may.any())


def refitted(
  policy: Policy, asked: Target, held: Progress, fitted: Fit
) -> tuple[Progress, Fit]:
  """Fits the policy to the latest examples, and makes up for the deficit.

  Args:
    policy: of `POLICIES`.
    asked: what is to be dropped.
    held: how that went; there has been a batch since the last fit.
    fitted: the last fit, which stays where none of the examples may be dropped.
  """
  # Cut by examples, not by batches: resuming has them in one piece.
  sample, since = _joined(held.recent), held.since
  owed = held.owed
  if since.asked:  # else none of them was of those that are asked for
    most = OWED * since.asked
    owed = min(max(owed, -most), most)
  if fits(policy, asked, sample):
    drop = _with_owed(asked.drop, owed, since.asked)
    fitted = fit(policy, sample, drop, asked.of_all)
  rest = _part(sample, slice(max(0, len(sample.hot) - LEAST), None))
  return held._replace(since=Stretch(), owed=owed, recent=(rest,)), fitted


def _with_owed(drop: float, owed: float, asked: float) -> float:
  """Returns the target that makes up for the deficit in as many batches again.

  It stays within half of the distance from the target to 0, or to 1.
  """
  if not asked:
    return drop
  wanted = drop * (1 + owed / asked)
  return float(min(max(wanted, drop / 2), (1 + drop) / 2))


def counted(
  asked: Target, held: Progress, facts: ExampleFacts, dropped: int
) -> Progress:
  """Adds a batch, of which `dropped` examples were dropped."""
  many = asked.of(facts)
  held = held._replace(
    since=held.since.and_of(facts, many, dropped),
    owed=held.owed + many - dropped,
    untold=held.untold.and_of(facts, many, dropped),
  )
  if not asked.refit:
    return held
  # The first ones of every batch: as good as any, and spread over them all.
  some = _part(facts, slice(0, -(-SAMPLED // asked.refit)))
  return held._replace(recent=(*held.recent, some))


def reported(
  asked: Target, held: Progress
) -> tuple[Progress, Shortfall | None]:
  """Returns a report once a stretch is over, if it missed its target."""
  stretch = held.untold
  if stretch.batches < STRETCH or not stretch.examples:
    return held, None
  held, before = held._replace(untold=Stretch()), held.hot
  of = stretch.examples if asked.of_all else stretch.hot
  dropped, hot = stretch.dropped / max(of, 1), stretch.hot / stretch.examples
  missed = stretch.asked / max(of, 1) - dropped
  if abs(missed) <= MISSED and hot >= FALLEN * before:
    # A share that rose is what a fall is measured from.
    return held._replace(hot=max(hot, before)), None
  facts = Shortfall(asked.drop, dropped, missed, hot, before)
  return held._replace(hot=hot), facts


def out_of_reach(
  policy: Policy, asked: Target, sample: ExampleFacts, fitted: Fit
) -> float:
  """Returns the share that a fit drops too little of its own sample.

  It exceeds rounding if the policy cannot drop as many.
  """
  never = np.zeros(len(sample.hot), np.float32)
  chances = select(policy, sample, fitted, never).probability
  dropped = len(chances) - float(chances.sum(dtype=np.float64))
  many = asked.of(sample)
  of = len(sample.hot) if asked.of_all else np.count_nonzero(sample.hot)
  return (many - dropped) / max(int(of), 1)


def _joined(parts: tuple[ExampleFacts, ...]) -> ExampleFacts:
  if len(parts) == 1:
    return parts[0]
  hot, stale, share, labels, scores, _ = zip(*parts, strict=True)
  return ExampleFacts(
    np.concatenate(hot),
    np.concatenate(stale),
    np.concatenate(share),
    np.concatenate(labels),
    None if scores[0] is None else np.concatenate(scores),
  )


def _part(facts: ExampleFacts, which: slice) -> ExampleFacts:
  """Copies some of the examples, so that the others are freed."""
  scores = facts.scores
  return ExampleFacts(
    facts.hot[which].copy(),
    facts.stale[which].copy(),
    facts.stale_share[which].copy(),
    facts.labels[which].copy(),
    None if scores is None else scores[which].copy(),
  )


def state_of(held: Progress) -> dict[str, Any]:
  """Returns numbers and arrays for a position."""
  recent = _joined(held.recent)._asdict() if held.recent else None
  return {
    'since': held.since._asdict(),
    'owed': held.owed,
    'recent': recent and {k: v for k, v in recent.items() if v is not None},
    'untold': held.untold._asdict(),
    'hot': held.hot,
  }


def progress_of(state: dict[str, Any]) -> Progress:
  """Restores progress from the result of `state_of`."""
  recent = state['recent']
  return Progress(
    Stretch(**state['since']),
    state['owed'],
    () if recent is None else (ExampleFacts(**recent),),
    Stretch(**state['untold']),
    state['hot'],
  )
