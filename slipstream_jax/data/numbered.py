"""Sources whose batch is a function of its number: they resume anywhere.

A count alone would continue any source anywhere: other examples would be left
out, or trained twice, and nobody would know. So a position is a count of
batches and a checksum of what decides which examples are in which batch.
"""

from collections.abc import Callable, Iterable
import functools
import json
from typing import Any, NamedTuple, Protocol, runtime_checkable
import zlib

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import check_seed, is_whole, UserError
from slipstream_jax.tables import as_array
from slipstream_jax.types import Batch, Lookups

_SAMPLED = 1 << 10  # examples that tell one data set from another


@runtime_checkable
class Column(Protocol):
  """The values of all examples, such as an array, as a checksum reads them."""

  @property
  def dtype(self) -> np.dtype:
    """Type of the values."""
    ...

  @property
  def shape(self) -> tuple[int, ...]:
    """[n, ...]."""
    ...

  def __len__(self) -> int: ...

  def __getitem__(self, rows: Any) -> np.ndarray: ...


class Numbered(BatchSource):
  """Batches made by a function of their number.

  Attributes:
    batch_at: the function, from 0, 1, ... to a batch.
  """

  def __init__(
    self,
    batch_at: Callable[[int], Batch],
    batches: int | None,
    order: object,
    columns: Iterable[Column] = (),
    *,
    reads: str,
  ) -> None:
    """Batches number 0, 1, ... of `batch_at`.

    Args:
      batch_at: asked for one number after the other, but after `set_state`;
        for the same one again if it raised.
      batches: how many there are; None is endless.
      order: what decides which examples are in which batch; JSON, or numpy's
        numbers. A position is refused by a source of another order.
      columns: arrays [n, ...] of the examples, where `order` does not tell them
        apart; 1,024 of each are compared.
      reads: the examples in words, for the error of a refused position.
    """
    self.batch_at, self._batches, self._reads = batch_at, batches, reads
    self._order, self._delivered = order, 0
    self.recheck(columns)

  def recheck(self, columns: Iterable[Column]) -> None:
    """Takes other columns to tell the examples of positions apart."""
    self._columns = tuple(columns)
    self.__dict__.pop('_checksum', None)

  # Made when it is first asked for: a source that nobody saves needs none.
  @functools.cached_property
  def _checksum(self) -> int:
    return checksum(self._order, self._columns)

  @property
  def endless(self) -> bool:
    """Whether the batches never end."""
    return self._batches is None

  def __next__(self) -> Batch:
    if self._batches is not None and self._delivered >= self._batches:
      raise StopIteration
    # Counted afterwards: one that raised is asked for again.
    batch = self.batch_at(self._delivered)
    self._delivered += 1
    return batch

  def get_state(self) -> dict[str, int]:
    """Batches delivered since the start, and a checksum of their order."""
    return {'delivered': self._delivered, 'order': self._checksum}

  def set_state(self, state: dict[str, int]) -> None:
    """Continues after the batches that `state` counts.

    Raises:
      UserError: it is of other data or of another order, in which other
        examples would be left.
    """
    delivered = state.get('delivered')
    if state.get('order') != self._checksum or not is_whole(delivered, 0):
      raise UserError(
        'a resumed run must read the same examples in the same order',
        got=self._reads,
        where='set_state, state',
        hint='use the data, seed and batch size that the run was started with',
      )
    self._delivered = int(state['delivered'])


def check_batch_size(batch_size: object, where: str) -> None:
  """Looks at B.

  Raises:
    UserError: it is no whole number of at least 1.
  """
  if not is_whole(batch_size, 1):
    raise UserError(
      'a batch must hold at least one example, a whole number of them',
      got=repr(batch_size),
      where=where,
      hint='set it, e.g. to 1024',
    )


def batches_of(epochs: int | None, per_epoch: int, where: str) -> int | None:
  """Batches of so many passes over the examples; None is endless.

  Raises:
    UserError: `epochs` is neither None nor a whole number of at least 1.
  """
  if epochs is None:
    return None
  if not is_whole(epochs, 1):
    raise UserError(
      'epochs must be a whole number of at least 1, or None for no end',
      got=repr(epochs),
      where=f'{where}, epochs',
      hint='give the passes to make over the examples',
    )
  return epochs * per_epoch


def batches_per_epoch(
  examples: int, batch_size: int, pad: bool, where: str
) -> int:
  """Batches of one pass, the last of which is filled up, or left out.

  Raises:
    UserError: there are too few examples for one.
  """
  check_batch_size(batch_size, where)
  whole, rest = divmod(examples, batch_size)
  batches = whole + (1 if rest and pad else 0)
  if batches < 1:
    raise UserError(
      f'a batch of {batch_size} needs at least as many examples',
      got=examples,
      where=where,
      hint='set a smaller batch size or give more examples',
    )
  return batches


def order_of_epochs(
  examples: int, seed: int | None
) -> Callable[[int], Int[np.ndarray, ' n']]:
  """The order of each epoch, i64[n], shuffled by (seed, epoch) if it can be."""

  # Epochs follow one another, so one order is enough to keep.
  @functools.lru_cache(maxsize=1)
  def order_of(epoch: int) -> Int[np.ndarray, ' n']:
    order = np.arange(examples)
    if seed is not None:
      np.random.default_rng((seed, epoch)).shuffle(order)
    return order

  return order_of


def checksum(order: object, columns: Iterable[Column] = ()) -> int:
  """CRC-32 of a description and of 1,024 examples' values, evenly spaced.

  Args:
    order: as in `Numbered`.
    columns: arrays [n, ...] of the examples.
  """
  # JSON, as it says the same on every machine and in every process. Tuples
  # and lists are one to it; numpy's numbers it must be helped with.
  crc = zlib.crc32(json.dumps(order, default=lambda x: x.item()).encode())
  for column in columns:
    form = f'{column.dtype.str} {column.shape}'.encode()
    last = len(column) - 1
    # From the first to the last: other data, or the same in another order,
    # would hardly agree in all of these, and so few are soon read.
    some = np.linspace(0, last, min(last + 1, _SAMPLED)).astype(np.int64)
    crc = zlib.crc32(column[some].tobytes(), zlib.crc32(form, crc))
  return crc


class Columns(NamedTuple):
  """Examples held in memory, one array per kind of field."""

  dense: Float[np.ndarray, 'n I']
  lookups: Lookups
  labels: Float[np.ndarray, ' n'] | Float[np.ndarray, 'n T']
  lookup_weights: Float[np.ndarray, '...'] | None = None
  """Shaped as the lookups; None: all weigh 1."""

  def take(self, index: np.ndarray | slice) -> 'Columns':
    """The examples at `index`."""
    return self.map(lambda column: column[index])

  def map(self, change: Callable[[np.ndarray], np.ndarray]) -> 'Columns':
    """The columns, each changed; what is None stays."""
    changed: list[Any] = [None if c is None else change(c) for c in self]
    return Columns(*changed)


class ColumnBatches(Numbered):
  """Batches over `Columns`, shuffled per epoch by (seed, epoch) or in order.

  Epochs run on endlessly for training (`epochs=None`); the remainder of an
  epoch is dropped, or padded with examples of weight 0 and lookups of -1.

  Attributes:
    batches_per_epoch: batches that one pass over the examples gives.
  """

  def __init__(
    self,
    columns: Columns,
    batch_size: int,
    *,
    shuffle_seed: int | None = None,
    epochs: int | None = None,
    pad_remainder: bool = False,
  ) -> None:
    """Batches of `batch_size` examples over `columns`.

    Args:
      columns: the examples: arrays, or lists that make some.
      batch_size: B.
      shuffle_seed: seed of the order of each epoch; None keeps file order.
      epochs: passes over the examples before the source ends; None is endless.
      pad_remainder: pad the last batch of an epoch rather than drop it.

    Raises:
      UserError: too few examples for a single batch, uneven columns, or an
        argument out of range. What the columns hold is looked at batch by
        batch, by what trains on them.
    """
    columns = _even(columns)
    examples = len(columns.labels)
    self.batches_per_epoch = batches_per_epoch(
      examples, batch_size, pad_remainder, 'ColumnBatches, batch_size'
    )
    if shuffle_seed is not None:
      check_seed(shuffle_seed, 'ColumnBatches, shuffle_seed')
    super().__init__(
      _cut(columns, batch_size, self.batches_per_epoch, shuffle_seed),
      batches_of(epochs, self.batches_per_epoch, 'ColumnBatches'),
      ('columns', batch_size, pad_remainder, shuffle_seed),
      [column for column in columns if column is not None],
      reads=f'{examples} examples by {batch_size}',
    )


def _cut(
  columns: Columns, batch_size: int, per_epoch: int, seed: int | None
) -> Callable[[int], Batch]:
  """The batch of a number: columns cut in the order of its epoch."""
  order_of = order_of_epochs(len(columns.labels), seed)

  def batch_at(number: int) -> Batch:
    epoch, step = divmod(number, per_epoch)
    start = step * batch_size
    index = order_of(epoch)[start : start + batch_size]
    return to_batch(columns.take(index), batch_size)

  return batch_at


def _even(columns: Columns) -> Columns:
  """The columns as arrays of one length."""
  named = zip(Columns._fields, columns, strict=True)
  arrays = [
    None if column is None else as_array(column, f'Columns.{name}')
    for name, column in named
  ]
  lengths = [len(a) if a.ndim else 'no' for a in arrays if a is not None]
  if len(set(lengths)) > 1 or 'no' in lengths:
    raise UserError(
      'columns must hold the same number of examples',
      got=lengths,
      where='Columns(dense, lookups, labels)',
      hint='give one entry of each per example',
    )
  checked: list[Any] = arrays
  return Columns(*checked)


def signed(lookups: np.ndarray) -> Lookups:
  """Lookups of any integer type as i32 or i64, which can hold -1.

  Raises:
    UserError: one is too large for i64, and would come out negative.
  """
  if lookups.dtype in (np.int32, np.int64):
    return lookups
  largest = np.iinfo(np.int64).max
  if lookups.dtype.kind == 'u' and lookups.max(initial=0) > largest:
    at = tuple(int(i) for i in np.argwhere(lookups > largest)[0])
    raise UserError(
      'lookups must be below 2**63',
      got=int(lookups[at]),
      where=f'example {at[0]}, Batch.lookups{list(at)}',
      hint='make them with TableSet.lookups(ids)',
    )
  return lookups.astype(np.int64)


def to_batch(columns: Columns, batch_size: int) -> Batch:
  """Examples as one batch, padded to `batch_size` with examples of weight 0."""
  dense, lookups, labels, lookup_weights = columns
  weights = np.ones(len(labels), np.float32)
  batch = Batch(dense, lookups, labels, weights, lookup_weights)
  return pad_batch(batch, batch_size)


def pad_batch(batch: Batch, batch_size: int) -> Batch:
  """The batch, padded with examples of weight 0 and lookups of -1."""
  short = batch_size - len(batch.weights)
  if not short:
    return batch

  lookups = batch.lookups
  if lookups.dtype.kind == 'u':  # in which -1 would be the largest row
    lookups = signed(lookups)

  def padded(column: np.ndarray, fill: int = 0) -> np.ndarray:
    pads = [(0, short)] + [(0, 0)] * (column.ndim - 1)
    return np.pad(column, pads, constant_values=fill)

  return batch.map(padded)._replace(lookups=padded(lookups, -1))
