"""Defines the policies that select examples.

Each has a measure and a correction, which `fit` and `select` of `base` use. An
example with gradient g, kept with probability p and weighted by 1/p, adds
|g|^2 (1/p - 1) to the variance of the gradient. For a given expected number of
kept examples the sum is least if p is proportional to |g|, clipped at 1. A good
measure is therefore a cheap estimate of

  |g| = |click probability - label| * |gradient of the logit|
"""

import numpy as np

from slipstream_jax.errors import choose
from slipstream_jax.selection.base import check_policy, ExampleFacts, Policy

FLOOR = 0.05
"""Least probability of most corrected policies. No weight exceeds 20."""
_LEAST = 1e-6  # a floor that only keeps logarithms finite
DENSE_SHARE = 0.3
"""Share of the dense parameters in the gradient's squared norm. A cautious
guess."""


def _all_alike(facts: ExampleFacts) -> np.ndarray:
  return np.ones(len(facts.hot))


def _if_stale(measure: float | np.ndarray, facts: ExampleFacts) -> np.ndarray:
  """Returns the measure for stale examples and inf for the others."""
  return np.where(facts.stale, measure, np.inf)


def _if_negative(measure: np.ndarray, facts: ExampleFacts) -> np.ndarray:
  """Returns the measure for negatives and inf for clicks."""
  return np.where(facts.labels > 0.5, np.inf, measure)


def _error(facts: ExampleFacts) -> np.ndarray:
  """Returns |click probability - label|, inf for unknown scores."""
  error = np.asarray(facts.scores, np.float64) - facts.labels
  np.abs(error, out=error)
  error[np.isnan(error)] = np.inf
  return error


def _root_of_error(facts: ExampleFacts) -> np.ndarray:
  return np.sqrt(_error(facts))


def _log_loss(facts: ExampleFacts) -> np.ndarray:
  """Returns the log loss of each score, NaN for unknown scores."""
  scores = np.asarray(facts.scores, np.float64)
  chance = np.where(facts.labels > 0.5, scores, 1 - scores)
  return -np.log(np.maximum(chance, _LEAST))


def _mean_loss(sample: ExampleFacts) -> float:
  """Returns the mean log loss of the known scores, or 0 if there is none."""
  loss = _log_loss(sample)
  loss = loss[~np.isnan(loss)]
  return float(loss.mean()) if len(loss) else 0.0


def _if_below_mean(facts: ExampleFacts) -> np.ndarray:
  """Returns 1 for examples below the mean loss and inf for the others."""
  return np.where(_log_loss(facts) < facts.constant, 1.0, np.inf)


def _fresh(facts: ExampleFacts) -> np.ndarray:
  """Estimates the norm of the logit's remaining gradient, at most 1.

  The squared norm is a sum over rows. Stale rows add nothing because they are
  not updated or no longer move. Dense parameters always add `DENSE_SHARE` of
  the whole.
  """
  fresh_share = 1 - np.asarray(facts.stale_share, np.float64)
  return np.sqrt(DENSE_SHARE + (1 - DENSE_SHARE) * fresh_share)


def _same(drop_target: float) -> float:
  return drop_target


def _twice(drop_target: float) -> float:
  """Returns twice the target, because half of the stale examples are kept."""
  return min(1.0, 2 * drop_target)


RANDOM = Policy('random', _all_alike, 'none', 0.0)
"""Drops hot examples at random without correction, so cold examples gain
weight. A control of equal cost."""

RANDOM_WEIGHTED = Policy('random_weighted', _all_alike, 'weight', FLOOR)
"""Thins hot examples at random and corrects by weights."""

STALE = Policy('stale', lambda facts: _if_stale(0.0, facts), 'none', 0.0, _same)
"""Drops all stale examples, as published (arXiv 2404.04270). The threshold
alone meets the target. The fit only distinguishes target 0 from the rest."""

STALE_REVISIT = Policy(
  'stale_revisit', lambda facts: _if_stale(1.0, facts), 'weight', FLOOR, _twice
)
"""Thins stale examples and corrects by weights. Our own."""

STALE_NEGATIVES = Policy(
  'stale_negatives',
  lambda facts: _if_negative(_if_stale(1.0, facts), facts),
  'weight',
  FLOOR,
  _twice,
  of_clicks=True,
)
"""Thins stale examples without a click and corrects by weights. This is
negative downsampling (He et al., 2014) of stale examples only. Our own."""

IMPORTANCE = Policy(
  'importance',
  lambda facts: _if_negative(_error(facts), facts),
  'weight',
  FLOOR,
  scored=True,
)
"""Has the least variance if all logit gradients have equal norms (Katharopoulos
and Fleuret, arXiv 1803.00942), except that clicks are always kept."""

STALE_IMPORTANCE = Policy(
  'stale_importance',
  lambda facts: _error(facts) * _fresh(facts),
  'weight',
  FLOOR,
  _same,
  scored=True,
)
"""Has the least variance if stale rows have no gradient. It thins expected
clicks too. Our own. Its gain over `importance` on synthetic clicks came from
thinning clicks, not from staleness."""

SURPRISE = Policy(
  'surprise', _error, 'weight', FLOOR, scored=True, thins_cold=True
)
"""Has the least variance over all examples if all logit gradients have equal
norms. It thins expected clicks and cold examples too. Our own, and the best on
synthetic clicks."""

SURPRISE_OFFSET = SURPRISE._replace(name='surprise_offset', correction='offset')
"""Corrects `surprise` in the logit, with less variance than its weights have.
It is local case-control sampling with a floor, which bounds the cost of wrong
scores. Without weights, an easy example that is kept counts no more than any
other."""

SURPRISE_ROOT = SURPRISE_OFFSET._replace(
  name='surprise_root', measure=_root_of_error
)
"""`surprise_offset` by the root of the error. Its chances differ less between
examples, so that wrong scores cost less, and right ones gain less."""

LOCAL_CASE_CONTROL = SURPRISE_OFFSET._replace(
  name='local_case_control', floor=_LEAST
)
"""Local case-control sampling (Fithian and Hastie, Annals of Statistics 2014):
an example is kept with probability c |y - p|. c follows from the drop target,
where the paper uses c = 1. Unlike `surprise_offset` it has no floor. While no
c |y - p| exceeds 1, the offset is -logit(p), and the model learns the residual
of the scores."""

NEGATIVES = Policy(
  'negatives',
  lambda facts: _if_negative(_all_alike(facts), facts),
  'offset',
  FLOOR,
  thins_cold=True,
)
"""Keeps all clicks and a share of the negatives, as is common in industry (He
et al., 2014). The log odds are corrected during training, not afterwards. It
needs no scores."""

INFOBATCH_ONCE = Policy(
  'infobatch_once',
  _if_below_mean,
  'weight',
  FLOOR,
  scored=True,
  thins_cold=True,
  constant=_mean_loss,
)
"""InfoBatch (Qin et al., ICLR 2024) in one pass: examples whose loss is below
the mean are dropped with probability r, and those kept weigh 1 / (1 - r). The
losses come from the scores, their mean from the sample, and r from the drop
target. The paper uses r = 0.5 and drops nothing in the last 12.5 %.
"""

POLICIES: dict[str, Policy] = {
  policy.name: policy
  for policy in (
    RANDOM,
    RANDOM_WEIGHTED,
    STALE,
    STALE_REVISIT,
    STALE_NEGATIVES,
    IMPORTANCE,
    STALE_IMPORTANCE,
    SURPRISE,
    SURPRISE_OFFSET,
    SURPRISE_ROOT,
    LOCAL_CASE_CONTROL,
    NEGATIVES,
    INFOBATCH_ONCE,
  )
}
"""All policies by name. tests/laws checks each of them."""

BLIND = tuple(
  name for name, one in POLICIES.items() if not one.stale_target(1.0)
)
"""Names of the policies that do not use staleness."""


def policy_named(policy: Policy | str) -> Policy:
  """Returns a policy, given as itself or as a name in `POLICIES`.

  Raises:
    UserError: it is neither, or `check_policy` refuses it.
  """
  if isinstance(policy, Policy):
    check_policy(policy, 'Policy')
    return policy
  return choose(POLICIES, policy, 'Skip.policy', 'or a Policy')
