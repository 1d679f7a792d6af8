"""Cuts kept inputs into full batches again, first in, first out."""

import numpy as np

from slipstream_jax.data.base import pad_batch
from slipstream_jax.types import Batch


class Rebatcher:
  """A queue of inputs that gives batches of one size.

  Attributes:
    batch_size: B, of every batch it gives.
    waiting: inputs in the queue.
  """

  def __init__(self, batch_size: int) -> None:
    """Gives batches of `batch_size` inputs."""
    self.batch_size = batch_size
    self._parts: list[Batch] = []
    self.waiting = 0

  def put(self, inputs: Batch) -> None:
    """Appends inputs, in their order; they are not copied."""
    if len(inputs.labels):
      self._parts.append(inputs)
      self.waiting += len(inputs.labels)

  def ready(self) -> bool:
    """Whether a full batch waits."""
    return self.waiting >= self.batch_size

  def take(self) -> Batch:
    """The next batch; padded with inputs of weight 0 if too few wait."""
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


def real_inputs(batch: Batch) -> Batch:
  """The inputs that are not padding."""
  real = batch.weights > 0
  return batch if real.all() else Batch(*(column[real] for column in batch))


def select_inputs(batch: Batch, keep: np.ndarray, weight: np.ndarray) -> Batch:
  """The inputs with keep bool[B], their weights times weight f32[B]."""
  index = np.flatnonzero(keep)
  if len(index) == len(keep):
    return batch._replace(weights=batch.weights * weight)
  dense, lookups, labels, weights = (c.take(index, axis=0) for c in batch)
  return Batch(dense, lookups, labels, weights * weight.take(index))
