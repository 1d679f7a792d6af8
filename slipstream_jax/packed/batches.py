"""Batches of a packed data set, shuffled or in order, without loading it.

Two groups of examples are in memory: the one that batches are cut from, and the
next one, which a thread reads and mixes (see `order` for groups). A position is
a count of batches, so a run resumes anywhere at the cost of reading one group.
"""

from typing import NamedTuple

from slipstream_jax.data.numbered import (
  batches_of,
  Columns,
  NumberedBatches,
  to_batch,
)
from slipstream_jax.data.prefetch import Worker
from slipstream_jax.packed.columns import PackedData
from slipstream_jax.packed.order import check, Order, places, runs
from slipstream_jax.packed.reader import Form, form_of, read
from slipstream_jax.types import Batch

BLOCK = 1 << 13
"""Consecutive examples read at once: 8 to 32 KB of each table's column."""
BUFFER_BYTES = 1 << 28
"""Memory for examples. Half of it takes some 800,000 of Criteo's."""
_IN_ORDER = 1 << 16  # examples of a group if nothing is mixed

_Key = tuple[int, int]  # epoch and group of it


class PackedBatches(NumberedBatches):
  """Batches of a range of a packed data set's examples.

  Lookups are global rows, i32[B, F], [B, F, L] or [B, K] with -1 for padding
  (i64 above 2**31 rows). Weights are 1.0, and 0.0 in padded examples, whose
  lookups are -1.

  Attributes:
    batches_per_epoch: batches of one pass over the examples, in every shard.
  """

  def __init__(
    self,
    packed: PackedData,
    batch_size: int,
    *,
    first: int = 0,
    end: int | None = None,
    shuffle_seed: int | None = None,
    epochs: int | None = None,
    pad_remainder: bool = False,
    shard: tuple[int, int] = (0, 1),
    block: int = BLOCK,
    buffer_bytes: int = BUFFER_BYTES,
  ):
    """Creates batches of `batch_size` examples.

    Args:
      packed: the data set.
      batch_size: B of this shard.
      first: first example.
      end: example after the last one. None: the end of the data set.
      shuffle_seed: seed of the order of each epoch. None keeps file order.
      epochs: passes over the examples before the source ends. None: endless.
      pad_remainder: whether the last, partial batch of an epoch is padded with
        examples of weight 0. Else it is left out.
      shard: (index, count), the share of the examples to read. All shards
        together have every example once, and all have as many batches.
      block: examples that are read together. Fewer are mixed better, more are
        read faster from a disk.
      buffer_bytes: memory for examples. As many as fit into half of it are
        mixed with one another.

    Raises:
      UserError: an argument is out of range, there are too few examples for a
        batch, or a column is not that of a packed data set.
    """
    form = form_of(packed)
    group = buffer_bytes // 2 // form.example_bytes  # two are in memory
    if shuffle_seed is None:
      group = min(group, _IN_ORDER)
    order = Order(
      first,
      form.examples if end is None else end,
      batch_size,
      pad_remainder,
      shuffle_seed,
      *shard,
      # A block never needs more room than a group.
      block=min(block, max(group, 1)),
      group=group,
    )
    check(order, form.examples)
    self.batches_per_epoch = order.batches
    self._buffer, self._closed = _Buffer(form, order, epochs), False
    super().__init__(
      self._buffer.batch_at,
      batches_of(epochs, order.batches, 'PackedBatches'),
      # Identified by checksums and not by folder, so data sets may be moved.
      [order, packed.manifest.get('columns')],
      reads=f'{order} of {form.folder}',
    )

  def __next__(self) -> Batch:
    if self._closed:
      raise StopIteration
    return super().__next__()

  def close(self) -> None:
    """Ends the thread and the iteration, and frees the memory."""
    self._closed = True
    self._buffer.close()


class _Group(NamedTuple):
  """A group in memory, its examples mixed."""

  key: _Key
  columns: Columns


class _Buffer:
  """Two groups: one to cut batches from, and the next, read in a thread."""

  def __init__(self, form: Form, order: Order, epochs: int | None) -> None:
    self._form, self._order, self._epochs = form, order, epochs
    self._current: _Group | None = None
    self._next: Worker[_Group] | None = None

  def batch_at(self, number: int) -> Batch:
    order = self._order
    epoch, step = divmod(number, order.batches)
    begin = step * order.batch_size
    end = min(begin + order.batch_size, order.examples)
    batch, filled = self._form.empty(order.batch_size), 0
    while begin < end:  # a group may end inside of a batch
      group = self._group(epoch, begin)
      first, last = order.bounds(group.key[1])
      stop = min(end, last)
      some = slice(filled, filled + stop - begin)
      # Copied, because the group's memory will be reused.
      for ours, column in zip(batch, group.columns, strict=True):
        if ours is not None and column is not None:
          ours[some] = column[begin - first : stop - first]
      begin, filled = stop, some.stop
    return to_batch(batch.take(slice(filled)), order.batch_size)

  def _group(self, epoch: int, place: int) -> _Group:
    """Returns the group of the epoch's example number `place`, in memory."""
    key = epoch, self._order.group_of(place)
    if self._current is not None and self._current.key == key:
      return self._current
    # Cleared first, so that an error or interrupt leaves no partial state.
    worker, self._next = self._next, None
    old, self._current = self._current, None
    group = None if worker is None else worker.take()
    if group is None or group.key != key:  # the first one, or after a jump
      room = None if group is None else group.columns
      group = _read_group(self._form, self._order, key, room)
    self._current, after = group, self._after(key)
    if after is not None:
      # Reuses the memory of the previous group, because the system would have
      # to clear new memory.
      room = None if old is None else old.columns
      # The thread must not refer to this object, or it would never be freed.
      reading = map(_read_group, [self._form], [self._order], [after], [room])
      # Depth 2, for the group and the end, so that the thread ends by itself.
      self._next = Worker(reading, 2, 'slipstream-reader')
    return group

  def _after(self, key: _Key) -> _Key | None:
    epoch, group = key
    if group + 1 < self._order.groups:
      return epoch, group + 1
    last = self._epochs is not None and epoch + 1 >= self._epochs
    return None if last else (epoch + 1, 0)

  def close(self) -> None:
    worker, self._next, self._current = self._next, None, None
    if worker is not None:
      worker.stop()


def _read_group(
  form: Form, order: Order, key: _Key, room: Columns | None
) -> _Group:
  """Reads a group into `room`, or into new memory."""
  if room is None:
    # Lengths of groups differ by at most one.
    room = form.empty(-(-order.examples // order.groups))
  where = places(order, *key)
  read(form, runs(order, *key), order.block, where, room)
  return _Group(key, room)
