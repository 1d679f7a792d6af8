"""Sources that compute a batch from its number, and so resume anywhere.

A position is a count of batches and a checksum of all that decides which
examples are in which batch. So no run resumes on other examples unnoticed.
"""

from collections.abc import Callable, Iterable
import functools
import json
from typing import Any, NamedTuple, Protocol, runtime_checkable
import zlib

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import check_seed, check_whole, is_whole, UserError
from slipstream_jax.tables import as_array
from slipstream_jax.types import Batch, Lookups

_SAMPLED = 1 << 10  # examples of a data set that a checksum reads


@runtime_checkable
class Column(Protocol):
  """The values of all examples, such as an array, that a checksum reads."""

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


class NumberedBatches(BatchSource):
  """Batches computed by a function of their number.

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
    """Starts before batch number 0.

    Args:
      batch_at: called with successive numbers, except after `set_state` or an
        error.
      batches: their number. None is endless.
      order: all that decides which examples are in which batch, as JSON or
        numpy's numbers. A source with another `order` refuses the position.
      columns: arrays [n, ...] of the examples, if `order` does not identify
        them. 1,024 examples of each are compared.
      reads: the examples in words, for the error of a refused position.
    """
    self.batch_at, self._batches, self._reads = batch_at, batches, reads
    self._order, self._delivered = order, 0
    self.recheck(columns)

  def recheck(self, columns: Iterable[Column]) -> None:
    """Replaces the columns that identify the examples of a position."""
    self._columns = tuple(columns)
    self.__dict__.pop('_checksum', None)

  # Computed on first use: a source that is never saved needs none.
  @functools.cached_property
  def _checksum(self) -> int:
    return checksum(self._order, self._columns)

  @property
  def endless(self) -> bool:
    """Whether the batches never end."""
    return self._batches is None

  @property
  def epochs(self) -> int | None:
    """Passes before the batches end. None: without end, or not known."""
    if self._batches is None or not self.batches_per_epoch:
      return None
    return self._batches // self.batches_per_epoch

  def __next__(self) -> Batch:
    if self._batches is not None and self._delivered >= self._batches:
      raise StopIteration
    # Counted afterwards: after an error the same batch is asked for.
    batch = self.batch_at(self._delivered)
    self._delivered += 1
    return batch

  def get_state(self) -> dict[str, int]:
    """Returns the number of batches delivered and a checksum of their order."""
    return {'delivered': self._delivered, 'order': self._checksum}

  def set_state(self, state: dict[str, int]) -> None:
    """Continues after the batches that `state` counts.

    Raises:
      UserError: it is of other data or of another order.
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
  """Checks that B is a whole number of at least 1, or raises a `UserError`."""
  if not is_whole(batch_size, 1):
    raise UserError(
      'a batch must hold at least one example, a whole number of them',
      got=repr(batch_size),
      where=where,
      hint='set it, e.g. to 1024',
    )


def check_pad_remainder(pad: object, where: str) -> None:
  """Raises a `UserError` unless `pad_remainder` of a source is a bool."""
  if not isinstance(pad, bool | np.bool):
    raise UserError(
      'pad_remainder must be True or False',
      got=repr(pad),
      where=f'{where}, pad_remainder',
      hint='set it to False to leave the remainder out',
    )


def batches_of(epochs: int | None, per_epoch: int, where: str) -> int | None:
  """Returns the batches of `epochs` passes over the examples. None: endless.

  Raises:
    UserError: `epochs` is neither None nor a whole number of at least 1.
  """
  if epochs is None:
    return None
  check_whole(epochs, 1, f'{where}, epochs', 'give the passes to make, or None')
  return epochs * per_epoch


def batches_per_epoch(
  examples: int, batch_size: int, pad: bool, where: str
) -> int:
  """Returns the batches of one pass. The last one is padded or left out.

  Raises:
    UserError: there are too few examples for a batch.
  """
  check_batch_size(batch_size, where)
  batches = -(-examples // batch_size) if pad else examples // batch_size
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
  """Returns a function from an epoch to its order of examples, i64[n].

  The order is shuffled by (seed, epoch). Without a seed it is 0 to n - 1.
  """

  # Epochs follow one another, so one order is enough.
  @functools.lru_cache(maxsize=1)
  def order_of(epoch: int) -> Int[np.ndarray, ' n']:
    order = np.arange(examples)
    if seed is not None:
      np.random.default_rng((seed, epoch)).shuffle(order)
    return order

  return order_of


def checksum(order: object, columns: Iterable[Column] = ()) -> int:
  """Returns a CRC-32 of a description and of 1,024 examples, evenly spaced.

  Args:
    order: as in `NumberedBatches`.
    columns: arrays [n, ...] of the examples.
  """
  # JSON is the same on every machine, but does not know numpy's numbers.
  crc = zlib.crc32(json.dumps(order, default=lambda x: x.item()).encode())
  for column in columns:
    form = f'{column.dtype.str} {column.shape}'.encode()
    last = len(column) - 1
    # From the first to the last, so that another order differs as well.
    some = np.linspace(0, last, min(last + 1, _SAMPLED)).astype(np.int64)
    crc = zlib.crc32(column[some].tobytes(), zlib.crc32(form, crc))
  return crc


class Columns(NamedTuple):
  """Examples in memory, one array per kind of field."""

  dense: Float[np.ndarray, 'n I']
  lookups: Lookups
  labels: Float[np.ndarray, ' n'] | Float[np.ndarray, 'n T']
  lookup_weights: Float[np.ndarray, '...'] | None = None
  """Shaped as the lookups. None: all weigh 1."""

  def take(self, index: np.ndarray | slice) -> 'Columns':
    """Returns the examples at `index`."""
    taken: list[Any] = [None if c is None else c[index] for c in self]
    return Columns(*taken)


class ColumnBatches(NumberedBatches):
  """Batches over `Columns`, shuffled per epoch by (seed, epoch) or in order.

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
    """Starts before the first batch.

    Args:
      columns: the examples, as arrays or lists.
      batch_size: B.
      shuffle_seed: seed of the order of each epoch. None keeps file order.
      epochs: passes over the examples before the source ends. None is endless.
      pad_remainder: pad the last batch of an epoch rather than drop it.

    Raises:
      UserError: too few examples for a single batch, uneven columns, or an
        argument out of range. Values are checked batch by batch in training.
    """
    columns = _even(columns)
    examples = len(columns.labels)
    check_pad_remainder(pad_remainder, 'ColumnBatches')
    per_epoch = batches_per_epoch(
      examples, batch_size, pad_remainder, 'ColumnBatches, batch_size'
    )
    self.batches_per_epoch = per_epoch
    if shuffle_seed is not None:
      check_seed(shuffle_seed, 'ColumnBatches, shuffle_seed')
    order_of = order_of_epochs(examples, shuffle_seed)

    def batch_at(number: int) -> Batch:
      epoch, step = divmod(number, per_epoch)
      start = step * batch_size
      index = order_of(epoch)[start : start + batch_size]
      return to_batch(columns.take(index), batch_size)

    super().__init__(
      batch_at,
      batches_of(epochs, per_epoch, 'ColumnBatches'),
      ('columns', batch_size, pad_remainder, shuffle_seed),
      [column for column in columns if column is not None],
      reads=f'{examples} examples by {batch_size}',
    )


def _even(columns: Columns) -> Columns:
  """Returns the columns as arrays of one length."""
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
  """Converts lookups of any integer type to i32 or i64, which can hold -1.

  Raises:
    UserError: one is too large for i64.
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
  """Returns examples as a batch, padded to B with examples of weight 0."""
  dense, lookups, labels, lookup_weights = columns
  weights = np.ones(len(labels), np.float32)
  batch = Batch(dense, lookups, labels, weights, lookup_weights)
  return pad_batch(batch, batch_size)


def pad_batch(batch: Batch, batch_size: int) -> Batch:
  """Pads a batch with examples of weight 0 and lookups of -1."""
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
