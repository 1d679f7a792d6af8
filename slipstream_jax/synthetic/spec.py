"""Specs of synthetic streams: sizes, skews, rates and two knobs.

The knobs, both off by default, affect how training goes:

* `saturation` gives popular rows larger effects. They are seen first, so the
  more of the signal they have, the sooner there is little left to learn.
* `drift_examples` lets popularity drift. The user, context or item of a rank
  stays that long, then a less popular one takes its place, so hot rows become
  cold. Ranks change one by one, not all at once.
"""

from numbers import Integral
from typing import NamedTuple

from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.tables import Feature, features_of

KAGGLE_ROWS = (
  *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683),
  *(8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15),
  *(286181, 105, 142572),
)
"""Rows of C1 to C26 in Criteo's Kaggle set: 33,762,577 in total."""
TAOBAO_ROWS = (987_994, 4_162_024, 9_439)
"""Users, items and categories of Taobao's user behaviour set."""
_BIG = 55_250_000
TERABYTE_ROWS = (
  *(_BIG, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, _BIG, 3067956, 405282),
  *(10, 2209, 11938, 155, 4, 976, 14, _BIG, 40790948, _BIG, 590152, 12973),
  *(108, 36),
)
"""Rows of C1 to C26 in Criteo's Terabyte set: 265,975,536 in total. The papers'
sample of 80 M examples has 266 M ids. The four largest tables are hashed to
match that; they have 130 M to 293 M ids in all 24 days."""
AVAZU_ROWS = (
  *(7, 7, 4737, 7745, 26, 8552, 559, 36, 2643748, 6622941, 8251, 5, 4, 2626),
  *(8, 9, 435, 4, 68, 172, 60),
)
"""Rows of C1, banner_pos, ... C21 in Avazu's set: 9,300,000 in total. These are
its ids, except for 2 % of the devices, which only occur after the papers' 32.3
M examples."""
MOVIELENS_ROWS = (162_541, 59_047)
"""Users and movies of MovieLens' ml-25m."""


class SyntheticSpec(NamedTuple):
  """A click stream. Equal specs give equal examples."""

  rows: tuple[int, ...] = KAGGLE_ROWS
  """R of each table."""
  dense_features: int = 13
  """I."""
  seed: int = 0
  """Seed of the examples."""
  teacher_seed: int | None = None
  """Seed of the population and of the planted effects. None: `seed`."""
  skews: tuple[float, float, float] = (1.1, 1.0, 1.08)
  """Zipf exponents of users, contexts and items."""
  field_skew: float = 1.05
  """Zipf exponent of fields with far fewer rows than their latent has."""
  own_share: float = 0.01
  """Chance that a field is drawn independently of its latent."""
  signal: tuple[float, ...] = (0.2, 0.5, 0.3)
  """Shares of the logit's variance due to dense features, rows, pairs of fields
  and, if there are four, triples of fields."""
  logit_std: float = 1.45
  """Standard deviation of the true logit. Sets the Bayes AUC."""
  base_rate: float = 0.25
  """Share of clicks."""
  saturation: float = 0.0
  """The effect of row r of a table falls as (r + 1)^(-saturation / 2)."""
  drift_examples: int = 0
  """Examples for which half of the users, contexts and items keep their rank.
  The others keep it forever. 0: no drift."""

  @property
  def title(self) -> str:
    """A short description of the stream."""
    if self.rows == KAGGLE_ROWS:
      return 'click stream (NOT real data), Criteo Kaggle shape'
    rows = f'{len(self.rows)} tables of {sum(self.rows):,} rows together'
    return f'click stream (NOT real data), {rows}'

  @property
  def sizes(self) -> dict[str, int]:
    """Rows of C1, C2, ..., one table per feature."""
    return {f'C{i}': r for i, r in enumerate(self.rows, start=1)}

  @property
  def features(self) -> dict[str, Feature]:
    """One feature per table, with the table's name."""
    return {name: Feature(name) for name in self.sizes}

  @property
  def population(self) -> 'SyntheticSpec':
    """The spec with the teacher's seed in place of its own."""
    seed = self.seed if self.teacher_seed is None else self.teacher_seed
    return self._replace(seed=seed, teacher_seed=None)


class SequenceSpec(NamedTuple):
  """A sequence log. Equal specs give equal examples."""

  rows: tuple[int, int, int] = TAOBAO_ROWS
  """R of users, items and categories; at least as many items as categories."""
  steps: int = 20
  """Most past items of an example. The candidate comes after them."""
  seed: int = 0
  """Seed of the examples."""
  teacher_seed: int | None = None
  """Seed of the users. None: `seed`."""
  skews: tuple[float, float, float] = (1.2, 1.8, 0.9)
  """Zipf exponents of users, of a category's items and of categories."""
  heads: tuple[float, float] = (0.01, 0.01)
  """Shares of users, and of a category's items, that are about equally popular.
  Zipf's law holds beyond them."""
  interests: int = 8
  """Categories of one user, drawn by their popularity."""
  favourites: int = 4
  """Items of each interest that a user returns to."""
  loyalty: float = 0.7
  """Share of past items that are favourites."""
  short_share: float = 0.2
  """Share of examples with fewer past items than `steps`, but at least one."""
  stray_share: float = 0.12
  """Share of clicked items outside the interests. Sets the Bayes AUC."""
  base_rate: float = 0.5
  """Share of clicks."""
  drift_examples: int = 0
  """Examples for which half of the users, and of the items within a category,
  keep their rank. The others keep it forever. 0: no drift."""

  @property
  def title(self) -> str:
    """A short description of the log."""
    return f'shop log (NOT real data), {sum(self.rows):,} rows together'

  @property
  def sizes(self) -> dict[str, int]:
    """Rows of users, items and categories."""
    return dict(zip(('user', 'item', 'category'), self.rows, strict=True))

  @property
  def features(self) -> dict[str, Feature]:
    """A sequence of each table, with the candidate in the last step."""
    return features_of([*self.sizes], self.steps + 1)

  @property
  def dense_features(self) -> int:
    """I."""
    return 1

  @property
  def population(self) -> 'SequenceSpec':
    """The spec with the teacher's seed in place of its own."""
    seed = self.seed if self.teacher_seed is None else self.teacher_seed
    return self._replace(seed=seed, teacher_seed=None)


Spec = SyntheticSpec | SequenceSpec
"""The spec of any stream."""

_Rule = tuple[object, str, str]
"""Whether the rule holds, its field, and the rule itself."""


def check_spec(spec: Spec) -> None:
  """Checks every value of a spec.

  Raises:
    UserError: a value is out of range.
  """
  seed, teacher_seed, skews = spec.seed, spec.population.seed, spec.skews
  for good, field, rule in (
    *(
      _sequence_rules(spec)
      if isinstance(spec, SequenceSpec)
      else _click_rules(spec)
    ),
    (is_whole(seed, 0, 1 << 63), 'seed', 'be in [0, 2**63)'),
    (is_whole(teacher_seed, 0, 1 << 63), 'teacher_seed', 'be in [0, 2**63)'),
    (0 < min(skews) <= max(skews) <= 3, 'skews', 'be in (0, 3]'),
    (0 < spec.base_rate < 1, 'base_rate', 'be in (0, 1)'),
    # 64 epochs of drift, over which the truth is averaged, fit 2**40 times.
    (0 <= spec.drift_examples < 1 << 32, 'drift_examples', 'be in [0, 2**32)'),
  ):
    if not good:
      raise UserError(
        f'{field} of a synthetic stream must {rule}',
        got=getattr(spec, field),
        where=f'{type(spec).__name__}.{field}',
        hint='see the default for a value that works',
      )


def _click_rules(spec: SyntheticSpec) -> tuple[_Rule, ...]:
  rows_good = all(isinstance(r, Integral) and r >= 1 for r in spec.rows)
  return (
    (spec.rows and rows_good, 'rows', 'hold whole numbers of at least 1'),
    (spec.dense_features >= 1, 'dense_features', 'be at least 1'),
    (0 < spec.field_skew <= 3, 'field_skew', 'be in (0, 3]'),
    (0 <= spec.own_share <= 1, 'own_share', 'be in [0, 1]'),
    (min(spec.signal) >= 0 < sum(spec.signal), 'signal', 'hold shares'),
    (len(spec.signal) in (3, 4), 'signal', 'hold three or four shares'),
    (0 < spec.logit_std <= 10, 'logit_std', 'be in (0, 10]'),
    (0 <= spec.saturation <= 2, 'saturation', 'be in [0, 2]'),
  )


def _sequence_rules(spec: SequenceSpec) -> tuple[_Rule, ...]:
  three = len(spec.rows) == 3
  users, items, categories = spec.rows if three else (0, 0, 0)
  rows_good = users >= 1 and items >= categories >= 1
  return (
    (rows_good, 'rows', 'be users, items, and no more categories than items'),
    (1 <= spec.steps < 1 << 16, 'steps', 'be in [1, 2**16)'),
    (0 <= min(spec.heads) <= max(spec.heads) <= 1, 'heads', 'be in [0, 1]'),
    (1 <= spec.interests <= 64, 'interests', 'be in [1, 64]'),
    (1 <= spec.favourites <= 64, 'favourites', 'be in [1, 64]'),
    (0 <= spec.loyalty <= 1, 'loyalty', 'be in [0, 1]'),
    (0 <= spec.short_share <= 1, 'short_share', 'be in [0, 1]'),
    (0 < spec.stray_share <= 1, 'stray_share', 'be in (0, 1]'),
  )
