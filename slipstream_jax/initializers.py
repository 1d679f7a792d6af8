"""Initial values of the rows of a table, as a user gives them.

The initial value of a row depends on its number alone, so that an untrained row
need not be saved, and any slice of a table can be computed by itself.
"""

from collections.abc import Callable, Mapping
import functools
import hashlib
import math
import numbers
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import ml_dtypes  # noqa: F401  so that numpy knows bfloat16
import numpy as np

from slipstream_jax.errors import as_array, UserError

_AT_ONCE = 1 << 22  # elements that are read at a time
_KINDS = (
  'an initializer must be Uniform(scale), Constant(value), an array [R, D], a'
  ' mapping from ids to vectors [D], a function as those of'
  ' jax.nn.initializers, or None'
)


class Uniform(NamedTuple):
  """Initialiser: each element is uniform in [-scale, scale)."""

  scale: float


class Constant(NamedTuple):
  """Initialiser: each element is `value`."""

  value: float


DrawFn = Callable[[Any, tuple[int, ...], Any], Any]
"""Draws an array by a random key, a shape and a dtype: a function of
`jax.nn.initializers`."""


class GivenRows:
  """Initialiser: the rows of an array, by their number.

  Equal ones have equal values in f32. Values are compared by their checksum,
  which is computed once.

  Attributes:
    array: [R, D], of real numbers. It does not change.
  """

  def __init__(self, array: Any, where: str) -> None:
    """Copies the array, unless nobody can write it or it is a `np.memmap`.

    `where` is the argument, for errors.

    Raises:
      UserError: it is no array [R, D] of real numbers.
    """
    given = array if isinstance(array, np.memmap) else _converted(array, where)
    if given.ndim != 2 or not _is_real(given.dtype):
      raise UserError(
        'an array of initial rows must be [R, D], of real numbers',
        got=f'{given.dtype}{list(given.shape)}',
        where=where,
        hint='give one row per id, in float32',
      )
    is_view = isinstance(array, np.ndarray) and given.base is not None
    if not isinstance(given, np.memmap) and (given.flags.writeable or is_view):
      with np.errstate(over='ignore', invalid='ignore'):
        given = given.astype(np.float32)
      given.flags.writeable = False
    self.array, self._where = given, where

  @functools.cached_property
  def checksum(self) -> str:
    """A checksum of the values in f32, of 128 bits."""
    digest = hashlib.blake2b(repr(self.array.shape).encode(), digest_size=16)
    step = max(1, _AT_ONCE // max(self.array.shape[1], 1))
    for start in range(0, len(self.array), step):
      part = _as_f32(self.array[start : start + step])
      digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()

  def write(self, rows: Int[np.ndarray, ' n'], out: Float[Any, 'n D']) -> None:
    """Writes rows, by their numbers, rounded to the nearest of `out`'s dtype.

    Raises:
      UserError: a value is not finite in that dtype.
    """
    write_rounded(self.array[rows], out, self._where)

  def check_finite(self, dtype: str) -> None:
    """Checks that all values are finite in a dtype, unless a file has them."""
    if isinstance(self.array, np.memmap):  # checked as they are read
      return
    step = max(1, _AT_ONCE // max(self.array.shape[1], 1))
    for start in range(0, len(self.array), step):
      part = self.array[start : start + step]
      write_rounded(part, np.empty(part.shape, dtype), self._where)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, GivenRows):
      return False
    if self.array is other.array:
      return True
    same = self.array.shape == other.array.shape
    return same and self.checksum == other.checksum

  def __hash__(self) -> int:
    return hash(self.array.shape)

  def __repr__(self) -> str:
    return f'rows {list(self.array.shape)}'


def _converted(array: Any, where: str) -> np.ndarray:
  try:
    return as_array(array, where)
  except RuntimeError as error:  # as a tensor that is being trained raises
    raise UserError(
      'initial rows must be an array that numpy can read',
      got=next(iter(str(error).splitlines()), ''),
      where=where,
      hint='convert it before, as tensor.detach().numpy() does',
    ) from error


class VectorsById:
  """Initialiser: a vector for each of some ids. Other rows have the default.

  Equal ones have equal checksums.

  Attributes:
    ids: as the user gave them.
    vectors: f32[n, D].
  """

  def __init__(self, given: Mapping[Any, Any], dim: int, where: str) -> None:
    """Copies the vectors.

    Raises:
      UserError: one is no vector [dim] of finite real numbers.
    """
    self.ids, self.where = [*given], where
    self.vectors = np.empty((len(given), dim), np.float32)
    with np.errstate(over='ignore', invalid='ignore'):
      for number, (key, value) in enumerate(given.items()):
        vector = as_array(value, where)
        if vector.shape != (dim,) or not _is_real(vector.dtype):
          raise UserError(
            f'a vector of an id must be [{dim}], of real numbers',
            got=f'{vector.dtype}{list(vector.shape)}',
            where=f'{where}, id {key!r}',
            hint='give vectors as long as embedding_dim',
          )
        self.vectors[number] = vector
    flawed = np.flatnonzero(~np.isfinite(self.vectors).all(axis=1))
    for number in flawed[:1].tolist():
      row, at = self.vectors[number : number + 1], self.ids[number]
      write_rounded(row, np.empty_like(row), f'{where}, id {at!r}')

  @functools.cached_property
  def checksum(self) -> str:
    """A checksum of ids and vectors in any order, of 128 bits."""
    total = 0
    for key, vector in zip(self.ids, self.vectors, strict=True):
      digest = hashlib.blake2b(f'{key}\0'.encode(), digest_size=16)
      digest.update(vector.data)
      total += int.from_bytes(digest.digest(), 'little')
    return f'{total % (1 << 128):032x}'

  def __eq__(self, other: object) -> bool:
    if self is other or not isinstance(other, VectorsById):
      return self is other
    same = self.vectors.shape == other.vectors.shape
    return same and self.checksum == other.checksum

  def __hash__(self) -> int:
    return hash(self.vectors.shape)

  def __repr__(self) -> str:
    return f'vectors {list(self.vectors.shape)} by id'


Initializer = Uniform | Constant | GivenRows | VectorsById | DrawFn
"""An initializer that was checked. Arrays and mappings have become objects."""


def as_initializer(
  given: Any, rows: tuple[int, ...], dim: int, dtype: str, where: str
) -> Initializer | None:
  """Checks an initializer from a user.

  Args:
    given: as in `Table`.
    rows: the numbers of rows that an array may have.
    dim: D.
    dtype: of the table's rows.
    where: the argument, for errors.

  Raises:
    UserError: it is none, or does not fit the table.
  """
  known = given is None or isinstance(given, GivenRows | VectorsById)
  if isinstance(given, Uniform | Constant):
    (number,) = given
    known = isinstance(number, numbers.Real) and math.isfinite(number)
  elif isinstance(given, Mapping):
    return VectorsById(given, dim, where)
  elif callable(given) and not isinstance(given, type):
    function: DrawFn = given
    return function
  elif not known and hasattr(given, '__array__'):
    given, known = GivenRows(given, where), True
    given.check_finite(dtype)
  if not known:
    raise UserError(
      f'{_KINDS}, with finite numbers',
      got=repr(given),
      where=where,
      hint='leave it out for Uniform(1/sqrt(vocabulary_size))',
    )
  if isinstance(given, GivenRows):
    _check_shape(given.array.shape, rows, dim, where)
  checked: Initializer | None = given
  return checked


def _check_shape(
  shape: tuple[int, ...], rows: tuple[int, ...], dim: int, where: str
) -> None:
  if shape[0] not in rows or shape[1] != dim:
    wanted = ' or '.join(f'[{n}, {dim}]' for n in rows)
    raise UserError(
      f'an array of initial rows must have the shape of the table, {wanted}',
      got=list(shape),
      where=where,
      hint='give its shape as vocabulary_size and embedding_dim',
    )


def write_rounded(values: Any, out: Float[Any, 'n D'], where: str) -> None:
  """Writes real numbers [n, D] to rows, rounded to the nearest of their dtype.

  Numbers in f64 are rounded to f32 before.

  Raises:
    UserError: a value is not finite in the dtype.
  """
  with np.errstate(over='ignore', invalid='ignore'):
    out[:] = _as_f32(values)
  finite = np.isfinite(out)
  if not finite.all():
    at = tuple(np.argwhere(~finite)[0])
    raise UserError(
      f'initial rows must be finite in {out.dtype}',
      got=float(values[at]),
      where=where,
      hint='replace such values, or take the dtype float32',
    )


def _as_f32(values: Any) -> np.ndarray:
  with np.errstate(over='ignore', invalid='ignore'):
    return np.asarray(values).astype(np.float32, copy=False)


def _is_real(dtype: np.dtype) -> bool:
  return dtype.kind in 'fiu' or dtype.name == 'bfloat16'
