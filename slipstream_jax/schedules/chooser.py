"""Decides once per period what to skip, then chooses example by example."""

from typing import Any, NamedTuple, no_type_check

from jaxtyping import Bool, Float
import numpy as np

from slipstream_jax.hashing import kernel
from slipstream_jax.schedules.base import State
from slipstream_jax.schedules.beside import Beside
from slipstream_jax.schedules.phases import SETTLE, SKIP
from slipstream_jax.schedules.rebatch import (
  corrected,
  hot_pattern,
  Index,
  real_examples,
)
from slipstream_jax.schedules.scored import BatchScorer, FIRST, Scored
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.scoring.base import scorer_named
from slipstream_jax.selection import gain
from slipstream_jax.selection.base import (
  check_chances,
  check_clicks,
  ExampleFacts,
  Fit,
  joined,
  Policy,
  select,
)
from slipstream_jax.selection.hot import (
  noted,
  Recount,
  recount_of,
  recount_state,
  renewed,
)
from slipstream_jax.selection.policies import SURPRISE
from slipstream_jax.selection.staleness import (
  check_alpha,
  classify,
  exact_threshold,
  example_changes,
  Places,
  stale_rows,
)
from slipstream_jax.selection.target import DropTarget
from slipstream_jax.types import Batch, HotRows, Lookups, RowChange, StaleRows

REFRESH = 10
"""Batches from one refresh of a scorer's weights to the next, if no policy is
fitted again."""
_FIRST = 16  # examples of a batch that tell how many are hot


class Decision(NamedTuple):
  """A decision that is valid while skipping."""

  stale: Bool[np.ndarray, ' H_and_1']
  """Which hot rows are stale. The last entry, for cold rows, is False."""
  fitted: Fit
  """Scale of the policy, from `selection.fit`."""


class Prepared(NamedTuple):
  """A batch of the source before its turn."""

  batch: Batch
  """Its examples, without padding."""
  size: int
  """Its examples, with padding."""
  scored: Scored | None = None
  """Scores of a scorer that can be frozen."""
  hot: Bool[np.ndarray, ' B'] | None = None
  """Which examples are hot, or seem to be. None where that depends on earlier
  batches."""
  uniforms: Float[np.ndarray, ' B'] | None = None
  """Draws that keep an example or not."""
  real: Bool[np.ndarray, ' _size'] | None = None
  """Mask of the examples that are not padding. None: all are real."""


class Chooser:
  """Scores, samples, decides and chooses examples by the settings.

  `prepare` does what needs no earlier choice, in any thread. `choose` goes in
  the order of the source.

  Attributes:
    event: report of the last batch, for the metrics, or None if there is none.
    beside: compares the model with the scorer, where the drop target is found.
  """

  def __init__(self, hot: HotRows, settings: Skip) -> None:
    """Starts without a decision, among examples that look up `hot`."""
    self._hot, self._settings = hot, settings
    self._policy = settings.chosen_policy
    self._mode = settings.chosen_mode
    self._compares_rows = settings.compares_rows
    self._alpha_checked = False
    self._decision: Decision | None = None
    cost = float(settings.auto_cost) if settings.finds_drop else None
    self._scoring = BatchScorer(
      scorer_named(settings.scorer), hot, cost, int(settings.refit) or REFRESH
    )
    late = settings.chosen_phases.settle
    self.beside = Beside(late, FIRST) if settings.finds_drop else None
    self._scores = self._mode.drops_examples and self._policy.scored
    self._learns = self._scores and not settings.scores_by_model
    policy = self._policy
    self._by_error = (
      policy.measure is SURPRISE.measure
      and policy.thins_cold
      and not policy.uniform
      and policy.correction != 'none'
    )
    self._sample: list[tuple[Lookups, ExampleFacts]] = []
    asked = settings.target, settings.of_all, int(settings.refit)
    self._target = DropTarget(self._policy, *asked)
    self.event: dict[str, Any] | None = None
    self._recount = Recount(hot)
    self._recounts = settings.recounts
    # Which hot rows were reassigned since the last window opened.
    self._renewed: Bool[np.ndarray, ' H_and_1'] | None = None

  def begin(self, batch: Batch) -> None:
    """Looks at the first batch of the source, before it is prepared.

    Raises:
      UserError: alpha is out of range for such lookups.
    """
    # The number of lookups is known with the first batch.
    if not self._alpha_checked:
      check_alpha(batch.lookups, self._settings.alpha)
      self._alpha_checked = True
    if self._scores:  # at a restored start, too
      self._scoring.begin(batch)

  def open_before(self, number: int, size: int) -> int:
    """Returns how many batches before one need not be chosen to prepare it.

    Args:
      number: of the batch in the source, from 0.
      size: its examples, with padding.
    """
    if not self._learns or self._settings.is_over(number):
      return number
    return number - self._scoring.refreshed_at(number, size)

  def prepare(self, batch: Batch, number: int) -> Prepared:
    """Scores the examples of a batch, and draws for them.

    Changes nothing. Batches that are prepared at once have the same bits.

    Args:
      batch: of the source.
      number: of the batch in the source, from 0, which decides the draws.

    Raises:
      UserError: an offset cannot correct the labels, or a scorer failed.
    """
    settings, size = self._settings, len(batch.labels)
    # Most batches pass in one compiled loop, which other threads do not wait
    # for as for many calls of numpy.
    all_real, chances, clicks = False, False, False
    if batch.labels.ndim == 1:
      all_real, chances, clicks = _kinds_of(batch.weights, batch.labels)
    real = None
    if not all_real:
      real = batch.weights > 0
      batch = real_examples(batch)
    if settings.offsets:
      if not clicks:
        check_clicks(batch.labels, 'Batch.labels')
      if batch.offset is None:
        # In all batches of a run, so that one program trains them all.
        none = np.zeros(len(batch.labels), np.float32)
        batch = batch._replace(offset=none)
    if self._mode.drops_examples and self._policy.needs_clicks and not chances:
      check_chances(batch.labels, 'Batch.labels')
    if settings.is_over(number) or not self._mode.drops_examples:
      return Prepared(batch, size)
    # Seeded by the batch's number, so that resuming draws the same.
    rng = np.random.default_rng((settings.seed, number + 1))
    return Prepared(
      batch,
      size,
      self._scoring.score(batch, number, size) if self._learns else None,
      None if self._recounts else self._is_hot(batch, settings.asks_hot),
      rng.random(len(batch.labels), np.float32),
      real,
    )

  def choose(
    self,
    prepared: Prepared,
    phase: str,
    number: int,
    predicted: Float[np.ndarray, ' B'] | None = None,
  ) -> tuple[Batch, Index]:
    """Returns a batch with weights that correct, and which of it to train.

    Args:
      prepared: the next batch of the source.
      phase: the name of its phase.
      number: as for `prepare`.
      predicted: what the model predicts of it, padding included, if it does.
    """
    self.event = None
    if predicted is not None and prepared.real is not None:
      predicted = predicted[prepared.real]
    batch, index, scores = self._choose(prepared, phase, number, predicted)
    if self.beside is not None:
      self.beside.put(batch, index, scores)
    return batch, index

  def _choose(
    self,
    prepared: Prepared,
    phase: str,
    number: int,
    predicted: Float[np.ndarray, ' B'] | None,
  ) -> tuple[Batch, Index, Float[np.ndarray, ' B'] | None]:
    """Returns the scores of the examples, too, or None without any."""
    settings, batch = self._settings, prepared.batch
    if settings.is_over(number):
      return batch, None, None
    if self._recounts:
      period = settings.chosen_phases.period
      self._recount = noted(self._recount, batch.lookups, period)
    # A sample to judge rows by must be trained whole. A sample that only fits
    # the scale again need not be.
    skipping = (SKIP,) if self._compares_rows else (SKIP, SETTLE)
    skips = self._mode.drops_examples and phase in skipping
    if not (self._scores or skips or phase == SETTLE):
      return batch, None, None
    # Even if nothing is skipped, because the scorer learns from it.
    scores = predicted
    if self._learns:
      scores = self._scoring.add(batch, prepared.scored, prepared.size)
    elif scores is not None:
      self._scoring.count(batch.labels, scores)
    is_hot, whole = prepared.hot, settings.asks_hot or phase == SETTLE
    if is_hot is None or (whole and not settings.asks_hot):
      is_hot = self._is_hot(batch, whole)
    none = np.zeros(len(is_hot), np.float32)
    # No row is stale here. If rows are compared, `_facts` finds those that are.
    facts = ExampleFacts(is_hot, none > 0, none, batch.labels, scores)
    if phase == SETTLE:
      self._sample.append((batch.lookups, facts))
    if not skips or self._decision is None:
      return batch, None, scores
    fitted = self._fitted(self._decision)
    if self._compares_rows:
      places = self._hot.places(batch.lookups)
      facts = self._facts(places, facts, self._decision.stale)
    assert prepared.uniforms is not None
    if self._by_error and 0 < fitted.scale < np.inf:
      batch, index = _select_by_error(
        self._policy, batch, facts, fitted, prepared.uniforms
      )
    else:
      chosen = select(self._policy, facts, fitted, prepared.uniforms)
      batch, index = corrected(batch, chosen)
    dropped = 0 if index is None else len(is_hot) - len(index)
    short = self._target.count(facts, dropped)
    if short is not None:
      self.event = {'kind': 'missed', **short}
    return batch, index, scores

  def _is_hot(self, batch: Batch, all_of_it: bool) -> Bool[np.ndarray, ' B']:
    """Returns which examples are hot, or only as many as seem to be.

    Where it does not matter which examples are hot, the share is reported. The
    first ones tell it, as it takes long to look up whether a row is hot.
    """
    examples = len(batch.labels)
    some = batch.lookups[: examples if all_of_it else _FIRST]
    return hot_pattern(self._recount.hot, some, examples)

  def _fitted(self, decision: Decision) -> Fit:
    """Returns the fit for the next batch, a new one if it is due."""
    if not self._target.is_due():
      return decision.fitted
    if self._policy.scored and self._scoring.due():
      self.event = {'kind': 'scorer', **self._worth(self._target.latest())}
    fitted = self._target.fit_again(decision.fitted)
    self._decision = decision._replace(fitted=fitted)
    return fitted

  def _worth(self, facts: ExampleFacts) -> dict[str, Any]:
    """Reports the quality of scores, and updates a drop target of 'auto'."""
    if self.beside is not None:
      segments, most = self.beside.segments, gain.next_drop(self._target.drop)
      drop, lost = self._scoring.may_drop(self._policy, facts, segments, most)
      self._target.drop = drop
      worth = self._scoring.report(drop)
      worth |= {'drop': drop, 'log_loss_lost': lost}
      if self.beside.segments:
        worth['model_apart'], _ = self.beside.segments[-1].mean()
      return worth
    hot = 1.0 if self._settings.of_all else float(np.mean(facts.hot))
    return self._scoring.report(self._target.drop * hot)

  def _facts(
    self, places: Places, facts: ExampleFacts, stale: np.ndarray
  ) -> ExampleFacts:
    kinds = classify(places, stale, self._settings.alpha)
    return ExampleFacts(*kinds, facts.labels, facts.scores)

  def decide(
    self, moved: RowChange | None
  ) -> tuple[StaleRows | None, dict[str, Any]]:
    """Decides threshold, stale rows and scale from the sample.

    Args:
      moved: change of the hot rows in the window, or None if there was none.

    Returns:
      The rows to freeze, or None if the mode freezes none, and the decision for
      the metrics. Its kind is 'undecided' if the sample allows none. Then no
      row is frozen, and no example is left out before a later fit succeeds.
    """
    settings, parts = self._settings, self._sample
    self.forget()
    stale, fitted = np.zeros(len(self._hot.rows) + 1, bool), Fit(np.inf)
    event: dict[str, Any] = {'examples_hot': 0.0, 'examples_stale': 0.0}
    possible = bool(parts)
    if parts:
      facts = joined([facts for _, facts in parts])
      hot = event['examples_hot'] = float(np.mean(facts.hot))
      if moved is not None:
        lookups = np.concatenate([lookups for lookups, _ in parts])
        places = self._hot.places(lookups)
        threshold = self._threshold(moved, places[facts.hot], hot)
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
        possible = hot > 0 or settings.threshold is not None
        facts = self._facts(places, facts, stale)
      event['examples_stale'] = float(np.mean(facts.stale))
      if self._mode.drops_examples:
        if self._policy.scored:
          event |= self._worth(facts)
        possible = self._target.can_fit(facts)
        if possible:
          fitted, event['missed'] = self._target.fit(facts)
    if not possible:
      event['missed'] = self._target.drop
    event['kind'] = 'decision' if possible else 'undecided'
    self._decision = Decision(stale, fitted)
    self._target.decided(event['examples_hot'])
    return (stale[:-1] if self._mode.freezes_rows else None), event

  def keep_all(self) -> None:
    """Keeps all examples until the next decision."""
    self._decision = None

  def renew(self, rows: np.ndarray) -> StaleRows | None:
    """Marks global rows that were reassigned to another id as not stale.

    Returns:
      The rows that are still stale, or None if none of these was.
    """
    places = self._hot.places(rows)
    if self._renewed is None:
      self._renewed = np.zeros(len(self._hot.rows) + 1, bool)
    self._renewed = self._renewed.copy()  # a position may refer to it
    self._renewed[places] = True
    self._renewed[-1] = False  # the entry of all cold rows
    decision = self._decision
    if decision is None or not (decision.stale & self._renewed).any():
      return None
    self._decision = decision._replace(stale=decision.stale & ~self._renewed)
    return self._decision.stale[:-1]

  def forget_renewed(self) -> None:
    """Forgets reassigned rows, because a window opens."""
    self._renewed = None

  def forget(self) -> None:
    """Drops the sample."""
    self._sample = []

  def _threshold(
    self, moved: RowChange, hot_places: Places, hot: float
  ) -> float:
    """Returns the threshold. Without hot examples it makes no row stale.

    `hot` is the share of hot examples in the sample.
    """
    settings = self._settings
    if settings.threshold is not None:
      return settings.threshold
    if not len(hot_places):
      return 0.0
    # Rows that `stale_rows` leaves out must not count towards the target.
    known = moved.touches >= settings.min_touches
    change = self._hot.with_cold(np.where(known, moved.change, np.inf), -1)
    changes = example_changes(hot_places, change, settings.alpha)
    return exact_threshold(changes, settings.stale_target(hot))

  def recount(self) -> None:
    """Updates the hot rows at the end of a period, if settings ask for it."""
    # Not at the first end: the profile has more examples.
    if self._recounts and self._decision is not None:
      self._recount = renewed(self._recount)

  def get_state(self) -> State:
    """Returns decision and scorer. Called only while there is no sample."""
    decision = self._decision
    return {
      'decision': decision
      and {'stale': decision.stale, 'fitted': decision.fitted._asdict()},
      'drop': self._target.drop,
      'scorer': self._scoring.get_state(),
      'renewed': self._renewed,
      'held': self._target.get_state(),
      'beside': self.beside and self.beside.get_state(),
      'recount': recount_state(self._recount, self._hot),
    }

  def set_state(self, state: State) -> None:
    """Restores a state from `get_state`. Does not modify it."""
    decision = state['decision']
    self._decision = decision and Decision(
      decision['stale'], Fit(**decision['fitted'])
    )
    self._scoring.set_state(state['scorer'])
    self._target.drop = state['drop']
    self._target.set_state(state['held'])
    # Versions before this one did not follow the model.
    if self.beside is not None and state.get('beside') is not None:
      self.beside.set_state(state['beside'])
    self._renewed = state['renewed']
    self.event = None
    self._recount = recount_of(state['recount'], self._hot)
    self.forget()


@kernel
@no_type_check
def _kinds_of(
  weights: np.ndarray, labels: np.ndarray
) -> tuple[bool, bool, bool]:
  """Whether all weights are above 0, all labels in [0, 1], and all 0 or 1."""
  real = chances = clicks = True
  for i in range(len(weights)):
    real &= weights[i] > 0
    chances &= (labels[i] >= 0) & (labels[i] <= 1)
    clicks &= (labels[i] == 0) | (labels[i] == 1)
  return real, chances, clicks


def _select_by_error(
  policy: Policy,
  batch: Batch,
  facts: ExampleFacts,
  fitted: Fit,
  uniforms: Float[np.ndarray, ' B'],
) -> tuple[Batch, Index]:
  """Does what `select` and `corrected` do for `surprise`, in one loop."""
  count, by_offset = len(uniforms), policy.correction == 'offset'
  weights = np.empty(count, np.float32)
  index, offset = np.empty(count, np.int64), batch.offset
  added = np.empty(count if by_offset else 0, np.float32)
  kept = _keep_by_error(
    facts.scores,
    batch.labels,
    batch.weights,
    uniforms,
    (fitted.scale, policy.floor, fitted.weight),
    weights,
    added,
    index,
  )
  if by_offset:
    offset = added if offset is None else offset + added
  batch = batch._replace(weights=weights, offset=offset)
  return batch, None if kept == count else index[:kept]


@kernel
@no_type_check
def _keep_by_error(
  scores: np.ndarray,
  labels: np.ndarray,
  weights: np.ndarray,
  uniforms: np.ndarray,
  numbers: tuple[float, float, float],
  out: np.ndarray,
  offset: np.ndarray,
  index: np.ndarray,
) -> int:
  """Keeps examples with probability clip(scale * |score - label|, floor, 1).

  Args:
    scores: f32[n]. NaN keeps the example.
    labels: f32[n].
    weights: f32[n], before.
    uniforms: f32[n].
    numbers: scale, floor, and the weight of what is kept by an offset.
    out: f32[n], receives the weights. 0 for a dropped example.
    offset: f32[n], receives the offsets. f32[0] if weights correct.
    index: i64[n], receives the positions of those kept.

  Returns:
    How many are kept.
  """
  scale, floor, kept_weight = numbers
  kept = 0
  for i in range(len(out)):
    score, label = np.float64(scores[i]), np.float64(labels[i])
    chance = np.float64(1)
    if score == score:
      chance = min(max(scale * abs(score - label), floor), 1.0)
    if len(offset):
      other = np.float64(1)
      if score == score:
        other = min(max(scale * abs(score - (1 - label)), floor), 1.0)
      ratio = chance / other if label > 0 else other / chance
      offset[i] = np.log(ratio)
    probability = np.float32(chance)
    # Uniforms are below 1, so probability 1 always keeps.
    keep = uniforms[i] < probability
    weight = np.float32(kept_weight)
    if not len(offset):
      weight = np.float32(1) / probability
    out[i] = weights[i] * weight if keep else np.float32(0)
    index[kept] = i
    kept += keep
  return kept
