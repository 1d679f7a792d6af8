"""Slipstream as a schedule: skip what no longer learns (arXiv 2404.04270).

It reads a source batch by batch, goes through the phases of `phases`, and
while it skips leaves examples out by a policy (mode `examples`) or names the
rows that stand still (mode `rows`). What it decides depends on the source, the
settings and the rows' changes alone, never on timing.
"""

from collections.abc import Iterator
import time
from typing import Any

from slipstream_jax.data.base import BatchSource
from slipstream_jax.errors import check_whole
from slipstream_jax.schedules.base import (
  Edge,
  Probe,
  Scheduled,
  ScheduleSpec,
  State,
)
from slipstream_jax.schedules.chooser import Chooser
from slipstream_jax.schedules.phases import (
  Pending,
  Phase,
  phase_at,
  SETTLE,
  SKIP,
  WINDOW,
)
from slipstream_jax.schedules.rebatch import real_examples, Rebatcher
from slipstream_jax.schedules.settings import (
  check_same,
  check_settings,
  refuse_nothing,
  Skip,
)
from slipstream_jax.types import Batch, HotRows

_REPLAY = 256  # batches that resuming reads again, at most, while it skips
_NOTHING = 1000  # batches in a row without an example to train, or a period


def slipstream(settings: Skip, batches: int | None = None) -> ScheduleSpec:
  """Skips what no longer learns.

  Args:
    settings: what to skip, and when.
    batches: of the source to read before the schedule ends; None: all.

  Raises:
    UserError: settings that cannot be.
  """
  check_settings(settings)
  if batches is not None:
    hint = 'leave it out to read all of the source'
    check_whole(batches, 0, 'slipstream, batches', hint)

  def make(
    source: BatchSource, hot: HotRows | None, probe: Probe
  ) -> Slipstream:
    assert hot is not None
    return Slipstream(source, hot, probe, settings, batches)

  settle = settings.phases.settle if settings.compares_rows else None
  return ScheduleSpec(make, needs_hot=True, settle=settle)


class Slipstream:
  """The schedule; `slipstream` makes it, of settings that it looked at.

  Attributes:
    seconds: CPU time spent on deciding and on choosing examples so far.
  """

  def __init__(
    self,
    source: BatchSource,
    hot: HotRows,
    probe: Probe,
    settings: Skip,
    batches: int | None,
  ) -> None:
    """Schedules the batches of `source`, all of one size but the last."""
    self._chooser = Chooser(hot, settings)
    self._source, self._probe = source, probe
    self._settings, self._batches = settings, batches
    self._phases = settings.phases
    if not settings.compares_rows:
      self._phases = self._phases._replace(window=0)
    self.seconds = 0.0
    self._read, self._emitted, self._nothing = 0, 0, 0
    self._queue: Rebatcher | None = None
    self._pending: Pending | None = None
    self._frozen = False  # whether a decision lets rows stand still
    # Of the next batch to deliver: its `Edge`, and other fields of `Scheduled`.
    self._edge: dict[str, Any] = {}
    self._marks: dict[str, Any] = {'seen': 0, 'dropped': 0}
    self._base = self._whole_state(source.get_state())

  def __iter__(self) -> Iterator[Scheduled]:
    return self

  def __next__(self) -> Scheduled:
    while self._queue is None or not self._queue.ready():
      if not self._read_one():
        if self._queue is None or not self._queue.waiting:
          raise StopIteration
        break  # what waits becomes the last batch, padded
    marks, self._marks = self._marks, {'seen': 0, 'dropped': 0}
    edge, self._edge = Edge(**self._edge), {}
    self._emitted += 1
    if self._phases.window:
      self._count_down()
    # All that was read has begun: of each batch read some examples are in the
    # queue before this batch is full, or fresh rows that come with it.
    source: State = self._source.get_state()
    marks['grown'] = source.get('vocabularies', {})
    return Scheduled(self._queue.take(), self.get_state(), edge=edge, **marks)

  def _read_one(self) -> bool:
    """Takes in a batch of the source; False once none is left."""
    if self._read == self._batches:
      return False
    position = self._source.get_state()
    batch = next(self._source, None)
    if batch is None:
      return False
    phase = phase_at(self._phases, self._read)
    # A new period has begun: what is still pending is of the one before.
    if phase.name != SKIP or (phase.samples and not self._phases.window):
      self._give_up()
    due = self._pending is not None and self._pending.left <= 0
    if due:
      self._decide()
    self._keep_base(phase, due, position)
    if self._queue is None:
      self._queue = Rebatcher(len(batch.labels))
    self._take_in(real_examples(batch), phase)
    return True

  # Settling: a decision is pending from the window's end until it is due, and
  # what is read meanwhile is its sample. The batch that closes the window and
  # `settle` more are counted as they are delivered, not as they are read: the
  # probe answers only after the step of the first, and of examples of weight 0
  # many batches are read for one that is delivered. Without windows nobody has
  # to answer, and batches count as they are read.

  def _count_down(self) -> None:
    if self._pending is not None:
      self._pending = self._pending._replace(left=self._pending.left - 1)

  def _give_up(self) -> None:
    """Drops the last period's decision if it has not come by the next one."""
    if self._pending is None:
      return
    self._pending = None
    self._chooser.forget()
    # Else the next window's end could fall on the same step, under one number.
    self._edge.pop('closes', None)
    self._marks['event'] = {'kind': 'undecided', 'batches_seen': self._read}

  def _decide(self) -> None:
    assert self._pending is not None
    moved = None
    if self._phases.window:
      moved = self._probe.row_change(self._pending.window)
    started = time.thread_time()
    stale, event = self._chooser.decide(moved)
    self.seconds += time.thread_time() - started
    self._pending = None
    self._marks['event'] = {
      'kind': 'decision',
      'batches_seen': self._read,
      **event,
      'seconds_choosing': self.seconds,
    }
    if stale is not None:
      self._edge['stale'], self._frozen = stale, True

  def _take_in(self, batch: Batch, phase: Phase) -> None:
    """Queues what is kept of a batch of the source."""
    assert self._queue is not None
    started = time.thread_time()
    if phase.samples and not self._phases.window:
      self._pending = Pending(self._read, self._settings.phases.settle)
    self._read += 1
    self._renew(batch, phase)
    name = phase.name if self._pending is None else SETTLE
    kept = self._chooser.choose(batch, name, self._read)
    self.seconds += time.thread_time() - started
    self._queue.put(kept)
    seen, trained = len(batch.labels), len(kept.labels)
    self._marks['seen'] += seen
    self._marks['dropped'] += seen - trained
    self._check_some(trained)
    if phase.opens:
      self._edge['opens'], self._frozen = True, False
      self._edge.pop('stale', None)  # decided, but thawed before its step
    if phase.closes:
      # The window is known by how much was read up to its end: to the trainer,
      # which compares after this batch's step, and to `_decide`, which asks.
      self._edge['closes'] = self._read
      # The step that closes the window is counted, too.
      left = 1 + self._settings.phases.settle
      self._pending = Pending(self._read, left)
    elif seen and not self._phases.window:
      self._count_down()

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

  def _check_some(self, trained: int) -> None:
    """Fails where reading goes on for ever, and nothing is left to train."""
    self._nothing = 0 if trained else self._nothing + 1
    if self._nothing >= max(_NOTHING, self._phases.period):
      dropped = bool(self._marks['dropped'])
      refuse_nothing(self._settings, self._nothing, dropped)

  # Resuming: the whole state is kept as a window opens, after each decision,
  # and every `_REPLAY` batches unless one is pending; a position is that, and
  # how many batches were delivered since. So no decision is ever made again,
  # for which neither the sample nor the rows' changes would be at hand.

  def _keep_base(self, phase: Phase, decided: bool, source: State) -> None:
    due = self._read - self._base['read'] >= _REPLAY
    quiet = self._pending is None and phase.name != WINDOW
    if phase.opens or decided or (due and quiet):
      self._base, self._emitted = self._whole_state(source), 0

  def _whole_state(self, source: State) -> State:
    return {
      'batches': self._batches,
      'settings': self._settings.in_words(),
      'read': self._read,
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
    return {**self._base, 'emitted': self._emitted}

  def set_state(self, state: State) -> None:
    """Continues right after `state`; reads at most a period again.

    Raises:
      UserError: it is of a run with other settings or another end, or the
        probe does not know what rows did in a window closed before `state`.
    """
    settings = self._settings.in_words()
    check_same(state, 'batches', 'read as many batches', self._batches)
    check_same(state, 'settings', 'skip by the same settings', settings)
    self._base = {k: v for k, v in state.items() if k != 'emitted'}
    self._source.set_state(state['source'])
    self._read, self._emitted = state['read'], 0
    self._edge, self._marks = dict(state['edge']), dict(state['marks'])
    self._queue = None
    if state['batch_size'] is not None:
      self._queue = Rebatcher(state['batch_size'], state['queue'])
    self._frozen = state['frozen']
    self._pending, self._nothing = None, state['nothing']
    self._chooser.set_state(state['chooser'])
    for _ in range(state['emitted']):
      next(self)
    self._resume_probe()

  def _resume_probe(self) -> None:
    pending, window = self._pending, None
    if self._phases.window and pending is not None:
      # One less as soon as the batch that closes the window was delivered.
      closed = pending.left <= self._settings.phases.settle
      window = pending.window if closed else None
    self._probe.resume(window)

  def unreported(self) -> tuple[int, int]:
    """Examples seen and dropped since the last batch delivered."""
    marks, self._marks = self._marks, {'seen': 0, 'dropped': 0}
    return marks['seen'], marks['dropped']

  def close(self) -> None:
    """Closes the source; may be called again."""
    self._source.close()
