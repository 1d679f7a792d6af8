"""Slipstream as a schedule: skip what no longer learns (arXiv 2404.04270).

It reads a source batch by batch, goes through the phases of `phases`, and in
phase `skip` leaves inputs out by a policy (mode `inputs`) or names the rows
that stand still (mode `rows`). What it decides depends on the source, the
settings and the rows' changes alone, never on timing.
"""

from collections.abc import Callable, Iterator
import time
from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.data.batches import BatchSource
from slipstream_jax.data.scheduled import Scheduled, State
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import Probe
from slipstream_jax.schedules.phases import (
  check,
  Phase,
  phase_at,
  Phases,
  SETTLE,
  SKIP,
)
from slipstream_jax.schedules.rebatch import (
  real_inputs,
  Rebatcher,
  select_inputs,
)
from slipstream_jax.selection.base import fit, InputFacts, Policy, select
from slipstream_jax.selection.classify import Alpha, classify, input_changes
from slipstream_jax.staleness.change import stale_rows
from slipstream_jax.staleness.threshold import exact_threshold
from slipstream_jax.types import Batch, HotRows, Lookups, RowChange

_REPLAY = 256  # batches that resuming reads again, at most, while it skips


class Settings(NamedTuple):
  """What Slipstream skips, and when."""

  mode: str
  """'inputs': leave stale inputs out; 'rows': let stale rows stand still."""
  policy: Policy
  """Which inputs, of `POLICIES`; in mode 'rows' its `stale_target` says how
  many of them are to be stale."""
  drop_target: float | int
  """Share of hot inputs to leave out, in [0, 1]; of all if `thin_cold`."""
  phases: Phases
  alpha: Alpha = None
  """Stale lookups that make an input stale; None: all of them."""
  min_touches: int = 1
  """Fewer in a window leave a row unknown, not stale; 0: as published."""
  thin_cold: bool = False
  """Whether cold inputs may be left out, too."""
  threshold: float | None = None
  """Given instead of found from the drop target."""
  seed: int = 0
  """Of the draws that keep an input or not."""


class Decision(NamedTuple):
  """What holds while skipping; made once per period."""

  stale: np.ndarray
  """bool[H + 1]: stale hot rows, and False for all cold ones."""
  scale: float
  """From `fit`."""


class Slipstream:
  """The schedule; see the module.

  Attributes:
    seconds: spent on deciding and on choosing inputs so far.
  """

  def __init__(
    self,
    source: BatchSource,
    hot: HotRows,
    probe: Probe,
    settings: Settings,
    batches: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
  ) -> None:
    """Schedules the batches of `source`, which it takes over.

    Args:
      source: all its batches but the last must be of one size.
      hot: the rows that are watched.
      probe: tells what they did in a window.
      settings: what to skip, and when.
      batches: of the source to read before the schedule ends; None: all.
      clock: for `seconds`.

    Raises:
      UserError: settings that cannot be.
    """
    _check(settings)
    self._source, self._hot, self._probe = source, hot, probe
    self._settings, self._batches, self._clock = settings, batches, clock
    self._phases = settings.phases
    if not compares_rows(settings):
      self._phases = self._phases._replace(window=0)
    self.seconds = 0.0
    self._read, self._emitted = 0, 0
    self._queue: Rebatcher | None = None
    self._decision: Decision | None = None
    self._sample: list[Batch] = []
    self._marks: dict[str, Any] = {}
    self._base = self._full_state()

  def __iter__(self) -> Iterator[Scheduled]:
    return self

  def __next__(self) -> Scheduled:
    while self._queue is None or not self._queue.ready():
      batch = self._next_batch()
      if batch is None:
        if self._queue is None or not self._queue.waiting:
          raise StopIteration
        break
      if self._queue is None:
        self._queue = Rebatcher(len(batch.labels))
      self._take_in(batch)
    marks, self._marks = self._marks, {}
    self._emitted += 1
    return Scheduled(
      self._queue.take(), self.get_state(), marks.pop('seen', 0), **marks
    )

  def _next_batch(self) -> Batch | None:
    if self._read == self._batches:
      return None
    phase = phase_at(self._phases, self._read)
    if phase.decides:
      # First of all, so that an interrupted wait leaves nothing half-done.
      self._decide()
    self._keep_base(phase)
    batch = next(self._source, None)
    return batch if batch is None else real_inputs(batch)

  def _take_in(self, batch: Batch) -> None:
    """Chooses among a batch of the source, and queues what is kept."""
    assert self._queue is not None
    phase = phase_at(self._phases, self._read)
    self._read += 1
    seen = len(batch.labels)
    if phase.opens:
      self._marks.update(opens=True)
    if phase.closes:
      self._marks.update(closes=self._read)
    if phase.name == SETTLE:
      self._sample.append(batch)
    skips = phase.name == SKIP and self._settings.mode == 'inputs'
    if skips and self._decision is not None:
      batch = self._choose(batch, self._decision)
    self._queue.put(batch)
    self._count(seen=seen, dropped=seen - len(batch.labels))

  def _count(self, **counts: int) -> None:
    for name, more in counts.items():
      self._marks[name] = self._marks.get(name, 0) + more

  def _choose(self, batch: Batch, decision: Decision) -> Batch:
    started = self._clock()
    facts = self._facts(batch, decision.stale)
    # By the batch's number, so that resuming draws the same again.
    rng = np.random.default_rng((self._settings.seed, self._read))
    uniforms = rng.random(len(batch.labels), np.float32)
    chosen = select(self._settings.policy, facts, decision.scale, uniforms)
    kept = select_inputs(batch, chosen.keep, chosen.weight)
    self.seconds += self._clock() - started
    return kept

  def _facts(self, batch: Batch, stale: np.ndarray) -> InputFacts:
    kinds = classify(self._hot, batch.lookups, stale, self._settings.alpha)
    hot = np.ones_like(kinds.hot) if self._settings.thin_cold else kinds.hot
    return InputFacts(hot, kinds.stale, kinds.stale_share, batch.labels)

  def _decide(self) -> None:
    """Threshold, stale rows and scale, from the batches since the window."""
    sample = Batch(*map(np.concatenate, zip(*self._sample, strict=True)))
    window = self._read - self._phases.settle
    moved = self._probe.row_change(window) if self._phases.window else None
    started = self._clock()
    settings = self._settings
    stale = np.zeros(len(self._hot.rows) + 1, bool)
    event: dict[str, Any] = {'kind': 'decision', 'batches_seen': self._read}
    if moved is not None:
      threshold = self._threshold(moved, sample.lookups)
      stale[:-1] = stale_rows(
        moved.change, threshold, moved.touches, settings.min_touches
      )
      untouched = stale[:-1] & (moved.touches == 0)
      event['threshold'] = threshold
      event['rows_stale'] = int(np.count_nonzero(stale))
      event['rows_stale_untouched'] = int(np.count_nonzero(untouched))
      event['rows_touched'] = int(np.count_nonzero(moved.touches))
    facts, scale = self._facts(sample, stale), np.inf
    if settings.mode == 'inputs':
      scale = fit(settings.policy, facts, float(settings.drop_target))
    event['inputs_hot'] = float(np.mean(facts.hot))
    event['inputs_stale'] = float(np.mean(facts.stale))
    self._decision, self._sample = Decision(stale, scale), []
    self.seconds += self._clock() - started
    event['seconds_choosing'] = self.seconds
    self._marks.update(event=event)
    if settings.mode == 'rows':
      self._marks.update(stale=stale[:-1])

  def _threshold(self, moved: RowChange, lookups: Lookups) -> float:
    settings = self._settings
    if settings.threshold is not None:
      return settings.threshold
    known = moved.touches >= settings.min_touches
    change = self._hot.with_cold(np.where(known, moved.change, np.inf), -1)
    changes = input_changes(self._hot, lookups, change, settings.alpha)
    places = self._hot.places(lookups)
    cold = (places == len(self._hot.rows)).any(
      axis=tuple(range(1, places.ndim))
    )
    target = float(settings.drop_target)
    if settings.mode == 'inputs':
      target = settings.policy.stale_target(target)
    return exact_threshold(changes[~cold], target)

  # Resuming: the whole state is kept once per window and every `_REPLAY`
  # batches; a position is that, and how many batches were delivered since.

  def _keep_base(self, phase: Phase) -> None:
    due = self._read - self._base['read'] >= _REPLAY
    if phase.opens or (due and not self._sample and phase.name != 'window'):
      self._base, self._emitted = self._full_state(), 0

  def _full_state(self) -> State:
    queued = None if self._queue is None else self._queue.peek()
    return {
      'read': self._read,
      'source': self._source.get_state(),
      'marks': dict(self._marks),
      'queued': None if queued is None else queued._asdict(),
      'batch_size': None if self._queue is None else self._queue.batch_size,
      'decision': None if self._decision is None else self._decision._asdict(),
    }

  def get_state(self) -> State:
    """Position after the last batch delivered."""
    return {**self._base, 'emitted': self._emitted}

  def set_state(self, state: State) -> None:
    """Continues right after `state`; reads at most a period again."""
    state = dict(state)
    emitted = state.pop('emitted')
    self._source.set_state(state['source'])
    self._base, self._read = state, state['read']
    self._emitted, self._sample = 0, []
    self._marks = dict(state['marks'])
    self._queue = None
    if state['batch_size'] is not None:
      self._queue = Rebatcher(state['batch_size'])
    if state['queued'] is not None and self._queue is not None:
      self._queue.put(Batch(**state['queued']))
    decision = state['decision']
    self._decision = None if decision is None else Decision(**decision)
    for _ in range(emitted):
      next(self)

  def unreported(self) -> tuple[int, int]:
    """Inputs seen and dropped since the last batch delivered."""
    return self._marks.get('seen', 0), self._marks.get('dropped', 0)

  def close(self) -> None:
    """Closes the source; may be called again."""
    self._source.close()


def compares_rows(settings: Settings) -> bool:
  """Whether what is skipped depends on how far rows moved."""
  if settings.mode == 'rows' or settings.threshold is not None:
    return True
  return settings.policy.stale_target(float(settings.drop_target)) > 0


def _check(settings: Settings) -> None:
  if settings.mode not in ('inputs', 'rows'):
    raise UserError(
      "mode must be 'inputs' or 'rows'",
      got=settings.mode,
      where='config.skip.mode',
      mend='pick one of them',
    )
  if not 0 <= settings.drop_target <= 1:  # NaN compares as False
    raise UserError(
      'the drop target must be in [0, 1]',
      got=settings.drop_target,
      where='config.skip.drop_target',
      mend='give the share of hot inputs to drop, such as 0.3',
    )
  if settings.threshold is not None and not settings.threshold >= 0:
    raise UserError(
      'the threshold must be at least 0',
      got=settings.threshold,
      where='config.skip.threshold',
      mend='leave it out to have it found from the drop target',
    )
  check(settings.phases, compares_rows(settings))
