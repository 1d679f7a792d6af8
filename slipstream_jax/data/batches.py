"""Batch sources: endless or finite streams of batches that can be stopped.

The contract is grain's for checkpointable iterators: `get_state` tells what
was delivered, `set_state` continues right after it, `close` is idempotent.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Integer
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.tables import Table
from slipstream_jax.types import Batch, Lookups


@runtime_checkable
class BatchSource(Protocol):
  """An iterator of batches whose position can be saved and restored."""

  def __iter__(self) -> Iterator[Batch]: ...

  def __next__(self) -> Batch: ...

  def get_state(self) -> dict[str, int]:
    """Position after the last batch delivered; plain JSON."""
    ...

  def set_state(self, state: dict[str, int]) -> None:
    """Continues as if the batches up to `state` had just been delivered."""
    ...

  def close(self) -> None:
    """Gives back threads and files; may be called more than once."""
    ...


class Dataset(NamedTuple):
  """A data set: what its batches look like, and where they come from."""

  name: str
  """Said in every summary; names the file, or says it is synthetic."""
  tables: tuple[Table, ...]
  """One per feature, in the order of the lookups' columns."""
  dense_features: int
  """I, columns of `Batch.dense`."""
  train: Callable[[int], BatchSource]
  """Batch size to the batches to train on."""
  test: Callable[[int], BatchSource]
  """Batch size to one pass over the held-out inputs, last batch padded."""
  profile: Callable[[int], BatchSource] | None = None
  """Batch size to batches that tell which rows are popular: like those to
  train on, but others, or every row trained would count as popular. None
  where a run trains on the same inputs again and again, or has no others."""
  train_inputs: int | None = None
  """Inputs of one epoch; None for an endless stream."""
  bayes_auc: float | None = None
  """AUC of the true click probabilities, where they are known."""
  base_rate: float | None = None
  """Share of clicks among the inputs to train on, where it is known."""
  counts: Callable[[], Integer[np.ndarray, ' N']] | None = None
  """Uses of each global row by the inputs to train on, where they were counted
  when the data set was made: no profile is read then."""


class InputShape(NamedTuple):
  """What every batch of a trainer must fit."""

  num_rows: int
  """N, rows of all tables."""
  features: int
  """F, columns of `Batch.lookups`."""
  dense_features: int
  """I, columns of `Batch.dense`."""
  series: int | None = None
  """L of every batch's lookups, where inputs are series; else any."""


def check_batch(batch: Batch, shape: InputShape) -> None:
  """Looks at a batch's shapes, not at its values.

  Raises:
    UserError: it does not fit the trainer, or its arrays not one another.
  """
  inputs = len(batch.labels)
  # Series of another length would compile the step anew, or fit no parameter.
  steps = () if shape.series is None else (shape.series,)
  wanted: dict[str, tuple[int, ...]] = {
    'dense': (inputs, shape.dense_features),
    'lookups': (inputs, shape.features, *steps),
    'labels': (inputs,),
    'weights': (inputs,),
  }
  for name, expected in wanted.items():
    found = np.shape(getattr(batch, name))
    multi_hot = name == 'lookups' and len(found) == 3 and not steps
    if (found[:2] if multi_hot else found) != expected:
      raise UserError(
        f'{name} of a batch of {inputs} labels must be {list(expected)}',
        got=list(found),
        where=f'Batch.{name}',
        mend='give one row per input, and the columns the trainer was made for',
      )


class Columns(NamedTuple):
  """Inputs held in memory, one array per kind of field."""

  dense: Float[np.ndarray, 'n I']
  lookups: Lookups
  labels: Float[np.ndarray, ' n']

  def take(self, index: np.ndarray | slice) -> 'Columns':
    """The inputs at `index`."""
    return Columns(*(column[index] for column in self))


class ColumnBatches:
  """Batches over `Columns`, shuffled per epoch by (seed, epoch) or in order.

  Epochs run on endlessly for training (`epochs=None`); the remainder of an
  epoch is dropped, or padded with inputs of weight 0 and lookups of -1.
  """

  def __init__(
    self,
    columns: Columns,
    batch_size: int,
    *,
    shuffle_seed: int | None = None,
    epochs: int | None = None,
    pad_remainder: bool = False,
  ):
    """Batches of `batch_size` inputs over `columns`.

    Args:
      columns: the inputs.
      batch_size: B.
      shuffle_seed: seed of the order of each epoch; None keeps file order.
      epochs: passes over the inputs before the source ends; None is endless.
      pad_remainder: pad the last batch of an epoch rather than drop it.

    Raises:
      UserError: too few inputs for a single batch, or uneven columns.
    """
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
      raise UserError(
        'columns must hold the same number of inputs',
        got=lengths,
        where='Columns(dense, lookups, labels)',
        mend='give one entry of each per input',
      )
    if batch_size < 1:
      raise UserError(
        'a batch must hold at least one input',
        got=batch_size,
        where='config.data.batch_size',
        mend='set a larger batch size',
      )
    self._columns, self._batch_size = columns, batch_size
    self._seed, self._epochs = shuffle_seed, epochs
    inputs = len(columns.labels)
    whole, rest = divmod(inputs, batch_size)
    self._per_epoch = whole + (1 if rest and pad_remainder else 0)
    if self._per_epoch < 1:
      raise UserError(
        f'a batch of {batch_size} needs at least as many inputs',
        got=inputs,
        where='config.data.batch_size',
        mend='set a smaller batch size or give more inputs',
      )
    self._delivered = 0
    self._order: tuple[int, np.ndarray] | None = None

  @property
  def batches_per_epoch(self) -> int:
    """Batches that one pass over the inputs gives."""
    return self._per_epoch

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    epoch, step = divmod(self._delivered, self._per_epoch)
    if self._epochs is not None and epoch >= self._epochs:
      raise StopIteration
    start = step * self._batch_size
    index = self._epoch_order(epoch)[start : start + self._batch_size]
    self._delivered += 1
    return to_batch(self._columns.take(index), self._batch_size)

  def _epoch_order(self, epoch: int) -> np.ndarray:
    if self._order is None or self._order[0] != epoch:
      order = np.arange(len(self._columns.labels))
      if self._seed is not None:
        np.random.default_rng((self._seed, epoch)).shuffle(order)
      self._order = epoch, order
    return self._order[1]

  def get_state(self) -> dict[str, int]:
    """Batches delivered since the start."""
    return {'delivered': self._delivered}

  def set_state(self, state: dict[str, int]) -> None:
    """Continues after the batches that `state` counts."""
    self._delivered = state['delivered']

  def close(self) -> None:
    """Nothing to give back."""


def to_batch(columns: Columns, batch_size: int) -> Batch:
  """Inputs as one batch, padded to `batch_size` with inputs of weight 0."""
  weights = np.ones(len(columns.labels), np.float32)
  return pad_batch(Batch(*columns, weights), batch_size)


def pad_batch(batch: Batch, batch_size: int) -> Batch:
  """The batch, padded with inputs of weight 0 and lookups of -1."""
  short = batch_size - len(batch.labels)
  if not short:
    return batch

  def padded(column: np.ndarray, fill: int) -> np.ndarray:
    pads = [(0, short)] + [(0, 0)] * (column.ndim - 1)
    return np.pad(column, pads, constant_values=fill)

  return Batch(
    padded(batch.dense, 0),
    padded(batch.lookups, -1),
    padded(batch.labels, 0),
    padded(batch.weights, 0),
  )
