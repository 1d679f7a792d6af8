"""Batches of a packed data set, shuffled or in order, without loading it.

Two groups of inputs are in memory: the one that batches are cut from, and the
next, which a thread reads and mixes meanwhile (`order` says which inputs a
group has). A position is a count of batches, so a run resumes anywhere at the
cost of reading one group.

`PackedBatches` has the methods of grain's checkpointable iterators, `get_state`
and `set_state`, with their meaning: a `grain.DatasetIterator` around it needs
to do no more than to call them. Where grain is to choose the order,
`packed_dataset.PackedInputs` is a random-access source for it.
"""

from collections.abc import Iterator
import threading
from typing import get_args, Literal, NamedTuple

from slipstream_jax.data.base import check_epochs, Columns, to_batch
from slipstream_jax.data.position import checksum, delivered_of
from slipstream_jax.errors import UserError
from slipstream_jax.packed.columns import Packed
from slipstream_jax.packed.order import check, group_of, Order, places, runs
from slipstream_jax.packed.reader import Form, form_of, read
from slipstream_jax.types import Batch

BLOCK = 1 << 13
"""Consecutive inputs read at once; 8 to 32 KB of each table's column."""
BUFFER_BYTES = 1 << 28
"""Memory for inputs; some 800,000 of Criteo's fit one half and are mixed."""
_IN_ORDER = 1 << 16  # inputs of a group in which nothing is mixed

Remainder = Literal['drop', 'pad']
_Key = tuple[int, int]  # epoch and group


class PackedBatches:
  """Batches of a range of a packed data set's inputs; a `BatchSource`.

  Lookups are global rows, i32[B, F] or [B, F, L] with -1 for padding (i64
  above 2**31 rows); weights are 1.0, and 0.0 in padded inputs, whose lookups
  are -1.
  """

  def __init__(
    self,
    packed: Packed,
    batch_size: int,
    *,
    first: int = 0,
    end: int | None = None,
    shuffle_seed: int | None = None,
    epochs: int | None = None,
    remainder: Remainder = 'drop',
    shard: tuple[int, int] = (0, 1),
    block: int = BLOCK,
    buffer_bytes: int = BUFFER_BYTES,
  ):
    """Batches of `batch_size` inputs.

    Args:
      packed: the data set.
      batch_size: B, of this shard.
      first: the first input.
      end: the input after the last one; None: all there are.
      shuffle_seed: seed of the order of each epoch; None keeps file order.
      epochs: passes over the inputs before the source ends; None is endless.
      remainder: 'drop' leaves out what fills no batch, 'pad' fills it up with
        inputs of weight 0.
      shard: (index, count): this reader's share of the inputs; all shares
        together have every input once, and equally many batches.
      block: inputs that are read together; fewer mix better, more read
        faster from a disk.
      buffer_bytes: memory for inputs; the inputs that fit half of it are
        mixed with one another.

    Raises:
      UserError: an argument out of range, too few inputs for a single batch,
        or columns that are none of a packed data set.
    """
    if remainder not in get_args(Remainder):
      raise UserError(
        f'remainder must be one of {", ".join(get_args(Remainder))}',
        got=repr(remainder),
        where='PackedBatches, remainder',
        mend='pick one of them',
      )
    self._form = form_of(packed)
    inputs = self._form.inputs
    group = buffer_bytes // 2 // self._form.input_bytes
    if shuffle_seed is None:
      group = min(group, _IN_ORDER)
    self._order = Order(
      first,
      inputs if end is None else end,
      batch_size,
      remainder == 'pad',
      shuffle_seed,
      *shard,
      block=min(block, max(group, 1)),
      group=group,
    )
    check(self._order, inputs)
    check_epochs(epochs, 'PackedBatches')
    self._epochs, self._delivered, self._closed = epochs, 0, False
    # Of the contents' checksums, not the folder: data sets may be moved.
    columns = packed.manifest.get('columns')
    self._fingerprint = checksum([self._order, columns])
    self._current: _Group | None = None
    self._ahead: _Reading | None = None

  @property
  def endless(self) -> bool:
    """Whether epochs never end."""
    return self._epochs is None

  @property
  def batches_per_epoch(self) -> int:
    """Batches that one pass over the inputs gives, in every shard."""
    return self._order.batches

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    order = self._order
    epoch, step = divmod(self._delivered, order.batches)
    if self._closed or (self._epochs is not None and epoch >= self._epochs):
      raise StopIteration
    begin = step * order.batch_size
    end = min(begin + order.batch_size, order.inputs)
    batch, filled = self._form.empty(order.batch_size), 0
    while begin < end:
      group = self._group(epoch, begin)
      stop = min(end, group.end)
      some = slice(filled, filled + stop - begin)
      # Copied, as the group's memory is that of another one soon.
      for ours, column in zip(batch, group.columns, strict=True):
        ours[some] = column[begin - group.begin : stop - group.begin]
      begin, filled = stop, some.stop
    self._delivered += 1
    return to_batch(batch.take(slice(filled)), order.batch_size)

  def _group(self, epoch: int, place: int) -> '_Group':
    """The group of the epoch's input number `place`, in memory."""
    key = epoch, group_of(self._order, place)
    if self._current is not None and self._current.key == key:
      return self._current
    ahead, self._ahead = self._ahead, None
    old, self._current = self._current, None
    group = None if ahead is None else ahead.take()
    if group is None or group.key != key:  # the first one, or after a jump
      room = None if group is None else group.columns
      group = _read_group(self._form, self._order, key, room)
    self._current, after = group, self._after(key)
    if after is not None:
      room = None if old is None else old.columns
      self._ahead = _Reading(self._form, self._order, after, room)
    return group

  def _after(self, key: _Key) -> _Key | None:
    epoch, group = key
    if group + 1 < self._order.groups:
      return epoch, group + 1
    last = self._epochs is not None and epoch + 1 >= self._epochs
    return None if last else (epoch + 1, 0)

  def get_state(self) -> dict[str, int]:
    """Batches delivered since the start, and a checksum of their order."""
    return {'delivered': self._delivered, 'order': self._fingerprint}

  def set_state(self, state: dict[str, int]) -> None:
    """Continues after the batches that `state` counts.

    Raises:
      UserError: it is of other data or of another order, in which other
        inputs would be left.
    """
    reads = f'{self._order} of {self._form.folder}'
    self._delivered = delivered_of(state, self._fingerprint, reads)

  def close(self) -> None:
    """Gives back memory and the thread; no more batches come."""
    self._closed = True
    ahead, self._ahead, self._current = self._ahead, None, None
    if ahead is not None:
      ahead.stop()


class _Group(NamedTuple):
  """Inputs [begin, end) of an epoch, mixed, in memory."""

  key: _Key
  begin: int
  end: int
  columns: Columns


def _read_group(
  form: Form, order: Order, key: _Key, room: Columns | None
) -> _Group:
  """Reads a group into `room`, or into new memory."""
  begin, end = order.bounds(key[1])
  if room is None:
    # No group is longer than another by more than one input.
    room = form.empty(-(-order.inputs // order.groups))
  where = places(order, *key)
  read(form, runs(order, *key), order.block, where, room)
  return _Group(key, begin, end, room)


class _Reading:
  """A group on its way, in a thread that ends with it."""

  def __init__(
    self, form: Form, order: Order, key: _Key, room: Columns | None
  ) -> None:
    self._arguments = form, order, key, room
    self._result: _Group | BaseException | None = None
    self._thread = threading.Thread(
      target=self._run, name='slipstream-reader', daemon=True
    )
    self._thread.start()

  def _run(self) -> None:
    try:
      self._result = _read_group(*self._arguments)
    except BaseException as error:  # handed to the consumer, who raises it
      self._result = error

  def take(self) -> _Group:
    """The group, or the error that reading it met."""
    self._thread.join()
    result = self._result
    assert result is not None
    if isinstance(result, BaseException):
      raise result
    return result

  def stop(self) -> None:
    """Waits for the thread: a group takes a fraction of a second."""
    self._thread.join()
