"""Batch sources: endless or finite streams of batches that can be stopped.

The contract is grain's for checkpointable iterators: `get_state` tells what
was delivered, `set_state` continues right after it, `close` is idempotent.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Integer
import numpy as np

from slipstream_jax.data.numbered import (
  batches_of,
  batches_per_epoch,
  Numbered,
  order_of_epochs,
)
from slipstream_jax.data.vocabulary import Vocabulary
from slipstream_jax.errors import check_seed, UserError
from slipstream_jax.tables import as_array, Feature, TableSet
from slipstream_jax.types import Batch, Lookups


@runtime_checkable
class BatchSource(Protocol):
  """An iterator of batches whose position can be saved and restored.

  A trainer copies what it gets, so a source may write its arrays again as soon
  as it is asked for the next batch. One that never ends should say so by an
  attribute `endless = True`: a pass over all of it is then refused rather than
  begun.
  """

  def __iter__(self) -> Iterator[Batch]: ...

  def __next__(self) -> Batch: ...

  def get_state(self) -> dict[str, int]:
    """Position after the last batch delivered; plain JSON.

    Where it grows vocabularies, also marks of them, by table, under
    'vocabularies': `Checkpoints` saves what they stand for.
    """
    ...

  def set_state(self, state: dict[str, int]) -> None:
    """Continues as if the batches up to `state` had just been delivered."""
    ...

  def close(self) -> None:
    """Gives back threads and files; may be called more than once."""
    ...


@runtime_checkable
class Bindable(Protocol):
  """Examples by name: a source of batches once their tables are known."""

  def bind(self, tables: TableSet) -> BatchSource:
    """Batches of the examples, from the start, in the tables' global rows."""
    ...


Source = BatchSource | Bindable
"""What a trainer takes."""


def bound_to(
  source: Source, tables: TableSet, instead: Callable[..., Any] | None = None
) -> BatchSource:
  """The source, for these tables if it is one of examples by name.

  Args:
    source: batches, or what makes some.
    tables: whose rows they are.
    instead: of a table and its growing vocabulary what to use in its place.
  """
  if not isinstance(source, Bindable):
    return source
  if instead is not None and getattr(source, 'grows', False):
    growing: Any = source
    batches: BatchSource = growing.bind(tables, instead)
    return batches
  return source.bind(tables)


def bound_in_order(
  source: Source, tables: TableSet, instead: Callable[..., Any] | None = None
) -> BatchSource:
  """Binds as `bound_to` does, but never shuffles examples by name."""
  in_order: Callable[[], Source] = getattr(source, 'in_order', lambda: source)
  return bound_to(in_order(), tables, instead)


class Dataset(NamedTuple):
  """A data set: what its batches look like, and where they come from."""

  name: str
  """Said in every summary; names the file, or says it is synthetic."""
  sizes: Mapping[str, int]
  """Rows of each table by its name, in the order of the global row space."""
  features: Mapping[str, Feature]
  """By name, in the order of the lookups' columns."""
  dense_features: int
  """I, columns of `Batch.dense`."""
  train: Callable[[int], BatchSource]
  """Batch size to the batches to train on."""
  test: Callable[[int], BatchSource]
  """Batch size to one pass over the held-out examples, last batch padded."""
  profile: Callable[[int], BatchSource] | None = None
  """Batch size to batches that tell which rows are popular: like those to
  train on, but others, or every row trained would count as popular. None
  where a run trains on the same examples again and again, or has no others."""
  train_examples: int | None = None
  """Examples of one epoch; None for an endless stream."""
  bayes_auc: float | None = None
  """AUC of the true click probabilities, where they are known."""
  base_rate: float | None = None
  """Share of clicks among the examples to train on, where it is known."""
  counts: Callable[[], Integer[np.ndarray, ' N']] | None = None
  """Uses of each global row by the examples to train on, where they were
  counted when the data set was made: no profile is read then."""
  vocabulary: Callable[[], Vocabulary] | None = None
  """Maps raw ids to the rows that they have here; None where examples come
  with rows."""
  names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
  """Names of the dense features, and of the labels of several heads, in order.
  Empty where they have none."""
  heads: int | None = None
  """T, of labels [B, T]; None: they are [B]."""


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


class Forwarded:
  """A source that asks another one: a base of those that look at batches."""

  def __init__(self, source: BatchSource) -> None:
    """Takes over `source`."""
    self._source = source

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    return next(self._source)

  def get_state(self) -> dict[str, int]:
    """Position of the source."""
    return self._source.get_state()

  def set_state(self, state: dict[str, int]) -> None:
    """Sets the position of the source."""
    self._source.set_state(state)

  def close(self) -> None:
    """Closes the source."""
    self._source.close()


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
