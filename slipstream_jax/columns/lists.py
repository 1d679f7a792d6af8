"""Checks lists of ids and their weights, for `slip.batches` and `slip.pack`."""

from typing import get_args, Literal, NamedTuple, no_type_check

from jaxtyping import Float, Int, Shaped
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
from slipstream_jax.errors import choose, UserError
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

  def check(self, where: str) -> None:
    """Checks the arguments.

    Raises:
      UserError: one has no such value.
    """
    if not isinstance(self.separator, str) or not self.separator:
      raise UserError(
        'a separator must be a text of at least one character',
        got=repr(self.separator),
        where=f'{where}, separator',
        hint="give one such as '|'",
      )
    choices = dict.fromkeys(get_args(TooLong))
    choose(choices, self.too_long, f'{where}, too_long')


def fitted(
  lists: Lists, name: str, feature: Feature, rules: ListRules, place: Place
) -> Lists:
  """Checks the lists of a feature, and converts their weights.

  If the feature has a `max_length` above 1, texts are split at the separator,
  and a missing id or text is an empty list. Arrays are cut to `max_length`
  columns, but lists end to end may still be longer. Weights are f32, of the
  same form, and 0 for padding.

  Raises:
    UserError: a list is too long, or weights are missing, superfluous, not
      finite, or not as many as the ids.
  """
  given, length = lists.weights is not None, feature.max_length
  if given != feature.weighted:
    raise UserError(
      f'the lookups of feature {name!r} must carry {"no " * given}weights',
      got='some' if given else 'none',
      where=place(None),
      hint='make it with Feature(..., weighted=True), or leave them out'
      if given
      else f'give lookup_weights={{{name!r}: ...}}, or make the feature with'
      ' weighted=False',
    )
  ids = _as_lists(lists, length, rules.separator, place)
  weights = None
  if lists.weights is not None:
    own = _as_lists(lists.weights, length, rules.separator, place)
    weights = _weights(ids, own, place)
  if ids.splits is not None:
    _check_lengths(np.diff(ids.splits), name, length, rules.too_long, place)
  elif len(ids.shape) == 2 and ids.shape[1] > length:
    columns = _kept_columns(ids, name, length, rules.too_long, place)
    ids = Lists(np.take_along_axis(ids.values, columns, 1))
    if weights is not None:
      weights = np.take_along_axis(weights, columns, 1)
  floats = None if weights is None else Lists(weights, ids.splits)
  return ids._replace(weights=floats)


def padded(
  lists: Lists, length: int, last: bool, fill: int
) -> Shaped[np.ndarray, 'n L']:
  """Returns lists from `fitted` as an array, with `fill` after their ends.

  `last` uses the last values of long lists, not the first.
  """
  values = lists.values
  if lists.splits is None:
    values = values[:, None] if values.ndim == 1 else values
    if values.shape[1] == length:
      return values
    out = np.full((len(values), length), fill, values.dtype)
    out[:, : values.shape[1]] = values
    return out
  out = np.full((lists.examples, length), fill, values.dtype)
  index = np.arange(lists.examples)
  pad_lists(values, lists.splits, index, 0, length, last, out)
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
  """Writes lists into columns. Columns after their ends stay as they are.

  Args:
    values: [m], all lists end to end.
    splits: i64[n + 1], where each list begins and ends.
    index: i64[B], the lists to write.
    column: column of `out` in which they begin.
    length: most columns of a list.
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
  if isinstance(values, np.ndarray):
    if values.dtype.kind not in 'OUT':
      return lists
    flat = [None if is_missing(value) else value for value in values.tolist()]
    present = np.array([value is not None for value in flat], bool)
    own = values[present]
    if not len(own) or not all(isinstance(x, str) for x in own.tolist()):
      return Lists.end_to_end(read(own, place).values, present)
    values = pl.Series(flat, dtype=pl.String)
  if values.dtype in (pl.String, pl.Categorical, pl.Enum):
    text = pl.col('x')
    cut = pl.when(text != '').then(text.str.split(separator))
    texts = values.cast(pl.String).alias('x').to_frame()
    return read(texts.select(cut)['x'], place)
  present = values.is_not_null().to_numpy()
  return Lists.end_to_end(read(values.drop_nulls(), place).values, present)


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
  if padding is not None:  # its weights are ignored
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
