"""What a schedule gives: which examples run, in which order, when to look.

A schedule turns the batches of a source into the batches to train. It runs
on the host, some batches ahead of the step, and touches no device.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from slipstream_jax.data.source import BatchSource, Forwarded
from slipstream_jax.types import Batch, HotRows, RowChange, StaleRows

State = dict[str, Any]
"""Position of a schedule: nested dicts of numbers, strings and arrays."""


class Edge(NamedTuple):
  """What becomes of the hot rows around a step: a window opens, closes, ...

  The rule, in the order in which it is carried out for a batch:

  1. If it `refreezes`, the rows that stood still so far are let go, and those
     of `stale` stand still instead; none do where a window opens. The planner
     calls `Placement.freeze` before it plans the batch, and the trainer
     `Engine.freeze` before it loads the batch's rows, as that plan says.
  2. If it `opens`, the trainer takes the snapshot. Then there is no `stale`:
     what was decided before the same step is undone by the window.
  3. The rows are loaded, the step is taken, and its rows are stored.
  4. If it `closes`, the trainer compares the rows with the snapshot and leaves
     the change in the probe, under the window's number; and if it `scores`, it
     leaves the loss of the held-out examples there.

  Where `hot_here` says so, the hot rows come to the device, or leave it, before
  anything else: `Placement.swap` in the planner, `Engine.swap` in the trainer.
  """

  opens: bool = False
  """A window opens with this step."""
  stale: StaleRows | None = None
  """The hot rows that stand still from this step on, until a window opens."""
  closes: int | None = None
  """A window closes with this step, and this is its number: the batches of
  the source that were read up to its end. The probe is asked by it."""
  hot_here: bool | None = None
  """Whether the hot rows are on the device in this step, of placements that
  swap them; None: the placement's own affair."""
  scores: int | None = None
  """After this step the held-out examples are scored, and this is the number
  by which the probe is asked for their loss."""

  @property
  def refreezes(self) -> bool:
    """Whether other rows stand still from this step on."""
    # A mask without a row in it also counts: it lets go of those of before.
    return self.opens or self.stale is not None

  @property
  def must_train(self) -> bool:
    """Whether the schedule counts on the step: it cannot be left out."""
    asks = self.closes is not None or self.scores is not None
    return self.refreezes or asks


class Scheduled(NamedTuple):
  """A batch to train, and what is to happen around its step."""

  batch: Batch
  state: State
  """Position of the schedule right after this batch."""
  seen: int = 0
  """Examples read from the source since the batch before."""
  dropped: int = 0
  """Of those, the ones left out."""
  edge: Edge = Edge()
  """What becomes of the hot rows."""
  event: dict[str, Any] | None = None
  """What was decided before this batch, for the metrics."""
  scale: float = 1.0
  """What the weights are multiplied by in the step. Rows feel them as they are
  in `batch`, where they say how many examples one stands for: a smaller batch
  than the source's has them scaled, as its losses are divided by its size."""
  batch_size: int | None = None
  """B, of the source's batches, where this one may have fewer examples: by it
  the batches seen are counted. None: as many as this one has."""
  grown: Mapping[str, Any] = {}
  """By table, where the vocabularies are that the source grows: all rows that
  got another id by then have begun with this batch, or before."""


@runtime_checkable
class Schedule(Protocol):
  """An iterator of batches to train that can be stopped and resumed.

  `PlannedBatches` owns it. Its planner's thread asks for batches, and nobody
  else while that thread runs; all other methods are called by the thread that
  trains.
  """

  @property
  def seconds(self) -> float:
    """CPU time spent on deciding and choosing so far; asked at any time."""
    ...

  def __iter__(self) -> Iterator[Scheduled]: ...

  def __next__(self) -> Scheduled:
    """The next batch; asked up to `depth` and a look-ahead before its step."""
    ...

  def get_state(self) -> State:
    """Position after the last batch delivered; asked before the first one."""
    ...

  def set_state(self, state: State) -> None:
    """Continues as if the batches up to `state` had just been delivered.

    Called while no thread plans: to resume, and to go back to the last batch
    that was used where others had been delivered.
    """
    ...

  def unreported(self) -> tuple[int, int]:
    """Examples seen, and dropped, since the last batch; none if asked again.

    Asked once there is no next batch: those are all that nobody reports.
    """
    ...

  def close(self) -> None:
    """Closes the source, once no thread plans; may be called more than once."""
    ...


@runtime_checkable
class Probe(Protocol):
  """How a schedule learns what rows did; `StepProbe` is the one of training."""

  def row_change(self, window: int) -> RowChange:
    """What rows did in the window closed under this number; waits for it.

    Called by a schedule within `__next__`, thus by the planner's thread, once
    the batch that closes the window and `settle` more were delivered: those
    are trained meanwhile, so neither side waits for the other.
    """
    ...

  def loss(self, number: int) -> float:
    """Loss of the held-out examples scored under this number; waits for it.

    Called as `row_change` is, some batches after the one that `scores`.
    """
    ...

  def resume_losses(self, number: int) -> None:
    """Forgets losses above that number: those batches are yet to come."""
    ...

  def resume(self, window: int | None) -> None:
    """A schedule goes on from a position that was saved: end of `set_state`.

    Args:
      window: the one that closed before that position, and that the schedule
        is yet to ask for; None if there is none. Of windows before, nothing
        will be asked.

    Raises:
      UserError: what rows did in that window is not known here.
    """
    ...


class Queue(Protocol):
  """Examples that wait to be cut into full batches, in an order of its own."""

  @property
  def batch_size(self) -> int:
    """B, of every batch it gives."""
    ...

  @property
  def waiting(self) -> int:
    """Examples in the queue."""
    ...

  def put(self, examples: Batch) -> None:
    """Appends examples, in their order; they are not copied."""
    ...

  def ready(self) -> bool:
    """Whether a batch can be taken before more is put."""
    ...

  def take(self) -> Batch:
    """The next batch; padded if too few wait, which is so at the end alone."""
    ...

  def get_state(self) -> State:
    """All that waits."""
    ...


MakeQueue = Callable[[int, State | None], Queue]
"""Batch size, and a state to begin with, to a queue."""


class Ordered(Forwarded):
  """A source as a schedule reads it: in its own order, or in another one.

  The defaults are those of a source's own order.
  """

  @property
  def counts(self) -> bool:
    """Whether examples of the last batch may be skipped; asked when read."""
    return True

  def take_edge(self) -> dict[str, Any]:
    """Returns fields of `Edge` for the batch that is delivered now."""
    return {}

  def resumed(self) -> None:
    """Forgets losses of steps to come; called at the end of `set_state`."""


class Regrouping(NamedTuple):
  """How examples change places, before or after some of them are left out."""

  name: str
  """In words, with its settings: a position is of one regrouping alone."""
  order: Callable[[BatchSource, HotRows, Probe], Ordered] | None = None
  """A source (taken over) to one of the same examples in another order."""
  queue: Callable[[HotRows], MakeQueue] | None = None
  """How what is kept is cut into batches; None: in its order."""
  settle: int | None = None
  """Batches from one that `scores` to the question for its loss; None where
  there is none."""
  held_out: Batch | None = None
  """Examples that are scored then."""


class ScheduleSpec(NamedTuple):
  """A schedule before it has a source, and what it asks of a trainer."""

  make: Callable[[BatchSource, HotRows | None, Probe], Schedule]
  """Source (taken over), hot rows and probe to the schedule."""
  needs_hot: bool = False
  """Hot rows must have been chosen."""
  settle: int | None = None
  """Batches between a window's end and the question what rows did in it; None
  if there are no windows: then no hot rows are watched."""
  regrouping: Regrouping | None = None
  """How it changes the order of examples; None: it keeps the source's."""
  offsets: bool = False
  """Its batches carry an offset, which makes up for what it leaves out."""
