"""Identity of raw ids: integers or text, in any common container.

Integers are kept as 64 bits and text as UTF-8, so that an id is the same in a
list, numpy, polars, arrow or pandas. Lossy conversions are refused: fractions
and dates are errors.

Two numbers stand for a text on disk, and neither may change. Vocabularies hash
it by `hash_texts`. Packed folders, which do not tell 7 from '7', store
`packed_ids`.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from jaxtyping import Bool, Int, UInt8
import numpy as np
import polars as pl

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import hash_texts, text_id
from slipstream_jax.tables import as_array

MISSING = -1
"""Stands for a missing id in packed folders."""
Ids = Int[np.ndarray, ' _']
"""Ids of one table, i64. `MISSING` stands for a missing one."""

Kind = Literal['', 'int64', 'uint64', 'text']
"""Kind of the ids; '' if there was none yet."""
_RULE = 'ids must be integers or text'
_INTEGERS = (
  *(pl.Int8, pl.Int16, pl.Int32, pl.Int64),
  *(pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64),
)
# `MISSING` is -1 and -2 pads lists, so a negative v becomes v - 2.
_LEAST = np.iinfo(np.int64).min + 2
_HINT = 'give int64, uint64 or strings, and None where an id is missing'


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
  series = _series(ids, where)
  if series is not None:
    return _of_series(series, where)
  array = _array(ids, where)
  shape, flat = array.shape, array.reshape(-1)
  if not flat.size:
    return RawIds('', np.empty(0, np.int64), None, shape)
  match array.dtype.kind:
    case 'i' | 'u':
      return _of_numbers(flat, None, shape)
    case 'U':
      return _of_words(flat.tolist(), None, shape, where)
    case 'S':
      return _of_bytes(flat.tolist(), None, shape, where)
    case 'O' | 'T':
      return _of_objects(flat, shape, where)
  raise UserError(_RULE, got=array.dtype, where=where, hint=_HINT)


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
  series = _series(ids, where)
  if series is not None:
    return _packed_series(series, where)
  array = _array(ids, where)
  flat = array.reshape(-1)
  if array.dtype.kind == 'i' and (flat.min(initial=0) >= _LEAST):
    numbers = np.asarray(array, np.int64)
    return np.where(numbers < 0, numbers - 2, numbers)
  if array.dtype.kind in 'biu':
    native = flat.astype(flat.dtype.newbyteorder('='))
    return _packed_series(pl.Series(native), where).reshape(array.shape)
  if array.dtype.kind == 'f' and flat.size:
    _refuse_type(flat[0].item(), array.dtype, where)
  raw = raw_ids(flat, where)
  words = raw.words
  if words is None:
    words = pl.Series(raw.bits.view(raw.kind or 'int64'))
  packed = _packed_series(words, where)
  if raw.present is not None:
    whole = np.full(len(flat), MISSING, np.int64)
    whole[raw.present] = packed
    packed = whole
  return packed.reshape(array.shape)


def text_ids(texts: Sequence[bytes]) -> Int[np.ndarray, ' n']:
  """Hashes texts to i64, the same on every machine. b'' is `MISSING`."""
  # Texts repeat, so each is hashed once.
  ids = {text: text_id(text) if text else MISSING for text in set(texts)}
  return np.fromiter((ids[text] for text in texts), np.int64, len(texts))


def _packed_series(series: pl.Series, where: str) -> Int[np.ndarray, ' n']:
  dtype = series.dtype
  if dtype == pl.Null:
    return np.full(len(series), MISSING, np.int64)
  if dtype.is_integer():
    numbers = series.cast(pl.Int64, strict=False)  # null beyond i64
    return _packed_numbers(series, numbers, numbers >= _LEAST)
  if dtype in (pl.Object, pl.Binary):
    objects = np.empty(len(series), object)
    objects[:] = series.to_list()
    return packed_ids(objects, where)
  if dtype not in (pl.String, pl.Categorical, pl.Enum, pl.Boolean):
    there = series.drop_nulls().head(1).to_list()
    _refuse_type(there[0] if there else None, dtype, where)
  texts = series.cast(pl.String)
  numbers = texts.cast(pl.Int64, strict=False)
  # Only the canonical form: '007' and '+7' are not 7.
  plain = (numbers.cast(pl.String) == texts) & (numbers >= _LEAST)
  return _packed_numbers(texts, numbers, plain)


def _refuse_type(value: object, dtype: object, where: str) -> NoReturn:
  raise UserError(
    _RULE,
    got=f'{value!r}, of type {dtype}',
    where=where,
    hint='cast them to whole numbers or to text first',
  )


def _packed_numbers(
  series: pl.Series, numbers: pl.Series, are_ids: pl.Series
) -> Int[np.ndarray, ' n']:
  """Returns the numbers that are ids, and hashes of all other values."""
  ids = numbers.fill_null(0).to_numpy()
  ids = np.where(ids < 0, ids - 2, ids)
  known = are_ids.fill_null(False).to_numpy()
  if not known.all():
    others = series.filter(pl.Series(~known)).cast(pl.String).fill_null('')
    ids[~known] = text_ids([text.encode() for text in others.to_list()])
  return ids


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
      hint='give ragged lists as their values, end to end',
    ) from error


def _of_series(series: pl.Series, where: str) -> RawIds:
  shape, dtype = (len(series),), series.dtype
  present = None
  if series.null_count():
    present = series.is_not_null().to_numpy()
    series = series.drop_nulls()
  if not len(series):
    return RawIds('', np.empty(0, np.int64), present, shape)
  # Not `is_integer`, which includes 128-bit integers that numpy lacks.
  if dtype in _INTEGERS:
    return _of_numbers(series.to_numpy(), present, shape)
  if dtype in (pl.String, pl.Categorical, pl.Enum):
    return _of_text(series.cast(pl.String), present, shape)
  if dtype == pl.Binary:
    return _of_bytes(series.to_list(), present, shape, where)
  if dtype == pl.Object:
    return _of_objects(np.array(series.to_list(), object), shape, where)
  ragged = dtype in (pl.List, pl.Array)
  hint = 'give series.explode(), its values' if ragged else _HINT
  raise UserError(_RULE, got=dtype, where=where, hint=hint)


def _of_numbers(
  flat: np.ndarray, present: np.ndarray | None, shape: tuple[int, ...]
) -> RawIds:
  # Not `== np.uint64`, which is False for another byte order.
  large = flat.dtype.kind == 'u' and flat.dtype.itemsize == 8
  kind: Kind = 'uint64' if large else 'int64'
  # Writable, because kernels would be compiled again for read-only arrays.
  whole = np.require(flat, kind, ['C', 'W'])
  return RawIds(kind, whole.view(np.int64), present, shape)


def _of_text(
  words: pl.Series, present: np.ndarray | None, shape: tuple[int, ...]
) -> RawIds:
  text = text_of(words)
  hashes = np.empty(len(words), np.uint64)
  hash_texts(text.data, text.ends, hashes)
  return RawIds('text', hashes.view(np.int64), present, shape, words)


def _of_words(
  words: list[str],
  present: np.ndarray | None,
  shape: tuple[int, ...],
  where: str,
) -> RawIds:
  try:
    return _of_text(pl.Series(words, dtype=pl.String), present, shape)
  except UnicodeEncodeError as error:
    raise UserError(
      'ids must be text that UTF-8 can write',
      got=repr(error.object[:20]),
      where=where,
      hint='give other bytes as numbers, e.g. a 64-bit hash of them',
    ) from error


def _of_bytes(
  words: list[bytes],
  present: np.ndarray | None,
  shape: tuple[int, ...],
  where: str,
) -> RawIds:
  try:
    texts = [word.decode() for word in words]
  except UnicodeDecodeError as error:
    raise UserError(
      'ids of bytes must be UTF-8',
      got=repr(error.object[:20]),
      where=where,
      hint='give other bytes as numbers, e.g. a 64-bit hash of them',
    ) from error
  return _of_words(texts, present, shape, where)


def _of_objects(flat: np.ndarray, shape: tuple[int, ...], where: str) -> RawIds:
  values = flat.tolist()
  present = np.array([not _is_missing(value) for value in values])
  values = [v for v, there in zip(values, present, strict=True) if there]
  which = None if present.all() else present
  kinds = {type(value) for value in values}
  if all(issubclass(kind, str) for kind in kinds):
    if not values:
      return RawIds('', np.empty(0, np.int64), which, shape)
    return _of_words(values, which, shape, where)
  if all(issubclass(kind, bytes) for kind in kinds):
    return _of_bytes(values, which, shape, where)
  whole = (int, np.integer)
  if not all(issubclass(k, whole) and k is not bool for k in kinds):
    names = ' and '.join(sorted(kind.__name__ for kind in kinds))
    ragged = kinds & {list, tuple, np.ndarray}
    hint = 'give the values of ragged lists, end to end' if ragged else _HINT
    raise UserError(_RULE, got=names, where=where, hint=hint)
  return _of_numbers(_sixty_four(values, where), which, shape)


def _sixty_four(values: list[int], where: str) -> np.ndarray:
  """Converts Python's integers to i64, or to u64 if one needs it."""
  low, high = min(values), max(values)
  if low < -(1 << 63) or high >= 1 << 64 or (low < 0 and high >= 1 << 63):
    raise UserError(
      'ids must all be in [-2**63, 2**63), or all in [0, 2**64)',
      got=f'{low} to {high}',
      where=where,
      hint='hash them to 64 bits, or give them as strings',
    )
  return np.array(values, np.uint64 if high >= 1 << 63 else np.int64)


def _is_missing(value: object) -> bool:
  """Whether it is None, NaN, or pandas' missing value."""
  if isinstance(value, float):
    return value != value
  return value is None or type(value).__name__ in ('NAType', 'NaTType')
