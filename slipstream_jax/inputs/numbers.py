"""Dense features, labels and weights, of any real type, as f32."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.inputs.columns import is_frozen, names_of, plain


def as_floats(
  array: np.ndarray,
  rule: str,
  where: str,
  place: Callable[[int], str],
  *,
  copied: bool = False,
) -> Float[np.ndarray, '...']:
  """Returns numbers as f32; f32 stays as it is.

  Args:
    array: of any type of real numbers, or of truth values.
    rule: what must hold of them, for errors.
    where: whose they are.
    place: a flat index in words.
    copied: whether f32 is copied, too, if somebody else may change it.

  Raises:
    UserError: of another type, or a value that is not finite as f32.
  """
  if array.dtype == object:  # a column of pandas, perhaps, with its own NaN
    array = _numbers(array, rule, where, place)
  elif array.dtype.kind not in 'biuf':
    raise UserError(
      'dense features, labels and weights must be real numbers',
      got=f'type {array.dtype}',
      where=where,
      hint='convert them to float32; words are ids, of a feature',
    )
  with np.errstate(over='ignore', invalid='ignore'):
    copy = copied and not is_frozen(array)
    floats = array.astype(np.float32, order='C', copy=copy)
  good = np.isfinite(floats)
  if not good.all():
    index = int(np.argmin(good.reshape(-1)))
    raise UserError(
      rule,
      got=array.reshape(-1)[index].item(),
      where=f'{where}, {place(index)}',
      hint='fill what is missing before, e.g. with 0',
    )
  return floats


def _numbers(
  array: np.ndarray, rule: str, where: str, place: Callable[[int], str]
) -> np.ndarray:
  for index, value in enumerate(array.reshape(-1)):
    if not isinstance(value, int | float | np.number | np.bool_):
      raise UserError(
        rule,
        got=repr(value),
        where=f'{where}, {place(index)}',
        hint='convert them to float32, and fill what is missing',
      )
  return array.astype(np.float64)


def read_matrix(
  data: Any, what: str, where: str, *, copied: bool = False
) -> tuple[Float[np.ndarray, 'n w'], dict[str, int | None]]:
  """Numbers of each example, side by side.

  Args:
    data: an array [n] or [n, w], or such arrays by name, a frame among them.
    what: which they are, such as 'dense features'.
    where: the argument.
    copied: as of `as_floats`.

  Returns:
    f32[n, w], and the width of each name, None where it has [n]; none of an
    array.

  Raises:
    UserError: as `as_floats`, or arrays of unlike lengths.
  """
  names = names_of(data)
  if names is None:
    return _block(plain(data, where), what, where, copied), {}
  arrays = {name: plain(data[name], f'{where}, {name!r}') for name in names}
  check_lengths({name: len(array) for name, array in arrays.items()}, where)
  if not arrays:
    raise UserError(
      f'{what} by name must have a column',
      got='none',
      where=where,
      hint='leave the argument out',
    )
  blocks = [
    _block(array, what, f'{where}, {name!r}', copied=False)
    for name, array in arrays.items()
  ]
  widths = {
    name: None if array.ndim == 1 else array.shape[1]
    for name, array in arrays.items()
  }
  return np.concatenate(blocks, axis=1), widths


def _block(
  array: np.ndarray, what: str, where: str, copied: bool
) -> Float[np.ndarray, 'n w']:
  matrix = array[:, None] if array.ndim == 1 else array
  width = max(matrix.shape[1], 1)

  def place(index: int) -> str:
    column = f', column {index % width}' if array.ndim == 2 else ''
    return f'example {index // width}{column}'

  rule = f'{what} must be finite numbers'
  return as_floats(matrix, rule, where, place, copied=copied)


def check_range(
  values: np.ndarray, good: np.ndarray, rule: str, where: str, hint: str
) -> None:
  """Looks whether all values [n, w] are `good`.

  Raises:
    UserError: the first that is not.
  """
  if not good.all():
    example, column = np.argwhere(~good)[0]
    raise UserError(
      rule,
      got=values[example, column].item(),
      where=f'{where}, example {example}',
      hint=hint,
    )


def check_lengths(lengths: dict[str, int], where: str) -> int:
  """The number of examples that all columns have.

  Raises:
    UserError: they have unlike ones.
  """
  sizes: Sequence[int] = list(lengths.values())
  if len(set(sizes)) > 1:
    raise UserError(
      'all columns must have the same number of examples',
      got=', '.join(f'{name} {size}' for name, size in lengths.items()),
      where=where,
      hint='give one entry of each per example',
    )
  return sizes[0] if sizes else 0
