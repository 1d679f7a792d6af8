"""Batches planned ahead of the step, in a thread of their own.

The worker takes batches from a schedule, finds their distinct rows and plans
them, up to `depth` batches ahead. What it holds is bounded, an error in it
surfaces at the next call with its traceback, and its position is that of
the batches delivered, not of those prefetched.
"""

import collections
from collections.abc import Callable, Iterator
import itertools
import queue
import threading
from typing import NamedTuple

from jaxtyping import Float
import numpy as np

from slipstream_jax.data.admission import InputShape
from slipstream_jax.data.scheduled import Schedule, Scheduled, State
from slipstream_jax.placement import bucket, Placement, Plan
from slipstream_jax.store.host_table import distinct, row_weights
from slipstream_jax.stream.probe import StepProbe
from slipstream_jax.types import Batch, Distinct, HotRows, RowIds

_WAIT_S = 0.05  # how often a full or empty queue looks for a stop


class PlannedBatch(NamedTuple):
  """A batch ready for its step."""

  scheduled: Scheduled
  plan: Plan
  row_weights: Float[np.ndarray, ' P']
  """Mean weight of the inputs behind each distinct row, padded to a bucket."""

  @property
  def batch(self) -> Batch:
    """The inputs."""
    return self.scheduled.batch


class _Found(NamedTuple):
  """A batch that is yet to be planned."""

  scheduled: Scheduled
  distinct: Distinct
  row_weights: Float[np.ndarray, ' P']


class PlannedBatches:
  """Iterator of planned batches, `depth` of them prepared ahead."""

  def __init__(
    self,
    schedule: Schedule,
    placement: Placement,
    shape: InputShape,
    depth: int = 2,
    hot: HotRows | None = None,
    probe: StepProbe | None = None,
    contents: Callable[[], RowIds | None] = lambda: None,
  ) -> None:
    """Plans the batches of `schedule`; takes it over.

    Args:
      schedule: where batches come from; closed with this iterator.
      placement: whose `plan` is called, in the order of the batches.
      shape: what every batch fits; the schedule's source is `Admitted`.
      depth: batches prepared ahead; 0 prepares each when it is asked for.
      hot: the hot rows, if any were chosen.
      probe: what the schedule waits for, if it waits at all.
      contents: rows in the device's slots, None if they are those that the
        placement starts with, unchanged; asked before the first batch is
        planned, and again after `set_state`.
    """
    self._schedule, self._placement = schedule, placement
    self._shape, self._depth, self._hot = shape, depth, hot
    self._probe, self._contents = probe or StepProbe(), contents
    self._delivered = schedule.get_state()
    self._worker: _Worker | None = None
    self._reset()

  def _reset(self) -> None:
    self._planned = self._plan_all()
    self._ended = self._told = False

  def _plan_all(self) -> Iterator[PlannedBatch]:
    placement, window = self._placement, collections.deque[_Found]()
    state = placement.start(self._shape.num_rows, self._hot, self._contents())
    found = self._find_all()
    while True:
      wanted = 1 + placement.look_ahead - len(window)
      window.extend(itertools.islice(found, wanted))
      if not window:
        return
      item = window[0].scheduled
      if item.opens or item.stale is not None:
        state = placement.freeze(state, item.stale)
      state, plan = placement.plan(state, [each.distinct for each in window])
      yield PlannedBatch(item, plan, window.popleft().row_weights)

  def _find_all(self) -> Iterator['_Found']:
    for item in self._schedule:
      found = distinct(item.batch.lookups, self._shape.num_rows, self._hot)
      weights = row_weights(
        found.inverse, item.batch.weights, bucket(len(found.rows))
      )
      yield _Found(item, found, weights)

  def __iter__(self) -> Iterator[PlannedBatch]:
    return self

  def __enter__(self) -> 'PlannedBatches':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def __next__(self) -> PlannedBatch:
    if self._ended:
      raise StopIteration
    try:
      if self._depth == 0:
        item = next(self._planned)
      else:
        if self._worker is None:
          self._worker = _Worker(self._planned, self._depth)
        item = self._worker.take()
    except BaseException:
      self._ended = True
      self._stop()
      raise
    self._delivered = item.scheduled.state
    return item

  def unreported(self) -> tuple[int, int]:
    """Inputs seen, and dropped, after the last batch; told once, at the end."""
    told, self._told = self._told, True
    return (0, 0) if told else self._schedule.unreported()

  @property
  def seconds_choosing(self) -> float:
    """CPU time that the schedule spent on choosing inputs so far."""
    return self._schedule.seconds

  def get_state(self) -> State:
    """Position of the schedule after the last batch delivered."""
    return self._delivered

  def set_state(self, state: State) -> None:
    """Drops what is in flight and continues right after `state`."""
    self._stop()
    self._schedule.set_state(state)
    self._delivered = state
    self._reset()

  def _stop(self) -> None:
    if self._worker is not None:
      self._probe.interrupt()
      self._worker.stop()
      self._probe.interrupt(False)
      self._worker = None

  def close(self) -> None:
    """Stops the worker and closes the schedule; may be called again."""
    self._stop()
    self._ended = True
    self._schedule.close()


class _Worker:
  """A thread that runs an iterator ahead into a bounded queue."""

  def __init__(self, items: Iterator[PlannedBatch], depth: int) -> None:
    self._items = items
    self._queue: queue.Queue[PlannedBatch | BaseException] = queue.Queue(depth)
    self._stopped = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name='slipstream-planner', daemon=True
    )
    self._thread.start()

  def _run(self) -> None:
    try:
      for item in self._items:
        if not self._put(item):
          return
      self._put(StopIteration())
    except BaseException as error:  # handed to the consumer, who raises it
      self._put(error)

  def _put(self, item: PlannedBatch | BaseException) -> bool:
    while not self._stopped.is_set():
      try:
        self._queue.put(item, timeout=_WAIT_S)
        return True
      except queue.Full:
        continue
    return False

  def take(self) -> PlannedBatch:
    item = self._queue.get()
    if isinstance(item, BaseException):
      raise item
    return item

  def stop(self) -> None:
    self._stopped.set()
    self._thread.join()
