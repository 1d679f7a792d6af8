"""Queues that cut kept examples into batches."""

import math
from typing import Any, no_type_check

from jaxtyping import Bool
import numpy as np

from slipstream_jax.data.numbered import pad_batch
from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.selection.base import joined, Selection
from slipstream_jax.types import Batch, HotRows, Lookups

_NONE = np.empty(0, np.int64)


class Rebatcher:
  """A queue that cuts examples into batches of one size, in their order.

  Attributes:
    batch_size: B, of every batch that it returns.
    waiting: number of examples in the queue.
  """

  def __init__(
    self, batch_size: int, state: dict[str, Any] | None = None
  ) -> None:
    """Starts with the examples of a state from `get_state`, or empty."""
    self.batch_size = batch_size
    self._parts: list[Batch] = []
    self.waiting = 0
    # Reassigned rows, and for each the examples in the queue before it.
    self._fresh = self._before = _NONE
    if state is not None:
      if state['queued']:
        self.put(Batch(**state['queued']))
      self._fresh = state['fresh']
      # Positions of batches that are not filled up did not have it.
      self._before = state.get('before', np.zeros(len(self._fresh), np.int64))

  def put(self, examples: Batch) -> None:
    """Appends examples in their order, without a copy."""
    if examples.fresh is not None:
      here = np.full(len(examples.fresh), self.waiting)
      self._fresh = np.concatenate([self._fresh, examples.fresh])
      self._before = np.concatenate([self._before, here])
    if len(examples.labels):
      self._parts.append(examples._replace(fresh=None))
      self.waiting += len(examples.labels)

  def ready(self) -> bool:
    """Whether there is a full batch."""
    return self.waiting >= self.batch_size

  def take(self) -> Batch:
    """Returns the next batch, padded with examples of weight 0 if needed."""
    return self._cut(self.batch_size)

  def _cut(self, size: int) -> Batch:
    """Removes the first examples, and returns them as a batch of that size.

    Its `fresh` rows are those of every batch put whose first example it has,
    and of batches without examples before it.
    """
    whole = self._whole()
    assert whole is not None
    self._parts, self.waiting = [], 0
    self.put(whole.map(lambda column: column[size:]))
    now = self._before < size
    fresh, self._fresh = self._fresh[now], self._fresh[~now]
    self._before = self._before[~now] - size
    batch = pad_batch(whole.map(lambda column: column[:size]), size)
    return batch._replace(fresh=fresh) if len(fresh) else batch

  def _whole(self) -> Batch | None:
    """Returns all examples in one piece, or None if there are none."""
    if len(self._parts) > 1:
      self._parts = [joined(self._parts)]
    return self._parts[0] if self._parts else None

  def get_state(self) -> dict[str, Any]:
    """Returns all examples in the queue."""
    whole, queued = self._whole(), None
    if whole is not None:
      queued = {k: v for k, v in whole._asdict().items() if v is not None}
    return {'queued': queued, 'fresh': self._fresh, 'before': self._before}


class SingleBatchQueue(Rebatcher):
  """A queue that returns each batch as it was put. It holds one at most."""

  def ready(self) -> bool:
    """Whether there is a batch."""
    return self.waiting > 0

  def take(self) -> Batch:
    """Returns the batch, with the fresh rows of batches without examples."""
    return self._cut(self.waiting)


class PopularFirstQueue(Rebatcher):
  """A queue of batches in order, with popular examples first in each."""

  def __init__(
    self, hot: HotRows, batch_size: int, state: dict[str, Any] | None = None
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


class WorkingSetQueue:
  """A queue that regroups W batches' worth of examples at a time.

  Attributes:
    longest: most examples that one of its two queues has held.
  """

  def __init__(
    self,
    working_set: int,
    hot: HotRows,
    batch_size: int,
    state: dict[str, Any] | None = None,
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

  def get_state(self) -> dict[str, Any]:
    """Returns all examples, and how many batches are due."""
    return {
      'queued': [queue.get_state() for queue in self._queues],
      'gathered': self._gathered,
      'due': list(self._due),
    }


Queue = Rebatcher | WorkingSetQueue
"""Examples that wait to be cut into batches, in an order of its own."""


SIZES = 8
"""Number of sizes of batches that are not filled up again. A program is
compiled for each size that occurs."""


def alone(
  kept: Batch,
  seen: int,
  batch_size: int,
  corrected: bool,
  multiple: int = 1,
) -> tuple[Batch, float]:
  """Pads the kept examples of one batch to a multiple of B / `SIZES`.

  A step divides the sum of its losses by the size of the batch, so the weights
  must be scaled. If the kept examples represent the dropped ones, the sum is
  divided by `batch_size`, else by the number of kept examples. A batch of which
  all is kept does not change.

  Args:
    kept: the examples, none of them padding.
    seen: number of examples before some were dropped.
    batch_size: B, of the source.
    corrected: whether the kept examples represent the dropped ones.
    multiple: divides the size. A divisor of `batch_size`.

  Returns:
    The batch, and its `Scheduled.scale`.
  """
  examples = len(kept.labels)
  if examples in (0, seen):
    return (pad_batch(kept, batch_size) if examples else kept), 1.0
  eighths = -(-SIZES * examples // batch_size)
  size = -(-batch_size * eighths // (SIZES * multiple)) * multiple
  scale = size / batch_size * (1 if corrected else seen / examples)
  return pad_batch(kept, size), scale


def real_examples(batch: Batch) -> Batch:
  """Returns the examples that are not padding."""
  real = batch.weights > 0
  return batch if real.all() else batch.map(lambda column: column[real])


def is_popular(batch: Batch, hot: HotRows) -> Bool[np.ndarray, ' B']:
  """Returns which examples look up hot rows only."""
  return only_hot(hot, batch.lookups)


def only_hot(hot: HotRows, lookups: Lookups) -> Bool[np.ndarray, ' n']:
  """Returns which examples look up only hot rows."""
  lists = lookups.reshape(len(lookups), math.prod(lookups.shape[1:]))
  out = np.empty(len(lists), np.bool_)
  _only_hot(lists, hot.place, len(hot.rows), out)
  return out


@kernel
@no_type_check
def _only_hot(
  lists: np.ndarray, place: np.ndarray, cold: int, out: np.ndarray
) -> None:
  for i in range(len(lists)):
    out[i] = True
    for k in range(lists.shape[1]):
      row = lists[i, k]
      if row >= 0 and place[row] == cold:
        out[i] = False
        break


def select(batch: Batch, which: Bool[np.ndarray, ' B']) -> Batch:
  """Returns some examples of a batch that has no reassigned rows.

  Raises:
    UserError: it has such rows.
  """
  if batch.fresh is not None and len(batch.fresh):
    raise UserError(
      'examples change places only where rows keep their ids',
      got=f'{len(batch.fresh)} rows that got another one',
      where='Batch.fresh',
      hint='train in the order of the source, or map ids by a vocabulary that'
      ' does not grow',
    )
  index = np.flatnonzero(which)
  return batch.map(lambda column: column.take(index, axis=0))


def select_examples(batch: Batch, selection: Selection) -> Batch:
  """Returns the kept examples, with weights multiplied and offsets added."""
  weights = batch.weights * selection.weight
  batch = batch._replace(weights=weights)
  if selection.offset is not None:
    own = batch.offset
    added = selection.offset if own is None else own + selection.offset
    batch = batch._replace(offset=added)
  index = np.flatnonzero(selection.keep)
  if len(index) == len(selection.keep):
    return batch
  return batch.map(lambda column: column.take(index, axis=0))
