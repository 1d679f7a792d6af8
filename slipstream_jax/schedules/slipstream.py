"""Slipstream as a schedule: skips what no longer learns (arXiv 2404.04270).

It goes through the phases of `phases`. While it skips, it leaves examples out
by a policy (mode `examples`) or freezes rows (mode `rows`). Decisions depend on
source, settings and changes of rows alone, never on timing.

A batch of the source is read, prepared (`Chooser.prepare`), gets its turn
(`Chooser.choose`), and its kept examples are copied into batches. Only the
first and the third step go in the order of the source. `stages` gives all four
to the threads that prepare batches. `__next__` does the same in one thread.
"""

from collections.abc import Iterator
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.schedules.ahead import Ahead
from slipstream_jax.schedules.base import (
  check_batches,
  check_same,
  Edge,
  Emitted,
  Probe,
  Regrouping,
  Schedule,
  ScheduledBatch,
  ScheduleSpec,
  Spent,
  Stages,
  State,
)
from slipstream_jax.schedules.chooser import Chooser, Prepared
from slipstream_jax.schedules.phases import (
  PendingDecision,
  Phase,
  phase_at,
  SETTLE,
  SKIP,
  WARM_UP,
  WINDOW,
)
from slipstream_jax.schedules.rebatch import (
  padded_size,
  Queue,
  Rebatcher,
  SingleBatchQueue,
)
from slipstream_jax.schedules.settings import check_settings, Skip
from slipstream_jax.types import Batch, HotRows

_REPLAY = 256  # batches that resuming reads again, at most, while it skips
_NOTHING = 1000  # batches in a row without an example, at least a period


def slipstream(
  settings: Skip,
  batches: int | None = None,
  regrouping: Regrouping | None = None,
  multiple: int = 1,
) -> ScheduleSpec:
  """Skips what no longer learns.

  Args:
    settings: what to skip, and when.
    batches: of the source to read before the schedule ends. None: all.
    regrouping: how another schedule changes the order of examples.
    multiple: divides the size of each batch.

  Raises:
    UserError: an invalid combination of settings.
  """
  check_settings(settings)
  cuts = regrouping is not None and regrouping.queue is not None
  if regrouping is not None and cuts and not settings.refills:
    raise UserError(
      'batches that are not filled up again go in the order of the source',
      got=f'refill {settings.refill}, and {regrouping.name}',
      where='Skip.refill',
      hint='set it to True, or take a system that keeps the order',
    )
  by_model = settings.scores_by_model
  if regrouping is not None and (settings.finds_drop or by_model):
    setting = 'scorer' if by_model else 'drop'
    raise UserError(
      f'{setting} {getattr(settings, setting)!r} follows the model in the order'
      ' of the source',
      got=regrouping.name,
      where=f'Skip.{setting}',
      hint='give another one, or take a system that keeps the order',
    )
  check_batches(batches, 'slipstream')

  def make(
    source: BatchSource, hot: HotRows | None, probe: Probe
  ) -> Slipstream:
    assert hot is not None
    if regrouping is not None and regrouping.order is not None:
      source = regrouping.order(source, hot, probe)
    how = settings, batches, regrouping, multiple
    return Slipstream(source, hot, probe, *how)

  settle = settings.chosen_phases.settle if settings.compares_rows else None
  asks = settings.finds_drop or by_model
  late = settings.chosen_phases.settle if asks else None
  corrects = settings.offsets
  return ScheduleSpec(make, True, settle, late, regrouping, corrects, by_model)


class _Read(NamedTuple):
  """A batch as it was read, before its turn."""

  batch: Batch | None
  """None at the end of the source."""
  number: int
  """Number of the batch in the source, from 0."""
  before: State
  """Position of the source before the batch."""
  after: State
  """And after it."""
  counts: bool
  """Whether its examples may be skipped."""
  seconds: float
  """The processor's time that reading took."""


class _Ready(NamedTuple):
  """A batch whose turn may come."""

  read: _Read
  prepared: Prepared | None
  """None at the end of the source."""
  seconds: float
  """The processor's time that preparing it took."""


class Slipstream(Schedule):
  """The schedule that `slipstream` makes from valid settings.

  A position is a whole state and the number of batches delivered since then.
  Resuming reads the batches after the whole state again.
  """

  def __init__(
    self,
    source: BatchSource,
    hot: HotRows,
    probe: Probe,
    settings: Skip,
    batches: int | None,
    regrouping: Regrouping | None,
    multiple: int = 1,
  ) -> None:
    """Takes over `source`, whose batches have one size but for the last."""
    super().__init__(source)
    self._hot, self._probe = hot, probe
    self._settings, self._batches = settings, batches
    self._regrouping, self._multiple = regrouping, multiple
    cuts = regrouping is not None and regrouping.queue is not None
    self._only_regroups = cuts and settings.until == 0
    self.refills = settings.refills
    self._words = settings.in_words()
    if regrouping is not None:
      self._words += f', {regrouping.name}'
    self._chooser = Chooser(hot, settings)
    self._beside = self._chooser.beside
    self._phases = settings.chosen_phases
    self._ahead: Ahead[_Read] | None = None
    if settings.scores_by_model:
      self._ahead = Ahead(self._phases.settle, settings.target)
    if not settings.compares_rows:
      self._phases = self._phases._replace(window=0)
    self._queue: Queue | None = None  # made when the first batch comes
    # Batches of the source that were read, that had their turn, and batches
    # emitted since the last whole state.
    self._taken = self._read = self._emitted = 0
    self._nothing = 0  # batches in a row of which nothing was kept
    self._phased = 0  # batches that phases count
    self._counts = True  # whether the last batch is one of them
    self._pending: PendingDecision | None = None
    self._frozen = False  # whether a decision freezes rows
    # Fields of the next batch to deliver, of `Edge` and of `ScheduledBatch`.
    self._edge: dict[str, Any] = {}
    self._marks: dict[str, Any] = {'seen': 0, 'dropped': 0}
    # The source's position after the last batch delivered, from which another
    # schedule may continue. None where its batches were put in another order.
    self._behind: State | None = None
    self._base: State = {}
    self._after: State = {}
    self._spent = Spent()
    self._adding = threading.Lock()
    self._note(self._source.get_state())
    self._remember(self._after)

  def _new_queue(self, batch_size: int, state: State | None = None) -> Queue:
    if not self._settings.refills:
      return SingleBatchQueue(batch_size, state)
    if self._regrouping is None or self._regrouping.queue is None:
      return Rebatcher(batch_size, state)
    return self._regrouping.queue(self._hot, batch_size, state)

  def __next__(self) -> ScheduledBatch:
    empty = self._queue is None or not self._queue.ready()
    if empty and self._only_regroups:
      self._remember(self._source.get_state())
    while self._queue is None or not self._queue.ready():
      read = self._next_read()
      self._commit(self._prepare(read))
      if read.batch is None:
        if self._queue is None or not self._queue.waiting:
          raise StopIteration
        break  # the rest becomes the last batch, padded
    started = time.thread_time()
    item = self._emit().scheduled()
    self._spend(time.thread_time() - started)
    return item

  def stages(self) -> Stages | None:
    """Returns the parts of `__next__`, for several threads.

    None where the next batch of the source may wait for a step, or may come in
    an order that does.
    """
    waits = self._beside is not None or self._ahead is not None
    if waits or self._phases.window or self._regrouping is not None:
      return None
    return Stages(
      self._read_all(),
      self._open_before,
      self._prepare,
      self._take_turn,
      self._spend,
    )

  def _read_all(self) -> Iterator[_Read]:
    while True:
      read = self._read_one()
      yield read
      if read.batch is None:
        return

  def _next_read(self) -> _Read:
    """Returns the batch of the source whose turn it is."""
    if self._ahead is None:
      return self._read_one()

    def read_one() -> tuple[int, Batch | None, _Read]:
      read = self._read_one()
      # After `until` nothing is left out.
      over = self._settings.is_over(read.number)
      return read.number, None if over else read.batch, read

    return self._ahead.take(read_one)

  def _read_one(self) -> _Read:
    """Reads a batch of the source, maybe ahead of its turn."""
    before = self._source.get_state()
    started = time.thread_time()
    number, batch = self._taken, None
    if number != self._batches:
      batch = next(self._source, None)
    seconds = time.thread_time() - started
    if batch is not None:
      self._taken += 1
      self._chooser.begin(batch)
    after, counts = self._source.get_state(), self._source.counts
    return _Read(batch, number, before, after, counts, seconds)

  def _open_before(self, read: _Read) -> int:
    """Returns how many batches before one need no turn to prepare it."""
    if read.batch is None:
      return read.number
    return self._chooser.open_before(read.number, len(read.batch.labels))

  def _prepare(self, read: _Read) -> _Ready:
    """Does what needs no choice, in any thread."""
    if read.batch is None:
      return _Ready(read, None, 0.0)
    started = time.thread_time()
    prepared = self._chooser.prepare(read.batch, read.number)
    return _Ready(read, prepared, time.thread_time() - started)

  def _take_turn(self, ready: _Ready) -> list[Emitted]:
    """Commits a batch of the source, and returns the batches it completes."""
    self._commit(ready)
    emitted: list[Emitted] = []
    while self._queue is not None and self._queue.ready():
      emitted.append(self._emit())
    ended = ready.read.batch is None
    if ended and self._queue is not None and self._queue.waiting:
      emitted.append(self._emit())
    return emitted

  def _commit(self, ready: _Ready) -> None:
    """Chooses from the next batch of the source. Goes in their order."""
    read, started = ready.read, time.thread_time()
    self._note(read.after)
    self.seconds_reading += read.seconds
    if ready.prepared is None:
      return
    # Examples that look up cold rows only are not skipped.
    self._counts = read.counts
    at = self._phased
    phase = phase_at(self._phases, at) if self._counts else Phase(SKIP)
    if self._settings.is_over(self._read):
      phase = Phase(WARM_UP)  # nothing is compared, decided or left out
    if phase.name != SKIP or (phase.samples and not self._phases.window):
      self._give_up()
    due = self._pending is not None and self._pending.left <= 0
    if due:
      self._decide()
    self._remember_if_due(phase, due, read.before)
    if self._queue is None:
      self._queue = self._new_queue(ready.prepared.size)
    self._take_in(ready.prepared, phase, self._queue)
    turn = time.thread_time() - started
    self._spend(ready.seconds + turn)
    spent = Spent(read.seconds, turn, ready.seconds)
    self._spent = Spent(*map(sum, zip(self._spent, spent, strict=True)))

  def _emit(self) -> Emitted:
    """Takes the next batch from the queue, without a copy."""
    assert self._queue is not None
    marks, self._marks = self._marks, {'seen': 0, 'dropped': 0}
    fields, self._edge = self._edge | self._source.take_edge(), {}
    self._emitted += 1
    if self._phases.window and (self._counts or 'closes' in fields):
      self._count_down()
    # Rows reassigned by then have begun, or come with this batch as fresh.
    marks['grown'] = self._after.get('vocabularies', {})
    waiting = self._queue.waiting
    copy, spent, self._spent = self._queue.cut(), self._spent, Spent()
    if self._beside is not None:
      fields['tells'] = self._beside.cut(waiting - self._queue.waiting)
      self._beside.ask(self._probe.losses.wait)
      # No step is as late as that and yet to be trained.
      late = self._settings.chosen_phases.settle
      self._probe.losses.forget(self._beside.told - late)
    if self._ahead is not None:
      fields['predicts'] = self._ahead.delivered(self._base['read'])
    marks |= {'state': self.get_state(), 'edge': Edge(**fields)}
    return Emitted(copy, marks, spent)

  def _spend(self, seconds: float) -> None:
    """Adds the processor's time of one of the threads."""
    with self._adding:
      self.seconds += seconds

  def _note(self, source: State) -> None:
    """Keeps the source's position after the last batch that had its turn."""
    self._after = source
    reorders = self._regrouping is not None and self._regrouping.order
    self._behind = None if reorders else source

  # With windows, batches count when they are delivered, because only a step
  # makes the probe answer. Without windows they count when they are read.

  def _count_down(self) -> None:
    if self._pending is not None:
      self._pending = self._pending._replace(left=self._pending.left - 1)

  def _give_up(self) -> None:
    """Drops the last period's decision if it has not come by the next one."""
    if self._pending is not None:
      self._pending = None
      self._chooser.forget()
      # Else two windows could close with one step, under one number.
      self._edge.pop('closes', None)
      self._tell('undecided')

  def _decide(self) -> None:
    assert self._pending is not None
    at = self._pending.window
    moved = self._probe.row_change(at) if self._phases.window else None
    stale, event = self._chooser.decide(moved)
    self._pending = None
    self._tell(**event, seconds_choosing=self.seconds)
    if stale is not None:
      self._edge['stale'], self._frozen = stale, True

  def _take_in(self, prepared: Prepared, phase: Phase, queue: Queue) -> None:
    """Puts the kept examples of a batch of the source into the queue."""
    if phase.samples and not self._phases.window:
      self._chooser.recount()
      self._pending = PendingDecision(self._read, self._phases.settle)
    number = self._read
    self._read += 1
    self._phased += self._counts
    self._renew(prepared.batch, phase)
    settles = self._pending is not None and self._counts
    name = SETTLE if settles else phase.name
    scores = None
    if self._ahead is not None:
      asked = number, prepared.size, self._probe.logits.wait
      scores = self._ahead.scores(*asked)
    batch, index = self._chooser.choose(prepared, name, number, scores)
    if (event := self._chooser.event) and 'event' not in self._marks:
      self._tell(**event)
    seen = len(batch.labels)
    trained = seen if index is None else len(index)
    if isinstance(queue, SingleBatchQueue):
      corrected = self._settings.chosen_policy.correction != 'none'
      how = queue.batch_size, corrected, self._multiple
      size, scale = padded_size(trained, seen, *how)
      self._marks |= {'scale': scale, 'batch_size': queue.batch_size}
      queue.put(batch, index, size)
    else:
      queue.put(batch, index)
    self._marks['seen'] += seen
    self._marks['dropped'] += seen - trained
    self._nothing = 0 if trained else self._nothing + 1
    if self._nothing >= max(_NOTHING, self._phases.period):
      self._train_something()
    if phase.opens:
      self._edge['opens'], self._frozen = True, False
      self._edge.pop('stale', None)  # thawed before the step of the decision
    if phase.closes:
      self._edge['closes'] = self._read  # the window's number
      # The step that closes the window is counted, too.
      self._pending = PendingDecision(self._read, 1 + self._phases.settle)
    elif seen and self._counts and not self._phases.window:
      self._count_down()

  def _train_something(self) -> None:
    """Stops skipping until the next decision, because nothing was left.

    Raises:
      UserError: the drop target is 1, or the source gives nothing but padding.
    """
    if not self._marks['dropped']:
      raise UserError(
        'a source must give examples of a weight above 0',
        got=f'{self._nothing} batches in a row without one',
        where='train, source',
        hint='look at its weights',
      )
    target = self._settings.target
    if target == 1:
      raise UserError(
        'the drop target must leave examples to train',
        got=f'{self._settings.drop}, which left none of the last'
        f' {self._nothing} batches of the source',
        where='Skip.drop',
        hint='lower it, or give a source that ends before',
      )
    self._chooser.keep_all()
    self._tell('undecided', missed=target - 1, batches_left_out=self._nothing)
    self._nothing = 0

  def _tell(self, kind: str, **event: Any) -> None:
    """Sets the event of the next batch, for the metrics."""
    self._marks['event'] = {'kind': kind, 'batches_seen': self._read, **event}

  def _renew(self, batch: Batch, phase: Phase) -> None:
    """Thaws rows that were reassigned to another id."""
    if phase.opens:
      self._chooser.forget_renewed()
    if batch.fresh is None or not self._phases.window:
      return
    stale = self._chooser.renew(batch.fresh)
    # These rows come with the next batch delivered, or later.
    if stale is not None and self._frozen:
      self._edge['stale'] = stale

  # The whole state is remembered when a window opens, after each decision, and
  # every `_REPLAY` batches unless a decision is pending. So resuming makes no
  # decision again without its sample. Where examples are only regrouped, it is
  # remembered whenever no full batch is left: nothing else must be saved then.

  def _remember_if_due(
    self, phase: Phase, decided: bool, source: State
  ) -> None:
    due = self._read - self._base['read'] >= _REPLAY
    quiet = self._pending is None and phase.name != WINDOW
    if phase.opens or decided or (due and quiet):
      self._remember(source)

  def _remember(self, source: State) -> None:
    """Makes the state of now, with a position of the source, the whole one."""
    queue = self._queue
    self._emitted = 0
    self._base = {
      'settings': self._words,
      'batches': self._batches,
      'source': source,
      'read': self._read,
      'queue': None if queue is None else queue.get_state(),
      'batch_size': None if queue is None else queue.batch_size,
      'phased': self._phased,
      'nothing': self._nothing,
      'edge': dict(self._edge),
      'marks': dict(self._marks),
      'frozen': self._frozen,
      'chooser': self._chooser.get_state(),
      'ahead': self._ahead and self._ahead.get_state(self._read),
    }

  def get_state(self) -> State:
    """Returns the position after the last batch delivered."""
    state: State = {'emitted': self._emitted, 'behind': self._behind}
    if self._beside is not None:
      state['heard'] = np.array(self._beside.heard, np.float64)
    return self._base | state

  def set_state(self, state: State) -> None:
    """Continues right after `state`. Reads at most a period again.

    Raises:
      UserError: it is of a run with other settings or another end, or the
        probe does not know what rows did in a window closed before `state`.
    """
    check_same(state, 'batches', 'read as many batches', self._batches)
    check_same(state, 'settings', 'skip by the same settings', self._words)
    self._base = {
      k: v for k, v in state.items() if k not in ('emitted', 'behind', 'heard')
    }
    self._source.set_state(state['source'])
    self._queue = None
    if state['batch_size'] is not None:
      self._queue = self._new_queue(state['batch_size'], state['queue'])
    self._read, self._emitted = state['read'], 0
    self._taken, self._spent = self._read, Spent()
    self._phased = state.get('phased', self._read)
    self._edge, self._marks = dict(state['edge']), dict(state['marks'])
    self._frozen = state['frozen']
    self._pending, self._nothing = None, state['nothing']
    self._chooser.set_state(state['chooser'])
    if self._ahead is not None:
      self._ahead.set_state(state['ahead'], self._probe.logits.knows)
    self._note(self._source.get_state())
    if self._beside is not None and 'heard' in state:
      steps, losses = state['emitted'], self._probe.losses.all()
      self._beside.resume(steps, state['heard'], losses)
    for _ in range(state['emitted']):
      next(self)
    self._source.resumed()
    if self._beside is not None:
      self._probe.losses.resume(self._beside.number)
    if self._ahead is not None:
      self._probe.logits.resume(self._ahead.last)
    window = None
    if self._phases.window and self._pending is not None:
      # One less was left as soon as the batch that closes it was delivered.
      closed = self._pending.left <= self._phases.settle
      window = self._pending.window if closed else None
    self._probe.resume(window)

  def unreported(self) -> tuple[int, int]:
    """Returns the examples seen and dropped since the last batch."""
    marks, self._marks = self._marks, {'seen': 0, 'dropped': 0}
    return marks['seen'], marks['dropped']
