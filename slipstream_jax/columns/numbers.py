"""Dense features, labels and weights, of any real type, as f32."""

from collections.abc import Callable, Mapping, Sequence
import math
import numbers
from typing import Any

from jaxtyping import Float
import numpy as np
import polars as pl

from slipstream_jax.columns.read import (
  as_objects,
  is_frozen,
  is_missing,
  names_of,
  place_in,
  read_plain,
)
from slipstream_jax.errors import UserError

Fill = float | Mapping[str, float] | None
"""Value for missing numbers, for all columns or by name. None refuses them."""


def fills_of(
  names: Sequence[str], fill: float | Mapping[str, float], where: str
) -> dict[str, float]:
  """Returns the value for missing numbers of each column, 0 by default.

  Raises:
    UserError: a value is not finite, or is for another column.
  """
  by_name = fill if isinstance(fill, Mapping) else dict.fromkeys(names, fill)
  for name, value in by_name.items():
    good = isinstance(value, numbers.Real) and math.isfinite(value)
    if name not in names or not good:
      raise UserError(
        'fill must be a finite number, or one per dense column',
        got=f'{value!r} for {name!r}',
        where=f'{where}, fill',
        hint='give 0.0, or a number for each of some dense columns',
      )
  return {name: float(by_name.get(name, 0.0)) for name in names}


def as_floats(
  values: Any,
  what: str,
  where: Callable[[int], str],
  *,
  fill: float | None = None,
  copied: bool = False,
) -> Float[np.ndarray, '...']:
  """Converts numbers to f32. An array of f32 stays as it is.

  Args:
    values: an array or a polars series of any type of real numbers, of truth
      values, or of texts that spell numbers. '' is a missing number.
    what: which numbers these are, for errors.
    where: the place of a flat index, for errors.
    fill: replaces missing numbers. None: they are errors.
    copied: whether f32 is copied too, if the user may change it.

  Raises:
    UserError: the type is another one, or a value is not finite as f32.
  """
  array = _numbers(values, what, where)
  with np.errstate(over='ignore', invalid='ignore'):
    copy = copied and not is_frozen(array)
    floats = array.astype(np.float32, order='C', copy=copy)
  good = np.isfinite(floats)
  if fill is not None and not good.all() and array.dtype.kind == 'f':
    missing = np.isnan(array)
    floats = np.where(missing, np.float32(fill), floats)
    good |= missing
  if not good.all():
    index = int(np.argmin(good.reshape(-1)))
    raise UserError(
      f'{what} must be finite numbers',
      got=as_objects(values).astype(object).reshape(-1)[index],
      where=where(index),
      hint='fill what is missing before, e.g. with 0',
    )
  return floats


def _numbers(values: Any, what: str, where: Callable[[int], str]) -> np.ndarray:
  """Returns numbers of any type of numpy, NaN where one is missing."""
  if isinstance(values, pl.Series):
    return _series(values, what, where)
  if values.dtype.kind in 'biuf':
    array: np.ndarray = values
    return array
  if values.dtype.kind not in 'OUT':
    raise _no_numbers(what, f'type {values.dtype}', where(0))
  flat = [None if is_missing(x) else x for x in values.reshape(-1).tolist()]
  are_texts = any(isinstance(value, str) for value in flat)
  kinds = str if are_texts else int | float | np.number | np.bool_
  for index, value in enumerate(flat):
    if value is not None and not isinstance(value, kinds):
      raise _no_numbers(what, repr(value), where(index))
  if are_texts:
    series = pl.Series(flat, dtype=pl.String)
    return _series(series, what, where).reshape(values.shape)
  return np.array(flat, np.float64).reshape(values.shape)


def _series(
  series: pl.Series, what: str, where: Callable[[int], str]
) -> Float[np.ndarray, ' n']:
  dtype = series.dtype
  if dtype in (pl.String, pl.Categorical, pl.Enum):
    texts = series.cast(pl.String)
    texts = texts.replace({'true': '1', 'false': '0', '': None})
    floats = texts.cast(pl.Float64, strict=False)
    bad = (floats.is_null() & texts.is_not_null()).to_numpy()
    if bad.any():
      index = int(np.argmax(bad))
      raise _no_numbers(what, repr(series[index]), where(index))
  elif dtype.is_numeric() or dtype in (pl.Boolean, pl.Null):
    floats = series.cast(pl.Float64)
  else:
    raise _no_numbers(what, f'type {dtype}', where(0))
  return floats.fill_null(np.nan).to_numpy()


def _no_numbers(what: str, got: str, where: str) -> UserError:
  return UserError(
    f'{what} must be real numbers',
    got=got,
    where=where,
    hint='convert them to float32. Words are ids, of a feature',
  )


def read_matrix(
  data: Any, what: str, where: str, *, fill: Fill = None, copied: bool = False
) -> tuple[Float[np.ndarray, 'n w'], dict[str, int | None]]:
  """Reads the numbers of each example, side by side.

  Args:
    data: an array [n] or [n, w], or such arrays by name, as in a frame.
    what: which numbers these are, for errors.
    where: the argument.
    fill: replaces missing numbers.
    copied: as for `as_floats`.

  Returns:
    f32[n, w], and the width of each name, None for [n]. An array has no names.

  Raises:
    UserError: as `as_floats`, or the arrays have unequal lengths.
  """
  names = names_of(data)
  if names is None:
    assert not isinstance(fill, Mapping)
    values = read_plain(data, place_in(where))
    return _block(values, what, where, fill, copied), {}
  arrays = {
    name: read_plain(data[name], place_in(f'{where}, {name!r}'))
    for name in names
  }
  check_lengths({name: len(array) for name, array in arrays.items()}, where)
  if not arrays:
    raise UserError(
      f'{what} by name must have a column',
      got='none',
      where=where,
      hint='leave the argument out',
    )
  fills = fill if isinstance(fill, Mapping) else dict.fromkeys(names, fill)
  blocks = [
    _block(array, what, f'{where}, {name!r}', fills.get(name, 0.0), False)
    for name, array in arrays.items()
  ]
  widths = {
    name: None if len(array.shape) == 1 else array.shape[1]
    for name, array in arrays.items()
  }
  return np.concatenate(blocks, axis=1), widths


def _block(
  values: Any, what: str, where: str, fill: float | None, copied: bool
) -> Float[np.ndarray, 'n w']:
  width = max(values.shape[1], 1) if len(values.shape) == 2 else 1

  def place(index: int) -> str:
    column = f', column {index % width}' if len(values.shape) == 2 else ''
    return f'{where}, example {index // width}{column}'

  floats = as_floats(values, what, place, fill=fill, copied=copied)
  return floats[:, None] if floats.ndim == 1 else floats


def check_range(
  values: np.ndarray,
  good: np.ndarray,
  rule: str,
  where: Callable[[int], str],
  hint: str,
) -> None:
  """Raises a `UserError` for the first of values [n, w] that is not good."""
  if not good.all():
    example, column = np.argwhere(~good)[0]
    raise UserError(
      rule,
      got=values[example, column].item(),
      where=where(int(example)),
      hint=hint,
    )


def check_lengths(lengths: Mapping[str, int], where: str) -> int:
  """Returns the one length of all columns, or raises a `UserError`."""
  sizes = list(lengths.values())
  if len(set(sizes)) > 1:
    raise UserError(
      'all columns must have the same number of examples',
      got=', '.join(f'{name} {size}' for name, size in lengths.items()),
      where=where,
      hint='give one entry of each per example',
    )
  return sizes[0] if sizes else 0
