"""What enters a trainer: each batch is checked once, and copied, at the door.

Past it every array is of the step's type, holds nothing but what can be
trained on, and is written by nobody: a source may use its arrays again.
"""

from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.data.flaw_kernels import find_flaws
from slipstream_jax.data.flaws import refuse
from slipstream_jax.data.numbered import signed
from slipstream_jax.data.source import bound_to, Forwarded, Source
from slipstream_jax.errors import UserError
from slipstream_jax.tables import as_array, check_integers, TableSet
from slipstream_jax.types import Batch

_NONE = np.empty(0, np.float32)


class ExampleShape(NamedTuple):
  """What every batch of a trainer must fit."""

  tables: TableSet
  """The features that its lookups are of, and their tables."""
  dense_features: int
  """I, columns of `Batch.dense`."""
  heads: int | None = None
  """T, of labels [B, T]; None: they are [B]."""

  @property
  def num_rows(self) -> int:
    """N, rows of all tables."""
    return self.tables.num_rows


class Admitted(Forwarded):
  """A source whose batches are looked at and copied as they come."""

  def __init__(self, source: Source, shape: ExampleShape) -> None:
    """Admits the batches of `source`, which it takes over.

    Args:
      source: a `BatchSource`, or examples by name that make one for tables.
      shape: what every batch must fit.

    Raises:
      UserError: `source` is none, or its examples do not fit the tables.
    """
    super().__init__(bound_to(source, shape.tables))
    self._shape = shape
    self._offsets: bool | None = None  # whether the batches before had any

  def __next__(self) -> Batch:
    batch = admit(super().__next__(), self._shape)
    offsets, self._offsets = self._offsets, batch.offset is not None
    # Else the step would compile anew, and examples could not be regrouped.
    if offsets not in (None, self._offsets):
      raise UserError(
        'all batches of a source have an offset, or none has',
        got='one with an offset' if self._offsets else 'one without an offset',
        where='Batch.offset',
        hint='give 0 to examples of which nothing is known',
      )
    return batch


def admit(batch: object, shape: ExampleShape, labelled: bool = True) -> Batch:
  """A copy of `batch` that can be trained on, or the reason why there is none.

  It takes less than 0.1 ms for 2,048 examples of Criteo's, a third of it to
  copy: too little to ask of sources which arrays nobody else will write.

  Args:
    batch: a `Batch` of arrays, or of lists that make some; its lookups of any
      integer type, the others of any type of real numbers.
    shape: what it must fit.
    labelled: whether it must have labels, as all that is trained on.

  Returns:
    f32 arrays, and lookups of i32 or i64, that nobody else holds.

  Raises:
    UserError: no examples, or no labels; an array of another shape or type; a
      lookup that is neither -1 nor a row of its feature's table; a label
      outside [0, 1], a negative weight, or anything that is not finite. It
      tells which.
  """
  if not isinstance(batch, Batch):
    raise UserError(
      'a source must give batches',
      got=type(batch).__name__,
      where='source',
      hint='make each with Batch(dense, lookups, labels, weights)',
    )
  columns: list[Any] = [
    None if column is None else as_array(column, f'Batch.{name}')
    for name, column in zip(Batch._fields, batch, strict=True)
  ]
  given = Batch(*columns)
  if given.labels is None and labelled:
    raise UserError(
      'examples must have labels, to train on them or to evaluate',
      got='none',
      where='Batch.labels',
      hint='give labels; without them there are only predictions',
    )
  _check_shapes(given, shape)
  check_integers(given.lookups, 'Batch.lookups')
  # Copied first: what is checked is then what is trained on, whoever writes.
  own = Batch(
    _floats('dense', given.dense),
    _copy(signed(given.lookups)),
    None if given.labels is None else _floats('labels', given.labels),
    _floats('weights', given.weights),
    _lookup_weights(given, shape.tables),
    None if given.offset is None else _floats('offset', given.offset),
    _fresh(given.fresh, shape.num_rows),
  )
  if shape.num_rows > np.iinfo(own.lookups.dtype).max:  # of i32, past 2**31
    own = own._replace(lookups=own.lookups.astype(np.int64))
  first, end = shape.tables.column_rows
  flaws = find_flaws(
    own.lookups.reshape(len(own.weights), len(first)),
    first.astype(own.lookups.dtype),
    end.astype(own.lookups.dtype),
    own.dense.reshape(-1),
    _NONE if own.labels is None else own.labels.reshape(-1),
    own.weights,
    _NONE if own.lookup_weights is None else own.lookup_weights.reshape(-1),
  )
  if flaws or (own.offset is not None and not np.isfinite(own.offset).all()):
    refuse(given, own, shape.tables)
  return own


def _fresh(rows: np.ndarray | None, num_rows: int) -> np.ndarray | None:
  """A copy of the rows that got another id; None if there are none."""
  if rows is None or not rows.size:
    return None
  check_integers(rows, 'Batch.fresh')
  bad = (rows < 0) | (rows >= num_rows)
  if rows.ndim != 1 or bad.any():
    raise UserError(
      f'fresh rows must be global rows in [0, {num_rows}), as [n]',
      got=list(rows.shape) if rows.ndim != 1 else int(rows[bad][0]),
      where='Batch.fresh',
      hint='give first row of the table + local row of each id that is new',
    )
  return rows.astype(np.int64)


def _check_shapes(batch: Batch, shape: ExampleShape) -> None:
  heads = () if shape.heads is None else (shape.heads,)
  # Examples without labels are counted by their weights.
  labels = np.shape(batch.weights)[:1] + heads
  labels = labels if batch.labels is None else batch.labels.shape
  if shape.heads == 1 and len(labels) == 1 and labels[0]:
    raise UserError(
      'a model must return logits [B] for labels [B]',
      got='logits [B, 1], which are of several heads, if only one',
      where='Trainer, model',
      hint='return one number per example, such as x[:, 0], or give labels'
      ' [n, 1]',
    )
  if not labels or not labels[0] or labels[1:] != heads:
    sizes = ', '.join(['B', *map(str, heads)])
    raise UserError(
      f'labels of a batch must be [{sizes}], with B of at least 1',
      got=list(labels),
      where='Batch.labels',
      hint='give one label per example and logit of the model, which returns'
      ' [B] if it has one, and no batch without examples',
    )
  examples = labels[0]
  # Bags of another length would compile the step anew, or fit no parameter.
  lookups = (examples, *shape.tables.example_shape)
  wanted: dict[str, tuple[int, ...]] = {
    'dense': (examples, shape.dense_features),
    'lookups': lookups,
    'weights': (examples,),
    'lookup_weights': lookups,
    'offset': (examples,),
  }
  for name, expected in wanted.items():
    column = getattr(batch, name)
    given = expected if column is None else column.shape
    if given != expected:
      raise UserError(
        f'{name} of a batch of {examples} labels must be {list(expected)}',
        got=list(given),
        where=f'Batch.{name}',
        hint='give one row per example, and the columns the trainer was made'
        ' for',
      )
  if batch.offset is not None and heads:
    raise UserError(
      'an offset is added to the one logit of each example',
      got=f'a model with {heads[0]} heads',
      where='Batch.offset',
      hint='leave it out, or train a model of one logit',
    )


def _lookup_weights(batch: Batch, tables: TableSet) -> np.ndarray | None:
  """One for each lookup, where a feature is weighted."""
  if batch.lookup_weights is None:
    # All or none of the batches have them, or the step would compile anew.
    shape = batch.lookups.shape
    return np.ones(shape, np.float32) if tables.is_weighted else None
  if not tables.is_weighted:
    raise UserError(
      'weights of lookups need a feature that is weighted',
      got='none that is',
      where='Batch.lookup_weights',
      hint='give Feature(..., weighted=True), or no such weights',
    )
  return _floats('lookup_weights', batch.lookup_weights)


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
