"""What a synthetic click stream is made of: sizes, skews, knobs and rates.

Two knobs, both off by default, say how training goes rather than how the log
looks:

* `saturation` gives popular rows the larger effects. They are met first, so
  the more of the signal is theirs, the sooner there is little left to learn.
* `drift_inputs` lets popularity wander: the user, context or item of a rank
  stays that long, then a less popular one takes its place, and what was hot
  yesterday is cold. Ranks change one by one, not all at once.
"""

from numbers import Integral
from typing import NamedTuple

from slipstream_jax.errors import UserError

KAGGLE_ROWS = (
  *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683),
  *(8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15),
  *(286181, 105, 142572),
)
"""Rows of C1 to C26 in Criteo's Kaggle set: 33,762,577 together."""


class SyntheticSpec(NamedTuple):
  """What the stream is; equal specs give equal inputs."""

  rows: tuple[int, ...] = KAGGLE_ROWS
  """R of each table."""
  dense_features: int = 13
  """I."""
  seed: int = 0
  """Seed of the inputs."""
  teacher_seed: int | None = None
  """Seed of the population and of the planted effects; None is `seed`."""
  skews: tuple[float, float, float] = (1.1, 1.0, 1.08)
  """Zipf exponents of users, contexts and items."""
  field_skew: float = 1.05
  """Zipf exponent of fields with far fewer rows than their latent has."""
  own_share: float = 0.01
  """Chance that a field is drawn by itself and not from its latent."""
  signal: tuple[float, float, float] = (0.2, 0.5, 0.3)
  """Shares of the logit's variance due to dense features, rows and pairs."""
  logit_std: float = 1.45
  """Standard deviation of the true logit; sets the Bayes AUC."""
  base_rate: float = 0.25
  """Share of clicks."""
  saturation: float = 0.0
  """The effect of row r of a table falls as (r + 1)^(-saturation / 2)."""
  drift_inputs: int = 0
  """Inputs for which half of the users, contexts and items keep their rank;
  the others keep it for ever. 0 is no drift."""

  @property
  def population(self) -> 'SyntheticSpec':
    """The same with the teacher's seed for all."""
    seed = self.seed if self.teacher_seed is None else self.teacher_seed
    return self._replace(seed=seed, teacher_seed=None)


def check_spec(spec: SyntheticSpec) -> None:
  """Looks at every value of a spec.

  Raises:
    UserError: one is out of range.
  """
  rows_good = all(isinstance(r, Integral) and r >= 1 for r in spec.rows)
  seed, teacher_seed, skews = spec.seed, spec.population.seed, spec.skews
  for good, field, rule in (
    (spec.rows and rows_good, 'rows', 'hold whole numbers of at least 1'),
    (spec.dense_features >= 1, 'dense_features', 'be at least 1'),
    (0 <= seed < 1 << 63, 'seed', 'be in [0, 2**63)'),
    (0 <= teacher_seed < 1 << 63, 'teacher_seed', 'be in [0, 2**63)'),
    (0 < min(skews) <= max(skews) <= 3, 'skews', 'be in (0, 3]'),
    (0 < spec.field_skew <= 3, 'field_skew', 'be in (0, 3]'),
    (0 <= spec.own_share <= 1, 'own_share', 'be in [0, 1]'),
    (min(spec.signal) >= 0 < sum(spec.signal), 'signal', 'hold shares'),
    (0 < spec.logit_std <= 10, 'logit_std', 'be in (0, 10]'),
    (0 < spec.base_rate < 1, 'base_rate', 'be in (0, 1)'),
    (0 <= spec.saturation <= 2, 'saturation', 'be in [0, 2]'),
    (0 <= spec.drift_inputs < 1 << 32, 'drift_inputs', 'be in [0, 2**32)'),
  ):
    if not good:
      raise UserError(
        f'{field} of a synthetic stream must {rule}',
        got=getattr(spec, field),
        where=f'SyntheticSpec.{field}',
        mend='see the default for a value that works',
      )
