"""Chooses the examples that a run trains, and corrects training for it.

A policy has a measure m(x, y) >= 0 of the worth of an example, and a
correction. It keeps an example with probability

  pi = uniform * share + (1 - uniform) * clip(scale * m, floor, 1)

`fit` chooses `scale` on a sample to meet the drop target in expectation.
`share` is the mean of the clipped part over the examples that may be dropped,
so `uniform` does not change the share kept. An example with measure inf is
always kept. A cold example is kept because its rows still learn, unless the
policy thins cold examples. The corrections are:

  weight   an example weighs 1 / pi, so the expected gradient is that of all
           examples.
  offset   log(pi(x, 1) / pi(x, 0)) is added to the logit in training only, and
           all kept examples weigh the same. The model learns the log odds of
           all examples by maximizing the likelihood of the labels given that
           the examples were kept (Fithian and Hastie, Annals of Statistics
           2014, and Wang, Zhang and Wang, NeurIPS 2021). The variance is lower
           than with weights. It needs binary labels and the logistic loss of
           one logit.
  none     training sees a different distribution.

Only `fit` uses several examples at once. `select` treats each example alone, so
the split of a stream into batches changes no bit.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any, get_args, Literal, NamedTuple

from jaxtyping import Bool, Float
import numpy as np

from slipstream_jax.errors import choose, UserError
from slipstream_jax.selection.staleness import check_drop_target


def scale_for(
  measure: Float[np.ndarray, ' n'], floor: float, wanted: float
) -> float:
  """Finds the scale at which clip(scale * measure, floor, 1) sums to `wanted`.

  Returns the nearest scale if none reaches `wanted`, the expected number of
  examples to keep. The measure must be finite and at least 0.
  """
  clipped = np.empty(len(measure))

  def total(scale: float) -> float:
    np.multiply(measure, scale, out=clipped)
    np.maximum(clipped, floor, out=clipped)
    return float(np.minimum(clipped, 1, out=clipped).sum())

  # The sum is monotone, so a binary search finds the corners. Between two no
  # example reaches the floor or 1, so it is linear and the result is exact.
  some = measure[measure > 0]
  corners = np.sort(np.concatenate([[0.0], floor / some, 1 / some]))
  after = bisect.bisect_left(corners, wanted, key=total)
  if after in (0, len(corners)):  # `wanted` is out of reach
    return float(corners[min(after, len(corners) - 1)])
  low, high = corners[after - 1], corners[after]
  missing = (wanted - total(low)) / (total(high) - total(low))
  return float(low + missing * (high - low))


Correction = Literal['weight', 'offset', 'none']
"""How training corrects for dropped examples."""
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)


class ExampleFacts(NamedTuple):
  """Facts about n examples that policies read."""

  hot: Bool[np.ndarray, ' n']
  """This and the next two fields are those of `ExampleKinds`."""
  stale: Bool[np.ndarray, ' n']
  stale_share: Float[np.ndarray, ' n']
  labels: Float[np.ndarray, ' n']
  """1.0 for a click, else 0.0, f32."""
  scores: Float[np.ndarray, ' n'] | None = None
  """Predicted click probability, f32. NaN marks an unknown score, and None
  means that none is known. Any recent model will do: its errors raise the
  variance but cause no bias."""
  constant: float = 0.0
  """Result of `Policy.constant` for the sample of the fit."""


class Selection(NamedTuple):
  """Decisions about n examples."""

  keep: Bool[np.ndarray, ' n']
  """Whether the example is trained on."""
  probability: Float[np.ndarray, ' n']
  """Probability of `keep`, f32 in [0, 1]."""
  weight: Float[np.ndarray, ' n']
  """Weight in the loss, f32. 0 for a dropped example."""
  offset: Float[np.ndarray, ' n'] | None = None
  """Added to the logit in training, f32. None unless the correction is
  'offset'."""


class Fit(NamedTuple):
  """Numbers that `fit` derives from a sample and `select` applies."""

  scale: float
  """Factor of the measure, at least 0. inf keeps every example."""
  weight: float = 1.0
  """Weight of each kept example if the correction is 'offset': 1 / mean(pi) of
  the sample. It preserves the length of the optimizer steps."""
  share: float = 1.0
  """Mean clipped measure of the sampled examples that may be dropped."""
  constant: float = 0.0
  """Value for `ExampleFacts.constant`."""


def joined(parts: Sequence[Any]) -> Any:
  """Concatenates the arrays of NamedTuples, field by field.

  A field without axes in the first part, such as None, stays as it is there.
  """
  return type(parts[0])(
    *(
      np.concatenate(column) if np.ndim(column[0]) else column[0]
      for column in zip(*parts, strict=True)
    )
  )


MeasureFn = Callable[[ExampleFacts], Float[np.ndarray, ' n']]
"""Maps facts to f64[n]. 0 is kept with the floor's probability, inf always.
Values of examples that are always kept are ignored. With correction 'offset' it
is called once with all labels 1 and once with all labels 0."""


def _none_stale(drop_target: float) -> float:
  """Returns 0 for every target. It has a name, so that policies pickle."""
  return 0.0


class Policy(NamedTuple):
  """A way to choose examples."""

  name: str
  measure: MeasureFn
  correction: Correction
  floor: float
  """Least probability, which bounds weights, offsets and the drop rate. Above 0
  unless the correction is 'none'."""
  stale_target: Callable[[float], float] = _none_stale
  """Maps the drop target to the share of hot examples that should be stale,
  the target of `exact_threshold`. 0 if staleness is not used."""
  scored: bool = False
  """Whether the measure needs scores."""
  thins_cold: bool = False
  """Whether cold examples may be dropped too."""
  uniform: float = 0.0
  """Part of the probability that is equal for all examples that may be
  dropped, in [0, 1]. It limits the cost of a wrong measure."""
  constant: Callable[[ExampleFacts], float] | None = None
  """Computes a number from the sample of the fit for the measure. None if the
  measure needs none."""
  of_clicks: bool = False
  """Whether labels must be in [0, 1] although no scores are needed."""

  @property
  def needs_clicks(self) -> bool:
    """Whether labels must be in [0, 1]."""
    return self.scored or self.of_clicks

  def thinned(self, facts: ExampleFacts) -> Bool[np.ndarray, ' n']:
    """Returns which examples the policy may drop."""
    return facts.hot | self.thins_cold


def fit(
  policy: Policy,
  sample: ExampleFacts,
  drop_target: float,
  of_all: bool = False,
) -> Fit:
  """Fits the scale at which a policy meets its drop target.

  The target is a number of examples, so equal targets leave equal work for all
  policies. A policy that thins cold examples drops that number from all
  examples. The fit is exact for the sample, in expectation over the uniforms,
  or as close as the floor and the examples always kept allow.

  Args:
    policy: the policy to fit.
    sample: facts of examples drawn at random, at least one of them hot.
    drop_target: share of the hot examples to drop, in [0, 1].
    of_all: whether `drop_target` is a share of all examples instead.

  Returns:
    The fit. For target 0 it keeps every example with weight 1.

  Raises:
    UserError: the target is not in [0, 1], no example is hot although the
      target needs one, or scores are missing.
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
  """Selects among n examples, each by its own facts and uniform.

  Args:
    policy: as given to `fit`.
    facts: of the examples.
    fitted: result of `fit`.
    uniforms: random numbers in [0, 1), independent of the facts.

  Raises:
    UserError: scores are missing, or the correction is 'offset' and a label is
      not 0 or 1.
  """
  facts = facts._replace(constant=fitted.constant)
  offset = None
  if policy.correction == 'offset':
    check_clicks(facts.labels, 'ExampleFacts.labels')
    # The probabilities for both labels serve the draw and the correction.
    labels = (np.full_like(facts.labels, label) for label in (1, 0))
    click, none = (
      _probability(policy, facts._replace(labels=label), fitted)
      for label in labels
    )
    probability = np.where(facts.labels > 0, click, none).astype(np.float32)
    offset = np.log(click / none).astype(np.float32)
  else:
    probability = _probability(policy, facts, fitted).astype(np.float32)
  # Uniforms are below 1, so probability 1 always keeps and 0 never does.
  keep = uniforms < probability
  weight = keep.astype(np.float32)
  if policy.correction == 'weight':
    np.divide(1, probability, out=weight, where=keep)
  elif offset is not None:
    weight *= np.float32(fitted.weight)
  return Selection(keep, probability, weight, offset)


def check_clicks(labels: np.ndarray, where: str) -> None:
  """Checks that all labels are 0 or 1, as an offset needs.

  Raises:
    UserError: a label is another number.
  """
  other = (labels != 0) & (labels != 1)
  if other.any():
    raise UserError(
      'an offset corrects labels that are 0 or 1',
      got=float(labels[other][0]),
      where=where,
      hint="take a policy whose correction is 'weight', such as surprise",
    )


def check_chances(labels: np.ndarray, where: str) -> None:
  """Checks that all labels are in [0, 1], as a policy of clicks needs.

  Raises:
    UserError: a label is another number.
  """
  if len(labels) and (labels.min() < 0 or labels.max() > 1):
    other = (labels < 0) | (labels > 1)
    raise UserError(
      'this policy of skipping takes labels of clicks, which are in [0, 1]',
      got=float(labels[other][0]),
      where=where,
      hint="take one that reads no label, such as policy='random_weighted'",
    )


def check_policy(policy: Policy, where: str) -> None:
  """Checks the correction, the floor and the uniform part of a policy.

  Raises:
    UserError: one of them is not allowed.
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
  """Returns the probability of keeping each example, f64[n]."""
  measure = _measure(policy, facts)
  if policy.thins_cold and not policy.uniform and 0 < fitted.scale < np.inf:
    # The usual case, in fewer passes. An example of measure inf gets 1.
    own = fitted.scale * measure
    return np.minimum(np.maximum(own, policy.floor, out=own), 1, out=own)
  always = np.isinf(measure) | np.isinf(fitted.scale)
  always |= ~policy.thinned(facts)
  with np.errstate(invalid='ignore'):  # infinity times 0, of those always kept
    own = np.clip(fitted.scale * measure, policy.floor, 1)
  alike = policy.uniform * fitted.share
  return np.where(always, 1, alike + (1 - policy.uniform) * own)


def _measure(policy: Policy, facts: ExampleFacts) -> np.ndarray:
  if policy.scored and facts.scores is None:
    raise UserError(
      f'policy {policy.name} needs scores',
      got=facts.scores,
      where='ExampleFacts.scores',
      hint='predict the examples first, or take a policy that needs none',
    )
  return policy.measure(facts)
