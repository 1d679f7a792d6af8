"""Reads a column of any library as arrays: one value, or a list, per example.

pandas and arrow are recognized by the names of their modules, and
tf.RaggedTensor by its attributes, so that none of them is imported here.
"""

from collections.abc import Callable, Mapping, Sequence
import copy
import mmap
from typing import Any, NamedTuple

from jaxtyping import Bool, Int
import numpy as np
import polars as pl

from slipstream_jax.errors import check_by_name, UserError
from slipstream_jax.tables import as_array

_NUMBERS = (
  *(pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32),
  *(pl.UInt64, pl.Float32, pl.Float64, pl.Boolean),
)

Place = Callable[[int | None], str]
"""Returns where an example of a column is, for errors. None: the column."""


class Ragged(NamedTuple):
  """Lists of unequal lengths, one per example. A plain tuple does the same."""

  values: Any
  """Values of all lists, one list after the other: [m]."""
  row_splits: Any
  """Start of each list in `values`, and the end of the last: [n + 1]."""
  weights: Any = None
  """Weight of each lookup in its bag, [m]. None: no weights."""


class Lists(NamedTuple):
  """A column that was read.

  Numbers are arrays. Texts of polars or arrow, and their numbers if some are
  missing, are a polars series [n] or [m].
  """

  values: Any
  """[n], one value each. Or [n, W], lists of one length, in which the integer
  -1 is padding. Or [m], lists end to end."""
  splits: Int[np.ndarray, ' n_and_1'] | None = None
  """Start of each list that lies end to end, and the end of the last, i64."""
  weights: 'Lists | None' = None
  """Weights of the lookups, in any of these forms."""

  @classmethod
  def end_to_end(cls, values: Any, lengths: np.ndarray) -> 'Lists':
    """Returns lists of the given lengths [n], whose values lie end to end."""
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    return cls(values, splits)

  @property
  def examples(self) -> int:
    """The number of examples, n."""
    return len(self.values if self.splits is None else self.splits[1:])

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the values."""
    shape: tuple[int, ...] = self.values.shape
    return shape

  def where(self, index: int, place: Place) -> str:
    """Returns where the value at a flat index is, for errors."""
    if self.splits is not None:
      example = int(np.searchsorted(self.splits, index, 'right')) - 1
      position = index - int(self.splits[example])
    elif len(self.shape) == 2:
      example, position = divmod(index, self.shape[1])
    else:
      return place(index)
    return f'{place(example)}, position {position}'

  @property
  def padding(self) -> Bool[np.ndarray, 'n W'] | None:
    """True where an array of lists has padding. None for other columns."""
    ids = self.values
    if len(self.shape) == 2 and ids.dtype.kind == 'i':
      padding: np.ndarray = ids == -1
      return padding
    return None


def library(column: object) -> str:
  """Returns the library that defines the type of a value, such as 'polars'."""
  return type(column).__module__.partition('.')[0]


def place_in(where: str) -> Place:
  """Returns the place of examples that are counted from 0."""
  return lambda i: where if i is None else f'{where}, example {i}'


def read(column: Any, place: Place) -> Lists:
  """Reads a column: one value, or one list of values, per example.

  A missing list is an empty one. Nested lists are lists, also if all have one
  length. Only an array [n, W] may hold padding.

  Args:
    column: an array, a list, or a column of polars, pandas or arrow, of values
      or of lists. Or `Ragged`, a tuple like it, or a tf.RaggedTensor.
    place: where it is, for errors.

  Raises:
    UserError: the column is none of these, or its splits do not fit.
  """
  if isinstance(column, tuple) and column and not np.isscalar(column[0]):
    return _ragged(column, place)
  if hasattr(column, 'row_splits') and hasattr(column, 'values'):
    return _ragged((column.values, column.row_splits), place)
  if library(column) == 'pyarrow':
    column = pl.Series(column)
  if isinstance(column, pl.Series):
    return _of_series(column, place)
  try:
    array = as_array(column, place(None))
  except UserError:  # lists of unequal lengths, or something else
    if not isinstance(column, Sequence):
      raise
    return _of_lists(column, place)
  if array.ndim == 1 and array.dtype == object and _holds_lists(array):
    return _of_lists(array, place)
  if array.ndim not in (1, 2):
    raise UserError(
      'a column must hold one value or one list of values per example',
      got=f'shape {list(array.shape)}',
      where=place(None),
      hint='give an array [n] or [n, L], or (values, row_splits)',
    )
  array = _settled(array)
  if array.ndim == 2 and isinstance(column, list | tuple):
    return Lists.end_to_end(array.reshape(-1), np.full(*array.shape))
  return Lists(array)


def read_plain(column: Any, place: Place) -> Any:
  """Reads a column whose lists have one length: values [n] or [n, W].

  Raises:
    UserError: as `read`, or the lists have unequal lengths.
  """
  lists = read(column, place)
  if lists.splits is None:
    return lists.values
  lengths = np.diff(lists.splits)
  if len(lengths) and (lengths != lengths[0]).any():
    raise UserError(
      'this must be one number, or equally many, per example',
      got='lists of unequal lengths',
      where=place(None),
      hint='give an array [n] or [n, columns]',
    )
  values = as_objects(lists.values)
  return values.reshape(len(lengths), -1 if values.size else 0)


def as_objects(values: Any) -> np.ndarray:
  """Returns values as an array, and a series as an array of objects."""
  if not isinstance(values, pl.Series):
    return np.asarray(values)
  # Not `np.array`, which makes a matrix of equally long tuples.
  return np.fromiter(values.to_list(), object, len(values))


def is_frozen(array: np.ndarray) -> bool:
  """Whether an array, and every array that it is a view of, is read-only.

  The read-only memory of polars and arrow is not frozen. It may belong to an
  array that the user can write.
  """
  part: Any = array
  while isinstance(part, np.ndarray):
    if part.flags.writeable:
      return False
    part = part.base
  return part is None or isinstance(part, mmap.mmap)


def frozen(values: Any) -> Any:
  """Returns a read-only copy of values or lists, or those that are frozen."""
  if isinstance(values, Lists):
    return Lists(*(None if part is None else frozen(part) for part in values))
  if isinstance(values, pl.Series):
    # A series may share the memory of a user's array, as its clones do. Values
    # that are gathered are new.
    return values.gather(np.arange(len(values)))
  if is_frozen(values):
    return values
  own = values.copy()
  own.flags.writeable = False
  return own


def kept(column: Any) -> Any:
  """Copies a column of a frame, so that its owner may change it."""
  if library(column) == 'pyarrow':
    return column.take(np.arange(len(column)))
  if library(column) == 'pandas':
    column = np.asarray(column)
  if isinstance(column, np.ndarray | pl.Series) and column.dtype != object:
    return frozen(column)
  return copy.deepcopy(column)  # with the lists in it


def names_of(frame: Any) -> tuple[str, ...] | None:
  """Returns the names of the columns of a frame or dict, None for others.

  Raises:
    UserError: a lazy frame, which holds no columns yet.
  """
  if library(frame) == 'polars' and hasattr(frame, 'collect'):
    raise UserError(
      'a frame must hold its columns',
      got='a LazyFrame',
      where='batches',
      hint='collect() it, or pack what does not fit in memory',
    )
  if isinstance(frame, Mapping):
    check_by_name(frame, 'batches, columns', 'name each column')
    return tuple(frame)
  if library(frame) == 'pyarrow' and hasattr(frame, 'column_names'):
    return tuple(frame.column_names)
  if hasattr(frame, 'columns') and hasattr(frame, '__getitem__'):
    return tuple(map(str, frame.columns))
  return None


def is_missing(value: object) -> bool:
  """Whether a value is None, NaN, or pandas' missing value."""
  if isinstance(value, float):
    return value != value
  return value is None or type(value).__name__ in ('NAType', 'NaTType')


def _settled(array: np.ndarray) -> np.ndarray:
  """Converts Python's integers to numpy's, if all values are integers."""
  if not array.size and array.dtype.kind == 'f':  # the type of empty lists
    return array.astype(np.int64)
  if array.dtype == object and all(type(x) is int for x in array.ravel()):
    low, high = min(array.ravel(), default=0), max(array.ravel(), default=0)
    if low >= -(1 << 63) and high < 1 << 63:
      return array.astype(np.int64)
  return array


def _holds_lists(array: np.ndarray) -> bool:
  return any(
    isinstance(x, list | tuple | np.ndarray) or library(x) == 'polars'
    for x in array
  )


def _of_lists(column: Sequence[Any] | np.ndarray, place: Place) -> Lists:
  """Reads lists of unequal lengths that are Python objects."""
  parts = []
  for example, values in enumerate(column):
    part = np.asarray([] if is_missing(values) else values)
    if part.ndim != 1:
      raise UserError(
        'where one example has a list, all must have a list of values',
        got=repr(values),
        where=place(example),
        hint='give an empty list to an example without lookups',
      )
    parts.append(part)
  lengths = np.array([len(part) for part in parts])
  parts = [part for part in parts if len(part)]
  values = np.concatenate(parts) if parts else np.empty(0, np.int64)
  return Lists.end_to_end(_settled(values), lengths)


def _of_series(series: pl.Series, place: Place) -> Lists:
  if isinstance(series.dtype, pl.Array) and not series.null_count():
    array = series.to_numpy()
    if array.dtype.kind in 'iufb':
      return Lists(array)
  if isinstance(series.dtype, pl.Array):
    series = series.arr.to_list()
  if not isinstance(series.dtype, pl.List):
    return Lists(_values(series))
  lengths = series.list.len().fill_null(0).cast(pl.Int64).to_numpy()
  # Without empty lists, each of which would explode to a null.
  values = series.filter(pl.Series(lengths > 0)).explode()
  if isinstance(values.dtype, pl.List | pl.Array):
    raise UserError(
      'ids and weights must be single values, or lists of values',
      got=f'{series.dtype}',
      where=place(None),
      hint='flatten the lists of each example to one list',
    )
  if not len(values) and values.dtype == pl.Null:
    return Lists.end_to_end(np.empty(0, np.int64), lengths)
  return Lists.end_to_end(_values(values), lengths)


def _values(series: pl.Series) -> Any:
  """Returns numbers as an array, other values as a series."""
  if series.dtype in _NUMBERS and not series.null_count():
    return series.to_numpy()
  if series.dtype == pl.Object:
    return as_objects(series)
  return series


def _ragged(column: tuple[Any, ...], place: Place) -> Lists:
  """Reads `(values, row_splits)` or `(values, row_splits, weights)`."""
  where = place(None)
  if len(column) not in (2, 3):
    raise UserError(
      'a tuple must be (values, row_splits) or (values, row_splits, weights)',
      got=f'{len(column)} entries',
      where=where,
      hint='give a list where you mean one entry per example',
    )
  values, given, weights = (*column, None)[:3]
  values = _flat(values, f'{where}, values')
  splits = as_objects(_flat(given, f'{where}, row_splits'))
  if splits.dtype.kind not in 'iu' or not len(splits):
    raise UserError(
      'row_splits must be integers, one more than there are examples',
      got=f'{len(splits)} of type {splits.dtype}',
      where=f'{where}, row_splits',
      hint='give where each list begins in values, and the end of the last',
    )
  splits = splits.astype(np.int64)
  flaws = np.diff(splits, prepend=0) < 0
  flaws[0] |= splits[0] != 0
  flaws[-1] |= splits[-1] != len(values)
  if flaws.any():
    at = int(np.argmax(flaws))
    raise UserError(
      f'row_splits must rise from 0 to {len(values)}, the number of values',
      got=int(splits[at]),
      where=f'{where}, row_splits[{at}]',
      hint='give where each list begins in values, and the end of the last',
    )
  if weights is not None:
    weights = Lists(_flat(weights, f'{where}, weights'))
    if weights.shape != (len(values),):
      raise UserError(
        'there must be one weight per lookup',
        got=f'{len(weights.values)} for {len(values)}',
        where=where,
        hint='give as many weights as ids',
      )
  return Lists(values, splits, weights)


def _flat(column: Any, where: str) -> Any:
  values = read_plain(column, place_in(where))
  if len(values.shape) != 1:
    raise UserError(
      'values and row_splits must be one-dimensional',
      got=f'shape {list(values.shape)}',
      where=where,
      hint='give all lists one after the other',
    )
  return values
