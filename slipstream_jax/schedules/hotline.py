"""Hotline's order: popular examples in batches of their own (arXiv 2204.05436).

A popular example looks up hot rows only. Where hot rows stay on the device, a
batch of such examples moves no row, and the rows of the others can be gathered
meanwhile. `hotline` takes some batches together, a working set. It returns the
full batches of popular examples first, then those of the others. Examples that
fill no batch wait for the next set. `hotline_micro` keeps the batches, and puts
popular examples first in each. Cut into equal parts (`Recipe.microbatches`),
most parts hold nothing else, as in the paper's later form.
"""

from typing import Any

import numpy as np

from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import check_whole
from slipstream_jax.schedules.base import (
  check_batches,
  MakeQueue,
  Queued,
  refuse_idle,
  Regrouping,
  Scheduled,
  ScheduleSpec,
  State,
)
from slipstream_jax.schedules.rebatch import (
  is_popular,
  real_examples,
  Rebatcher,
  select,
)
from slipstream_jax.types import Batch, HotRows

WORKING_SET = 4
"""Batches in a working set, as published. 1 is slow."""
_IDLE = 1000  # batches in a row without an example to train


def hotline(
  working_set: int = WORKING_SET, batches: int | None = None
) -> ScheduleSpec:
  """Trains full batches of popular examples, then others, by working sets.

  Args:
    working_set: W, batches of the source that are regrouped together.
    batches: of the source to read before the schedule ends. None: all.

  Raises:
    UserError: a number out of range.
  """
  hint = f'use {WORKING_SET}, as published'
  check_whole(working_set, 1, 'hotline, working_set', hint)

  def queue(hot: HotRows) -> MakeQueue:
    return lambda size, state: WorkingSets(size, hot, working_set, state)

  return _spec(Regrouping(f'hotline {working_set}', queue=queue), batches)


def hotline_micro(batches: int | None = None) -> ScheduleSpec:
  """Puts popular examples first in each batch, and keeps its examples.

  Args:
    batches: of the source to read before the schedule ends. None: all.

  Raises:
    UserError: a number out of range.
  """

  def queue(hot: HotRows) -> MakeQueue:
    return lambda size, state: PopularFirst(size, hot, state)

  return _spec(Regrouping('hotline_micro', queue=queue), batches)


def _spec(regrouping: Regrouping, batches: int | None) -> ScheduleSpec:
  check_batches(batches, 'hotline')

  def make(source: BatchSource, hot: HotRows | None, _: Any) -> Regrouped:
    assert hot is not None
    return Regrouped(source, hot, regrouping, batches)

  return ScheduleSpec(make, needs_hot=True, regrouping=regrouping)


class WorkingSets:
  """A queue that regroups W batches' worth of examples at a time.

  Attributes:
    batch_size: B, of every batch that it returns.
    longest: most examples that one of its two queues has held.
  """

  def __init__(
    self,
    batch_size: int,
    hot: HotRows,
    working_set: int,
    state: State | None = None,
  ) -> None:
    """Starts with the examples of a state from `get_state`, or empty."""
    self.batch_size, self._hot, self._set = batch_size, hot, working_set
    queued = (None, None) if state is None else state['queued']
    self._queues = [Rebatcher(batch_size, one) for one in queued]
    # Examples put since the last set, and the full batches of that set that
    # are due: popular ones, then others.
    self._gathered: int = 0 if state is None else state['gathered']
    self._due: list[int] = [0, 0] if state is None else list(state['due'])
    self.longest = 0

  @property
  def waiting(self) -> int:
    """Number of examples in the queue."""
    return sum(queue.waiting for queue in self._queues)

  def put(self, examples: Batch) -> None:
    """Appends up to B examples.

    Raises:
      UserError: rows were reassigned to other ids.
    """
    popular = is_popular(examples, self._hot)
    for queue, which in zip(self._queues, (popular, ~popular), strict=True):
      queue.put(select(examples, which))
      self.longest = max(self.longest, queue.waiting)
    self._gathered += len(popular)
    # The next B examples might be more than W batches' worth.
    if self._gathered > (self._set - 1) * self.batch_size:
      self._gathered = 0
      self._due = [q.waiting // self.batch_size for q in self._queues]

  def ready(self) -> bool:
    """Whether full batches of the last working set are left."""
    return any(self._due)

  def take(self) -> Batch:
    """Returns the next batch of the set, or of all examples at the end."""
    if not self.ready():
      return self._queues[0 if self._queues[0].waiting else 1].take()
    kind = 0 if self._due[0] else 1
    self._due[kind] -= 1
    return self._queues[kind].take()

  def get_state(self) -> State:
    """Returns all examples in the queue, and how many batches are due."""
    return {
      'queued': [queue.get_state() for queue in self._queues],
      'gathered': self._gathered,
      'due': list(self._due),
    }


class PopularFirst(Rebatcher):
  """A queue of batches in order, with popular examples first in each."""

  def __init__(
    self, batch_size: int, hot: HotRows, state: State | None = None
  ) -> None:
    """Starts with the examples of a state from `get_state`, or empty."""
    super().__init__(batch_size, state)
    self._hot = hot

  def take(self) -> Batch:
    """Returns the next batch, with its padding last."""
    batch = super().take()
    kind = np.where(is_popular(batch, self._hot), 0, 1)
    kind[batch.weights == 0] = 2
    order = np.argsort(kind, kind='stable')
    return batch.map(lambda column: column.take(order, axis=0))


class Regrouped(Queued):
  """The schedule that trains all examples, cut into batches by a queue."""

  def __init__(
    self,
    source: BatchSource,
    hot: HotRows,
    regrouping: Regrouping,
    batches: int | None,
  ) -> None:
    """Takes over `source`, whose batches have one size but for the last."""
    assert regrouping.queue is not None
    rule = 'regroup examples in the same way'
    settings = 'regrouping', rule, regrouping.name
    super().__init__(source, regrouping.queue(hot), batches, settings)
    self._seen = self._idle = 0
    self._remember(self._source.get_state())

  def __next__(self) -> Scheduled:
    if self._queue is None or not self._queue.ready():
      self._remember(self._source.get_state())
      while (self._queue is None or not self._queue.ready()) and self._more():
        pass
      if self._queue is None or not self._queue.waiting:
        raise StopIteration
    batch = self._queue.take()
    self._emitted += 1
    seen, self._seen = self._seen, 0
    source: State = self._source.get_state()
    grown = source.get('vocabularies', {})
    return Scheduled(batch, self.get_state(), seen, grown=grown)

  def _more(self) -> bool:
    """Reads a batch of the source into the queue. False if none is left."""
    batch = self._next_of_source()
    if batch is None:
      return False
    self._read += 1
    examples = real_examples(batch)
    self._queue_of(len(batch.labels)).put(examples)
    self._seen += len(examples.labels)
    self._idle = 0 if len(examples.labels) else self._idle + 1
    if self._idle >= _IDLE:
      refuse_idle(self._idle)
    return True

  def _own_state(self) -> State:
    return {'seen': self._seen, 'idle': self._idle}

  def _set_own_state(self, state: State) -> None:
    self._seen, self._idle = state['seen'], state['idle']

  def unreported(self) -> tuple[int, int]:
    """Returns the examples seen since the last batch. None is dropped."""
    seen, self._seen = self._seen, 0
    return seen, 0
