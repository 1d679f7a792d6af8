"""Cuts kept examples into full batches again, first in, first out."""

from typing import Any

import numpy as np

from slipstream_jax.data.base import pad_batch
from slipstream_jax.schedules.base import State
from slipstream_jax.types import Batch

_NONE = np.empty(0, np.int64)


class Rebatcher:
  """A queue of examples that gives batches of one size.

  Attributes:
    batch_size: B, of every batch it gives.
    waiting: examples in the queue.
  """

  def __init__(self, batch_size: int, state: State | None = None) -> None:
    """Gives batches of `batch_size` examples; first those of `get_state`."""
    self.batch_size = batch_size
    self._parts: list[Batch] = []
    self.waiting = 0
    # Rows that got another id, and how many examples wait before them.
    self._fresh = self._before = _NONE
    if state is not None:
      if state['queued'] is not None:
        self.put(Batch(**state['queued']))
      self._fresh, self._before = state['fresh'], state['before']

  def put(self, examples: Batch) -> None:
    """Appends examples, in their order; they are not copied."""
    if examples.fresh is not None:
      here = np.full(len(examples.fresh), self.waiting)
      self._fresh = np.concatenate([self._fresh, examples.fresh])
      self._before = np.concatenate([self._before, here])
    if len(examples.labels):
      self._parts.append(examples._replace(fresh=None))
      self.waiting += len(examples.labels)

  def ready(self) -> bool:
    """Whether a full batch waits."""
    return self.waiting >= self.batch_size

  def take(self) -> Batch:
    """The next batch; padded with examples of weight 0 if too few wait.

    Its `fresh` rows are those of the batches of which it has the first
    examples, and of those before that have none.
    """
    size = self.batch_size
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
    """All that waits, in one piece; None if nothing does."""
    if len(self._parts) > 1:
      self._parts = [_joined(self._parts)]
    return self._parts[0] if self._parts else None

  def get_state(self) -> State:
    """All that waits."""
    whole = self._whole()
    return {
      'queued': None if whole is None else _without_none(whole),
      'fresh': self._fresh,
      'before': self._before,
    }


def _without_none(batch: Batch) -> State:
  return {k: v for k, v in batch._asdict().items() if v is not None}


def real_examples(batch: Batch) -> Batch:
  """The examples that are not padding."""
  real = batch.weights > 0
  return batch if real.all() else batch.map(lambda column: column[real])


def select_examples(
  batch: Batch, keep: np.ndarray, weight: np.ndarray
) -> Batch:
  """The examples with keep bool[B], their weights times weight f32[B]."""
  index = np.flatnonzero(keep)
  if len(index) == len(keep):
    return batch._replace(weights=batch.weights * weight)
  kept = batch.map(lambda column: column.take(index, axis=0))
  return kept._replace(weights=kept.weights * weight.take(index))


def _joined(parts: list[Batch]) -> Batch:
  """The examples of all of them, in their order."""
  # Of one source: a column is in all of them or in none; and none is fresh.
  joined: list[Any] = [
    None if column[0] is None else np.concatenate(column)
    for column in zip(*parts, strict=True)
  ]
  return Batch(*joined)
