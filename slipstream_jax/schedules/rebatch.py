"""Cuts kept examples into full batches again, first in, first out."""

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
    self.put(Batch(*(column[size:] for column in whole)))
    return pad_batch(Batch(*(column[:size] for column in whole)), size)

  def peek(self) -> Batch | None:
    """All that waits, in one piece; None if nothing does."""
    if len(self._parts) > 1:
      columns = zip(*self._parts, strict=True)
      self._parts = [Batch(*map(np.concatenate, columns))]
    return self._parts[0] if self._parts else None


def real_examples(batch: Batch) -> Batch:
  """The examples that are not padding."""
  real = batch.weights > 0
  return batch if real.all() else Batch(*(column[real] for column in batch))


def select_examples(
  batch: Batch, keep: np.ndarray, weight: np.ndarray
) -> Batch:
  """The examples with keep bool[B], their weights times weight f32[B]."""
  index = np.flatnonzero(keep)
  if len(index) == len(keep):
    return batch._replace(weights=batch.weights * weight)
  dense, lookups, labels, weights = (c.take(index, axis=0) for c in batch)
  return Batch(dense, lookups, labels, weights * weight.take(index))
