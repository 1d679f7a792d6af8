"""Schedules: which examples run, in which order, and when rows are compared.

A schedule turns the batches of a source into the batches to train. It runs
on the host, some batches ahead of the step, and touches no device.
"""

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
import numpy as np

from slipstream_jax.data.source import BatchSource, SourceWrapper
from slipstream_jax.errors import check_whole, UserError
from slipstream_jax.schedules.rebatch import Queue
from slipstream_jax.types import Batch, HotRows, RowChange, StaleRows

State = dict[str, Any]
"""Position of a schedule: nested dicts of numbers, strings and arrays."""


class Predictions(NamedTuple):
  """Batches of the source that the model scores before a step."""

  batches: tuple[tuple[int, Batch], ...]
  """Each batch with its number in the source."""
  since: int
  """Once the step is taken, logits of lower numbers are not needed any more."""


class Edge(NamedTuple):
  """Changes of the hot rows around a step.

  They are carried out in this order:

  0. Where `hot_here` is set, the planner (`Placement.swap`) and the trainer
     (`Engine.swap`) bring the hot rows to the device, or remove them.
  1. If it `refreezes`, frozen rows are thawed and those of `stale` are frozen:
     by `Placement.freeze` before the batch is planned, and by `Engine.freeze`
     before its rows are loaded.
  2. If it `opens`, the trainer takes the snapshot. There is no `stale` then,
     because the window undoes a decision for the same step.
  3. If it `predicts`, the model predicts other batches. The rows are loaded,
     the step is taken, and its rows are stored. The probe gets the logits of
     those batches.
  4. If it `closes`, the trainer gives the probe the change of the rows since
     the snapshot. If it `scores`, the loss of the held-out examples.
  """

  opens: bool = False
  """A window opens with this step."""
  stale: StaleRows | None = None
  """The hot rows frozen from this step on, until a window opens."""
  closes: int | None = None
  """A window closes with this step. This is its number: the batches of the
  source that were read up to its end."""
  hot_here: bool | None = None
  """Whether the hot rows are on the device in this step, for placements that
  swap them. None leaves that to the placement."""
  scores: int | None = None
  """The held-out examples are scored after this step, under this number."""
  tells: int | None = None
  """The probe gets the loss of this step, under this number."""
  predicts: Predictions | None = None
  """The probe gets the logits of these batches, each under its number."""

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


class ScheduledBatch(NamedTuple):
  """A batch to train, and what happens around its step."""

  batch: Batch
  state: State
  """Position of the schedule right after this batch."""
  seen: int = 0
  """Examples read from the source since the batch before."""
  dropped: int = 0
  """Examples among those seen that were left out."""
  edge: Edge = Edge()
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


class Spent(NamedTuple):
  """Seconds of the processor on the batches of the source behind a batch."""

  read: float = 0.0
  choose: float = 0.0
  """Choosing, as far as that goes in the order of the source."""
  score: float = 0.0
  """Scoring, and what else batches are prepared with."""


class Emitted(NamedTuple):
  """A batch to train whose examples are not copied yet."""

  copy: Callable[[], Batch]
  """Copies them, in any thread, once."""
  fields: dict[str, Any]
  """All other fields of the `ScheduledBatch`."""
  spent: Spent

  def scheduled(self) -> ScheduledBatch:
    """Copies the examples."""
    return ScheduledBatch(self.copy(), **self.fields)


class Stages(NamedTuple):
  """The parts of `Schedule.__next__`, for several threads.

  They give the same batches as `__next__`. `set_state` starts anew.
  """

  read: Iterator[Any]
  """Reads batches of the source, then one item that stands for the end. One
  thread at a time asks it."""
  open_before: Callable[[Any], int]
  """Returns how many items before one need not have had their turn when it is
  prepared."""
  prepare: Callable[[Any], Any]
  """Prepares what was read, in any thread."""
  take_turn: Callable[[Any], list[Emitted]]
  """Called with each prepared item, in their order. Returns the batches that it
  completes."""
  spend: Callable[[float], None]
  """Adds seconds of copying to `Schedule.seconds`, in any thread."""


@runtime_checkable
class Numbered(Protocol):
  """Values that steps put under numbers."""

  def wait(self, number: int) -> Float[np.ndarray, ' *shape']:
    """Waits for the value of that number, and copies it."""
    ...

  def knows(self, number: int) -> bool:
    """Whether `wait` returns at once."""
    ...

  def forget(self, number: int) -> None:
    """Drops values below that number, which no position asks for again."""
    ...

  def resume(self, number: int) -> None:
    """Drops values above that number, whose steps are yet to come."""
    ...

  def all(self) -> dict[int, Float[np.ndarray, ' *shape']]:
    """Returns all values that are there."""
    ...


@runtime_checkable
class Probe(Protocol):
  """Tells a schedule what rows did. `StepProbe` is the one of training.

  A schedule asks in `__next__`, by the planner's thread, `settle` batches after
  the one that closes the window or scores. Those are trained meanwhile, so
  neither side waits for the other.
  """

  @property
  def losses(self) -> Numbered:
    """Losses f32[] of held-out examples or steps, by the schedule's numbers."""
    ...

  @property
  def logits(self) -> Numbered:
    """Logits f32[B] of the model, by numbers of the source's batches."""
    ...

  def row_change(self, window: int) -> RowChange:
    """Waits for the change of rows in the window closed under this number."""
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


class OrderedSource(SourceWrapper):
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
    refills: whether kept examples make full batches. None: none are left out.
    seconds: CPU time spent on deciding and choosing so far. Read at any time.
    seconds_reading: CPU time of the source, where examples are chosen.
  """

  refills: bool | None = None
  seconds = seconds_reading = 0.0

  def __init__(self, source: BatchSource) -> None:
    """Takes over `source`."""
    if not isinstance(source, OrderedSource):
      source = OrderedSource(source)
    self._source: OrderedSource = source

  def __iter__(self) -> Iterator[ScheduledBatch]:
    return self

  @abc.abstractmethod
  def __next__(self) -> ScheduledBatch:
    """Returns the next batch, some batches before its step is taken."""

  def stages(self) -> Stages | None:
    """Returns the parts of `__next__`, or None if one thread must do all."""
    return None

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
  order: Callable[[BatchSource, HotRows, Probe], OrderedSource] | None = None
  """Makes a source (taken over) one of the same examples in another order."""
  queue: Callable[[HotRows, int, State | None], Queue] | None = None
  """Makes the queue that cuts kept examples into batches, from the hot rows, B
  and a state to begin with. None: they are cut in their order."""
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
  late: int | None = None
  """Batches from a step to the question for its loss, or for what it predicts.
  None: it never asks."""
  regrouping: Regrouping | None = None
  """How it changes the order of examples. None keeps the source's."""
  offsets: bool = False
  """Whether batches carry an offset, which corrects for dropped examples."""
  predicts: bool = False
  """Whether the model scores examples before they are chosen."""


def plain() -> ScheduleSpec:
  """Trains every example, in the order of the source."""
  return ScheduleSpec(lambda source, hot, probe: PlainSchedule(source))


class PlainSchedule(Schedule):
  """The schedule that trains every batch of a source."""

  def __next__(self) -> ScheduledBatch:
    batch = next(self._source)
    # First, because the position includes it.
    edge = Edge(**self._source.take_edge())
    state = self.get_state()
    grown = state.get('vocabularies', {})
    seen = int(np.count_nonzero(batch.weights))  # the rest is padding
    return ScheduledBatch(batch, state, seen, edge=edge, grown=grown)


def check_batches(batches: object, schedule: str) -> None:
  """Checks the number of the source's batches that a schedule reads.

  Raises:
    UserError: it is neither None nor a whole number of at least 0.
  """
  if batches is not None:
    hint = 'leave it out to read all of the source'
    check_whole(batches, 0, f'{schedule}, batches', hint)


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
