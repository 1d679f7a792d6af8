"""Hotline's order: popular examples in batches of their own (arXiv 2204.05436).

A popular example looks up hot rows only, so a batch of such moves no row where
hot rows stay on the device; the rows of the others can be gathered meanwhile.
`hotline` takes some batches together, a working set, and gives first the full
batches of popular examples, then those of the others; what fills none waits for
the next set. `hotline_micro` leaves the batches as they are, and puts popular
examples first in each: cut into equal parts (`Recipe.microbatches`), most parts
hold nothing else, as in the paper's later form.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import check_whole
from slipstream_jax.schedules.base import (
  MakeQueue,
  Queue,
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
from slipstream_jax.schedules.refusals import check_same, refuse_idle
from slipstream_jax.types import Batch, HotRows

WORKING_SET = 4
"""Batches that fill the pipeline, as published; 1 is slow."""
_IDLE = 1000  # batches in a row without an example to train


def hotline(
  working_set: int = WORKING_SET, batches: int | None = None
) -> ScheduleSpec:
  """Full batches of popular examples, then others, a working set at a time.

  Args:
    working_set: W, batches of the source that are regrouped together.
    batches: of the source to read before the schedule ends; None: all.

  Raises:
    UserError: a number that cannot be.
  """
  hint = f'use {WORKING_SET}, as published'
  check_whole(working_set, 1, 'hotline, working_set', hint)

  def queue(hot: HotRows) -> MakeQueue:
    return lambda size, state: WorkingSets(size, hot, working_set, state)

  return _spec(Regrouping(f'hotline {working_set}', queue=queue), batches)


def hotline_micro(batches: int | None = None) -> ScheduleSpec:
  """Popular examples first in each batch, whose examples stay the same.

  Args:
    batches: as of `hotline`.

  Raises:
    UserError: a number that cannot be.
  """

  def queue(hot: HotRows) -> MakeQueue:
    return lambda size, state: PopularFirst(size, hot, state)

  return _spec(Regrouping('hotline_micro', queue=queue), batches)


def _spec(regrouping: Regrouping, batches: int | None) -> ScheduleSpec:
  if batches is not None:
    hint = 'leave it out to read all of the source'
    check_whole(batches, 0, 'hotline, batches', hint)

  def make(source: BatchSource, hot: HotRows | None, _: Any) -> Regrouped:
    assert hot is not None
    return Regrouped(source, hot, regrouping, batches)

  return ScheduleSpec(make, needs_hot=True, regrouping=regrouping)


class WorkingSets:
  """A queue that regroups W batches' worth of examples at a time.

  Attributes:
    batch_size: B, of every batch it gives.
    longest: most examples that one of its two queues has held.
  """

  def __init__(
    self,
    batch_size: int,
    hot: HotRows,
    working_set: int,
    state: State | None = None,
  ) -> None:
    """Examples of `get_state` wait, if it is given."""
    self.batch_size, self._hot, self._set = batch_size, hot, working_set
    queued = (None, None) if state is None else state['queued']
    self._queues = [Rebatcher(batch_size, one) for one in queued]
    # Examples put since the last set, and full batches that are due of it:
    # popular ones, then others.
    self._gathered: int = 0 if state is None else state['gathered']
    self._due: list[int] = [0, 0] if state is None else list(state['due'])
    self.longest = 0

  @property
  def waiting(self) -> int:
    """Examples in the queue."""
    return sum(queue.waiting for queue in self._queues)

  def put(self, examples: Batch) -> None:
    """Appends up to B examples.

    Raises:
      UserError: rows got another id.
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
    """The next batch: of the set, or at the end of what is left of any."""
    if not self.ready():
      return self._queues[0 if self._queues[0].waiting else 1].take()
    kind = 0 if self._due[0] else 1
    self._due[kind] -= 1
    return self._queues[kind].take()

  def get_state(self) -> State:
    """All that waits, and what is due."""
    return {
      'queued': [queue.get_state() for queue in self._queues],
      'gathered': self._gathered,
      'due': list(self._due),
    }


class PopularFirst(Rebatcher):
  """A queue that gives batches in order, popular examples first in each."""

  def __init__(
    self, batch_size: int, hot: HotRows, state: State | None = None
  ) -> None:
    """Gives batches of `batch_size` examples; first those of `get_state`."""
    super().__init__(batch_size, state)
    self._hot = hot

  def take(self) -> Batch:
    """The next batch, and padding last."""
    batch = super().take()
    kind = np.where(is_popular(batch, self._hot), 0, 1)
    kind[batch.weights == 0] = 2
    order = np.argsort(kind, kind='stable')
    return batch.map(lambda column: column.take(order, axis=0))


class Regrouped:
  """The schedule that trains everything, cut by a queue.

  Attributes:
    seconds: CPU time spent on choosing: none.
  """

  seconds = 0.0

  def __init__(
    self,
    source: BatchSource,
    hot: HotRows,
    regrouping: Regrouping,
    batches: int | None,
  ) -> None:
    """Regroups the batches of `source`, all of one size but the last."""
    assert regrouping.queue is not None
    self._source, self._make = source, regrouping.queue(hot)
    self._name, self._batches = regrouping.name, batches
    self._queue: Queue | None = None
    self._read = self._seen = self._idle = self._emitted = 0
    self._base = self._whole_state()

  def __iter__(self) -> Iterator[Scheduled]:
    return self

  def __next__(self) -> Scheduled:
    # A position is the state before a working set was read, and how many
    # batches were delivered since: resuming reads these few again.
    if self._queue is None or not self._queue.ready():
      self._base, self._emitted = self._whole_state(), 0
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
    """Takes in a batch of the source; False once none is left."""
    if self._read == self._batches:
      return False
    batch = next(self._source, None)
    if batch is None:
      return False
    self._read += 1
    if self._queue is None:
      self._queue = self._make(len(batch.labels), None)
    examples = real_examples(batch)
    self._queue.put(examples)
    self._seen += len(examples.labels)
    self._idle = 0 if len(examples.labels) else self._idle + 1
    if self._idle >= _IDLE:
      refuse_idle(self._idle)
    return True

  def _whole_state(self) -> State:
    return {
      'regrouping': self._name,
      'batches': self._batches,
      'source': self._source.get_state(),
      'read': self._read,
      'seen': self._seen,
      'idle': self._idle,
      'queue': None if self._queue is None else self._queue.get_state(),
      'batch_size': None if self._queue is None else self._queue.batch_size,
    }

  def get_state(self) -> State:
    """Position after the last batch delivered."""
    return {**self._base, 'emitted': self._emitted}

  def set_state(self, state: State) -> None:
    """Continues right after `state`; reads at most a working set again.

    Raises:
      UserError: it is of another schedule or of another end.
    """
    check_same(
      state, 'regrouping', 'regroup examples in the same way', self._name
    )
    check_same(state, 'batches', 'read as many batches', self._batches)
    self._base = {k: v for k, v in state.items() if k != 'emitted'}
    self._source.set_state(state['source'])
    self._read, self._seen = state['read'], state['seen']
    self._idle, self._emitted = state['idle'], 0
    self._queue = None
    if state['batch_size'] is not None:
      self._queue = self._make(state['batch_size'], state['queue'])
    for _ in range(state['emitted']):
      next(self)

  def unreported(self) -> tuple[int, int]:
    """Examples seen since the last batch delivered; none is dropped."""
    seen, self._seen = self._seen, 0
    return seen, 0

  def close(self) -> None:
    """Closes the source; may be called again."""
    self._source.close()
