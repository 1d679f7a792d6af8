"""Schedules: which examples run, in which order, and when rows are compared.

A schedule turns the batches of a source into the batches to train. It runs
on the host, some batches ahead of the step, and touches no device.
"""

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np

from slipstream_jax.data.source import BatchSource, Forwarded
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.types import Batch, HotRows, RowChange, StaleRows

State = dict[str, Any]
"""Position of a schedule: nested dicts of numbers, strings and arrays."""


class Edge(NamedTuple):
  """Changes of the hot rows around a step.

  They are carried out for a batch in this order:

  0. Where `hot_here` is set, the hot rows come to the device, or leave it:
     `Placement.swap` in the planner, `Engine.swap` in the trainer.
  1. If it `refreezes`, the rows frozen so far are thawed, and those of `stale`
     are frozen. None are where a window opens. The planner calls
     `Placement.freeze` before it plans the batch, and the trainer calls
     `Engine.freeze` before it loads the batch's rows.
  2. If it `opens`, the trainer takes the snapshot. There is no `stale` then,
     because the window undoes a decision for the same step.
  3. The rows are loaded, the step is taken, and its rows are stored.
  4. If it `closes`, the trainer compares the rows with the snapshot and leaves
     the change in the probe, under the window's number. If it `scores`, it
     leaves the loss of the held-out examples there.
  """

  opens: bool = False
  """A window opens with this step."""
  stale: StaleRows | None = None
  """The hot rows frozen from this step on, until a window opens."""
  closes: int | None = None
  """A window closes with this step. This is its number: the batches of the
  source that were read up to its end. The probe is asked by it."""
  hot_here: bool | None = None
  """Whether the hot rows are on the device in this step, for placements that
  swap them. None leaves that to the placement."""
  scores: int | None = None
  """The held-out examples are scored after this step. This is the number by
  which the probe is asked for their loss."""

  @property
  def refreezes(self) -> bool:
    """Whether other rows are frozen from this step on."""
    # A mask without a row also counts: it thaws the rows of before.
    return self.opens or self.stale is not None

  @property
  def must_train(self) -> bool:
    """Whether the schedule depends on the step, so that it is not left out."""
    asks = self.closes is not None or self.scores is not None
    return self.refreezes or asks


class Scheduled(NamedTuple):
  """A batch to train, and what happens around its step."""

  batch: Batch
  state: State
  """Position of the schedule right after this batch."""
  seen: int = 0
  """Examples read from the source since the batch before."""
  dropped: int = 0
  """Examples among those seen that were left out."""
  edge: Edge = Edge()
  """Changes of the hot rows."""
  event: dict[str, Any] | None = None
  """The decision before this batch, for the metrics."""
  scale: float = 1.0
  """Factor of the weights in the step. A batch smaller than the source's has
  its weights scaled, because the step divides the losses by the size of the
  batch. Rows are counted by the weights in `batch`, which are not scaled."""
  batch_size: int | None = None
  """B of the source's batches, by which the batches seen are counted. None: the
  size of this batch."""
  grown: Mapping[str, Any] = {}
  """By table, a mark of its growing vocabulary. All rows that were reassigned
  by then have begun with this batch, or before."""


@runtime_checkable
class Probe(Protocol):
  """Tells a schedule what rows did. `StepProbe` is the one of training."""

  def row_change(self, window: int) -> RowChange:
    """Waits for the change of rows in the window closed under this number.

    Called by a schedule within `__next__`, so by the planner's thread, once the
    batch that closes the window and `settle` more were delivered. Those are
    trained meanwhile, so neither side waits for the other.
    """
    ...

  def loss(self, number: int) -> float:
    """Waits for the loss of the held-out examples scored under this number.

    Called like `row_change`, some batches after the one that `scores`.
    """
    ...

  def resume_losses(self, number: int) -> None:
    """Forgets losses above that number, whose batches are yet to come."""
    ...

  def resume(self, window: int | None) -> None:
    """Tells that a schedule resumes. Called at the end of its `set_state`.

    Args:
      window: the number of a window that closed before that position and that
        the schedule has not asked for yet, or None if there is none.

    Raises:
      UserError: the change of rows in that window is not known here.
    """
    ...


@runtime_checkable
class Queue(Protocol):
  """Examples that wait to be cut into full batches, in an order of its own."""

  @property
  def batch_size(self) -> int:
    """B, of every batch that it returns."""
    ...

  @property
  def waiting(self) -> int:
    """Number of examples in the queue."""
    ...

  def put(self, examples: Batch) -> None:
    """Appends examples in their order. They are not copied."""
    ...

  def ready(self) -> bool:
    """Whether a batch can be taken before more is put."""
    ...

  def take(self) -> Batch:
    """Returns the next batch. It is padded only at the end of the source."""
    ...

  def get_state(self) -> State:
    """Returns all examples in the queue."""
    ...


MakeQueue = Callable[[int, State | None], Queue]
"""Makes a queue from a batch size and a state to begin with."""


class Ordered(Forwarded):
  """A source as a schedule reads it: in its own order, or in another one.

  The defaults are those of a source's own order.
  """

  @property
  def counts(self) -> bool:
    """Whether examples of the last batch may be skipped. Read after a batch."""
    return True

  def take_edge(self) -> dict[str, Any]:
    """Returns fields of `Edge` for the batch that is delivered now."""
    return {}

  def resumed(self) -> None:
    """Forgets losses of steps to come. Called at the end of `set_state`."""


class Schedule(abc.ABC):
  """An iterator of batches to train that can be stopped and resumed.

  `PlannedBatches` owns it. While the planner's thread runs, only that thread
  asks for batches. All other methods are called by the thread that trains. The
  defaults suit a schedule whose position is that of its source.

  Attributes:
    seconds: CPU time spent on deciding and choosing so far. Read at any time.
  """

  seconds = 0.0

  def __init__(self, source: BatchSource) -> None:
    """Takes over `source`."""
    if not isinstance(source, Ordered):
      source = Ordered(source)
    self._source: Ordered = source

  def __iter__(self) -> Iterator[Scheduled]:
    return self

  @abc.abstractmethod
  def __next__(self) -> Scheduled:
    """Returns the next batch, some batches before its step is taken."""

  def get_state(self) -> State:
    """Returns the position after the last batch delivered, or at the start."""
    return self._source.get_state()

  def set_state(self, state: State) -> None:
    """Continues as if the batches up to `state` had just been delivered.

    Called while no thread plans: to resume, and to return to the last batch
    that was used.

    Raises:
      UserError: it is of another schedule, other settings or another end.
    """
    self._source.set_state(state)
    self._source.resumed()

  def unreported(self) -> tuple[int, int]:
    """Returns the examples seen, and dropped, since the last batch.

    Called once there is no next batch. A second call returns (0, 0).
    """
    return 0, 0

  def close(self) -> None:
    """Closes the source once no thread plans. May be called more than once."""
    self._source.close()


class Regrouping(NamedTuple):
  """A change of the order of examples, before or after some are left out."""

  name: str
  """In words, with its settings. Only the same regrouping takes a position."""
  order: Callable[[BatchSource, HotRows, Probe], Ordered] | None = None
  """Makes a source (taken over) one of the same examples in another order."""
  queue: Callable[[HotRows], MakeQueue] | None = None
  """How kept examples are cut into batches. None: in their order."""
  settle: int | None = None
  """Batches from one that `scores` to the question for its loss. None where
  there is none."""
  held_out: Batch | None = None
  """Examples that are scored then."""


class ScheduleSpec(NamedTuple):
  """A schedule before it has a source, and what it needs of a trainer."""

  make: Callable[[BatchSource, HotRows | None, Probe], Schedule]
  """Makes the schedule from a source (taken over), hot rows and a probe."""
  needs_hot: bool = False
  """Whether hot rows must have been chosen."""
  settle: int | None = None
  """Batches from a window's end to the question what rows did in it. None if
  there are no windows: then no hot rows are watched."""
  regrouping: Regrouping | None = None
  """How it changes the order of examples. None keeps the source's."""
  offsets: bool = False
  """Whether batches carry an offset, which corrects for dropped examples."""


def plain() -> ScheduleSpec:
  """Trains every example, in the order of the source."""
  return ScheduleSpec(lambda source, hot, probe: Plain(source))


class Plain(Schedule):
  """The schedule that trains every batch of a source."""

  def __next__(self) -> Scheduled:
    batch = next(self._source)
    # First, because the position includes it.
    edge = Edge(**self._source.take_edge())
    state = self.get_state()
    grown = state.get('vocabularies', {})
    seen = int(np.count_nonzero(batch.weights))  # the rest is padding
    return Scheduled(batch, state, seen, edge=edge, grown=grown)


class Queued(Schedule):
  """A base of schedules that cut examples into batches by a queue.

  A position is a whole state and the number of batches delivered since then.
  Resuming reads the batches after the whole state again.
  """

  def __init__(
    self,
    source: BatchSource,
    make_queue: MakeQueue,
    batches: int | None,
    settings: tuple[str, str, str],
  ) -> None:
    """Takes over `source`, whose batches have one size but for the last.

    Args:
      source: what to train on.
      make_queue: makes the queue when the first batch comes.
      batches: of the source to read before the schedule ends. None: all.
      settings: a name in positions, the rule that it must be the same on
        resuming, and its value.
    """
    super().__init__(source)
    self._make_queue, self._batches = make_queue, batches
    self._settings_name, self._rule, self._words = settings
    self._queue: Queue | None = None
    self._read = self._emitted = 0
    self._base: State = {}

  def _next_of_source(self) -> Batch | None:
    if self._read == self._batches:
      return None
    return next(self._source, None)

  def _queue_of(self, batch_size: int) -> Queue:
    """Returns the queue, which is made when the first batch comes."""
    if self._queue is None:
      self._queue = self._make_queue(batch_size, None)
    return self._queue

  def _remember(self, source: State) -> None:
    """Makes the whole state of now the one that positions refer to.

    Args:
      source: position of the source to read on from.
    """
    queue = self._queue
    self._emitted = 0
    self._base = self._own_state() | {
      self._settings_name: self._words,
      'batches': self._batches,
      'source': source,
      'read': self._read,
      'queue': None if queue is None else queue.get_state(),
      'batch_size': None if queue is None else queue.batch_size,
    }

  @abc.abstractmethod
  def _own_state(self) -> State:
    """Returns the state of a schedule beside source, queue and settings."""

  @abc.abstractmethod
  def _set_own_state(self, state: State) -> None:
    """Sets what `_own_state` returned."""

  def get_state(self) -> State:
    """Returns the position after the last batch delivered."""
    return {**self._base, 'emitted': self._emitted}

  def set_state(self, state: State) -> None:
    """Continues right after `state`. See `Schedule.set_state`."""
    check_same(state, 'batches', 'read as many batches', self._batches)
    check_same(state, self._settings_name, self._rule, self._words)
    self._base = {
      k: v for k, v in state.items() if k not in ('emitted', 'behind')
    }
    self._source.set_state(state['source'])
    self._read, self._emitted = state['read'], 0
    self._queue = None
    if state['batch_size'] is not None:
      self._queue = self._make_queue(state['batch_size'], state['queue'])
    self._set_own_state(state)
    for _ in range(state['emitted']):
      next(self)
    self._source.resumed()


def check_batches(batches: int | None, where: str) -> None:
  """Checks the number of the source's batches that a schedule reads.

  Raises:
    UserError: it is neither None nor a whole number of at least 0.
  """
  if batches is not None:
    hint = 'leave it out to read all of the source'
    check_whole(batches, 0, f'{where}, batches', hint)


def check_same(state: State, name: str, rule: str, own: object) -> None:
  """Checks that a position is of a schedule with the same settings.

  Raises:
    UserError: the position has another value of that name.
  """
  before = state.get(name)
  if before != own:
    raise UserError(
      f'a resumed run must {rule}, {before}',
      got=own,
      where=f'slipstream, {name}',
      hint='use what the run was started with',
    )


def refuse_idle(batches: int) -> NoReturn:
  """Raises the error of a source that returns nothing but padding.

  Raises:
    UserError: always.
  """
  raise UserError(
    'a source must give examples of a weight above 0',
    got=f'{batches} batches in a row without one',
    where='train, source',
    hint='look at its weights',
  )
