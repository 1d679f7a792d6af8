"""Batches planned ahead of the step, in threads of their own.

Workers take batches from a schedule and find their unique rows; one thread
plans them in their order, up to `depth` batches ahead. What they hold is
bounded, an error in them surfaces at the next call with its traceback, and the
position is that of the batches used, not of those prefetched.
"""

from collections.abc import Callable, Iterator, Sequence
import os
import threading
import weakref

from slipstream_jax.data.interrupts import held
from slipstream_jax.data.prefetch import ends_at_exit, Worker
from slipstream_jax.engine.planner import PlannedBatch, Planner, Start
from slipstream_jax.engine.probe import JudgementProbe, StepProbe
from slipstream_jax.errors import check_whole
from slipstream_jax.placement import Placement, Plan
from slipstream_jax.schedules.base import Schedule, State
from slipstream_jax.store.helpers import Helpers
from slipstream_jax.tables import TableSet
from slipstream_jax.types import HotRows

_MOST_WORKERS = 8  # planning, which is one thread's, does not feed more

Waits = tuple[StepProbe | JudgementProbe, ...]


def workers_of(workers: int | None, where: str = 'planned, workers') -> int:
  """The threads that find unique rows; None: one per core, at most 8.

  An error names `where`.

  Raises:
    UserError: no such number.
  """
  if workers is None:
    return min(os.cpu_count() or 1, _MOST_WORKERS)
  hint = 'use 1 or more, or None for one per core'
  check_whole(workers, 1, where, hint)
  return int(workers)


class PlannedBatches:
  """Iterator of planned batches, `depth` of them prepared ahead.

  An error leaves it where it was: the next call tries that batch again. Where
  a schedule compares rows, each batch is to be trained, in the thread that
  takes it, before the next ones are asked for.

  Attributes:
    probe: what the schedule waits for, if it waits at all.
    workers: threads that find unique rows.
    helpers: threads that copy the rows of steps.
  """

  def __init__(
    self,
    schedule: Schedule,
    placements: Sequence[Placement],
    tables: TableSet,
    depth: int = 2,
    hot: Sequence[HotRows | None] | None = None,
    probe: StepProbe | None = None,
    start: Callable[[], Start] | None = None,
    judged: JudgementProbe | None = None,
    workers: int | None = 1,
    prefetch: Callable[[tuple[Plan, ...]], None] = lambda plans: None,
  ) -> None:
    """Plans the batches of `schedule`; takes it over.

    Args:
      schedule: where batches come from; closed with this iterator.
      placements: per group, whose `plan` is called, in the batches' order.
      tables: whose rows are looked up; the schedule's source is `Admitted`.
      depth: batches prepared ahead; 0 prepares each when it is asked for.
      hot: per group its hot rows, if any were chosen.
      probe: what the schedule waits for, if it waits at all.
      start: asked before the first batch is planned, and again after
        `set_state`; by default, all is as placements start with it.
      judged: what `start` waits for, if chains judge rows.
      workers: threads that find unique rows, each of another batch, and so
        batches read ahead of planning; None: as many as there are cores, at
        most 8. Where `depth` is 0, nobody reads ahead.
      prefetch: told of each batch's plans, by the thread that makes them.

    Raises:
      UserError: `depth` or `workers` is no such number.
    """
    hint = 'use 2, or 0 to prepare each when it is asked for'
    check_whole(depth, 0, 'planned, depth', hint)
    self.workers = workers_of(workers) if depth else 1
    self.helpers = Helpers(self.workers)
    none = (None,) * len(tables.groups)
    self._planner = Planner(
      schedule,
      placements,
      tables,
      none if hot is None else hot,
      start or (lambda: Start(none, 0)),
      prefetch,
    )
    self._depth, self.probe = int(depth), probe or StepProbe()
    self._waits: Waits = (
      (self.probe,) if judged is None else (self.probe, judged)
    )
    self._position = schedule.get_state()
    self._worker: Worker[PlannedBatch] | None = None
    self._must_train: int | None = None
    self._dropped: weakref.finalize | None = None
    self._closed = False
    self._reset()

  def _reset(self) -> None:
    self._batches = self._planner.find_all(self.workers)
    self._planned = self._planner.plan_all(self._batches)
    self._next: PlannedBatch | None = None
    # Whether a batch was asked for and did not come; whether none will.
    self._asking = self._ended = False

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
    """The next batch, the same one until `advance`; None if there is none.

    Raises:
      UserError: a batch does not fit; other errors are the schedule's.
    """
    if self._next is None and not (self._ended or self._closed):
      if self._asking:  # an error or an interrupt came instead
        self.set_state(self._position)
      self._asking = True
      self._next = self._ask()
      self._ended = self._next is None
      self._asking = False
    return self._next

  def _ask(self) -> PlannedBatch | None:
    if self._depth == 0:
      # Who would take the step that a schedule waits for is in here.
      _interrupt(self._waits)
      item = next(self._planned, None)
      _interrupt(self._waits, False)
      return item
    if self._worker is None:
      with held():  # else an interrupt may leave a thread that nobody stops
        self._worker = Worker(self._planned, self._depth, 'slipstream-planner')
        self._dropped = weakref.finalize(self, _drop, self._worker, self._waits)
        ends_at_exit(self)
    # A schedule may wait for a step that nobody is going to take: the caller,
    # who would, waits here. Then it fails with a sentence rather than for ever.
    waits, batches = self._waits, self._batches
    return self._worker.take(
      # In this order: while the schedule waits, what it gave is made use of.
      lambda: any(wait.starves for wait in waits) and batches.starves,
      lambda: _interrupt(waits),
    )

  def advance(self) -> None:
    """Takes the batch that `peek` gave as used: the position is behind it."""
    item, self._next = self._next, None
    assert item is not None
    self._position = item.scheduled.state
    if item.scheduled.edge.must_train:
      self._must_train = item.step

  def skipped(self, step: int) -> bool:
    """Whether a batch that the schedule counts on was used, but not trained.

    Args:
      step: `Engine.step` now.
    """
    # Its step, had it been taken, would have made the step one more.
    return self._must_train is not None and step <= self._must_train

  def unreported(self) -> tuple[int, int]:
    """As the schedule's; to be asked once `peek` has given None."""
    return self._planner.schedule.unreported()

  @property
  def seconds_choosing(self) -> float:
    """CPU time that the schedule spent on choosing examples so far."""
    return self._planner.schedule.seconds

  def get_state(self) -> State:
    """Position of the schedule after the last batch used."""
    return self._position

  def set_state(self, state: State) -> None:
    """Drops what is in flight and continues right after `state`.

    Raises:
      UserError: `state` is of another source or schedule; the position stays.
    """
    self.pause()  # an interrupt from here on begins it anew
    self._planner.schedule.set_state(state)
    self._position, self._must_train = state, None
    self._reset()

  @property
  def closed(self) -> bool:
    """Whether `end` or `close` was called, even if it was cut off."""
    return self._closed

  @property
  def reads_here(self) -> bool:
    """Whether the caller runs in one of the threads that read ahead."""
    worker = self._worker
    return self._batches.is_current or bool(worker and worker.is_current)

  @property
  def ended(self) -> bool:
    """Whether the source was read to its end, and no further."""
    return self._ended

  def pause(self) -> None:
    """Ends the threads. The next batch is planned anew from the position."""
    self._next, self._ended = None, False
    self._asking = True  # so that the next `peek` sets the position
    self._stop()
    # Only now: no thread is left that could wait.
    _interrupt(self._waits, False)

  def _stop(self) -> None:
    if self._worker is not None:
      assert self._dropped is not None
      # Else it may wait for a step, and `stop` for it.
      _interrupt(self._waits)
      # An interrupt here leaves it to be stopped: two would share a schedule.
      self._worker.stop()
      self._dropped.detach()
      self._worker = None

  def threads(self) -> Iterator[threading.Thread]:
    """Ends what threads wait for as Python exits; they are others' to name."""
    _interrupt(self._waits)
    yield from ()

  def end(self) -> None:
    """Ends the threads for good and leaves the source open; idempotent."""
    self._closed, self._next = True, None
    self._stop()
    self.helpers.close()

  def close(self) -> None:
    """Ends the threads and closes the schedule; idempotent."""
    self.end()
    self._planner.schedule.close()


def _interrupt(waits: Waits, interrupted: bool = True) -> None:
  for wait in waits:
    wait.interrupt(interrupted)


def _drop(worker: Worker[PlannedBatch], waits: Waits) -> None:
  """Ends the thread of an iterator that nobody closed."""
  _interrupt(waits)
  # It runs wherever garbage happens to be collected, so it must not wait.
  worker.stop(wait=False)
