"""A column of any library, as numpy's arrays: numbers, words, or lists of them.

Polars, pandas and arrow are known by the names of their modules, so none of
them is imported here; tf.RaggedTensor by its attributes.
"""

from collections.abc import Mapping, Sequence
import copy
import mmap
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np

from slipstream_jax.errors import check_by_name, UserError
from slipstream_jax.tables import as_array


class Ragged(NamedTuple):
  """Lists of unlike lengths, one per example; a plain tuple is as good."""

  values: Any
  """Of all lists, one list after the other: [m]."""
  row_splits: Any
  """Where each list begins in `values`, and the end of the last: [n + 1]."""
  weights: Any = None
  """Weight of each lookup in its bag, [m]; None where they have none."""


class Lists(NamedTuple):
  """Values of a column, as arrays."""

  values: np.ndarray
  """[n], one each; [n, W], lists of equal lengths; [m], lists end to end."""
  splits: Int[np.ndarray, ' n_and_1'] | None = None
  """Where lists that lie end to end begin and end, i64; else None."""
  weights: np.ndarray | None = None
  """Shaped as the values."""

  @property
  def examples(self) -> int:
    """The number of examples, n."""
    return len(self.values if self.splits is None else self.splits[1:])

  def place(self, index: int) -> tuple[int, int]:
    """Example and position in its list of the value at a flat index."""
    if self.splits is None:
      width = 1 if self.values.ndim == 1 else self.values.shape[1]
      return divmod(index, width)
    example = int(np.searchsorted(self.splits, index, 'right')) - 1
    return example, index - int(self.splits[example])


def library(column: object) -> str:
  """The library that a value's type is of, such as 'polars'."""
  return type(column).__module__.partition('.')[0]


def read(column: Any, where: str) -> Lists:
  """Values, one per example, or lists of them.

  Args:
    column: an array, a list, or a column of polars, pandas or arrow, of values
      or of lists; `Ragged` or a tuple like it; or a tf.RaggedTensor.
    where: whose it is, for errors.

  Raises:
    UserError: no such column, values that are missing, or splits that do not
      fit them.
  """
  if isinstance(column, tuple) and column and not np.isscalar(column[0]):
    return _ragged(column, where)
  if hasattr(column, 'row_splits') and hasattr(column, 'values'):
    return _ragged((column.values, column.row_splits), where)
  match library(column):
    case 'polars':
      return _of_polars(column, where)
    case 'pyarrow':
      return _of_arrow(column, where)
  try:
    array = as_array(column, where)
  except UserError:  # lists of unlike lengths, or nothing of use
    if not isinstance(column, Sequence):
      raise
    return _of_lists(column, where)
  if array.ndim == 1 and array.dtype == object and _holds_lists(array):
    return _of_lists(array, where)
  if array.ndim not in (1, 2):
    raise UserError(
      'a column must hold one value or one list of values per example',
      got=f'shape {list(array.shape)}',
      where=where,
      hint='give an array [n] or [n, L], or (values, row_splits)',
    )
  return Lists(_settled(array))


def is_frozen(array: np.ndarray) -> bool:
  """Tells whether an array, and all that it is a view of, is read-only.

  Frames of polars and arrow show their memory read-only. It may be that of an
  array that somebody else can write, so it is not frozen.
  """
  part: Any = array
  while isinstance(part, np.ndarray):
    if part.flags.writeable:
      return False
    part = part.base
  return part is None or isinstance(part, mmap.mmap)


def frozen(array: np.ndarray) -> np.ndarray:
  """Returns a read-only copy of an array, or the array if it is frozen."""
  if is_frozen(array):
    return array
  own = array.copy()
  own.flags.writeable = False
  return own


def kept(column: Any) -> Any:
  """Returns a column that stays as it is when its owner changes the original.

  Args:
    column: as of `read`, or any other column of a frame.
  """
  if library(column) == 'pandas':
    column = np.asarray(column)
  if isinstance(column, np.ndarray) and column.dtype != object:
    return frozen(column)
  # Columns of polars and arrow may show the memory of somebody's array, and
  # their own copies share it: taken value by value they do not.
  if library(column) == 'polars':
    return column.gather(np.arange(len(column)))
  if library(column) == 'pyarrow':
    return column.take(np.arange(len(column)))
  return copy.deepcopy(column)  # with the lists in it


def plain(column: Any, where: str) -> np.ndarray:
  """The same where all lists are equally long: [n] or [n, W].

  Raises:
    UserError: as `read`, or lists of unlike lengths.
  """
  lists = read(column, where)
  if lists.splits is None:
    return lists.values
  lengths = np.diff(lists.splits)
  if len(lengths) and (lengths != lengths[0]).any():
    raise UserError(
      'this must be one number, or equally many, per example',
      got='lists of unlike lengths',
      where=where,
      hint='give an array [n] or [n, columns]',
    )
  return lists.values.reshape(len(lengths), -1 if lists.values.size else 0)


def names_of(frame: Any) -> tuple[str, ...] | None:
  """Names of a frame's columns, or of a dict's; None if it is no frame.

  Raises:
    UserError: a frame that holds no columns yet.
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


def _settled(array: np.ndarray) -> np.ndarray:
  """Python's integers as numpy's, where they are all integers."""
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


def _of_lists(column: Sequence[Any] | np.ndarray, where: str) -> Lists:
  """Lists of unlike lengths, as Python has them."""
  parts = []
  for example, values in enumerate(column):
    part = np.asarray(values)
    if part.ndim != 1:
      raise UserError(
        'where one example has a list, all must have a list of values',
        got=repr(values),
        where=f'{where}, example {example}',
        hint='give an empty list to an example without lookups',
      )
    parts.append(part)
  splits = np.zeros(len(parts) + 1, np.int64)
  splits[1:] = np.cumsum([len(part) for part in parts])
  parts = [part for part in parts if len(part)]
  values = np.concatenate(parts) if parts else np.empty(0, np.int64)
  return Lists(_settled(values), splits)


def _of_polars(series: Any, where: str) -> Lists:
  if not str(series.dtype).startswith('List'):
    return Lists(_numpy(series, series.null_count()))
  _check_present(series.is_null().to_numpy(), where)
  lengths = series.list.len().to_numpy()
  # Without empty lists, each of which would explode to a null.
  values = series.filter(series.list.len() > 0).explode()
  if not len(values):
    return _end_to_end(lengths, np.empty(0, np.int64))
  return _end_to_end(lengths, _numpy(values, values.null_count()))


def _of_arrow(array: Any, where: str) -> Lists:
  if hasattr(array, 'combine_chunks'):
    array = array.combine_chunks()
  form: dict[str, Any] = {'zero_copy_only': False}
  if not hasattr(array, 'value_lengths'):
    return Lists(_numpy(array, array.null_count, **form))
  _check_present(array.is_null().to_numpy(**form), where)
  values = array.flatten()
  lengths = array.value_lengths().to_numpy(**form)
  return _end_to_end(lengths, _numpy(values, values.null_count, **form))


def _numpy(column: Any, missing: int, **form: Any) -> np.ndarray:
  """Values of polars or arrow; with None, rather than NaN, for missing ones."""
  if not missing:
    return column.to_numpy(**form)
  values = np.empty(len(column), object)
  to_list = 'to_pylist' if library(column) == 'pyarrow' else 'to_list'
  values[:] = getattr(column, to_list)()
  return values


def _end_to_end(lengths: np.ndarray, values: np.ndarray) -> Lists:
  splits = np.zeros(len(lengths) + 1, np.int64)
  np.cumsum(lengths, out=splits[1:])
  return Lists(values, splits)


def _check_present(missing: np.ndarray, where: str) -> None:
  if missing.any():
    raise UserError(
      'each example must have a list, if only an empty one',
      got='null',
      where=f'{where}, example {int(np.argmax(missing))}',
      hint='fill what is missing first',
    )


def _ragged(column: tuple[Any, ...], where: str) -> Lists:
  """Checks splits against values, and weights against both."""
  if len(column) not in (2, 3):
    raise UserError(
      'a tuple must be (values, row_splits) or (values, row_splits, weights)',
      got=f'{len(column)} entries',
      where=where,
      hint='give a list where you mean one entry per example',
    )
  values = _flat(column[0], f'{where}, values')
  splits = _flat(column[1], f'{where}, row_splits')
  if splits.dtype.kind not in 'iu' or not len(splits):
    raise UserError(
      'row_splits must be integers, one more than there are examples',
      got=f'{len(splits)} of type {splits.dtype}',
      where=f'{where}, row_splits',
      hint='give where each list begins in values, and the end of the last',
    )
  splits = splits.astype(np.int64)
  falls = np.flatnonzero(splits[1:] < splits[:-1])
  if splits[0] != 0 or splits[-1] != len(values) or len(falls):
    at = (
      0 if splits[0] else int(falls[0]) + 1 if len(falls) else len(splits) - 1
    )
    raise UserError(
      f'row_splits must rise from 0 to {len(values)}, the number of values',
      got=int(splits[at]),
      where=f'{where}, row_splits[{at}]',
      hint='give where each list begins in values, and the end of the last',
    )
  weights = column[2] if len(column) == 3 else None
  if weights is not None:
    weights = _flat(weights, f'{where}, weights')
  return Lists(values, splits, weights)


def _flat(column: Any, where: str) -> np.ndarray:
  array = plain(column, where)
  if array.ndim != 1:
    raise UserError(
      'values and row_splits must be one-dimensional',
      got=f'shape {list(array.shape)}',
      where=where,
      hint='give all lists one after the other',
    )
  return array
