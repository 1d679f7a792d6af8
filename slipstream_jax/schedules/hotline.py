"""Hotline's order: popular examples in batches of their own (arXiv 2204.05436).

A popular example looks up hot rows only. Where hot rows stay on the device, a
batch of such examples moves no row, and the rows of the others can be gathered
meanwhile. `hotline` takes some batches together, a working set. It returns the
full batches of popular examples first, then those of the others. Examples that
fill no batch wait for the next set. `hotline_micro` keeps the batches, and puts
popular examples first in each. In equal parts (`Recipe.microbatches`), most
parts hold nothing else, as in the paper's later form.
"""

import functools

import numpy as np

from slipstream_jax.errors import check_whole
from slipstream_jax.schedules.base import Regrouping, ScheduleSpec, State
from slipstream_jax.schedules.rebatch import is_popular, Rebatcher, select
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.schedules.slipstream import slipstream
from slipstream_jax.types import Batch, HotRows

WORKING_SET = 4
"""Batches in a working set, as published. 1 is slow."""
_NOTHING = Skip(0, 'random', until=0)  # settings that skip nothing


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
  queue = functools.partial(WorkingSets, working_set)
  regrouping = Regrouping(f'hotline {working_set}', queue=queue)
  return slipstream(_NOTHING, batches, regrouping)


def hotline_micro(batches: int | None = None) -> ScheduleSpec:
  """Puts popular examples first in each batch, and keeps its examples.

  Args:
    batches: of the source to read before the schedule ends. None: all.

  Raises:
    UserError: a number out of range.
  """
  regrouping = Regrouping('hotline_micro', queue=PopularFirst)
  return slipstream(_NOTHING, batches, regrouping)


class WorkingSets:
  """A queue that regroups W batches' worth of examples at a time.

  Attributes:
    longest: most examples that one of its two queues has held.
  """

  def __init__(
    self,
    working_set: int,
    hot: HotRows,
    batch_size: int,
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
    """Returns all examples, and how many batches are due."""
    return {
      'queued': [queue.get_state() for queue in self._queues],
      'gathered': self._gathered,
      'due': list(self._due),
    }


class PopularFirst(Rebatcher):
  """A queue of batches in order, with popular examples first in each."""

  def __init__(
    self, hot: HotRows, batch_size: int, state: State | None = None
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
