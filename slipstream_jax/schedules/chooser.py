"""Decides once per period what to skip, then chooses example by example."""

from typing import Any, NamedTuple

from jaxtyping import Bool
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.schedules.phases import SETTLE, SKIP
from slipstream_jax.schedules.rebatch import select_examples, with_offset
from slipstream_jax.schedules.scorer import LinearScorer
from slipstream_jax.schedules.settings import mode_named, Skip
from slipstream_jax.selection import renewal, target
from slipstream_jax.selection.base import ExampleFacts, Fit, fit, select
from slipstream_jax.selection.change import stale_rows
from slipstream_jax.selection.classify import (
  check_alpha,
  classify_places,
  ExampleKinds,
  place_changes,
  Places,
)
from slipstream_jax.selection.renewal import noted, Recount, renewed
from slipstream_jax.selection.sample import only_hot, Sampled, together
from slipstream_jax.selection.target import (
  Asked,
  counted,
  decided,
  due,
  Held,
  Missed,
  out_of_reach,
  refitted,
  reported,
)
from slipstream_jax.selection.threshold import exact_threshold
from slipstream_jax.types import Batch, HotRows, Lookups, RowChange, StaleRows


class Decision(NamedTuple):
  """What holds while skipping."""

  stale: Bool[np.ndarray, ' H_and_1']
  """Stale hot rows, and False for all cold ones."""
  fitted: Fit
  """From `selection.fit`."""


class Chooser:
  """Scores, samples, decides and chooses, by the settings."""

  def __init__(self, hot: HotRows, settings: Skip) -> None:
    """Chooses among examples that look up `hot` and other rows."""
    self._hot, self._settings = hot, settings
    self._policy = settings.chosen_policy
    self._mode = mode_named(settings.mode)
    self._offsets = settings.offsets
    self._compares_rows = settings.compares_rows
    self._alpha_checked = False
    self._decision: Decision | None = None
    self._scorer: LinearScorer | None = None
    self._sample: list[Sampled] = []
    asked = float(settings.drop), settings.of_all, int(settings.refit)
    self._asked, self._held = Asked(*asked), Held()
    self._missed: Missed | None = None
    self._recount = Recount(hot)
    self._recounts = settings.recounts
    # Hot rows that got another id since the last window opened.
    self._renewed: Bool[np.ndarray, ' H_and_1'] | None = None

  def choose(self, batch: Batch, phase: str, number: int) -> Batch:
    """The examples of the source's batch `number` to train, with weights.

    Args:
      batch: of the source, without its padding.
      phase: the name of the phase it stands in.
      number: which draws are made for its examples.

    Raises:
      UserError: alpha is out of range for such lookups.
    """
    # Once, by the first batch: how many lookups there are is not known before.
    if not self._alpha_checked:
      check_alpha(batch.lookups, self._settings.alpha)
      self._alpha_checked = True
    # In all batches of a run, so that one program trains them.
    if self._offsets:
      batch = with_offset(batch)
    settings = self._settings
    self._missed = None
    if settings.is_over(number - 1):
      return batch
    if self._recounts:
      period = settings.phases.period
      self._recount = noted(self._recount, batch.lookups, period)
    scored = self._mode.drops_examples and self._policy.scored
    # A sample that is to judge rows anew must be trained whole; one that only
    # fits the scale again need not be.
    skipping = (SKIP,) if self._compares_rows else (SKIP, SETTLE)
    skips = self._mode.drops_examples and phase in skipping
    if not (scored or skips or phase == SETTLE):
      return batch
    # Scored even where nothing is skipped: that is how the scorer learns.
    places = self._hot.places(batch.lookups)
    scores = self._learn(batch, places) if scored else None
    is_hot = self._is_hot(batch.lookups, places)
    examples = Sampled(places, is_hot, batch.labels, scores)
    if phase == SETTLE:
      self._sample.append(examples)
    if not skips or self._decision is None:
      return batch
    fitted = self._fitted(self._decision)
    facts = self._facts(examples, self._decision.stale)
    # By the batch's number, so that resuming draws the same again.
    rng = np.random.default_rng((self._settings.seed, number))
    uniforms = rng.random(len(batch.labels), np.float32)
    chosen = select(self._policy, facts, fitted, uniforms)
    dropped = len(uniforms) - int(np.count_nonzero(chosen.keep))
    held = counted(self._asked, self._held, facts, dropped)
    self._held, self._missed = reported(self._asked, held)
    return select_examples(batch, chosen)

  def _fitted(self, decision: Decision) -> Fit:
    """The fit of the next batch: a new one, where that is due."""
    if due(self._asked, self._held):
      self._held, fitted = refitted(
        self._policy, self._asked, self._held, decision.fitted
      )
      self._decision = decision._replace(fitted=fitted)
      return fitted
    return decision.fitted

  def missed(self) -> dict[str, Any] | None:
    """What the last batch gave occasion to tell, for the metrics."""
    return self._missed and self._missed._asdict()

  def _learn(self, batch: Batch, places: np.ndarray) -> np.ndarray:
    """Click probabilities; the scorer learns from every example it scores.

    So it must be called on each batch of the source, in every phase and once,
    before anything is left out: else its scores would depend on the choice.
    """
    if self._scorer is None:
      features = places.shape[1], batch.dense.shape[1]
      self._scorer = LinearScorer.create(self._hot, *features)
    return self._scorer.learn(places, batch.dense, batch.labels)

  def _facts(self, examples: Sampled, stale: np.ndarray) -> ExampleFacts:
    if self._compares_rows:
      kinds = classify_places(examples.places, stale, self._settings.alpha)
    else:  # no row is stale, which is known without counting
      none = np.zeros(len(examples.places), np.float32)
      kinds = ExampleKinds(examples.hot, none > 0, none)
    return ExampleFacts(*kinds, examples.labels, examples.scores)

  def decide(
    self, moved: RowChange | None
  ) -> tuple[StaleRows | None, dict[str, Any]]:
    """Sets threshold, stale rows and scale, from the sample.

    Args:
      moved: what the hot rows did in the window; None if there was none.

    Returns:
      The rows that are to stand still, or None if the mode freezes none, and
      what was decided, for the metrics.

    Raises:
      UserError: no example of the sample is hot.
    """
    sample, settings = self._sampled(), self._settings
    self.forget()
    stale = np.zeros(len(self._hot.rows) + 1, bool)
    event: dict[str, Any] = {}
    if moved is not None:
      threshold = self._threshold(moved, sample)
      stale[:-1] = stale_rows(
        moved.change, threshold, moved.touches, settings.min_touches
      )
      if self._renewed is not None:
        stale &= ~self._renewed
      untouched = stale[:-1] & (moved.touches == 0)
      event |= {
        'threshold': threshold,
        'rows_stale': int(np.count_nonzero(stale)),
        'rows_stale_untouched': int(np.count_nonzero(untouched)),
        'rows_touched': int(np.count_nonzero(moved.touches)),
      }
    facts, fitted = self._facts(sample, stale), Fit(np.inf)
    event['examples_hot'] = float(np.mean(sample.hot))
    event['examples_stale'] = float(np.mean(facts.stale))
    if self._mode.drops_examples:
      drop, of_all, _ = self._asked
      fitted = fit(self._policy, facts, drop, of_all)
      short = out_of_reach(self._policy, self._asked, facts, fitted)
      event['missed'] = short
    self._decision = Decision(stale, fitted)
    self._held = decided(self._held, event['examples_hot'])
    return (stale[:-1] if self._mode.freezes_rows else None), event

  def renew(self, rows: np.ndarray) -> StaleRows | None:
    """These global rows have another id from here on, which is not stale.

    Returns:
      The rows that are stale yet, if one of them was.
    """
    places = self._hot.places(rows)
    if self._renewed is None:
      self._renewed = np.zeros(len(self._hot.rows) + 1, bool)
    self._renewed = self._renewed.copy()  # an old one may be in a position
    self._renewed[places] = True
    self._renewed[-1] = False  # which is of all cold rows
    decision = self._decision
    if decision is None or not (decision.stale & self._renewed).any():
      return None
    self._decision = decision._replace(stale=decision.stale & ~self._renewed)
    return self._decision.stale[:-1]

  def forget_renewed(self) -> None:
    """A window opens: from here on, rows are compared with their new ids."""
    self._renewed = None

  def _sampled(self) -> Sampled:
    """The sample in one piece; fails if nothing can be decided on it."""
    parts = self._sample
    examples = sum(len(part.labels) for part in parts)
    hot = sum(np.count_nonzero(part.hot) for part in parts)
    fits = self._mode.drops_examples or self._settings.threshold is None
    if self._policy.thins_cold and self._asked.of_all:
      fits = fits and self._compares_rows
    if not examples or (fits and not hot):
      raise UserError(
        'a decision needs a sample with examples that look up hot rows only',
        got=f'{examples} examples, {hot} of them hot',
        where='Phases.settle',
        hint='lengthen it, or choose more hot rows',
      )
    return together(parts)

  def forget(self) -> None:
    """Drops the sample: its decision was made, or is not going to be."""
    self._sample = []

  def _threshold(self, moved: RowChange, sample: Sampled) -> float:
    """The one given, or that which makes as many examples stale as wanted."""
    settings = self._settings
    if settings.threshold is not None:
      return settings.threshold
    # What `stale_rows` will not call stale must not count towards the target.
    known = moved.touches >= settings.min_touches
    change = self._hot.with_cold(np.where(known, moved.change, np.inf), -1)
    some = sample.places[sample.hot]
    changes = place_changes(some, change, settings.alpha)
    hot = len(some) / len(sample.hot)  # above 0, or `_sampled` would have said
    return exact_threshold(changes, settings.stale_target(hot))

  def recount(self) -> None:
    """A period ends: what is hot by now is counted, if it ever is."""
    # Not the first one: what is before training was profiled, and by more.
    if self._recounts and self._decision is not None:
      self._recount = renewed(self._recount)

  def _is_hot(self, lookups: Lookups, places: Places) -> np.ndarray:
    if self._recount.hot is not self._hot:  # others than those that were found
      places = self._recount.hot.places(lookups)
    return only_hot(places, len(self._hot.rows))

  def get_state(self) -> State:
    """Decision and scorer; only while nothing is sampled."""
    decision, scorer = self._decision, self._scorer
    return {
      'decision': decision and _state_of(decision),
      'scorer': scorer and scorer.copy()._asdict(),
      'renewed': self._renewed,
      'held': target.state_of(self._held),
      'recount': renewal.state_of(self._recount, self._hot),
    }

  def set_state(self, state: State) -> None:
    """Continues from `state`, which is not changed."""
    decision, scorer = state['decision'], state['scorer']
    self._decision = decision and Decision(
      decision['stale'], Fit(**decision['fitted'])
    )
    self._scorer = scorer and LinearScorer(**scorer).copy()
    self._renewed = state['renewed']
    self._held, self._missed = target.held_of(state['held']), None
    self._recount = renewal.recount_of(state['recount'], self._hot)
    self.forget()


def _state_of(decision: Decision) -> State:
  return {'stale': decision.stale, 'fitted': decision.fitted._asdict()}
