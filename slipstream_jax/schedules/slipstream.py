"""Slipstream as a schedule: skip what no longer learns (arXiv 2404.04270).

It reads a source batch by batch, goes through the phases of `phases`, and in
phase `skip` leaves inputs out by a policy (mode `inputs`) or names the rows
that stand still (mode `rows`). What it decides depends on the source, the
settings and the rows' changes alone, never on timing.
"""

from collections.abc import Callable, Iterator
import time
from typing import Any

from slipstream_jax.data.batches import BatchSource
from slipstream_jax.data.scheduled import Scheduled, State
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.base import Probe
from slipstream_jax.schedules.choosing import Chooser, Settings
from slipstream_jax.schedules.phases import Phase, phase_at, WINDOW
from slipstream_jax.schedules.rebatch import real_inputs, Rebatcher
from slipstream_jax.types import Batch, HotRows

_REPLAY = 256  # batches that resuming reads again, at most, while it skips


class Slipstream:
  """The schedule; see the module."""

  def __init__(
    self,
    source: BatchSource,
    hot: HotRows,
    probe: Probe,
    settings: Settings,
    batches: int | None = None,
    clock: Callable[[], float] = time.thread_time,
  ) -> None:
    """Schedules the batches of `source`, which it takes over.

    Args:
      source: all its batches but the last must be of one size.
      hot: the rows that are watched.
      probe: tells what they did in a window.
      settings: what to skip, and when.
      batches: of the source to read before the schedule ends; None: all.
      clock: for `seconds`; by default the CPU time of its thread.

    Raises:
      UserError: settings that cannot be.
    """
    self._chooser = Chooser(hot, settings)
    self._source, self._probe, self._clock = source, probe, clock
    self._settings, self._batches = settings, batches
    self._phases = settings.phases
    if not settings.compares_rows:
      self._phases = self._phases._replace(window=0)
    self._seconds = 0.0
    self._read, self._emitted = 0, 0
    self._queue: Rebatcher | None = None
    self._marks: dict[str, Any] = {}
    self._base = self._whole_state()

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
      self._take_in(real_inputs(batch))
    marks, self._marks = self._marks, {}
    self._emitted += 1
    batch, seen = self._queue.take(), marks.pop('seen', 0)
    return Scheduled(batch, self.get_state(), seen, **marks)

  def _next_batch(self) -> Batch | None:
    if self._read == self._batches:
      return None
    phase = phase_at(self._phases, self._read)
    if phase.decides:
      self._decide()
    self._keep_base(phase)
    return next(self._source, None)

  def _decide(self) -> None:
    moved = None
    if self._phases.window:
      moved = self._probe.row_change(self._read - self._phases.settle)
    started = self._clock()
    stale, event = self._chooser.decide(moved)
    self._seconds += self._clock() - started
    self._marks['event'] = {
      'kind': 'decision',
      'batches_seen': self._read,
      **event,
      'seconds_choosing': self._seconds,
    }
    if self._settings.mode == 'rows':
      self._marks['stale'] = stale

  def _take_in(self, batch: Batch) -> None:
    """Queues what is kept of a batch of the source."""
    assert self._queue is not None
    phase, started = phase_at(self._phases, self._read), self._clock()
    self._read += 1
    kept = self._chooser.choose(batch, phase, self._read)
    self._seconds += self._clock() - started
    self._queue.put(kept)
    seen, trained = len(batch.labels), len(kept.labels)
    self._marks['seen'] = self._marks.get('seen', 0) + seen
    self._marks['dropped'] = self._marks.get('dropped', 0) + seen - trained
    if phase.opens:
      self._marks['opens'] = True
    if phase.closes:
      self._marks['closes'] = self._read

  # Resuming: the whole state is kept once per window and every `_REPLAY`
  # batches; a position is that, and how many batches were delivered since.

  def _keep_base(self, phase: Phase) -> None:
    due = self._read - self._base['read'] >= _REPLAY
    quiet = not self._chooser.sampling and phase.name != WINDOW
    if phase.opens or (due and quiet):
      self._base, self._emitted = self._whole_state(), 0

  def _whole_state(self) -> State:
    queued = None if self._queue is None else self._queue.peek()
    return {
      'batches': self._batches,
      'read': self._read,
      'source': self._source.get_state(),
      'marks': dict(self._marks),
      'queued': None if queued is None else queued._asdict(),
      'batch_size': None if self._queue is None else self._queue.batch_size,
      'chooser': self._chooser.get_state(),
    }

  def get_state(self) -> State:
    """Position after the last batch delivered."""
    return {**self._base, 'emitted': self._emitted}

  def set_state(self, state: State) -> None:
    """Continues right after `state`; reads at most a period again.

    Raises:
      UserError: it is of a run over another number of batches, whose last
        inputs were cut into batches otherwise.
    """
    if state['batches'] != self._batches:
      raise UserError(
        f'a resumed run must read as many batches, {state["batches"]}',
        got=self._batches,
        where='config.train.steps',
        mend='use the number that the run was started with',
      )
    self._base = {k: v for k, v in state.items() if k != 'emitted'}
    self._source.set_state(state['source'])
    self._read, self._emitted = state['read'], 0
    self._marks = dict(state['marks'])
    self._queue = None
    if state['batch_size'] is not None:
      self._queue = Rebatcher(state['batch_size'])
      if state['queued'] is not None:
        self._queue.put(Batch(**state['queued']))
    self._chooser.set_state(state['chooser'])
    for _ in range(state['emitted']):
      next(self)

  @property
  def seconds(self) -> float:
    """CPU time spent on deciding and on choosing inputs so far."""
    return self._seconds

  def unreported(self) -> tuple[int, int]:
    """Inputs seen and dropped since the last batch delivered."""
    return self._marks.get('seen', 0), self._marks.get('dropped', 0)

  def close(self) -> None:
    """Closes the source; may be called again."""
    self._source.close()
