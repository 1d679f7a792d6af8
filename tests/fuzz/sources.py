"""Batch sources as users write them, and a look at what goes by."""

from typing import NamedTuple

import numpy as np

import slipstream_jax as slip
from slipstream_jax.schedules.base import Edge
from tests.support.watchdog import Hang

MOST = 5_000  # batches that a run of some steps may read


class Source:
  """Batches of any arrays, with weights; or what another source gives.

  Attributes:
    given: copies of the batches delivered, as numpy arrays.
    dead: whether to fail, so that a thread that reads for ever ends.
  """

  def __init__(self, batches, epochs, reuses=False, inner=None):
    self._batches, self._epochs, self._reuses = batches, epochs, reuses
    self._inner, self._delivered, self._memory = inner, 0, None
    self.given, self.dead, self.closed = [], False, False

  def __iter__(self):
    return self

  @property
  def endless(self):
    return self._inner.endless if self._inner else self._epochs is None

  def __next__(self):
    if self.dead or self._delivered > MOST:
      raise Hang(f'{self._delivered} batches were read')
    batch = next(self._inner) if self._inner else self._own()
    self._delivered += 1
    if len(self.given) < 200:
      self.given.append(copy_of(batch))
    return batch

  def _own(self):
    epoch, step = divmod(self._delivered, max(1, len(self._batches)))
    if not self._batches or (self._epochs and epoch >= self._epochs):
      raise StopIteration
    batch = self._batches[step]
    if not self._reuses:
      return batch
    if self._memory is None:
      self._memory = copy_of(batch)
    for kept, column in zip(self._memory, batch, strict=True):
      if kept is not None:
        kept[...] = column
    return self._memory

  def get_state(self):
    return self._inner.get_state() if self._inner else {'at': self._delivered}

  def set_state(self, state):
    if self._inner:
      self._inner.set_state(state)
    else:
      self._delivered = state['at']

  def close(self):
    self.closed = True


def copy_of(batch):
  """A batch's arrays, as they are now."""
  return batch.map(np.array)


def cut(columns, size, pads):
  """Batches of a dict of columns, in their order; the remainder padded."""
  names = 'dense', 'lookups', 'labels', 'weights', 'lookup_weights', 'offset'
  found = []
  columns = columns | {'labels': np.ravel(columns['labels'])}  # of [n, 1]
  for start in range(0, len(columns['lookups']), size):
    whole = [columns.get(name) for name in names]
    part = [x if x is None else x[start : start + size] for x in whole]
    short = size - len(part[1])
    if short and not pads:
      break
    if short:
      fills = zip(part, (0, -1, 0, 0, 0, 0), strict=True)
      part = [_padded(column, short, fill) for column, fill in fills]
    found.append(slip.Batch(*part))
  return found


def _padded(column, short, fill):
  if column is None:
    return None
  column = np.asarray(column)
  pads = [(0, short)] + [(0, 0)] * (column.ndim - 1)
  return np.pad(column, pads, constant_values=fill)


class Emitted(NamedTuple):
  """What the oracle needs of a planned batch."""

  batch: slip.Batch
  edge: Edge


class Seen:
  """Planned batches, each copied before it is trained."""

  def __init__(self, batches):
    self._batches, self._item, self.emitted = batches, None, []

  def peek(self):
    item = self._batches.peek()
    if item is not None and item is not self._item:
      scheduled = item.scheduled
      self.emitted.append(Emitted(copy_of(scheduled.batch), scheduled.edge))
    self._item = item
    return item

  def __getattr__(self, name):
    return getattr(self._batches, name)
