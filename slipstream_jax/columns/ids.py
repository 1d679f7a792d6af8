"""Raw ids as 64-bit numbers: integers or text, in any common container.

An id is the same in a list, numpy, polars, arrow or pandas. Both hashes of a
text are on disk and may not change: `hash_texts` in vocabularies, `packed_ids`
in packed folders.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from jaxtyping import Bool, Int, UInt8
import numpy as np
import polars as pl

from slipstream_jax.columns.read import as_objects, is_missing
from slipstream_jax.errors import UserError
from slipstream_jax.hashing import hash_texts, text_id
from slipstream_jax.tables import as_array

MISSING = -1
"""Stands for a missing id in packed folders."""
Ids = Int[np.ndarray, ' _']
"""Ids of one table, i64. A missing one is `MISSING`."""

Kind = Literal['', 'int64', 'uint64', 'text']
"""Kind of the ids, '' if there was none yet."""
_RULE = 'ids must be integers or text'
_INTEGERS = (
  *(pl.Int8, pl.Int16, pl.Int32, pl.Int64),
  *(pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64),
)
# `MISSING` is -1 and -2 pads lists, so a negative v becomes v - 2.
_LEAST = np.iinfo(np.int64).min + 2
_HINT = 'give int64, uint64 or strings, and None where an id is missing'
_CAST_HINT = 'cast them to whole numbers or to text first'
_RAGGED_HINT = 'give the values of ragged lists, end to end'


class Text(NamedTuple):
  """Texts, end to end."""

  data: UInt8[np.ndarray, ' bytes']
  """UTF-8."""
  ends: Int[np.ndarray, ' n']
  """End of each text, i64."""


class RawIds(NamedTuple):
  """Ids of any shape, without the missing ones."""

  kind: Kind
  bits: Int[np.ndarray, ' n']
  """i64: the integer (or the bits of a u64), or the hash of the text."""
  present: Bool[np.ndarray, ' m'] | None
  """Which of all m ids are not missing. None: all."""
  shape: tuple[int, ...]
  words: pl.Series | None = None
  """The hashed texts as a polars series."""

  def spread(self, rows: Int[np.ndarray, ' n']) -> Int[np.ndarray, '...']:
    """Returns the rows in the shape of the input, row 0 for missing ids."""
    if self.present is not None:
      whole = np.zeros(len(self.present), rows.dtype)
      whole[self.present] = rows
      rows = whole
    return rows.reshape(self.shape)


def raw_ids(ids: Any, where: str) -> RawIds:
  """Converts ids from users.

  Args:
    ids: integers or strings in a list, a numpy array, a polars or pandas
      series, or an arrow array. None, null and NaN are missing ids. Bytes must
      be UTF-8. A result of this function is returned as it is.
    where: as in `UserError`.

  Raises:
    UserError: the ids have another type, do not fit 64 bits, or mix integers
      and text.
  """
  if isinstance(ids, RawIds):
    return ids
  values, present, shape = _present_values(ids, where)
  if not len(values):
    return RawIds('', np.empty(0, np.int64), present, shape)
  if isinstance(values, pl.Series):
    text = text_of(values)
    hashes = np.empty(len(values), np.uint64)
    hash_texts(text.data, text.ends, hashes)
    bits = hashes.view(np.int64)
    return RawIds('text', bits, present, shape, values)
  kind: Kind = 'uint64' if _is_u64(values) else 'int64'
  # Writable, because kernels would be compiled again for read-only arrays.
  whole = np.require(values, kind, ['C', 'W'])
  return RawIds(kind, whole.view(np.int64), present, shape)


def packed_ids(ids: Any, where: str) -> Int[np.ndarray, '...']:
  """Returns ids as packed folders store them, i64 of their shape.

  An integer is its own id, but a negative v becomes v - 2. A text that spells
  such an integer in canonical form has the same id, so 7 and '7' are equal, but
  not '007'. Other texts, and integers beyond i64, are hashed by `text_ids`.
  Missing ids and '' are `MISSING`. Truth values are the texts 'true' and
  'false'.

  Args:
    ids: as for `raw_ids`, or truth values.
    where: as in `UserError`.

  Raises:
    UserError: the ids have another type.
  """
  values, present, shape = _present_values(ids, where, spell=True)
  if isinstance(values, pl.Series):
    parsed = values.cast(pl.Int64, strict=False)
    # Only the canonical form: '007' and '+7' are not 7.
    plain = (parsed.cast(pl.String) == values) & (parsed >= _LEAST)
    numbers = parsed.fill_null(0).to_numpy()
    known = plain.fill_null(False).to_numpy()
  else:
    numbers = values.astype(np.int64, copy=False)
    known = numbers >= (0 if _is_u64(values) else _LEAST)
  packed = np.where(numbers < 0, numbers - 2, numbers)
  if not known.all():
    others = pl.Series(values).filter(pl.Series(~known)).cast(pl.String)
    packed[~known] = text_ids([text.encode() for text in others.to_list()])
  if present is not None:
    whole = np.full(len(present), MISSING, np.int64)
    whole[present] = packed
    packed = whole
  return packed.reshape(shape)


def text_ids(texts: Sequence[bytes]) -> Int[np.ndarray, ' n']:
  """Hashes texts to i64, the same on every machine. b'' is `MISSING`."""
  # Texts repeat, so each is hashed once.
  ids = {text: text_id(text) if text else MISSING for text in set(texts)}
  return np.fromiter((ids[text] for text in texts), np.int64, len(texts))


def as_kind(ids: RawIds, kind: Kind, where: str) -> RawIds:
  """Converts ids to the kind of a vocabulary.

  Raises:
    UserError: the kinds differ: text and integers, or integers out of range.
  """
  if not ids.kind or not kind or ids.kind == kind:
    return ids
  rule, hint = f'ids must be {kind}, as the first were', 'keep to one type'
  if 'text' in (kind, ids.kind):
    raise UserError(rule, got=ids.kind, where=where, hint=hint)
  # Signed and unsigned: the same bits would be two different numbers.
  beyond = np.flatnonzero(ids.bits < 0)
  if len(beyond):
    value = ids.bits[beyond[0]].view(ids.kind)
    raise UserError(
      rule, got=value, where=where, hint='convert all ids to one type'
    )
  return ids._replace(kind=kind)


def text_of(words: pl.Series) -> Text:
  """Joins a series of strings without nulls to texts, end to end."""
  ends = np.cumsum(words.str.len_bytes().to_numpy(), dtype=np.int64)
  whole = words.str.join('').item() if len(words) else ''
  # A writable copy, because read-only arrays would compile kernels again.
  return Text(np.frombuffer(bytearray(whole.encode()), np.uint8), ends)


def _is_u64(values: np.ndarray) -> bool:
  # Not `== np.uint64`, which is False for another byte order.
  return values.dtype.kind == 'u' and values.dtype.itemsize == 8


def _present_values(
  ids: Any, where: str, *, spell: bool = False
) -> tuple[np.ndarray | pl.Series, np.ndarray | None, tuple[int, ...]]:
  """Returns the ids that are not missing, which they are, and the shape of all.

  The ids are an array of integers or a series of texts. `spell` writes truth
  values and integers of 128 bits as texts. If none is missing, which is None.
  """
  present = None
  series = _series(ids, where)
  if series is not None and series.dtype != pl.Object:
    shape, dtype = (len(series),), series.dtype
    if series.null_count():
      present = series.is_not_null().to_numpy()
      series = series.drop_nulls()
    wide = dtype.is_integer() and dtype not in _INTEGERS
    if spell and (wide or dtype == pl.Boolean):
      series, dtype = series.cast(pl.String), pl.String()
    if dtype in _INTEGERS:
      return series.to_numpy(), present, shape
    if dtype in (pl.String, pl.Categorical, pl.Enum):
      return series.cast(pl.String), present, shape
    # In a folder, no column of another type is one of missing ids.
    refused = dtype != pl.Null if spell else len(series) > 0
    if dtype != pl.Binary and refused:
      first = next(iter(series.head(1).to_list()), None)
      _refuse(first, dtype, where, spell)
    return _of_objects(series.to_list(), where), present, shape
  array = _array(ids, where) if series is None else as_objects(series)
  if spell and array.dtype.kind == 'b':
    array = np.where(array, 'true', 'false')
  shape, kind = array.shape, array.dtype.kind
  if kind in 'iu':
    return array.reshape(-1), None, shape
  values = array.reshape(-1).tolist()
  if kind in 'OT':
    present = np.array([not is_missing(value) for value in values], bool)
    values = [v for v, there in zip(values, present, strict=True) if there]
    present = None if present.all() else present
  elif kind not in 'US' and values:
    _refuse(values[0], array.dtype, where, spell)
  return _of_objects(values, where), present, shape


def _refuse(value: object, dtype: object, where: str, spell: bool) -> NoReturn:
  hint = _CAST_HINT if spell else _HINT
  raise UserError(
    _RULE,
    got=f'{value!r}, of type {dtype}',
    where=where,
    hint=_RAGGED_HINT if isinstance(value, list) else hint,
  )


def _series(ids: Any, where: str) -> pl.Series | None:
  if isinstance(ids, pl.Series):
    return ids
  if isinstance(ids, pl.DataFrame | pl.LazyFrame | dict):
    raise UserError(
      'ids must be those of one table',
      got=type(ids).__name__,
      where=where,
      hint="give one column, e.g. frame['item']",
    )
  # Arrow arrays, and pandas objects if arrow is installed.
  if hasattr(ids, '__arrow_c_array__') or hasattr(ids, '__arrow_c_stream__'):
    try:
      return pl.Series(ids)
    except (ImportError, TypeError, pl.exceptions.PolarsError):
      return None
  return None


def _array(ids: Any, where: str) -> np.ndarray:
  if not isinstance(ids, list | tuple):
    return as_array(ids, where)
  # As objects, because numpy would convert [1, 'a'] to text, [1, None] to
  # fractions and [True, 1] to integers.
  try:
    return np.array(ids, object)
  except ValueError as error:
    raise UserError(
      'lists of ids must be of one length',
      got=str(error),
      where=where,
      hint=_RAGGED_HINT,
    ) from error


def _of_objects(values: list[Any], where: str) -> np.ndarray | pl.Series:
  """Returns integers as i64 or u64, and text or bytes as a series."""
  kinds = {type(value) for value in values}
  whole = (int, np.integer)
  if all(issubclass(k, whole) and k is not bool for k in kinds):
    low, high = min(values, default=0), max(values, default=0)
    if low < -(1 << 63) or high >= 1 << 64 or (low < 0 and high >= 1 << 63):
      raise UserError(
        'ids must all be in [-2**63, 2**63), or all in [0, 2**64)',
        got=f'{low} to {high}',
        where=where,
        hint='hash them to 64 bits, or give them as strings',
      )
    return np.array(values, np.uint64 if high >= 1 << 63 else np.int64)
  try:
    if all(issubclass(kind, bytes) for kind in kinds):
      values, kinds = [value.decode() for value in values], {str}
    if all(issubclass(kind, str) for kind in kinds):
      return pl.Series(values, dtype=pl.String)
  except (UnicodeDecodeError, UnicodeEncodeError) as error:
    raise UserError(
      'ids of text or bytes must be valid UTF-8',
      got=repr(error.object[:20]),
      where=where,
      hint='give other bytes as numbers, e.g. a 64-bit hash of them',
    ) from error
  names = ' and '.join(sorted(kind.__name__ for kind in kinds))
  hint = _RAGGED_HINT if kinds & {list, tuple, np.ndarray} else _HINT
  raise UserError(_RULE, got=names, where=where, hint=hint)
