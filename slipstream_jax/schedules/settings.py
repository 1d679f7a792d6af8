"""Settings of Slipstream: what it skips, and when."""

from numbers import Real
from typing import Literal, NamedTuple

import numpy as np

from slipstream_jax.errors import check_whole, choose, UserError
from slipstream_jax.named import in_short, refuse_others
from slipstream_jax.schedules.phases import (
  check_phases,
  Phases,
  phases_for,
)
from slipstream_jax.scoring.base import (
  in_words,
  MODEL,
  scorer_named,
  ScorerFn,
)
from slipstream_jax.selection.base import Policy
from slipstream_jax.selection.policies import policy_named, SURPRISE
from slipstream_jax.selection.staleness import Alpha, check_drop_target


class Mode(NamedTuple):
  """How a decision is used while examples or rows are skipped."""

  name: str
  drops_examples: bool
  """Whether the policy leaves examples out."""
  freezes_rows: bool
  """Whether stale rows are frozen until the next window."""


MODES: dict[str, Mode] = {
  mode.name: mode
  for mode in (
    Mode('examples', drops_examples=True, freezes_rows=False),
    Mode('rows', drops_examples=False, freezes_rows=True),
  )
}
"""All modes by name."""


SHORT = 1000
"""Batches in a pass below which data are short."""

OF = {'all': True, 'hot': False}
"""Whether the drop target is a share of all examples, by `drop_of`."""


class Skip(NamedTuple):
  """Settings of what Slipstream skips, and when: `Skip(drop=0.3)` suffices."""

  drop: float | int | Literal['auto'] = 0.3
  """Drop target: share of the examples of `drop_of` to leave out, in [0, 1].
  Where none are left out, the share to make stale. 'auto', which is
  experimental, drops as many as seem to cost less than `auto_cost`, none while
  that is not known, and at most half. It follows the losses of scorer and
  model, but cannot foresee what a model learns after a plateau."""
  policy: Policy | str | None = None
  """Policy of which examples to leave out: of `POLICIES`, or its name. 'random'
  is the control, 'stale' the published rule. None: 'surprise_offset' where the
  trainer has the logistic loss of one logit, else 'surprise'."""
  mode: Mode | str = 'examples'
  """Of `MODES`, or its name: 'examples' leaves examples out, 'rows' freezes
  stale rows."""
  phases: Phases | None = None
  """When rows are compared, and when anything is skipped. None: `Phases()`, in
  proportion to the batches in a pass over the source where it has fewer than
  4,000."""
  alpha: Alpha = None
  """Number of stale lookups that makes an example stale. None: all of them."""
  min_touches: int = 1
  """Touches that a row needs in a window to be stale. 0: as published."""
  threshold: float | None = None
  """Largest change of a stale row. None: found from the drop target."""
  seed: int = 0
  """Seed of the draws that keep an example or not."""
  drop_of: str = 'all'
  """Examples that `drop` is a share of: 'all', or the 'hot' ones."""
  refit: int = 10
  """Batches from one fit of the policy's scale to the next while it skips. 0
  fits it once a period, and keeps the hot examples of the start."""
  refill: bool | None = None
  """Whether kept examples are cut into full batches again. False takes a step
  for the kept examples of each batch of the source. None: False where a pass
  over the source has fewer than `SHORT` batches, as more steps lose less."""
  uniform: float | None = None
  """Uniform part of the probability, in [0, 1]. None: the policy's."""
  until: int | None = None
  """Batches of the source after which nothing is skipped. None: never."""
  scorer: ScorerFn | str = 'linear'
  """Scorer that predicts clicks for policies that need scores: of `SCORERS`, or
  its name, or a function of the hot rows, F and I that makes one. 'model': the
  model that is trained predicts them, some steps before they are chosen."""
  auto_cost: float = 0.001
  """Share of the log loss that dropping may cost by estimate, with
  drop='auto'."""

  def __repr__(self) -> str:
    return in_short(self)

  # The properties are of settings that `check_settings` accepts.

  @property
  def finds_drop(self) -> bool:
    """Whether the drop target is found while training."""
    return isinstance(self.drop, str) and self.drop == 'auto'

  @property
  def target(self) -> float:
    """Drop target, or 0 while it is not known."""
    return 0.0 if self.finds_drop else float(self.drop)

  @property
  def chosen_mode(self) -> Mode:
    """Mode of that name."""
    if isinstance(self.mode, Mode):
      return self.mode
    return choose(MODES, self.mode, 'Skip.mode')

  @property
  def chosen_phases(self) -> Phases:
    """Phases, as for a source of unknown length if there are none."""
    return phases_for(None) if self.phases is None else self.phases

  @property
  def chosen_policy(self) -> Policy:
    """Policy with the uniform part of these settings."""
    policy = policy_named(SURPRISE if self.policy is None else self.policy)
    if self.uniform is None:
      return policy
    return policy._replace(uniform=float(self.uniform))

  @property
  def refills(self) -> bool:
    """Whether kept examples make full batches, as for long data if not set."""
    return self.refill is None or bool(self.refill)

  @property
  def of_all(self) -> bool:
    """Whether the drop target is a share of all examples."""
    return choose(OF, self.drop_of, 'Skip.drop_of')

  @property
  def asked(self) -> float | None:
    """Share of all examples to leave out. None where that is not asked for."""
    drops = self.chosen_mode.drops_examples and self.of_all
    return self.target if drops and not self.finds_drop else None

  def stale_target(self, hot: float = 1.0) -> float:
    """Returns the share of hot examples that the threshold should make stale.

    Args:
      hot: share of hot examples among all, above 0.
    """
    target = self.target
    if self.of_all:  # there may be fewer hot examples than that
      target = min(1.0, target / hot)
    if not self.chosen_mode.drops_examples:
      return target
    return self.chosen_policy.stale_target(target)

  @property
  def compares_rows(self) -> bool:
    """Whether skipping depends on how far rows moved."""
    if self.chosen_mode.freezes_rows or self.threshold is not None:
      return True
    return self.stale_target() > 0

  @property
  def offsets(self) -> bool:
    """Whether batches carry an offset, which corrects for dropped examples."""
    corrects = self.chosen_policy.correction == 'offset'
    return self.chosen_mode.drops_examples and corrects

  @property
  def scores_by_model(self) -> bool:
    """Whether the model that is trained scores the examples."""
    drops = self.chosen_mode.drops_examples and self.chosen_policy.scored
    return drops and isinstance(self.scorer, str) and self.scorer == MODEL

  @property
  def follows_steps(self) -> bool:
    """Whether choices depend on the rows or parameters that steps change."""
    return self.compares_rows or self.scores_by_model

  @property
  def recounts(self) -> bool:
    """Whether hot examples are those of rows that are counted again."""
    # Where rows are compared, the watched rows are the hot ones.
    drops = self.chosen_mode.drops_examples and not self.compares_rows
    again = self.refit and self.chosen_phases.period
    return bool(again and self.asks_hot and drops)

  @property
  def asks_hot(self) -> bool:
    """Whether it matters which examples are hot: not if all are thinned."""
    return not (self.chosen_policy.thins_cold and self.of_all)

  def is_over(self, batch: int) -> bool:
    """Whether skipping has ended before the source's batch number `batch`."""
    return self.until is not None and batch >= self.until

  def in_words(self) -> str:
    """Returns all settings as text, which positions hold for a comparison."""
    # Converted first, so that equal settings of other types read alike.
    values = self._asdict() | {
      'mode': self.chosen_mode.name,
      'policy': self.chosen_policy.name,
      'drop': self.drop if self.finds_drop else self.target,
      'scorer': in_words(self.scorer),
      'auto_cost': float(self.auto_cost),
      'phases': [int(count) for count in self.chosen_phases],
      'refill': self.refills,
    }
    return ', '.join(f'{key} {value}' for key, value in values.items())


refuse_others(Skip, {})
_AT_LEAST = {'min_touches': 0, 'seed': 0, 'alpha': 1, 'refit': 0, 'until': 0}


def check_settings(settings: Skip) -> None:
  """Checks all that can be checked before the first batch.

  Raises:
    UserError: an invalid combination of settings.
  """

  def check(name: str, good: bool, rule: str, hint: str) -> None:
    if not good:
      got = repr(getattr(settings, name))
      raise UserError(rule, got=got, where=f'Skip.{name}', hint=hint)

  mode = settings.chosen_mode
  policy = settings._replace(uniform=None).chosen_policy
  choose(OF, settings.drop_of, 'Skip.drop_of')
  if not settings.finds_drop:
    check_drop_target(settings.drop, 'Skip.drop')
  else:
    _check_auto(settings, mode, policy)
  scorer_named(settings.scorer)
  check(
    'auto_cost',
    isinstance(settings.auto_cost, Real) and 0 < settings.auto_cost < 1,
    'the cost of dropping must be a share of the log loss, in (0, 1)',
    'leave it at 0.001',
  )
  threshold, uniform = settings.threshold, settings.uniform
  check(
    'threshold',
    threshold is None or (isinstance(threshold, Real) and threshold >= 0),
    'the threshold must be at least 0',
    'leave it out to have it found from the drop target',
  )
  for name, least in _AT_LEAST.items():
    value = getattr(settings, name)
    counts = value if name == 'alpha' and isinstance(value, tuple) else (value,)
    left_out = name in ('alpha', 'until') and value is None
    for count in () if left_out else counts:
      hint = 'pick another one, such as 1'
      check_whole(count, least, f'Skip.{name}', hint)
  check(
    'refill',
    settings.refill is None or isinstance(settings.refill, bool | np.bool),
    'refill must be True, False or None',
    'leave it out to have it chosen by the length of the data',
  )
  check(
    'uniform',
    uniform is None or (isinstance(uniform, Real) and 0 <= uniform <= 1),
    'the uniform part of a probability must be in [0, 1]',
    'give 0.25, or leave it out',
  )
  check(
    'until',
    settings.until is None or mode.drops_examples,
    f'until goes with a mode that leaves examples out, not {mode.name}',
    'leave it out',
  )
  if settings.phases is not None:
    check_phases(settings.phases, settings.compares_rows)


def _check_auto(settings: Skip, mode: Mode, policy: Policy) -> None:
  """Checks that the drop target can be found while training."""
  by_scores = policy.scored and not policy.stale_target(0.5)
  corrects = mode.drops_examples and policy.correction != 'none'
  if not (by_scores and corrects and settings.of_all):
    raise UserError(
      "drop 'auto' leaves out a share of all examples by their scores alone",
      got=f'policy {policy.name}, mode {mode.name}, drop_of {settings.drop_of}',
      where='Skip.drop',
      hint='take a policy such as surprise, or give a share',
    )
  if settings.scores_by_model:
    raise UserError(
      "drop 'auto' compares the model with a scorer that learns beside it",
      got=f'scorer {settings.scorer}',
      where='Skip.scorer',
      hint='take linear, or give a share to drop',
    )
