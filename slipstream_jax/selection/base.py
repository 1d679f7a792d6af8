"""Chooses the examples that a run trains, and corrects training for it.

A policy is a measure m(x, y) >= 0 of what an example is worth, and a
correction. An example is kept with probability

  pi = uniform * share + (1 - uniform) * clip(scale * m, floor, 1)

where `scale` is fitted to a sample so that the drop target is met in
expectation, and `share` is the mean of the clipped part over the examples that
may be left out: so the same share is kept whatever part of it is `uniform`.
Measure inf is always kept, and so is every cold example, unless the policy
thins them, too: its rows are the ones that learn. How it is corrected:

  weight   an example weighs 1 / pi: the expected gradient is that of all.
  offset   log(pi(x, 1) / pi(x, 0)) is added to its logit, in training only,
           and all that are kept weigh the same. The model then learns the log
           odds of all examples from those kept, by the likelihood of their
           labels given that they were kept (Fithian and Hastie, Annals of
           Statistics 2014; Wang, Zhang and Wang, NeurIPS 2021), with less
           variance than weights have. It holds for clicks, and for the
           logistic loss of one logit.
  none     training sees another distribution.

A fit is the only look at more than one example; it is applied to each batch
(`select`) example by example: how a stream is cut into batches changes no bit.
"""

import bisect
from collections.abc import Callable
from typing import get_args, Literal, NamedTuple

from jaxtyping import Bool, Float
import numpy as np

from slipstream_jax.errors import choose, UserError
from slipstream_jax.selection.staleness import check_drop_target


def scale_for(
  measure: Float[np.ndarray, ' n'], floor: float, wanted: float
) -> float:
  """Finds the scale at which clip(scale * measure, floor, 1) sums to `wanted`.

  Exact, without a search over scales: the sum is piecewise linear, and rises.

  Args:
    measure: of n examples, finite and at least 0.
    floor: least summand, in [0, 1].
    wanted: examples to keep, in expectation.

  Returns:
    At least 0. If no scale keeps as few, or as many, the nearest one.
  """

  def total(scale: float) -> float:
    return float(np.clip(scale * measure, floor, 1).sum())

  # Between two corners no example meets floor or 1, so the sum is linear. It
  # never falls with the scale, so few corners must be evaluated.
  some = measure[measure > 0]
  corners = np.unique(np.concatenate([[0.0], floor / some, 1 / some]))
  after = bisect.bisect_left(corners, wanted, key=total)
  if after in (0, len(corners)):  # no scale keeps as few, or as many
    return float(corners[min(after, len(corners) - 1)])
  low, high = corners[after - 1], corners[after]
  missing = (wanted - total(low)) / (total(high) - total(low))
  return float(low + missing * (high - low))


Correction = Literal['weight', 'offset', 'none']
"""How training makes up for what is left out."""
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)


class ExampleFacts(NamedTuple):
  """Facts about n examples, on which policies decide."""

  hot: Bool[np.ndarray, ' n']
  """From `classify`, as the next two."""
  stale: Bool[np.ndarray, ' n']
  """Only hot examples are stale."""
  stale_share: Float[np.ndarray, ' n']
  """Share of the lookups that are of stale rows, f32."""
  labels: Float[np.ndarray, ' n']
  """1.0 for a click, else 0.0; f32."""
  scores: Float[np.ndarray, ' n'] | None = None
  """Predicted click probability, f32; NaN, or None for all, if not known. A
  recent guess by any model will do: it moves variance, never the mean."""
  constant: float = 0.0
  """What the policy's `constant` made of the sample that it was fitted to."""


class Selection(NamedTuple):
  """The decision about n examples."""

  keep: Bool[np.ndarray, ' n']
  """The example is trained."""
  probability: Float[np.ndarray, ' n']
  """Chance of that, f32 in [0, 1]; its mean is the expected share kept."""
  weight: Float[np.ndarray, ' n']
  """Weight in the loss, f32; 0 where dropped."""
  offset: Float[np.ndarray, ' n'] | None = None
  """Added to the logit in training, f32; None where weights correct, or
  nothing does."""


class Fit(NamedTuple):
  """Numbers that a policy derives from a sample, for the examples after it."""

  scale: float
  """Of the measure, at least 0; inf keeps every example."""
  weight: float = 1.0
  """Of correction 'offset', that of every example kept: 1 / mean(pi) of the
  sample. It keeps the length of the optimizers' steps."""
  share: float = 1.0
  """Mean chance of the sample's examples that may be left out."""
  constant: float = 0.0
  """As of `ExampleFacts`."""


MeasureFn = Callable[[ExampleFacts], Float[np.ndarray, ' n']]
"""Facts to f64[n]: 0 is kept with the floor's probability, inf always.
What it says of examples that are always kept is not used. Of correction
'offset' it is asked about each example with both labels."""


class Policy(NamedTuple):
  """A way to choose examples."""

  name: str
  measure: MeasureFn
  correction: Correction
  """How training makes up for what is left out."""
  floor: float
  """Least probability; it bounds weights, offsets and the drop rate. Above 0
  where there is a correction."""
  stale_target: Callable[[float], float]
  """Drop target to the share of hot examples that should be stale, which is
  what `exact_threshold` wants; 0 where staleness is not used."""
  scored: bool = False
  """It needs scores, which cost a forward pass, or a smaller model."""
  thins_cold: bool = False
  """It may leave out cold examples too, which the others keep."""
  uniform: float = 0.0
  """Part of the probability that is alike for all that may be left out, in
  [0, 1]: what a measure is wrong about then costs less."""
  constant: Callable[[ExampleFacts], float] | None = None
  """Of the sample it is fitted to, a number that the measure reads; None: it
  needs none."""

  def thinned(self, facts: ExampleFacts) -> Bool[np.ndarray, ' n']:
    """Returns the examples that the policy may leave out."""
    return facts.hot | self.thins_cold


def fit(
  policy: Policy,
  sample: ExampleFacts,
  drop_target: float,
  of_all: bool = False,
) -> Fit:
  """Fits the scale at which a policy drops as many examples as it should.

  The target is a number of examples for every policy, so that equal targets
  leave the same work. A policy that thins cold examples, too, takes that many
  from all examples. The fit is exact for the sample, in expectation over the
  uniforms. A target that the policy cannot meet, because of its floor or of
  what it always keeps, is met as nearly as possible.

  Args:
    policy: of `POLICIES`.
    sample: facts of examples drawn at random, at least one of them hot.
    drop_target: examples to drop, as a share of the hot ones, in [0, 1].
    of_all: whether it is a share of all examples instead.

  Returns:
    A fit; of target 0 one that keeps every example with weight 1.

  Raises:
    UserError: the target is no share, no example is hot where that matters, or
      scores are missing.
  """
  check_drop_target(drop_target, 'fit, drop_target')
  some = len(sample.hot) and of_all and policy.thins_cold
  if not (some or sample.hot.any()):
    raise UserError(
      'a policy needs a sample with hot examples',
      got=f'{len(sample.hot)} examples, none hot',
      where='fit, sample',
      hint='sample more examples, or raise the budget for hot rows',
    )
  if drop_target == 0:
    return Fit(np.inf)
  constant = 0.0 if policy.constant is None else policy.constant(sample)
  measure = _measure(policy, sample._replace(constant=constant))
  measure = measure[policy.thinned(sample)]
  sometimes = measure[np.isfinite(measure)]
  examples = len(sample.hot)
  of = examples if of_all else np.count_nonzero(sample.hot)
  wanted = len(sometimes) - drop_target * of
  scale = scale_for(sometimes, policy.floor, wanted)
  if not len(sometimes):
    return Fit(scale, constant=constant)
  share = float(np.clip(scale * sometimes, policy.floor, 1).mean())
  fitted = Fit(scale, share=share, constant=constant)
  if policy.correction != 'offset':
    return fitted
  kept = examples - (1 - share) * len(sometimes)
  return fitted._replace(weight=examples / kept)


def select(
  policy: Policy,
  facts: ExampleFacts,
  fitted: Fit,
  uniforms: Float[np.ndarray, ' n'],
) -> Selection:
  """Chooses among n examples, each by its own facts and its own uniform.

  Args:
    policy: of `POLICIES`.
    facts: of the examples.
    fitted: from `fit` of the same policy.
    uniforms: in [0, 1), independent of the facts.

  Raises:
    UserError: scores are missing, or a label that an offset cannot correct.
  """
  facts = facts._replace(constant=fitted.constant)
  if policy.correction == 'offset':
    return _select_by_offset(policy, facts, fitted, uniforms)
  probability = _probability(policy, facts, fitted).astype(np.float32)
  # Uniforms are below 1, so a chance of 1 always keeps; one of 0 never does.
  keep = uniforms < probability
  weight = np.zeros(len(keep), np.float32)
  weight[keep] = 1 / probability[keep] if policy.correction == 'weight' else 1
  return Selection(keep, probability, weight)


def _select_by_offset(
  policy: Policy, facts: ExampleFacts, fitted: Fit, uniforms: np.ndarray
) -> Selection:
  labels = facts.labels
  check_clicks(labels, 'ExampleFacts.labels')
  # As both labels would be kept: drawn and corrected by the same numbers.
  click, none = (
    _probability(policy, facts._replace(labels=np.full_like(labels, y)), fitted)
    for y in (1, 0)
  )
  probability = np.where(labels > 0, click, none).astype(np.float32)
  keep = uniforms < probability
  weight = np.where(keep, np.float32(fitted.weight), np.float32(0))
  offset = np.log(click / none).astype(np.float32)
  return Selection(keep, probability, weight, offset)


def check_clicks(labels: np.ndarray, where: str) -> None:
  """Checks that an offset can correct the labels.

  Raises:
    UserError: one is neither 0 nor 1.
  """
  other = (labels != 0) & (labels != 1)
  if other.any():
    raise UserError(
      'an offset corrects labels that are 0 or 1',
      got=float(labels[other][0]),
      where=where,
      hint="take a policy whose correction is 'weight', such as surprise",
    )


def check_policy(policy: Policy, where: str) -> None:
  """Checks the correction, the floor and the uniform part of a policy.

  Raises:
    UserError: another correction, or a floor or uniform part that cannot be.
  """
  choose(dict.fromkeys(CORRECTIONS), policy.correction, f'{where}, correction')
  corrected = policy.correction != 'none'
  # NaN compares as False.
  if not 0 <= policy.floor <= 1 or (corrected and not policy.floor):
    least = 'above 0, and at most 1' if corrected else 'in [0, 1]'
    raise UserError(
      f'the floor of a policy of correction {policy.correction!r} must be'
      f' {least}',
      got=policy.floor,
      where=f'{where}, floor',
      hint='use 0.05: an example that is never kept cannot be made up for',
    )
  if not 0 <= policy.uniform <= 1:
    raise UserError(
      'the uniform part of a probability must be in [0, 1]',
      got=policy.uniform,
      where=f'{where}, uniform',
      hint='use 0.25, or 0 for none',
    )


def _probability(
  policy: Policy, facts: ExampleFacts, fitted: Fit
) -> Float[np.ndarray, ' n']:
  """Returns the chance f64[n] that each example is kept."""
  measure = _measure(policy, facts)
  always = ~policy.thinned(facts) | np.isinf(measure) | np.isinf(fitted.scale)
  # Only of those not always kept: infinity times 0 would be NaN.
  own = np.clip(fitted.scale * measure[~always], policy.floor, 1)
  probability = np.ones(len(always))
  alike = policy.uniform * fitted.share
  probability[~always] = alike + (1 - policy.uniform) * own
  return probability


def _measure(policy: Policy, facts: ExampleFacts) -> np.ndarray:
  if policy.scored and facts.scores is None:
    raise UserError(
      f'policy {policy.name} needs scores',
      got=facts.scores,
      where='ExampleFacts.scores',
      hint='predict the examples first, or take a policy that needs none',
    )
  return policy.measure(facts)
