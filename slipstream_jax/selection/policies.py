"""Policies choose the examples that are worth training.

Each is a measure and a correction, read by `fit` and `select` of `base`. Kept
with chance p and weighed 1/p, an example of gradient g adds |g|^2 (1/p - 1) to
the variance of the gradient. For a given expected number of kept examples, the
sum is least where p is proportional to |g|, clipped at 1; so a good measure is
a cheap estimate of

  |g| = |click probability - label| * |gradient of the logit|
"""

import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.selection.base import check_policy, ExampleFacts, Policy

FLOOR = 0.05
"""Least probability of the corrected policies: no weight exceeds 20."""
_LEAST = 1e-6  # no floor, but logarithms stay finite
DENSE_SHARE = 0.3
"""Of the gradient's square, that of the dense parameters; a guess that errs on
the safe side."""


def _all_alike(facts: ExampleFacts) -> np.ndarray:
  return np.ones(len(facts.hot))


def _if_stale(measure: float | np.ndarray, facts: ExampleFacts) -> np.ndarray:
  """Returns the measure of stale examples, inf for the others."""
  return np.where(facts.stale, measure, np.inf)


def _if_negative(measure: np.ndarray, facts: ExampleFacts) -> np.ndarray:
  """Returns the measure of negatives, inf for clicks."""
  return np.where(facts.labels > 0.5, np.inf, measure)


def _error(facts: ExampleFacts) -> np.ndarray:
  """Returns |click probability - label|, inf for examples not scored."""
  error = abs(np.asarray(facts.scores, np.float64) - facts.labels)
  return np.where(np.isnan(error), np.inf, error)


def _log_loss(facts: ExampleFacts) -> np.ndarray:
  """Returns -log(chance of the label), NaN for examples not scored."""
  scores = np.asarray(facts.scores, np.float64)
  chance = np.where(facts.labels > 0.5, scores, 1 - scores)
  return -np.log(np.maximum(chance, _LEAST))


def _mean_loss(sample: ExampleFacts) -> float:
  """Returns the mean loss of the scored examples, or 0."""
  loss = _log_loss(sample)
  loss = loss[~np.isnan(loss)]
  return float(loss.mean()) if len(loss) else 0.0


def _if_below_mean(facts: ExampleFacts) -> np.ndarray:
  """Returns 1 below the mean loss, inf for the others."""
  return np.where(_log_loss(facts) < facts.constant, 1.0, np.inf)


def _fresh(facts: ExampleFacts) -> np.ndarray:
  """Estimates the norm of the logit's remaining gradient, at most 1.

  The square of the norm is a sum over rows. Those that are stale add nothing,
  as they are not updated or no longer move; dense parameters, taken for
  `DENSE_SHARE` of the whole, always add theirs.
  """
  fresh_share = 1 - np.asarray(facts.stale_share, np.float64)
  return np.sqrt(DENSE_SHARE + (1 - DENSE_SHARE) * fresh_share)


def _none(drop_target: float) -> float:
  return 0.0


def _same(drop_target: float) -> float:
  return drop_target


def _twice(drop_target: float) -> float:
  """Returns twice the target, as half of the stale are kept at weight 2."""
  return min(1.0, 2 * drop_target)


RANDOM = Policy('random', _all_alike, 'none', 0.0, _none)
"""Control of the same cost: hot examples are dropped blindly, at weight 1, so
that cold ones gain weight against them."""

RANDOM_WEIGHTED = Policy('random_weighted', _all_alike, 'weight', FLOOR, _none)
"""Hot examples thinned blindly, and weighed up."""

STALE = Policy('stale', lambda facts: _if_stale(0.0, facts), 'none', 0.0, _same)
"""As published (arXiv 2404.04270): stale examples are dropped whole. The target
is met by the threshold alone; here it only tells 0 from the rest."""

STALE_REVISIT = Policy(
  'stale_revisit', lambda facts: _if_stale(1.0, facts), 'weight', FLOOR, _twice
)
"""Stale examples thinned, and weighed up: none is lost for ever. Ours."""

STALE_NEGATIVES = Policy(
  'stale_negatives',
  lambda facts: _if_negative(_if_stale(1.0, facts), facts),
  'weight',
  FLOOR,
  _twice,
)
"""Stale examples without a click thinned, and weighed up; as negative
downsampling (He et al., 2014) but of stale examples. Ours."""

IMPORTANCE = Policy(
  'importance',
  lambda facts: _if_negative(_error(facts), facts),
  'weight',
  FLOOR,
  _none,
  scored=True,
)
"""Least variance for equal gradients of the logit (Katharopoulos and Fleuret,
arXiv 1803.00942), but clicks are always kept."""

STALE_IMPORTANCE = Policy(
  'stale_importance',
  lambda facts: _error(facts) * _fresh(facts),
  'weight',
  FLOOR,
  _same,
  scored=True,
)
"""Least variance where stale rows add no gradient; clicks are thinned as well
if they were expected. Ours. What it gained over `importance` on synthetic
clicks came from the clicks; the freshness made no difference there."""

SURPRISE = Policy(
  'surprise', _error, 'weight', FLOOR, _none, scored=True, thins_cold=True
)
"""Least variance for equal gradients of the logit, of all examples: expected
clicks and cold examples are thinned, too. Ours; the best on synthetic
clicks."""

SURPRISE_OFFSET = SURPRISE._replace(name='surprise_offset', correction='offset')
"""As `surprise`, corrected in the logit: less variance than its weights have.
Local case-control sampling with a floor, which bounds what an example that the
scores are wrong about costs; and without weights, an easy one that is kept
counts no more than any other."""

LOCAL_CASE_CONTROL = SURPRISE_OFFSET._replace(
  name='local_case_control', floor=_LEAST
)
"""Local case-control sampling (Fithian and Hastie, Annals of Statistics 2014):
accepted with c |y - p|, where c follows from the drop target; published is
c = 1, with which as many are accepted as the scores are wrong. It differs from
`surprise_offset` in that it has no floor: while no c |y - p| exceeds 1, the
offset is -logit(p), and the model learns what the scores do not know."""

NEGATIVES = Policy(
  'negatives',
  lambda facts: _if_negative(_all_alike(facts), facts),
  'offset',
  FLOOR,
  _none,
  thins_cold=True,
)
"""The industry's habit (He et al., 2014): clicks are kept, and of all others a
share; their log odds are corrected while training, not afterwards. It needs no
scores."""

INFOBATCH_ONCE = Policy(
  'infobatch_once',
  _if_below_mean,
  'weight',
  FLOOR,
  _none,
  scored=True,
  thins_cold=True,
  constant=_mean_loss,
)
"""InfoBatch (Qin et al., ICLR 2024) in one pass: examples whose loss is below
the mean are dropped with chance r, and the others of them weigh 1 / (1 - r).
Losses are those of the scores, their mean is the sample's, and r follows from
the drop target; published is r = 0.5, with nothing dropped in the last 12.5 %.
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
    LOCAL_CASE_CONTROL,
    NEGATIVES,
    INFOBATCH_ONCE,
  )
}
"""Every policy by its name; all obey the laws in tests/laws."""

BLIND = tuple(
  name for name, one in POLICIES.items() if not one.stale_target(1.0)
)
"""Those that never ask how far rows moved."""


def policy_named(policy: Policy | str) -> Policy:
  """Returns a policy, given itself or by its name in `POLICIES`.

  Raises:
    UserError: it is neither, or one that cannot be made up for.
  """
  if isinstance(policy, Policy):
    check_policy(policy, 'Policy')
    return policy
  if not isinstance(policy, str) or policy not in POLICIES:
    raise UserError(
      f'the policy must be one of {", ".join(POLICIES)}, or a Policy',
      got=repr(policy),
      where='Skip.policy',
      hint='pick one of them',
    )
  return POLICIES[policy]
