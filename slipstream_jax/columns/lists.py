"""Lists of ids, and weights of their lookups, as a feature takes them.

This is the one check of lists, for batches in memory and for packed folders.
"""

from typing import Any, Literal, NamedTuple, no_type_check

from jaxtyping import Bool, Float, Int
import numpy as np
import polars as pl

from slipstream_jax.columns.numbers import as_floats
from slipstream_jax.columns.read import (
  as_objects,
  is_missing,
  Lists,
  Place,
  read,
)
from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.tables import Feature

TooLong = Literal['error', 'first', 'last']
"""What happens to a list longer than its feature's `max_length`: it is refused,
or its first or last ids are used."""


class ListRules(NamedTuple):
  """How lists are read."""

  separator: str = '|'
  """Separates the ids of a list in a text."""
  too_long: TooLong = 'error'


class Bags(NamedTuple):
  """Ids of a feature, whose lists and weights were checked."""

  values: Any
  """As in `Lists`, with at most `max_length` columns; or lists end to end,
  which may still be longer if they are to be cut."""
  splits: Int[np.ndarray, ' n_and_1'] | None = None
  weights: Float[np.ndarray, '...'] | None = None
  """f32, shaped as the values. 0 for padding."""

  @property
  def padding(self) -> Bool[np.ndarray, 'n W'] | None:
    """As in `Lists`."""
    return Lists(self.values, self.splits).padding


def fitted(
  lists: Lists, name: str, feature: Feature, rules: ListRules, place: Place
) -> Bags:
  """Checks the lists of a feature, and converts their weights.

  If the feature has a `max_length` above 1, texts are split at the separator,
  and a missing id or text is an empty list.

  Args:
    lists: ids of the feature.
    name: name of the feature.
    feature: its `max_length` and whether it is weighted.
    rules: how lists are read.
    place: where the column is, for errors.

  Raises:
    UserError: a list is too long, or weights are missing, superfluous, not
      finite, or not as many as the ids.
  """
  _check_weighted(lists, name, feature, place)
  length = feature.max_length
  ids = _as_lists(lists, length, rules.separator, place)
  weights = None
  if lists.weights is not None:
    own = _as_lists(lists.weights, length, rules.separator, place)
    weights = _weights(ids, own, place)
  if ids.splits is not None:
    _check_lengths(np.diff(ids.splits), name, length, rules.too_long, place)
    return Bags(ids.values, ids.splits, weights)
  if len(ids.shape) == 1 or ids.shape[1] <= length:
    return Bags(ids.values, None, weights)
  columns = _kept_columns(ids, name, length, rules.too_long, place)
  if weights is not None:
    weights = np.take_along_axis(weights, columns, 1)
  return Bags(np.take_along_axis(ids.values, columns, 1), None, weights)


def padded(
  values: np.ndarray, bags: Bags, length: int, last: bool, fill: int
) -> np.ndarray:
  """Returns values of bags as [n, length], with `fill` after each list's end.

  Args:
    values: [n], [n, W] or [m], one for each value of the bags.
    bags: the bags.
    length: columns of the result.
    last: whether the last values of long lists are used, not the first.
    fill: the padding.
  """
  if bags.splits is None:
    values = values[:, None] if values.ndim == 1 else values
    if values.shape[1] == length:
      return values
    out = np.full((len(values), length), fill, values.dtype)
    out[:, : values.shape[1]] = values
    return out
  count = len(bags.splits) - 1
  out = np.full((count, length), fill, values.dtype)
  pad_lists(values, bags.splits, np.arange(count), 0, length, last, out)
  return out


@kernel
@no_type_check
def pad_lists(
  values: np.ndarray,
  splits: np.ndarray,
  index: np.ndarray,
  column: int,
  length: int,
  last: bool,
  out: np.ndarray,
) -> None:
  """Writes lists into columns. Leaves what is behind their ends as it is.

  Args:
    values: [m], all lists end to end.
    splits: i64[n + 1], where each list begins and ends.
    index: i64[B], the lists to write.
    column: column of `out` in which they begin.
    length: columns for each list, at most which are written.
    last: whether the last values of longer lists are written, not the first.
    out: [B, K].
  """
  for i in range(len(index)):
    begin, end = splits[index[i]], splits[index[i] + 1]
    if end - begin > length:
      if last:
        begin = end - length
      else:
        end = begin + length
    for k in range(end - begin):
      out[i, column + k] = values[begin + k]


def _as_lists(lists: Lists, length: int, separator: str, place: Place) -> Lists:
  """Converts single values to lists, for features that take lists."""
  values = lists.values
  if length == 1 or lists.splits is not None or len(lists.shape) == 2:
    return lists
  texts = _texts(values)
  if texts is not None:
    cut = pl.when(pl.col('x') != '').then(pl.col('x').str.split(separator))
    return read(texts.alias('x').to_frame().select(cut)['x'], place)
  if isinstance(values, pl.Series):
    missing = values.is_null().to_numpy()
    present = read(values.drop_nulls(), place).values
  elif values.dtype == object:
    missing = np.array([is_missing(value) for value in values], bool)
    present = read(values[~missing], place).values
  else:
    return lists
  splits = np.zeros(len(values) + 1, np.int64)
  np.cumsum(~missing, out=splits[1:])
  return Lists(present, splits)


def _texts(values: Any) -> pl.Series | None:
  """Returns a column of texts as a series; None if it holds something else."""
  if isinstance(values, pl.Series):
    text = values.dtype in (pl.String, pl.Categorical, pl.Enum)
    return values.cast(pl.String) if text else None
  if values.dtype.kind not in 'OUT':
    return None
  flat = [None if is_missing(value) else value for value in values.tolist()]
  texts = [value for value in flat if value is not None]
  if not texts or not all(isinstance(value, str) for value in texts):
    return None
  return pl.Series(flat, dtype=pl.String)


def _check_weighted(
  lists: Lists, name: str, feature: Feature, place: Place
) -> None:
  if feature.weighted == (lists.weights is not None):
    return
  if feature.weighted:
    raise UserError(
      f'the lookups of feature {name!r} must carry weights',
      got='none',
      where=place(None),
      hint=f'give lookup_weights={{{name!r}: ...}}, or make the feature'
      ' with weighted=False',
    )
  raise UserError(
    f'the lookups of feature {name!r} must carry no weights',
    got='some',
    where=place(None),
    hint='make it with Feature(..., weighted=True), or leave them out',
  )


def _weights(
  ids: Lists, weights: Lists, place: Place
) -> Float[np.ndarray, '...']:
  """Converts weights to f32, and checks that each id has one."""
  good, where = weights.shape == ids.shape, place(None)
  got = f'{list(weights.shape)} for {list(ids.shape)}'
  if weights.splits is not None:
    good = False
    if ids.splits is not None and ids.examples == weights.examples:
      lengths, wanted = np.diff(weights.splits), np.diff(ids.splits)
      good = np.array_equal(lengths, wanted)
      at = int(np.argmax(lengths != wanted))
      where, got = place(at), f'{lengths[at]} for {wanted[at]} ids'
  if not good:
    raise UserError(
      'weights of lookups must be shaped as the ids are',
      got=got,
      where=f'{where}, lookup_weights',
      hint='give one weight per lookup',
    )
  values, padding = weights.values, ids.padding
  if padding is not None:  # it weighs nothing, whatever its weight is
    values = np.where(padding, 0, as_objects(values))
  return as_floats(
    values, 'weights of lookups', lambda index: ids.where(index, place)
  )


def _kept_columns(
  ids: Lists, name: str, length: int, too_long: TooLong, place: Place
) -> Int[np.ndarray, 'n L']:
  """Returns the columns of an array of lists that its feature uses."""
  count, width = ids.shape
  padding = ids.padding
  lengths = np.full(count, width)
  if padding is not None:
    # The last lookup says how long a list is: padding may come before it.
    ends = width - np.argmax(~padding[:, ::-1], axis=1)
    lengths = np.where(padding.all(axis=1), 0, ends)
  _check_lengths(lengths, name, length, too_long, place)
  first = np.maximum(lengths - length, 0) * (too_long == 'last')
  columns: np.ndarray = first[:, None] + np.arange(length)
  return columns


def _check_lengths(
  lengths: np.ndarray, name: str, most: int, too_long: TooLong, place: Place
) -> None:
  over = lengths > most
  if too_long == 'error' and over.any():
    example = int(np.argmax(over))
    raise UserError(
      f'feature {name!r} has at most {most} lookups per example',
      got=int(lengths[example]),
      where=place(example),
      hint="give it a larger max_length, or too_long='first' or 'last' to use"
      ' some of a long list',
    )
