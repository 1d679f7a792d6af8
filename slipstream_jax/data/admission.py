"""What enters a trainer: each batch is checked once, and copied, at the door.

Past it every array is of the step's type, holds nothing but what can be
trained on, and is written by nobody: a source may use its arrays again.
"""

from typing import NamedTuple

import numpy as np

from slipstream_jax.data.base import BatchSource, Forwarded, signed
from slipstream_jax.data.flaw_kernels import find_flaws
from slipstream_jax.errors import UserError
from slipstream_jax.tables import as_array, check_integers, TableSet
from slipstream_jax.types import Batch


class ExampleShape(NamedTuple):
  """What every batch of a trainer must fit."""

  tables: TableSet
  """The tables that its lookups are of, one per feature."""
  dense_features: int
  """I, columns of `Batch.dense`."""

  @property
  def num_rows(self) -> int:
    """N, rows of all tables."""
    return self.tables.num_rows


class Admitted(Forwarded):
  """A source whose batches are looked at and copied as they come."""

  def __init__(self, source: BatchSource, shape: ExampleShape) -> None:
    """Admits the batches of `source`, which it takes over.

    Raises:
      UserError: `source` is none.
    """
    wanted = ('__next__', 'get_state', 'set_state', 'close')
    missing = [name for name in wanted if not hasattr(source, name)]
    if missing:
      raise UserError(
        f'a batch source must have {", ".join(wanted)}',
        got=f'{type(source).__name__} without {", ".join(missing)}',
        where='source',
        hint='give arrays to ColumnBatches, or write these methods',
      )
    super().__init__(source)
    self._shape = shape

  def __next__(self) -> Batch:
    return admit(super().__next__(), self._shape)


def admit(batch: object, shape: ExampleShape) -> Batch:
  """A copy of `batch` that can be trained on, or the reason why there is none.

  It takes less than 0.1 ms for 2,048 examples of Criteo's, a third of it to
  copy: too little to ask of sources which arrays nobody else will write.

  Args:
    batch: a `Batch` of arrays, or of lists that make some; its lookups of any
      integer type, the others of any type of real numbers.
    shape: what it must fit.

  Returns:
    f32 arrays, and lookups of i32 or i64, that nobody else holds.

  Raises:
    UserError: no examples; an array of another shape or type; a lookup that is
      neither -1 nor a row of its feature's table; a label outside [0, 1], a
      negative weight, or anything that is not finite. It tells which.
  """
  if not isinstance(batch, Batch):
    raise UserError(
      'a source must give batches',
      got=type(batch).__name__,
      where='source',
      hint='make each with Batch(dense, lookups, labels, weights)',
    )
  given = Batch(
    *(
      as_array(column, f'Batch.{name}')
      for name, column in zip(Batch._fields, batch, strict=True)
    )
  )
  _check_shapes(given, shape)
  check_integers(given.lookups, 'Batch.lookups')
  # Copied first: what is checked is then what is trained on, whoever writes.
  own = Batch(
    _floats('dense', given.dense),
    _copy(signed(given.lookups)),
    _floats('labels', given.labels),
    _floats('weights', given.weights),
  )
  if shape.num_rows > np.iinfo(own.lookups.dtype).max:  # of i32, past 2**31
    own = own._replace(lookups=own.lookups.astype(np.int64))
  offsets = shape.tables.offsets.astype(own.lookups.dtype)
  examples, features, *steps = own.lookups.shape
  flaws = find_flaws(
    own.lookups.reshape(examples, features, *(steps or [1])),
    offsets[:-1],
    offsets[1:],
    own.dense,
    own.labels,
    own.weights,
  )
  if flaws:
    _refuse(given, own, shape)
  return own


def _check_shapes(batch: Batch, shape: ExampleShape) -> None:
  if batch.labels.ndim != 1 or not len(batch.labels):
    raise UserError(
      'labels of a batch must be [B], with B of at least 1',
      got=list(batch.labels.shape),
      where='Batch.labels',
      hint='give one label per example, and no batch without examples',
    )
  examples, features = len(batch.labels), len(shape.tables)
  # Sequences of another length would compile the step anew, or fit no
  # parameter.
  length = shape.tables.sequence_length
  steps = () if length is None else (length,)
  wanted: dict[str, tuple[int, ...]] = {
    'dense': (examples, shape.dense_features),
    'lookups': (examples, features, *steps),
    'weights': (examples,),
  }
  for name, expected in wanted.items():
    given = getattr(batch, name).shape
    # A multi-hot list may be as long as it likes, but holds a lookup.
    if name == 'lookups' and len(given) == 3 and not steps:
      good = given[:2] == expected and given[2] > 0
    else:
      good = given == expected
    if not good:
      raise UserError(
        f'{name} of a batch of {examples} labels must be {list(expected)}',
        got=list(given),
        where=f'Batch.{name}',
        hint='give one row per example, and the columns the trainer was made'
        ' for',
      )


def _copy(array: np.ndarray) -> np.ndarray:
  return np.array(array, order='C')


def _floats(name: str, array: np.ndarray) -> np.ndarray:
  """A copy of a column as f32; what is too large for it becomes infinite."""
  if array.dtype == np.float32:
    return array.astype(np.float32, order='C')
  if not np.can_cast(array.dtype, np.float32, 'same_kind'):
    raise UserError(
      f'{name} must be real numbers',
      got=array.dtype,
      where=f'Batch.{name}',
      hint='convert them to float32',
    )
  with np.errstate(over='ignore', invalid='ignore'):
    return array.astype(np.float32, order='C')


def _refuse(given: Batch, own: Batch, shape: ExampleShape) -> None:
  """Says which value of a batch is bad: the first, in this order."""
  # All is looked at again, slowly: after an error there is no next batch.
  first, last = shape.tables.offsets[:-1], shape.tables.offsets[1:]
  axes = (-1,) + (1,) * (own.lookups.ndim - 2)
  rows = own.lookups.astype(np.int64)
  outside = (rows < first.reshape(axes)) | (rows >= last.reshape(axes))
  for name, bad in (
    ('lookups', (rows != -1) & outside),
    ('dense', ~np.isfinite(own.dense)),
    ('labels', ~((own.labels >= 0) & (own.labels <= 1))),
    ('weights', ~((own.weights >= 0) & np.isfinite(own.weights))),
  ):
    if bad.any():
      at = tuple(int(i) for i in np.argwhere(bad)[0])
      rule, hint = _law(name, at, shape)
      raise UserError(
        rule,
        got=getattr(given, name)[at],
        where=f'example {at[0]}, Batch.{name}{list(at)}',
        hint=hint,
      )


def _law(
  name: str, at: tuple[int, ...], shape: ExampleShape
) -> tuple[str, str]:
  """What an array must hold, and what to do about it."""
  match name:
    case 'lookups':
      table, offsets = shape.tables.tables[at[1]], shape.tables.offsets
      return (
        f'lookups of feature {at[1]} ({table.name}) must be in'
        f' [{offsets[at[1]]}, {offsets[at[1] + 1]}), or -1 for padding',
        'make them with TableSet.lookups(ids)',
      )
    case 'dense':
      return (
        f'dense features must be finite, column {at[1]} too',
        'fill what is missing before training, e.g. with 0',
      )
    case 'labels':
      return (
        'labels must be in [0, 1]',
        'give 1 for a click and 0 for none, or the chance of one',
      )
    case _:
      return (
        'weights must be finite and at least 0',
        'give 1 to an example that counts once, and 0 to padding',
      )
