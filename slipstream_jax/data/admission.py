"""Checks and copies each batch once, before a trainer uses it.

After that, every array has the type that a step takes and holds valid values.
No other code can write it, so a source may reuse its arrays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np

from slipstream_jax.data.numbered import signed
from slipstream_jax.data.source import bound_to, Source, SourceWrapper
from slipstream_jax.errors import UserError
from slipstream_jax.initializers import VectorsById
from slipstream_jax.tables import as_array, check_integers, Table, TableSet
from slipstream_jax.types import Batch


class ExampleShape(NamedTuple):
  """The tables and numbers of columns that every batch must fit."""

  tables: TableSet
  """The tables, and the features that look them up."""
  dense_features: int
  """I, columns of `Batch.dense`."""
  heads: int | None = None
  """T, of labels [B, T]. None: they are [B]."""
  clicks: tuple[bool, ...] = (True,)
  """Whether labels must be in [0, 1], per head. Others may be any numbers."""

  @property
  def num_rows(self) -> int:
    """N, rows of all tables."""
    return self.tables.num_rows


class CheckedSource(SourceWrapper):
  """A source whose batches are checked and copied when they are read."""

  def __init__(self, source: Source, shape: ExampleShape) -> None:
    """Takes over `source`, whose batches must fit `shape`.

    Raises:
      UserError: `source` is none, or its examples do not fit the tables.
    """
    super().__init__(bound_to(source, shape.tables))
    self._shape = shape
    self._offsets: bool | None = None  # whether the batches before had any

  def __next__(self) -> Batch:
    batch = admit(super().__next__(), self._shape)
    offsets, self._offsets = self._offsets, batch.offset is not None
    # Else the step is compiled again, and examples cannot be regrouped.
    if offsets not in (None, self._offsets):
      raise UserError(
        'all batches of a source have an offset, or none has',
        got='one with an offset' if self._offsets else 'one without an offset',
        where='Batch.offset',
        hint='give 0 to examples of which nothing is known',
      )
    return batch


def admit(batch: object, shape: ExampleShape, labelled: bool = True) -> Batch:
  """Checks a batch and returns a copy that can be trained on.

  Args:
    batch: a `Batch` of arrays or of lists. Lookups are of any integer type, all
      else of any type of real numbers.
    shape: the batch must fit it.
    labelled: whether it must have labels.

  Returns:
    f32 arrays, and lookups of i32 or i64, without references elsewhere.

  Raises:
    UserError: names the first flaw: no examples, no labels, an array of another
      shape or type, a lookup that is neither -1 nor a row of its feature's
      table, a label of a click outside [0, 1], a negative weight, or a number
      that is not finite.
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
  if shape.heads is None and given.labels is not None:
    labels = given.labels
    if labels.ndim == 2 and labels.shape[1] == 1:
      given = given._replace(labels=labels[:, 0])
  _check_shapes(given, shape)
  check_integers(given.lookups, 'Batch.lookups')
  # Copied before the check: the user may write the arrays in between.
  own = Batch(
    _floats('dense', given.dense),
    np.array(signed(given.lookups), order='C'),
    None if given.labels is None else _floats('labels', given.labels),
    _floats('weights', given.weights),
    _lookup_weights(given, shape.tables),
    None if given.offset is None else _floats('offset', given.offset),
    _fresh(given.fresh, shape.num_rows),
    _fresh_vectors(given, shape.tables),
  )
  if shape.num_rows > np.iinfo(own.lookups.dtype).max:  # of i32, past 2**31
    own = own._replace(lookups=own.lookups.astype(np.int64))
  _check_values(given, own, shape)
  return own


def _fresh(rows: np.ndarray | None, num_rows: int) -> np.ndarray | None:
  """Checks and copies reassigned rows. Returns None if there are none."""
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


def _fresh_vectors(batch: Batch, tables: TableSet) -> np.ndarray | None:
  """Checks and copies the vectors that reassigned rows start from."""
  vectors, rows = batch.fresh_vectors, batch.fresh
  if vectors is None:
    return None
  check_integers(vectors, 'Batch.fresh_vectors')
  if rows is None or vectors.shape != rows.shape:
    raise UserError(
      'fresh_vectors must have one number per fresh row',
      got=f'{list(vectors.shape)} for {rows if rows is None else rows.shape}',
      where='Batch.fresh_vectors',
      hint='leave it out, or give -1 for a row without a vector',
    )
  sizes = np.array([_vectors_in(one) for one in tables.tables.values()])
  number_of_table = np.searchsorted(tables.offsets, rows, side='right') - 1
  bad = (vectors < -1) | (vectors >= sizes[number_of_table])
  if bad.any():
    raise UserError(
      'fresh_vectors must number vectors of the initializer of their table',
      got=int(vectors[bad][0]),
      where='Batch.fresh_vectors',
      hint='give Table(initializer={id: vector}), or -1 for no vector',
    )
  return vectors.astype(np.int64) if vectors.size else None


def _vectors_in(table: Table) -> int:
  how = table.initializer
  return len(how.ids) if isinstance(how, VectorsById) else 0


def _check_shapes(batch: Batch, shape: ExampleShape) -> None:
  heads = () if shape.heads is None else (shape.heads,)
  # Examples without labels are counted by their weights.
  labels = np.shape(batch.weights)[:1] + heads
  labels = labels if batch.labels is None else batch.labels.shape
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
  # With bags of another length the step would be compiled again.
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
  """Returns weights of lookups if a feature is weighted, 1 by default."""
  if batch.lookup_weights is None:
    # All or no batches have them. Else the step would be compiled again.
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


def _floats(name: str, array: np.ndarray) -> np.ndarray:
  """Copies a column as f32. Values too large for f32 become infinite."""
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


@numba.njit(cache=True, nogil=True, boundscheck=False)
@no_type_check
def _fits(lookups: np.ndarray, firsts: np.ndarray, ends: np.ndarray) -> bool:
  """Whether each lookup [n, K] is -1 or in [first, end) of its column, [K]."""
  bad = False  # no early return, so that the loop has no branch
  for i in range(len(lookups)):
    for k in range(len(firsts)):
      row = lookups[i, k]
      bad |= (row != -1) & ((row < firsts[k]) | (row >= ends[k]))
  return not bad


_RULES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str, str]] = {
  'dense': (
    np.isfinite,
    'dense features must be finite, column {column} too',
    'fill what is missing before training, e.g. with 0',
  ),
  'weights': (
    lambda weights: (weights >= 0) & np.isfinite(weights),
    'weights must be finite and at least 0',
    'give 1 to an example that counts once, and 0 to padding',
  ),
  'lookup_weights': (
    np.isfinite,
    'weights of the lookups of feature {feature} must be finite',
    'give 1 to a lookup that counts once, also to padding',
  ),
  'offset': (
    np.isfinite,
    'offsets of logits must be finite',
    'give 0 to an example of which nothing is known',
  ),
}
"""For each column which values are valid, the rule, and a hint."""


def _check_values(given: Batch, own: Batch, shape: ExampleShape) -> None:
  """Checks all values of a batch.

  Args:
    given: the batch as the source gave it.
    own: the same in the types of a step.
    shape: tables whose rows are looked up, and heads of clicks.

  Raises:
    UserError: with feature or column, example, value and bound.
  """
  tables = shape.tables
  rows = own.lookups.reshape(len(own.weights), -1)
  first, end = (bound.astype(rows.dtype) for bound in tables.column_rows)
  if not _fits(rows, first, end):
    valid = (rows == -1) | ((rows >= first) & (rows < end))
    _refuse(
      'lookups',
      valid.reshape(own.lookups.shape),
      'lookups of feature {number} ({feature}) must be in [{first}, {end}), or'
      ' -1 for padding',
      'make them with TableSet.lookups(ids)',
      given,
      tables,
    )
  for name, (is_valid, rule, hint) in _RULES.items():
    column = getattr(own, name)
    if column is not None and not (valid := is_valid(column)).all():
      _refuse(name, valid, rule, hint, given, tables)
  _check_labels(given, own.labels, shape)


def _check_labels(
  given: Batch, labels: np.ndarray | None, shape: ExampleShape
) -> None:
  """Checks labels f32[B] or f32[B, T], which are those of `given`."""
  if labels is None or (good := (labels >= 0) & (labels <= 1)).all():
    return
  finite, tables = np.isfinite(labels), shape.tables
  if not finite.all():
    hint = 'leave out the examples that have none'
    _refuse('labels', finite, 'labels must be finite', hint, given, tables)
  good |= ~np.array(shape.clicks)
  if not good.all():
    rule = 'labels must be in [0, 1] for a loss of clicks'
    hint = (
      'give 1 for a click and 0 for none, or its chance, or give the trainer'
      ' another loss, such as loss=optax.squared_error for ratings'
    )
    _refuse('labels', good, rule, hint, given, tables)


def _refuse(
  name: str,
  valid: np.ndarray,
  rule: str,
  hint: str,
  given: Batch,
  tables: TableSet,
) -> None:
  at = tuple(int(i) for i in np.argwhere(~valid)[0])
  facts: dict[str, object] = {'column': at[-1]}
  if name in ('lookups', 'lookup_weights'):
    facts = _feature_at(tables, at[1:])
  raise UserError(
    rule.format(**facts),
    got=getattr(given, name)[at],
    where=f'example {at[0]}, Batch.{name}{list(at)}',
    hint=hint,
  )


def _feature_at(tables: TableSet, at: tuple[int, ...]) -> dict[str, object]:
  """Returns number and name of a lookup's feature, and its table's rows."""
  column = int(np.ravel_multi_index(at, tables.example_shape))
  first, end = (int(bound[column]) for bound in tables.column_rows)
  spans = enumerate(tables.columns.items())
  number, name = next((n, f) for n, (f, span) in spans if column < span.stop)
  return {'number': number, 'feature': name, 'first': first, 'end': end}
