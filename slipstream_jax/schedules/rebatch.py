"""Cuts kept examples into full batches again, first in, first out."""

from typing import Any

import numpy as np

from slipstream_jax.data.base import pad_batch
from slipstream_jax.types import Batch


class Rebatcher:
  """A queue of examples that gives batches of one size.

  Attributes:
    batch_size: B, of every batch it gives.
    waiting: examples in the queue.
  """

  def __init__(self, batch_size: int) -> None:
    """Gives batches of `batch_size` examples."""
    self.batch_size = batch_size
    self._parts: list[Batch] = []
    self.waiting = 0

  def put(self, examples: Batch) -> None:
    """Appends examples, in their order; they are not copied."""
    if len(examples.labels):
      self._parts.append(examples)
      self.waiting += len(examples.labels)

  def ready(self) -> bool:
    """Whether a full batch waits."""
    return self.waiting >= self.batch_size

  def take(self) -> Batch:
    """The next batch; padded with examples of weight 0 if too few wait."""
    size = self.batch_size
    whole = self.peek()
    assert whole is not None
    self._parts, self.waiting = [], 0
    if len(whole.labels) == size:
      return whole
    self.put(whole.map(lambda column: column[size:]))
    return pad_batch(whole.map(lambda column: column[:size]), size)

  def peek(self) -> Batch | None:
    """All that waits, in one piece; None if nothing does."""
    if len(self._parts) > 1:
      self._parts = [_joined(self._parts)]
    return self._parts[0] if self._parts else None


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
  # Of one source: a column is in all of them or in none.
  joined: list[Any] = [
    None if column[0] is None else np.concatenate(column)
    for column in zip(*parts, strict=True)
  ]
  return Batch(*joined)
