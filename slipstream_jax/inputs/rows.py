"""Local ids to global rows: each is looked at, and named if it is none."""

import functools
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.inputs.columns import Lists, read
from slipstream_jax.inputs.growing import raw_column, RawColumn
from slipstream_jax.inputs.list_kernels import place_ids
from slipstream_jax.inputs.numbers import as_floats
from slipstream_jax.inputs.slots import Slot
from slipstream_jax.tables import row_dtype
from slipstream_jax.types import Array

TooLong = Literal['error', 'first', 'last']
"""What of a list longer than its feature's `max_length` is used."""


@runtime_checkable
class Words(Protocol):
  """What knows the local ids of raw ones: a vocabulary."""

  def rows(self, ids: Any) -> Array:
    """Local ids, shaped as the raw ones."""
    ...


def with_weights(lists: Lists, weights: Any, where: str) -> Lists:
  """The lists with a weight for each lookup.

  Args:
    lists: ids of a feature.
    weights: a column like that of the ids, or [m] where these are lists end
      to end; None: those they have, if any.
    where: whose they are.

  Raises:
    UserError: not one per id, given twice, or no finite numbers.
  """
  if weights is not None:
    if lists.weights is not None:
      raise UserError(
        'weights of lookups must be given once',
        got='some with the ids, and lookup_weights',
        where=where,
        hint='leave one of them out',
      )
    given = read(weights, f'{where}, lookup_weights')
    flat = given.splits is None
    if not flat and lists.splits is not None:
      flat = np.array_equal(np.asarray(given.splits), lists.splits)
    if not flat or given.values.shape != lists.values.shape:
      raise UserError(
        'weights of lookups must be shaped as the ids are',
        got=f'{list(given.values.shape)} for {list(lists.values.shape)}',
        where=f'{where}, lookup_weights',
        hint='give one weight per lookup',
      )
    lists = lists._replace(weights=given.values)
  if lists.weights is None:
    return lists
  if lists.weights.shape != lists.values.shape:
    raise UserError(
      'there must be one weight per lookup',
      got=f'{lists.weights.shape} for {lists.values.shape}',
      where=where,
      hint='give as many weights as ids',
    )
  # Padding weighs nothing, whatever stands there.
  floats = np.where(_is_padding(lists), 0, lists.weights)
  place = functools.partial(_example, lists)
  rule = 'weights of lookups must be finite'
  return lists._replace(weights=as_floats(floats, rule, where, place))


def to_rows(
  lists: Lists,
  slot: Slot,
  words: Words | None,
  too_long: TooLong,
  where: str,
) -> Lists:
  """Global rows for a feature's ids, and -1 for padding.

  Args:
    lists: its ids: local, or raw ones if there are `words`.
    slot: where they belong.
    words: a vocabulary of its raw ids.
    too_long: what of lists longer than `slot.length` is used; lists that lie
      end to end keep all, for who cuts them into columns.
    where: whose they are, for errors.

  Returns:
    Rows of `slot.dtype`; [n, W] with W at most `slot.length`, or end to end.

  Raises:
    UserError: an id outside of its table, none that is a whole number, a list
      too long, or weights where none belong or are missing.
  """
  _check_weights(lists, slot, where)
  if words is not None:
    lists = lists._replace(values=_known(lists, words, slot, where))
  values = lists.values
  _check_whole(lists, slot, where)
  # Unsigned ones past the end become negative, and are no more padding for it.
  ids = np.ascontiguousarray(values).astype(np.int64, copy=False).reshape(-1)
  padded = values.ndim == 2 and values.dtype.kind == 'i'
  rows = np.empty(len(ids), slot.dtype)
  flaw = place_ids(ids, slot.size, slot.first, slot.unknown, padded, rows)
  if flaw >= 0:
    _refuse(lists, slot, flaw, padded, where)
  rows = rows.reshape(values.shape)
  return _as_lists(lists, rows, slot, too_long, where)


def _as_lists(
  lists: Lists, rows: np.ndarray, slot: Slot, too_long: TooLong, where: str
) -> Lists:
  """The lists with rows in place of their values."""
  lists = lists._replace(values=rows)
  if rows.ndim == 1 and lists.splits is None:
    return Lists(rows[:, None], None, _column(lists.weights))
  return _fit(lists, slot, too_long, where)


def to_places(
  lists: Lists, slot: Slot, too_long: TooLong, where: str
) -> tuple[Lists, RawColumn]:
  """For raw ids whose rows are not known yet: what `to_rows` gives of others.

  Returns:
    In place of each row the place of its lookup in the column of raw ids; and
    that column.

  Raises:
    UserError: as `to_rows`, but that nothing is known of their table.
  """
  _check_weights(lists, slot, where)
  values, padding = lists.values, _is_padding(lists)
  raw = raw_column(values, where)
  places = np.arange(values.size).reshape(values.shape)
  # Of no more bytes than rows, where they can be.
  places = places.astype(np.result_type(slot.dtype, row_dtype(values.size)))
  places[padding] = -1
  return _as_lists(lists, places, slot, too_long, where), raw


def _column(weights: np.ndarray | None) -> np.ndarray | None:
  return None if weights is None else weights[:, None]


def _is_padding(lists: Lists) -> np.ndarray | bool:
  ids = lists.values
  return ids.ndim == 2 and ids.dtype.kind == 'i' and ids == -1


def _example(lists: Lists, index: int) -> str:
  """Example, and position if it has a list, of the value at a flat index."""
  example, position = lists.place(index)
  is_list = lists.splits is not None or lists.values.ndim == 2
  return f'example {example}' + (f', position {position}' * is_list)


def _check_weights(lists: Lists, slot: Slot, where: str) -> None:
  if slot.weighted == (lists.weights is not None):
    return
  if slot.weighted:
    raise UserError(
      f'the lookups of feature {slot.name!r} must carry weights',
      got='none',
      where=where,
      hint=f'give lookup_weights={{{slot.name!r}: ...}}, or make the feature'
      ' with weighted=False',
    )
  raise UserError(
    f'the lookups of feature {slot.name!r} must carry no weights',
    got='some',
    where=where,
    hint='make it with Feature(..., weighted=True), or leave them out',
  )


def _known(lists: Lists, words: Words, slot: Slot, where: str) -> np.ndarray:
  """Local ids of raw ones; padding stays."""
  raw, padding = lists.values, _is_padding(lists)
  if padding is False:
    local, wanted = np.asarray(words.rows(raw)), raw.shape
  else:
    local = np.asarray(words.rows(raw[~padding]))
    wanted = raw[~padding].shape
  if local.shape != wanted:
    raise UserError(
      'a vocabulary must give one row per id',
      got=f'shape {list(local.shape)} for {list(wanted)}',
      where=where,
      hint='return an array shaped as the ids',
    )
  if padding is False:
    return local
  spread = np.full(raw.shape, -1, np.result_type(local.dtype, np.int64))
  spread[~padding] = local
  strange = ~padding & (spread < 0)  # an id of -1 is no padding, if it is told
  if strange.any() and slot.unknown < 0:
    lists = lists._replace(values=spread)
    _refuse(lists, slot, int(np.argmax(strange)), False, where)
  spread[strange] = slot.size
  return spread


def _check_whole(lists: Lists, slot: Slot, where: str) -> None:
  """Ids must be of an integer type; if not, the worst of them is named."""
  values = lists.values
  if values.dtype.kind in 'iu':
    return
  flat, index, hint = values.reshape(-1), 0, 'convert them to int64'
  if values.dtype.kind == 'f':
    odd = ~(np.isfinite(flat) & (flat == np.floor(flat)))
    if odd.any():
      index = int(np.argmax(odd))
      hint = 'fill what is missing, and give whole numbers'
  elif values.dtype.kind == 'O':
    odd = np.array([not is_whole(x, 0, slot.size) for x in flat], bool)
    index = int(np.argmax(odd))
    if _is_missing(_at(flat, index)):
      hint = 'fill what is missing, and convert them to int64'
  elif values.dtype.kind == 'b':
    hint = 'convert them to int64, if True is to be the id 1'
  if values.dtype.kind in 'SUT' or isinstance(_at(flat, index), str | bytes):
    hint = (
      f'give vocabularies={{{slot.name!r}: Vocabulary.fit(...)}}, which knows'
      ' the ids of words'
    )
  raise UserError(
    f'ids of feature {slot.name!r} must be integers in [0, {slot.size})',
    got=f'{_at(flat, index)!r} of type {values.dtype}',
    where=f'{where}, {_example(lists, index)}' if len(flat) else where,
    hint=hint,
  )


def _at(flat: np.ndarray, index: int) -> Any:
  value = flat[index] if len(flat) else None
  return value.item() if isinstance(value, np.generic) else value


def _is_missing(value: object) -> bool:
  is_nan = isinstance(value, float) and value != value
  return value is None or is_nan or repr(value) in ('<NA>', 'NaT')


def _refuse(
  lists: Lists, slot: Slot, index: int, padded: bool, where: str
) -> None:
  padding = ', or -1 for padding' * padded
  raise UserError(
    f'ids of feature {slot.name!r} must be in [0, {slot.size}) of table'
    f' {slot.table!r}{padding}',
    got=int(lists.values.reshape(-1)[index]),
    where=f'{where}, {_example(lists, index)}',
    hint="enlarge the table, or make it with unknown='row', one row for all"
    ' such ids',
  )


def _fit(lists: Lists, slot: Slot, too_long: TooLong, where: str) -> Lists:
  """Lists that are no longer than they may be, or a sentence about one."""
  rows, splits, weights = lists
  if splits is None and rows.shape[1] <= slot.length:
    return lists
  if splits is None:
    # How far the last lookup reaches is how long the list is.
    ends = rows.shape[1] - np.argmax(rows[:, ::-1] != -1, axis=1)
    lengths = np.where((rows != -1).any(axis=1), ends, 0)
    real = np.arange(rows.shape[1]) < lengths[:, None]
    splits = np.concatenate([[0], np.cumsum(lengths)])
    weights = None if weights is None else weights[real]
    lists = Lists(rows[real], splits, weights)
  lengths = np.diff(splits)
  over = lengths > slot.length
  if too_long == 'error' and over.any():
    example = int(np.argmax(over))
    raise UserError(
      f'feature {slot.name!r} has at most {slot.length} lookups per example',
      got=int(lengths[example]),
      where=f'{where}, example {example}',
      hint="give it a larger max_length, or too_long='first' or 'last' to use"
      ' some of a long list',
    )
  return lists
