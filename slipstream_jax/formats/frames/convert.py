"""Converts frames to examples, by the role of each column."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np
import polars as pl

from slipstream_jax.columns.ids import packed_ids
from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import Chunk, END
from slipstream_jax.formats.frames.pieces import Piece
from slipstream_jax.tables import Feature


class Roles(NamedTuple):
  """The roles of a frame's columns."""

  features: Mapping[str, Feature]
  """Features, each with ids in the column of its name."""
  lookup_weights: Mapping[str, str]
  """Column of weights of each weighted feature."""
  dense: Mapping[str, float]
  """Columns, and the value that replaces missing values."""
  labels: tuple[str, ...]
  one_label: bool
  """Whether labels are [n] instead of [n, T]."""
  separator: str
  """Separates the ids of a list in a text column."""
  too_long: str
  """What to do with lists longer than max_length, one of `TOO_LONG`."""

  @property
  def columns(self) -> list[str]:
    """All columns, each once."""
    names = *self.features, *self.lookup_weights.values(), *self.dense
    return list(dict.fromkeys((*names, *self.labels)))


TOO_LONG = ('error', 'first', 'last')
"""Raise an error, or keep the first or the last max_length ids."""


def to_chunk(roles: Roles, piece: Piece) -> Chunk:
  """Converts a piece to examples.

  Raises:
    UserError: an invalid value. Names column, value and row.
  """
  examples = piece.frame.height
  ids = [
    _feature_ids(roles, piece, name, feature)
    for name, feature in roles.features.items()
  ]
  weights = None
  if roles.lookup_weights:
    weights = np.concatenate(
      [
        _weights(roles, piece, name, found_ids)
        for name, found_ids in zip(roles.features, ids, strict=True)
      ],
      axis=1,
    )
  labels = np.empty((examples, len(roles.labels)), np.float32)
  for at, name in enumerate(roles.labels):
    labels[:, at] = _label(piece, name)
  dense = np.empty((examples, len(roles.dense)), np.float32)
  for at, (name, fill) in enumerate(roles.dense.items()):
    dense[:, at] = _dense(piece, name, fill)
  return Chunk(
    labels[:, 0] if roles.one_label else labels,
    dense,
    np.concatenate(ids, axis=1),
    weights,
  )


def _feature_ids(
  roles: Roles, piece: Piece, name: str, feature: Feature
) -> Int[np.ndarray, 'n L']:
  series = piece.frame[name]
  if feature.max_length == 1:
    return _ids(series, piece, name, None)[:, None]
  lists = _lists(series, roles.separator)
  lengths = _lengths(lists)
  values = _ids(_flat(lists, lengths), piece, name, lengths)
  return _padded(values, lengths, feature, roles, piece, name, END)


def _ids(
  series: pl.Series, piece: Piece, name: str, lengths: np.ndarray | None
) -> Int[np.ndarray, ' n']:
  row = 0
  if lengths is not None and len(series):
    row = int(np.flatnonzero(lengths)[0])
  where = f'{piece.where(row)}, column {name}'
  if lengths is None and isinstance(series.dtype, pl.List | pl.Array):
    raise UserError(
      f'a list of {name} must have at most 1 id',
      got=f'type {series.dtype}',
      where=where,
      hint='set the max_length of its Feature',
    )
  return packed_ids(series, where)


def _lists(series: pl.Series, separator: str) -> pl.Series:
  """Converts the column to lists: splits texts, and wraps single ids."""
  if isinstance(series.dtype, pl.Array):
    return series.arr.to_list()
  if isinstance(series.dtype, pl.List):
    return series
  if series.dtype == pl.String:
    texts = pl.when(pl.col('x') != '').then(pl.col('x').str.split(separator))
    return series.alias('x').to_frame().select(texts.alias('x'))['x']
  return (
    series.alias('x')
    .to_frame()
    .select(
      pl.when(pl.col('x').is_not_null()).then(pl.concat_list('x')).alias('x')
    )['x']
  )


def _lengths(lists: pl.Series) -> Int[np.ndarray, ' n']:
  """Returns the length of each list, i64; 0 if it is missing."""
  return lists.list.len().fill_null(0).cast(pl.Int64).to_numpy()


def _flat(lists: pl.Series, lengths: np.ndarray) -> pl.Series:
  """Returns the elements of all lists. Empty lists add no null."""
  return lists.filter(pl.Series(lengths > 0)).explode()


def _padded(
  values: np.ndarray,
  lengths: Int[np.ndarray, ' n'],
  feature: Feature,
  roles: Roles,
  piece: Piece,
  name: str,
  end: int | float,
) -> np.ndarray:
  """Pads the lists to values [n, L], with `end` after their last element."""
  most = feature.max_length
  long = np.flatnonzero(lengths > most)
  if len(long) and roles.too_long == 'error':
    raise UserError(
      f'lists of {name} must have at most {most} ids',
      got=int(lengths[long[0]]),
      where=f'{piece.where(int(long[0]))}, column {name}',
      hint="raise max_length, or set too_long to 'first' or 'last'",
    )
  starts = np.cumsum(lengths) - lengths
  kept = np.minimum(lengths, most)
  if roles.too_long == 'last':
    starts = starts + lengths - kept
  there = np.arange(most) < kept[:, None]
  places = (starts[:, None] + np.arange(most))[there]
  out = np.full((len(lengths), most), end, values.dtype)
  out[there] = values[places]
  return out


def _weights(
  roles: Roles, piece: Piece, name: str, ids: Int[np.ndarray, 'n L']
) -> Float[np.ndarray, 'n L']:
  """Returns the weights of a feature's lookups, f32; 1 if it has no column.

  Padding has weight 0 if it has one.
  """
  column = roles.lookup_weights.get(name)
  if column is None:
    return np.ones(ids.shape, np.float32)
  feature = roles.features[name]
  if feature.max_length == 1:
    lengths = of_ids = np.ones(len(ids), np.int64)
    flat = piece.frame[column]
  else:
    lists, of_lists = (
      _lists(piece.frame[at], roles.separator) for at in (column, name)
    )
    lengths, of_ids = _lengths(lists), _lengths(of_lists)
    flat = _flat(lists, lengths)
  differ = np.flatnonzero(lengths != of_ids)
  if len(differ):
    at = int(differ[0])
    raise UserError(
      f'each id of {name} must have a weight',
      got=f'{lengths[at]} for {of_ids[at]} ids',
      where=f'{piece.where(at)}, column {column}',
      hint='give lists of the same lengths',
    )
  rows = np.repeat(np.arange(len(lengths)), lengths)
  values = _numbers(flat, piece, column, rows)
  good = np.isfinite(values) & (abs(values) <= np.finfo(np.float32).max)
  _check(good, values, piece, column, rows, 'a weight must be a finite number')
  padded = _padded(values, lengths, feature, roles, piece, name, 0.0)
  return padded.astype(np.float32)


def _label(piece: Piece, name: str) -> Float[np.ndarray, ' n']:
  values = _numbers(piece.frame[name], piece, name)
  good = (values >= 0) & (values <= 1)  # False for NaN, a missing label
  _check(good, values, piece, name, None, 'a label must be in [0, 1]')
  return values.astype(np.float32)


def _dense(piece: Piece, name: str, fill: float) -> Float[np.ndarray, ' n']:
  values = _numbers(piece.frame[name], piece, name)
  values = np.where(np.isnan(values), fill, values)
  good = abs(values) <= np.finfo(np.float32).max
  rule = 'a dense feature must be missing, or a finite number of float32'
  _check(good, values, piece, name, None, rule)
  return values.astype(np.float32)


def _numbers(
  series: pl.Series, piece: Piece, name: str, rows: np.ndarray | None = None
) -> Float[np.ndarray, ' n']:
  """Converts the column to f64, NaN where it is null or empty."""
  dtype = series.dtype
  if dtype == pl.String:
    texts = series.replace({'true': '1', 'false': '0', '': None})
    numbers = texts.cast(pl.Float64, strict=False)
    bad = (numbers.is_null() & texts.is_not_null()).to_numpy()
    _check(~bad, series, piece, name, rows, 'the column must hold numbers')
  elif dtype.is_numeric() or dtype in (pl.Boolean, pl.Null):
    numbers = series.cast(pl.Float64)
  else:
    raise UserError(
      'the column must hold numbers',
      got=f'{_value(series)}, of type {dtype}',
      where=f'{piece.where(0)}, column {name}',
      hint='make a number of each value first',
    )
  return numbers.fill_null(np.nan).to_numpy()


def _check(
  good: np.ndarray,
  values: object,
  piece: Piece,
  name: str,
  rows: np.ndarray | None,
  rule: str,
) -> None:
  """Raises UserError for the first value that is not good."""
  if good.all():
    return
  at = int(np.argmin(good))
  got = values[at]  # type: ignore[index]
  missing = isinstance(got, float) and np.isnan(got)
  row = at if rows is None else int(rows[at])
  raise UserError(
    rule,
    got='nothing' if missing else repr(got) if isinstance(got, str) else got,
    where=f'{piece.where(row)}, column {name}',
    hint='fix the value, or leave the row out',
  )


def _value(series: pl.Series) -> str:
  there = series.drop_nulls().head(1).to_list()  # as Python values
  return repr(there[0]) if there else 'nothing'
