"""Slipstream as a schedule: skip what no longer learns (arXiv 2404.04270).

It goes through the phases of `phases`, and while it skips leaves examples out
by a policy (mode `examples`) or names the rows that stand still (mode `rows`).
It decides by source, settings and rows' changes alone, never by timing.
"""

from collections.abc import Iterator
import time
from typing import Any

from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import check_whole
from slipstream_jax.schedules import rebatch
from slipstream_jax.schedules.base import (
  Edge,
  Ordered,
  Probe,
  Queue,
  Regrouping,
  Scheduled,
  ScheduleSpec,
  State,
)
from slipstream_jax.schedules.chooser import Chooser
from slipstream_jax.schedules.phases import (
  closed_window,
  Pending,
  Phase,
  phase_at,
  SETTLE,
  SKIP,
  WARM_UP,
  WINDOW,
)
from slipstream_jax.schedules.refusals import check_same, refuse_nothing
from slipstream_jax.schedules.settings import check_settings, Skip
from slipstream_jax.types import Batch, HotRows

_REPLAY = 256  # batches that resuming reads again, at most, while it skips
_NOTHING = 1000  # batches in a row without an example to train, or a period


def slipstream(
  settings: Skip,
  batches: int | None = None,
  regrouping: Regrouping | None = None,
  multiple: int = 1,
) -> ScheduleSpec:
  """Skips what no longer learns.

  Args:
    settings: what to skip, and when.
    batches: of the source to read before the schedule ends; None: all.
    regrouping: how examples change places: as of another schedule.
    multiple: divides the size of each batch, as it does that of the source's.

  Raises:
    UserError: settings that cannot be.
  """
  check_settings(settings)
  rebatch.check_order(regrouping, settings.refill)
  if batches is not None:
    hint = 'leave it out to read all of the source'
    check_whole(batches, 0, 'slipstream, batches', hint)

  def make(
    source: BatchSource, hot: HotRows | None, probe: Probe
  ) -> Slipstream:
    assert hot is not None
    order = None if regrouping is None else regrouping.order
    ordered = order(source, hot, probe) if order else Ordered(source)
    how = settings, batches, regrouping, multiple
    return Slipstream(ordered, hot, probe, *how)

  settle = settings.phases.settle if settings.compares_rows else None
  return ScheduleSpec(make, True, settle, regrouping, settings.offsets)


class Slipstream:
  """The schedule; `slipstream` makes it, of settings that it looked at."""

  def __init__(
    self,
    source: Ordered,
    hot: HotRows,
    probe: Probe,
    settings: Skip,
    batches: int | None,
    regrouping: Regrouping | None,
    multiple: int = 1,
  ) -> None:
    """Schedules batches all of one size but the last."""
    self._chooser = Chooser(hot, settings)
    self._source, self._probe = source, probe
    self._settings, self._batches = settings, batches
    self._sizes = settings.chosen_policy.correction != 'none', multiple
    more = '' if regrouping is None else f', {regrouping.name}'
    self._words = settings.in_words() + more
    self._make = rebatch.queue_of(regrouping, hot, settings.refill)
    self._phases = settings.phases
    if not settings.compares_rows:
      self._phases = self._phases._replace(window=0)
    self.seconds = 0.0
    self._read, self._emitted, self._nothing = 0, 0, 0
    self._phased, self._counts = 0, True  # batches that phases count; the last
    self._queue: Queue | None = None
    self._pending: Pending | None = None
    self._frozen = False  # whether a decision lets rows stand still
    # Of the next batch to deliver: its `Edge`, and other fields of `Scheduled`.
    self._edge: dict[str, Any] = {}
    self._marks: dict[str, Any] = {'seen': 0, 'dropped': 0}
    # Where the source was after the last batch delivered: another schedule
    # goes on from there. Not known where its batches were put in an order.
    self._knows_source = regrouping is None or regrouping.order is None
    self._behind: State | None = None
    self._base = self._whole_state(source.get_state())
    self._note_source()

  def __iter__(self) -> Iterator[Scheduled]:
    return self

  def __next__(self) -> Scheduled:
    while self._queue is None or not self._queue.ready():
      if not self._read_one():
        if self._queue is None or not self._queue.waiting:
          raise StopIteration
        break  # what waits becomes the last batch, padded
    marks, self._marks = self._marks, {'seen': 0, 'dropped': 0}
    fields, self._edge = self._edge | self._source.take_edge(), {}
    self._emitted += 1
    if self._phases.window and (self._counts or 'closes' in fields):
      self._count_down()
    # All that was read has begun, or is fresh and comes with this batch.
    marks['grown'] = self._note_source().get('vocabularies', {})
    batch, edge = self._queue.take(), Edge(**fields)
    return Scheduled(batch, self.get_state(), edge=edge, **marks)

  def _note_source(self) -> State:
    source: State = self._source.get_state()
    self._behind = source if self._knows_source else None
    return source

  def _read_one(self) -> bool:
    """Takes in a batch of the source; False once none is left."""
    if self._read == self._batches:
      return False
    position = self._source.get_state()
    batch = next(self._source, None)
    if batch is None:
      return False
    # Of examples that look up cold rows alone there is nothing to skip.
    self._counts = self._source.counts
    at = self._phased
    phase = phase_at(self._phases, at) if self._counts else Phase(SKIP)
    if self._settings.is_over(self._read):
      phase = Phase(WARM_UP)  # nothing is compared, decided or left out
    if phase.name != SKIP or (phase.samples and not self._phases.window):
      self._give_up()
    due = self._pending is not None and self._pending.left <= 0
    if due:
      self._decide()
    self._keep_base(phase, due, position)
    if self._queue is None:
      self._queue = self._make(len(batch.labels), None)
    self._take_in(rebatch.real_examples(batch), phase)
    return True

  # With windows, batches count as they are delivered, for only a step makes the
  # probe answer; without, nobody has to, and they count as they are read.

  def _count_down(self) -> None:
    if self._pending is not None:
      self._pending = self._pending._replace(left=self._pending.left - 1)

  def _give_up(self) -> None:
    """Drops the last period's decision if it has not come by the next one."""
    if self._pending is not None:
      self._pending = None
      self._chooser.forget()
      # Else the next window's end could be of the same step, by one number.
      self._edge.pop('closes', None)
      self._tell('undecided')

  def _decide(self) -> None:
    assert self._pending is not None
    at = self._pending.window
    moved = self._probe.row_change(at) if self._phases.window else None
    started = time.thread_time()
    stale, event = self._chooser.decide(moved)
    self.seconds += time.thread_time() - started
    self._pending = None
    self._tell(**event, seconds_choosing=self.seconds)
    if stale is not None:
      self._edge['stale'], self._frozen = stale, True

  def _take_in(self, batch: Batch, phase: Phase) -> None:
    """Queues what is kept of a batch of the source."""
    assert self._queue is not None
    started = time.thread_time()
    if phase.samples and not self._phases.window:
      self._chooser.recount()
      self._pending = Pending(self._read, self._settings.phases.settle)
    self._read += 1
    self._phased += self._counts
    self._renew(batch, phase)
    settles = self._pending is not None and self._counts
    name = SETTLE if settles else phase.name
    kept = self._chooser.choose(batch, name, self._read)
    self.seconds += time.thread_time() - started
    if (event := self._chooser.event) and 'event' not in self._marks:
      self._tell(**event)
    seen, trained = len(batch.labels), len(kept.labels)
    if not self._settings.refill:
      size = self._queue.batch_size
      kept, scale = rebatch.alone(kept, seen, size, *self._sizes)
      self._marks |= {'scale': scale, 'batch_size': size}
    self._queue.put(kept)
    self._marks['seen'] += seen
    self._marks['dropped'] += seen - trained
    self._nothing = 0 if trained else self._nothing + 1
    if self._nothing >= max(_NOTHING, self._phases.period):
      self._train_something()
    if phase.opens:
      self._edge['opens'], self._frozen = True, False
      self._edge.pop('stale', None)  # decided, but thawed before its step
    if phase.closes:
      self._edge['closes'] = self._read  # the window's number
      # The step that closes the window is counted, too.
      self._pending = Pending(self._read, 1 + self._phases.settle)
    elif seen and self._counts and not self._phases.window:
      self._count_down()

  def _train_something(self) -> None:
    """Ends the skipping that left nothing to train, unless it was asked for.

    Raises:
      UserError: the drop target is 1, or the source gives nothing but padding.
    """
    dropped, target = self._marks['dropped'] > 0, self._settings.target
    if not dropped or target == 1:
      refuse_nothing(self._settings, self._nothing, dropped)
    self._chooser.keep_all()
    self._tell('undecided', missed=target - 1, batches_left_out=self._nothing)
    self._nothing = 0

  def _tell(self, kind: str, **event: Any) -> None:
    """With the next batch, for the metrics."""
    self._marks['event'] = {'kind': kind, 'batches_seen': self._read, **event}

  def _renew(self, batch: Batch, phase: Phase) -> None:
    """Rows that got another id are not stale, whatever the old one's did."""
    if phase.opens:
      self._chooser.forget_renewed()
    if batch.fresh is None or not self._phases.window:
      return
    stale = self._chooser.renew(batch.fresh)
    # At the next batch delivered, which these rows come with or after.
    if stale is not None and self._frozen:
      self._edge['stale'] = stale

  # The whole state is kept as a window opens, after each decision, and every
  # `_REPLAY` batches unless one is pending; a position is that, and how many
  # batches came since. So no decision is made again, without its sample.

  def _keep_base(self, phase: Phase, decided: bool, source: State) -> None:
    due = self._read - self._base['read'] >= _REPLAY
    quiet = self._pending is None and phase.name != WINDOW
    if phase.opens or decided or (due and quiet):
      self._base, self._emitted = self._whole_state(source), 0

  def _whole_state(self, source: State) -> State:
    return {
      'batches': self._batches,
      'settings': self._words,
      'read': self._read,
      'phased': self._phased,
      'nothing': self._nothing,
      'source': source,
      'edge': dict(self._edge),
      'marks': dict(self._marks),
      'frozen': self._frozen,
      'queue': None if self._queue is None else self._queue.get_state(),
      'batch_size': None if self._queue is None else self._queue.batch_size,
      'chooser': self._chooser.get_state(),
    }

  def get_state(self) -> State:
    """Position after the last batch delivered."""
    return {**self._base, 'emitted': self._emitted, 'behind': self._behind}

  def set_state(self, state: State) -> None:
    """Continues right after `state`; reads at most a period again.

    Raises:
      UserError: it is of a run with other settings or another end, or the
        probe does not know what rows did in a window closed before `state`.
    """
    check_same(state, 'batches', 'read as many batches', self._batches)
    check_same(state, 'settings', 'skip by the same settings', self._words)
    own = ('emitted', 'behind')
    self._base = {k: v for k, v in state.items() if k not in own}
    self._source.set_state(state['source'])
    self._read, self._emitted = state['read'], 0
    self._phased = state.get('phased', self._read)
    self._edge, self._marks = dict(state['edge']), dict(state['marks'])
    self._queue = None
    if state['batch_size'] is not None:
      self._queue = self._make(state['batch_size'], state['queue'])
    self._frozen = state['frozen']
    self._pending, self._nothing = None, state['nothing']
    self._chooser.set_state(state['chooser'])
    self._note_source()
    for _ in range(state['emitted']):
      next(self)
    self._source.resumed()
    self._probe.resume(closed_window(self._phases, self._pending))

  def unreported(self) -> tuple[int, int]:
    """Examples seen and dropped since the last batch delivered."""
    marks, self._marks = self._marks, {'seen': 0, 'dropped': 0}
    return marks['seen'], marks['dropped']

  def close(self) -> None:
    """Closes the source; may be called again."""
    self._source.close()
