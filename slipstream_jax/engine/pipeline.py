"""Batches planned ahead of the step, in background threads.

Workers take batches from a schedule and find their unique rows. One thread
plans the batches in order, up to `depth` of them ahead. The next call raises an
error of a thread with its traceback.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import os
import threading
from typing import Any
import weakref

from jaxtyping import Bool, Float
import numpy as np

from slipstream_jax.data.interrupts import held
from slipstream_jax.data.prefetch import ends_at_exit, Worker
from slipstream_jax.engine.buffers import to_host
from slipstream_jax.engine.clock import HostClock, Threads
from slipstream_jax.engine.planner import PlannedBatch, Planner
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.schedules.base import State
from slipstream_jax.store.threads import Helpers
from slipstream_jax.types import RowChange

_WAIT_S = 0.05  # seconds between checks for an interrupt


class _StepWaiter:
  """Lets the planner's thread wait for a step, until it is interrupted."""

  def __init__(self, here: threading.Condition) -> None:
    self.here, self._interrupted = here, False
    self._there: Callable[[], bool] | None = None

  def wait(self, there: Callable[[], bool], needed: str, got: str) -> None:
    """Waits, with the lock held, until `there` is true.

    Raises:
      UserError: `interrupt` was called first.
    """
    self._there = there
    try:
      while not there():
        if self._interrupted:
          raise UserError(
            f'a decision needs {needed}',
            got=got,
            where='slipstream, batches',
            hint='train each batch, in the thread that takes it, before '
            'asking for those after it',
          )
        self.here.wait(_WAIT_S)
    finally:
      self._there = None

  @property
  def starves(self) -> bool:
    """Whether a thread waits for a result that no step has put yet."""
    with self.here:
      return self._there is not None and not self._there()

  def interrupt(self, interrupted: bool = True) -> None:
    """Makes waits fail, or allows them again."""
    with self.here:
      self._interrupted = interrupted
      self.here.notify_all()


class StepValues:
  """Values by number, which the step's thread puts, on any device."""

  def __init__(self, mailbox: _StepWaiter, needed: str, got: str) -> None:
    """Starts empty. The words are of the error if a wait is interrupted."""
    self._mailbox, self._needed, self._got = mailbox, needed, got
    self._values: dict[int, Any] = {}

  def put(self, number: int, value: Any) -> None:
    """Puts a value, for those who wait for it."""
    self.put_all({number: value})

  def put_all(self, values: Mapping[int, Any]) -> None:
    """Puts values by number."""
    with self._mailbox.here:
      self._values |= values
      self._mailbox.here.notify_all()

  def wait(self, number: int) -> Float[np.ndarray, ' *shape']:
    """Waits for the value of that number, and copies it to the host."""
    with self._mailbox.here:
      there = functools.partial(self.knows, number)
      self._mailbox.wait(there, self._needed.format(number), self._got)
      value = self._values[number]
    # Outside the lock, as it waits for the device while a step may `put`.
    return np.asarray(to_host(value))

  def knows(self, number: int) -> bool:
    """Whether the value of that number is here."""
    return number in self._values

  def forget(self, number: int) -> None:
    """Drops values below that number, which no position asks for again."""
    with self._mailbox.here:
      self._values = {n: x for n, x in self._values.items() if n >= number}

  def resume(self, number: int) -> None:
    """Drops values above that number, as their steps will be repeated."""
    with self._mailbox.here:
      self._values = {n: x for n, x in self._values.items() if n <= number}

  def all(self) -> dict[int, Float[np.ndarray, ' *shape']]:
    """Returns all values by number, on the host."""
    with self._mailbox.here:
      values = dict(self._values)
    return {number: np.asarray(to_host(x)) for number, x in values.items()}


class StepProbe(_StepWaiter):
  """Mailbox of what steps tell the schedule.

  The step's thread puts arrays into it. The schedule, in the planner's thread,
  waits for those that it needs, and copies them.

  Attributes:
    window: number of the last window put, 0 before the first.
    change: of the rows in that window.
    losses: of held-out examples or steps, f32[], by numbers of the schedule.
    logits: of the model, f32[B], by numbers of the source's batches.
  """

  def __init__(self) -> None:
    """Makes an empty mailbox."""
    super().__init__(threading.Condition())
    self.window, self.change = 0, None
    self.losses = StepValues(self, 'loss number {}', 'no step that puts it')
    self.logits = StepValues(
      self,
      'what the model predicts of batch {} of the source',
      'no step before which it does',
    )

  def put(self, window: int, change: Any) -> None:
    """Puts a window's change and touches: f32[H] and i32[H], on a device."""
    # One window is enough: a schedule asks before its next window closes, or
    # not at all. The number tells whether it is the right one.
    with self.here:
      self.window, self.change = window, change
      self.here.notify_all()

  def row_change(self, window: int) -> RowChange:
    """Waits for the row changes of that window and copies them to the host."""
    with self.here:
      self.wait(
        lambda: self.window == window,
        f'the row changes of window {window}',
        'no step that ended it',
      )
      change = self.change
    # Outside the lock, as it waits for the device while a step may `put`.
    return RowChange(*to_host(change))

  def resume(self, window: int | None) -> None:
    """Keeps only the change of that window, for a schedule that resumes.

    Raises:
      UserError: it is not here. The step that puts it is in the past, so
        waiting for it would deadlock.
    """
    if window is None:
      # A repeated window has the same number, and must not get the old result.
      self.put(0, None)
    elif self.window != window:
      raise UserError(
        f'a schedule resumes where its window {window} has been compared',
        got=f'window {self.window}' if self.window else 'no window',
        where='set_state, state',
        hint='restore the checkpoint that the state is of, after slipstream()',
      )

  def take_over(self, other: 'StepProbe') -> None:
    """Adds the values of another mailbox, for the same schedule."""
    self.losses.put_all(other.losses.all())
    self.logits.put_all(other.logits.all())


class JudgementProbe(_StepWaiter):
  """Lets one iterator wait for the judgements of a trainer.

  They are in a mailbox that all its iterators share. Windows are numbered by
  the `Engine.step` before which rows were judged, and changes are masks per
  group, bool[H] or None, of stale rows.
  """

  def __init__(self, judgements: StepProbe) -> None:
    """Waits for results in this mailbox."""
    super().__init__(judgements.here)
    self._judgements = judgements

  def stale(self, step: int) -> Sequence[Bool[np.ndarray, ' _H'] | None]:
    """Waits for the masks judged before the given step, or later."""
    judgements = self._judgements
    with self.here:
      self.wait(
        lambda: judgements.window >= step,
        'the stale rows of the last window of skip_stale',
        'no step after it',
      )
      stale = judgements.change
    return tuple(to_host(stale))


_MOST_WORKERS = 8  # one thread plans, and is not faster than that many

Waits = tuple[StepProbe | JudgementProbe, ...]


def workers_of(workers: int | None, where: str = 'planned, workers') -> int:
  """Returns the number of threads that find unique rows.

  None: one per core, at most 8.

  Raises:
    UserError: the number is not positive and whole. It names `where`.
  """
  if workers is None:
    return min(os.cpu_count() or 1, _MOST_WORKERS)
  hint = 'use 1 or more, or None for one per core'
  check_whole(workers, 1, where, hint)
  return int(workers)


class PlannedBatches:
  """Iterator of planned batches, `depth` of them prepared ahead.

  An error does not move the position: the next call tries that batch again. If
  a schedule compares rows, train each batch in the thread that takes it, before
  asking for the next one.

  Attributes:
    probe: the mailbox of results that the schedule waits for, if any.
    workers: threads that find unique rows.
    helpers: threads that copy the rows of steps.
    clock: measures what the host spends on the batches that are trained.
    closed: whether `end` or `close` was called, even if it was interrupted.
    ended: whether the source was read to its end.
  """

  def __init__(
    self,
    planner: Planner,
    depth: int = 2,
    probe: StepProbe | None = None,
    judged: JudgementProbe | None = None,
    workers: int | None = 1,
  ) -> None:
    """Takes over the planner, whose schedule's source is a `CheckedSource`.

    Args:
      planner: plans the batches. Its schedule is closed with this iterator.
      depth: batches prepared ahead. 0 prepares each when it is asked for.
      probe: as the attribute.
      judged: the mailbox that the planner's start waits for, if chains judge
        rows.
      workers: as in `workers_of`. As many batches are read ahead of planning,
        or none if `depth` is 0.

    Raises:
      UserError: `depth` or `workers` is out of range.
    """
    hint = 'use 2, or 0 to prepare each when it is asked for'
    check_whole(depth, 0, 'planned, depth', hint)
    self.workers = workers_of(workers) if depth else 1
    self.helpers = Helpers(self.workers)
    # Without a batch ahead, one thread does everything.
    cores = len(os.sched_getaffinity(0)) if depth else 1
    self.clock = HostClock(Threads(self.workers, cores))
    self._planner = planner
    self._depth, self.probe = int(depth), probe or StepProbe()
    self._waits: Waits = (
      (self.probe,) if judged is None else (self.probe, judged)
    )
    self._position = planner.schedule.get_state()
    self._worker: Worker[PlannedBatch] | None = None
    self._must_train: int | None = None
    self._dropped: weakref.finalize | None = None
    self.closed = False
    self._reset()

  def _reset(self) -> None:
    self._batches = self._planner.find_all(self.workers)
    self._planned = self._planner.plan_all(self._batches)
    self._next: PlannedBatch | None = None
    # Whether a batch was asked for and not returned, and whether none is left.
    self._asking = self.ended = False

  def __iter__(self) -> Iterator[PlannedBatch]:
    return self

  def __enter__(self) -> 'PlannedBatches':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def __next__(self) -> PlannedBatch:
    item = self.peek()
    if item is None:
      raise StopIteration
    self.advance()
    return item

  def peek(self) -> PlannedBatch | None:
    """Returns the next batch, the same one until `advance`. None at the end.

    Raises errors of the schedule, too.
    """
    if self._next is None and not (self.ended or self.closed):
      if self._asking:  # an error or an interrupt came instead
        self.set_state(self._position)
      self._asking = True
      self._next = self._ask()
      self.ended = self._next is None
      self._asking = False
    return self._next

  def _ask(self) -> PlannedBatch | None:
    if self._depth == 0:
      # The thread that would take the step that a schedule waits for is here.
      _interrupt(self._waits)
      item = next(self._planned, None)
      _interrupt(self._waits, False)
      return item
    if self._worker is None:
      with held():  # else an interrupt may leave a thread that is not stopped
        self._worker = Worker(self._planned, self._depth, 'slipstream-planner')
        self._dropped = weakref.finalize(self, _drop, self._worker, self._waits)
        ends_at_exit(self)
    # A schedule may wait for a step that the caller would take, who waits here.
    # Then it raises an error rather than deadlock.
    waits, batches = self._waits, self._batches
    return self._worker.take(
      # In this order: while the schedule waits, its batches are still planned.
      lambda: any(wait.starves for wait in waits) and batches.starves,
      lambda: _interrupt(waits),
    )

  def advance(self) -> None:
    """Moves the position behind the batch that `peek` returned."""
    item, self._next = self._next, None
    assert item is not None
    self._position = item.scheduled.state
    if item.scheduled.edge.must_train:
      self._must_train = item.step

  def skipped(self, step: int) -> bool:
    """Whether a batch that must be trained was not, at this `Engine.step`."""
    # Training it would have increased the engine's step.
    return self._must_train is not None and step <= self._must_train

  def unreported(self) -> tuple[int, int]:
    """Returns the schedule's `unreported`, after `peek` has returned None."""
    return self._planner.schedule.unreported()

  @property
  def refills(self) -> bool | None:
    """Whether kept examples make full batches. None: none are left out."""
    return self._planner.schedule.refills

  @property
  def seconds_choosing(self) -> float:
    """CPU time that the schedule has spent on choosing examples, in seconds."""
    return self._planner.schedule.seconds

  def get_state(self) -> State:
    """Returns the schedule's position after the last batch used."""
    return self._position

  def set_state(self, state: State) -> None:
    """Drops the batches in flight and continues right after `state`.

    Raises:
      UserError: `state` is of another source or schedule. The position stays.
    """
    self.pause()  # after an interrupt from here on, `peek` sets the position
    self._planner.schedule.set_state(state)
    self._position, self._must_train = state, None
    self._reset()

  @property
  def reads_here(self) -> bool:
    """Whether the calling thread is one of those that read ahead."""
    worker = self._worker
    return self._batches.is_current or bool(worker and worker.is_current)

  def pause(self) -> None:
    """Ends the threads. The next batch is planned again from the position."""
    self._next, self.ended = None, False
    self._asking = True  # so that the next `peek` sets the position
    self._stop()
    # Only now, as no thread is left that could wait.
    _interrupt(self._waits, False)

  def _stop(self) -> None:
    if self._worker is not None:
      assert self._dropped is not None
      # Else it may wait for a step while `stop` waits for it.
      _interrupt(self._waits)
      # After an interrupt here it is stopped again, as two threads must not
      # share a schedule.
      self._worker.stop()
      self._dropped.detach()
      self._worker = None

  def threads(self) -> Iterator[threading.Thread]:
    """Ends the threads' waits as Python exits. Yields none of the threads."""
    _interrupt(self._waits)
    yield from ()

  def end(self) -> None:
    """Ends the threads and leaves the source open. Idempotent."""
    self.closed, self._next = True, None
    self._stop()
    self.helpers.close()

  def close(self) -> None:
    """Ends the threads and closes the schedule. Idempotent."""
    self.end()
    self._planner.schedule.close()


def _interrupt(waits: Waits, interrupted: bool = True) -> None:
  for wait in waits:
    wait.interrupt(interrupted)


def _drop(worker: Worker[PlannedBatch], waits: Waits) -> None:
  """Ends the thread of an iterator that was not closed."""
  _interrupt(waits)
  # The garbage collector may call it in any thread, so it must not wait.
  worker.stop(wait=False)
