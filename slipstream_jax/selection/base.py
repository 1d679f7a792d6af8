"""Which examples a training run keeps, with what probability and weight.

A policy ranks hot examples by a priority. Each is kept with probability

  clip(scale * priority, floor, 1)

for one scale, fitted to a sample so that the drop target is met in
expectation, and weighs 1 / probability in the loss if the policy is
unbiased. Priority inf is always kept, and so is every cold example: its rows
are the ones that learn. A scale is fitted once per phase (`fit`, the only
look at more than one example), then applied to each batch (`select`), example
by example: how a stream is cut into batches changes no bit.
"""

import bisect
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Bool, Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.selection.threshold import check_drop_target


class ExampleFacts(NamedTuple):
  """What policies know of n examples."""

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


class Selection(NamedTuple):
  """What becomes of n examples."""

  keep: Bool[np.ndarray, ' n']
  """The example is trained."""
  probability: Float[np.ndarray, ' n']
  """Chance of that, f32 in [0, 1]; its mean is the expected share kept."""
  weight: Float[np.ndarray, ' n']
  """Weight in the loss, f32; 0 where dropped."""


PriorityFn = Callable[[ExampleFacts], Float[np.ndarray, ' n']]
"""Facts to f64[n]: 0 is kept with the floor's probability, inf always.
What it says of cold examples is not used."""


class Policy(NamedTuple):
  """One way to choose examples."""

  name: str
  priority: PriorityFn
  unbiased: bool
  """Kept examples weigh 1 / probability: the expected gradient is that of all
  examples. If not, they weigh 1, and training sees another distribution."""
  floor: float
  """Least probability; it bounds weights and drop rate. Above 0 if unbiased."""
  stale_target: Callable[[float], float]
  """Drop target to the share of hot examples that should be stale, which is
  what `exact_threshold` wants; 0 where staleness is not used."""
  scored: bool = False
  """It needs scores, which cost a forward pass, or a smaller model."""
  thins_cold: bool = False
  """It may leave out cold examples too, which the others keep."""

  def thinned(self, facts: ExampleFacts) -> Bool[np.ndarray, ' n']:
    """The examples that it may leave out."""
    return facts.hot | self.thins_cold


def fit(policy: Policy, sample: ExampleFacts, drop_target: float) -> float:
  """The scale at which a policy drops as many examples as its target says.

  The target is a share of the hot examples, for every policy, so that equal
  targets leave the same work; one that thins cold examples, too, takes that
  many from all. Exact for the sample, in expectation over the uniforms: the
  expected share is a rising piecewise linear function of the scale, solved
  between two of its corners. A target that the policy cannot meet, because of
  its floor or of what it always keeps, is met as nearly as it can.

  Args:
    policy: of `POLICIES`.
    sample: facts of examples drawn at random, at least one of them hot.
    drop_target: examples to drop, as a share of the hot ones, in [0, 1].

  Returns:
    At least 0; inf, which keeps every example with weight 1, for target 0.

  Raises:
    UserError: the target is no share, no example is hot, or scores are missing.
  """
  check_drop_target(drop_target, 'fit, drop_target')
  if not sample.hot.any():
    raise UserError(
      'a policy needs a sample with hot examples',
      got=f'{len(sample.hot)} examples, none hot',
      where='fit, sample',
      hint='sample more examples, or raise the budget for hot rows',
    )
  if drop_target == 0:
    return np.inf
  priority = _priority(policy, sample)[policy.thinned(sample)]
  sometimes = priority[np.isfinite(priority)]
  dropped = drop_target * np.count_nonzero(sample.hot)
  wanted = len(sometimes) - dropped
  return _fill(sometimes, policy.floor, wanted)


def select(
  policy: Policy,
  facts: ExampleFacts,
  scale: float,
  uniforms: Float[np.ndarray, ' n'],
) -> Selection:
  """Chooses among n examples, each by its own facts and its own uniform.

  Args:
    policy: of `POLICIES`.
    facts: of the examples.
    scale: from `fit` of the same policy.
    uniforms: in [0, 1), independent of the facts.

  Raises:
    UserError: scores are missing.
  """
  priority = _priority(policy, facts)
  always = ~policy.thinned(facts) | np.isinf(priority) | np.isinf(scale)
  # Only of those not always kept: infinity times 0 would be NaN.
  with_scale = scale * priority[~always]
  probability = np.ones(len(always), np.float32)
  probability[~always] = np.clip(with_scale, policy.floor, 1)
  # Uniforms are below 1, so a chance of 1 always keeps; one of 0 never does.
  keep = uniforms < probability
  weight = np.zeros(len(always), np.float32)
  weight[keep] = 1 / probability[keep] if policy.unbiased else 1
  return Selection(keep, probability, weight)


def _fill(priority: np.ndarray, floor: float, wanted: float) -> float:
  """The scale at which clip(scale * priority, floor, 1) sums to `wanted`."""

  def total(scale: float) -> float:
    return float(np.clip(scale * priority, floor, 1).sum())

  # Between two corners no example meets floor or 1, so the sum is linear. It
  # never falls with the scale: few of the corners need be summed at.
  some = priority[priority > 0]
  corners = np.unique(np.concatenate([[0.0], floor / some, 1 / some]))
  after = bisect.bisect_left(corners, wanted, key=total)
  if after in (0, len(corners)):  # no scale keeps as few, or as many
    return float(corners[min(after, len(corners) - 1)])
  low, high = corners[after - 1], corners[after]
  missing = (wanted - total(low)) / (total(high) - total(low))
  return float(low + missing * (high - low))


def _priority(policy: Policy, facts: ExampleFacts) -> np.ndarray:
  if policy.scored and facts.scores is None:
    raise UserError(
      f'policy {policy.name} needs scores',
      got=facts.scores,
      where='ExampleFacts.scores',
      hint='predict the examples first, or take a policy that needs none',
    )
  return policy.priority(facts)
