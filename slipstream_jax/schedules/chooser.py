"""Decides once per period what to skip, then chooses input by input."""

from numbers import Real
from typing import Any, NamedTuple

from jaxtyping import Bool
import numpy as np

from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.schedules.phases import (
  check_phases,
  Phases,
  SETTLE,
  SKIP,
)
from slipstream_jax.schedules.rebatch import select_inputs
from slipstream_jax.schedules.scorer import LinearScorer, ScorerState
from slipstream_jax.selection.base import fit, InputFacts, Policy, select
from slipstream_jax.selection.change import stale_rows
from slipstream_jax.selection.classify import (
  Alpha,
  check_alpha,
  classify_places,
  InputKinds,
  place_changes,
  Places,
)
from slipstream_jax.selection.policies import policy_named
from slipstream_jax.selection.threshold import exact_threshold
from slipstream_jax.types import Batch, HotRows, RowChange


class Settings(NamedTuple):
  """What Slipstream skips, and when."""

  mode: str
  """'inputs': leave inputs out; 'rows': let stale rows stand still."""
  policy: Policy | str
  """Which inputs: of `POLICIES`, or its name; not used in mode 'rows'."""
  drop_target: float | int
  """Inputs to leave out, as a share of the hot ones, in [0, 1]; in mode
  'rows' the share of hot inputs that are to be stale."""
  phases: Phases
  alpha: Alpha = None
  """Stale lookups that make an input stale; None: all of them."""
  min_touches: int = 1
  """Fewer in a window leave a row unknown, not stale; 0: as published."""
  threshold: float | None = None
  """Given instead of found from the drop target."""
  seed: int = 0
  """Of the draws that keep an input or not."""

  @property
  def compares_rows(self) -> bool:
    """Whether what is skipped depends on how far rows moved.

    Raises:
      UserError: there is no policy of that name.
    """
    if self.mode == 'rows' or self.threshold is not None:
      return True
    target = float(self.drop_target)
    return policy_named(self.policy).stale_target(target) > 0


class Decision(NamedTuple):
  """What holds while skipping."""

  stale: Bool[np.ndarray, ' H_and_1']
  """Stale hot rows, and False for all cold ones."""
  scale: float
  """From `selection.fit`."""


class Sampled(NamedTuple):
  """What a decision looks at of n inputs."""

  places: Places
  """`hot.places` of their lookups."""
  labels: np.ndarray
  """f32[n]."""
  scores: np.ndarray | None
  """Click probabilities, f32[n], where the policy asks for them."""


class Chooser:
  """Scores, samples, decides and chooses, by the settings."""

  def __init__(self, hot: HotRows, settings: Settings) -> None:
    """Chooses among inputs that look up `hot` and other rows.

    Raises:
      UserError: settings that cannot be.
    """
    _check(settings)
    self._hot, self._settings = hot, settings
    self._policy = policy_named(settings.policy)
    self._alpha_checked = False
    self._decision: Decision | None = None
    self._scorer: LinearScorer | None = None
    self._sample: list[Sampled] = []

  def choose(self, batch: Batch, phase: str, number: int) -> Batch:
    """The inputs of the source's batch `number` to train, with weights.

    Args:
      batch: of the source, without its padding.
      phase: the name of the phase it stands in.
      number: which draws are made for its inputs.

    Raises:
      UserError: alpha is out of range for such lookups.
    """
    settings, decision = self._settings, self._decision
    if not self._alpha_checked:
      check_alpha(batch.lookups, settings.alpha)
      self._alpha_checked = True
    leaves_out = settings.mode == 'inputs'
    scored = leaves_out and self._policy.scored
    # Where no rows are compared, a new decision needs no inputs trained whole.
    skipping = (SKIP,) if settings.compares_rows else (SKIP, SETTLE)
    skips = leaves_out and phase in skipping
    if not (scored or skips or phase == SETTLE):
      return batch
    places = self._hot.places(batch.lookups)
    scores = self._scores(batch, places) if scored else None
    seen = Sampled(places, batch.labels, scores)
    if phase == SETTLE:
      self._sample.append(seen)
    if not skips or decision is None:
      return batch
    facts = self._facts(seen, decision.stale)
    # By the batch's number, so that resuming draws the same again.
    rng = np.random.default_rng((settings.seed, number))
    uniforms = rng.random(len(batch.labels), np.float32)
    chosen = select(self._policy, facts, decision.scale, uniforms)
    return select_inputs(batch, chosen.keep, chosen.weight)

  def _scores(self, batch: Batch, places: np.ndarray) -> np.ndarray:
    """Click probabilities, each before its input was learned from."""
    if self._scorer is None:
      features = places.shape[1], batch.dense.shape[1]
      self._scorer = LinearScorer.create(self._hot, *features)
    return self._scorer.learn(places, batch.dense, batch.labels)

  def _facts(self, inputs: Sampled, stale: np.ndarray) -> InputFacts:
    if self._settings.compares_rows:
      kinds = classify_places(inputs.places, stale, self._settings.alpha)
    else:
      none = np.zeros(len(inputs.places), np.float32)
      kinds = InputKinds(self._is_hot(inputs.places), none > 0, none)
    return InputFacts(*kinds, inputs.labels, inputs.scores)

  def decide(
    self, moved: RowChange | None
  ) -> tuple[Bool[np.ndarray, ' H'], dict[str, Any]]:
    """Sets threshold, stale rows and scale, from the sample.

    Args:
      moved: what the hot rows did in the window; None if there was none.

    Returns:
      The stale rows, and what was decided, for the metrics.

    Raises:
      UserError: no input of the sample is hot.
    """
    sample, settings = self._sampled(), self._settings
    self._sample = []
    stale = np.zeros(len(self._hot.rows) + 1, bool)
    event: dict[str, Any] = {}
    if moved is not None:
      threshold = self._threshold(moved, sample.places)
      stale[:-1] = stale_rows(
        moved.change, threshold, moved.touches, settings.min_touches
      )
      untouched = stale[:-1] & (moved.touches == 0)
      event |= {
        'threshold': threshold,
        'rows_stale': int(np.count_nonzero(stale)),
        'rows_stale_untouched': int(np.count_nonzero(untouched)),
        'rows_touched': int(np.count_nonzero(moved.touches)),
      }
    facts, scale = self._facts(sample, stale), np.inf
    if settings.mode == 'inputs':
      scale = fit(self._policy, facts, float(settings.drop_target))
    self._decision = Decision(stale, scale)
    event['inputs_hot'] = float(np.mean(self._is_hot(sample.places)))
    event['inputs_stale'] = float(np.mean(facts.stale))
    return stale[:-1], event

  def _sampled(self) -> Sampled:
    """The sample in one piece; fails if nothing can be decided on it."""
    parts, settings = self._sample, self._settings
    inputs = sum(len(part.labels) for part in parts)
    hot = sum(np.count_nonzero(self._is_hot(part.places)) for part in parts)
    needs_hot = settings.mode == 'inputs' or settings.threshold is None
    if not inputs or (needs_hot and not hot):
      raise UserError(
        'a decision needs a sample with inputs that look up hot rows only',
        got=f'{inputs} inputs, {hot} of them hot',
        where='Phases.settle',
        mend='lengthen it, or choose more hot rows',
      )
    return _joined(parts)

  def forget(self) -> None:
    """Drops the sample, as its decision is not going to be made."""
    self._sample = []

  def _threshold(self, moved: RowChange, places: np.ndarray) -> float:
    settings = self._settings
    if settings.threshold is not None:
      return settings.threshold
    known = moved.touches >= settings.min_touches
    change = self._hot.with_cold(np.where(known, moved.change, np.inf), -1)
    hot = places[self._is_hot(places)]
    target = float(settings.drop_target)
    if settings.mode == 'inputs':
      target = self._policy.stale_target(target)
    return exact_threshold(place_changes(hot, change, settings.alpha), target)

  def _is_hot(self, places: np.ndarray) -> np.ndarray:
    axes = tuple(range(1, places.ndim))
    hot: np.ndarray = places.max(axis=axes, initial=-1) < len(self._hot.rows)
    return hot

  def get_state(self) -> State:
    """Decision and scorer; only while nothing is sampled."""
    decision, scorer = self._decision, self._scorer
    return {
      'decision': None if decision is None else decision._asdict(),
      'scorer': None if scorer is None else scorer.copy()._asdict(),
    }

  def set_state(self, state: State) -> None:
    """Continues from `state`, which is not changed."""
    decision, scorer = state['decision'], state['scorer']
    self._decision = None if decision is None else Decision(**decision)
    self._scorer, self._sample = None, []
    if scorer is not None:
      copied = {name: array.copy() for name, array in scorer.items()}
      self._scorer = LinearScorer(ScorerState(**copied))


def _joined(parts: list[Sampled]) -> Sampled:
  places, labels, scores = zip(*parts, strict=True)
  return Sampled(
    np.concatenate(places),
    np.concatenate(labels),
    None if scores[0] is None else np.concatenate(scores),
  )


def _check(settings: Settings) -> None:
  """Looks at all that can be judged before the first batch.

  Raises:
    UserError: settings that cannot be.
  """
  if settings.mode not in ('inputs', 'rows'):
    raise UserError(
      "mode must be 'inputs' or 'rows'",
      got=repr(settings.mode),
      where='Settings.mode',
      mend='pick one of them',
    )
  policy_named(settings.policy)
  target, threshold = settings.drop_target, settings.threshold
  # NaN compares as False.
  if not isinstance(target, Real) or not 0 <= target <= 1:
    raise UserError(
      'the drop target must be in [0, 1]',
      got=repr(target),
      where='Settings.drop_target',
      mend='give the share of hot inputs to drop, such as 0.3',
    )
  given = threshold is not None
  if given and not (isinstance(threshold, Real) and threshold >= 0):
    raise UserError(
      'the threshold must be at least 0',
      got=repr(threshold),
      where='Settings.threshold',
      mend='leave it out to have it found from the drop target',
    )
  for name, least in (('min_touches', 0), ('seed', 0), ('alpha', 1)):
    value = getattr(settings, name)
    each = value if isinstance(value, tuple) else (value,)
    left_out = name == 'alpha' and value is None
    if not left_out and not all(is_whole(number, least) for number in each):
      raise UserError(
        f'{name} must be a whole number, at least {least}',
        got=repr(value),
        where=f'Settings.{name}',
        mend='pick another one, such as 1',
      )
  check_phases(settings.phases, settings.compares_rows)
