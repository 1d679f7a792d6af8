"""Dense features and labels by name, in the order that a trainer learned.

A trainer learns the names from the first source that has columns of the kind.
Columns of later sources are put in its order by their names. A source that
gives an array has no names to contradict: its columns are taken in the
trainer's order.
"""

from collections.abc import Sequence
import difflib
from typing import Any

from jaxtyping import Int
import numpy as np

from slipstream_jax.data.source import Known, WidthByName, Widths
from slipstream_jax.errors import UserError

# An underscore: dense features and labels have unlike numbers of columns.
Order = Int[np.ndarray, ' _w']
"""For each column that the trainer has, the column of the source."""


class Reordered:
  """A matrix with its columns in another order, without a copy of all."""

  def __init__(self, matrix: np.ndarray, order: Order) -> None:
    """Columns `order` of `matrix`."""
    self._matrix, self._order = matrix, order
    self.dtype = matrix.dtype
    self.shape, self.size = matrix.shape, matrix.size

  def __len__(self) -> int:
    return len(self._matrix)

  def __getitem__(self, rows: Any) -> np.ndarray:
    return np.ascontiguousarray(self._matrix[rows][:, self._order])

  def take(self, rows: Int[np.ndarray, ' m'], axis: int) -> np.ndarray:
    """Takes rows, as `numpy.ndarray.take` does with axis 0."""
    del axis
    return self[rows]


def completed(known: Known, own: Known, widths: Widths | None = None) -> Known:
  """Returns the known names, completed by those of another source.

  Args:
    known: before it came.
    own: of the source.
    widths: the columns there are; names of other widths are not learned.
  """
  return Known(
    *(
      _completed(*pair, None if widths is None else widths[at])
      for at, pair in enumerate(zip(known, own, strict=True))
    )
  )


def _completed(
  known: WidthByName | None, own: WidthByName | None, width: int | None
) -> WidthByName | None:
  if known is not None or own is None:
    return known
  fits = width in (None, sum(one or 1 for one in own.values()))
  return own if fits or not own else None


def order_of(
  known: WidthByName | None,
  own: WidthByName | None,
  what: str,
  where: str,
  *,
  absent: bool = False,
) -> Order | None:
  """Returns the place of each known column in a source; None: all in order.

  Args:
    known: names that a trainer learned.
    own: names of the source.
    what: one of these columns in words, such as 'dense feature'.
    where: the argument.
    absent: whether the source has no such columns at all.

  Raises:
    UserError: a name that is missing or not known, or one of another width.
  """
  if known is None or own is None or (not own and not absent):
    return None
  if not known:
    if len(own) > 1:  # of one name no order can be mistaken
      raise _nameless(own, what, where)
    return None
  names = ', '.join(map(repr, own)) or 'none'
  for name in known:
    if name not in own:
      raise UserError(
        f'there must be a {what} {name!r}, which the trainer'
        f' learned{nearest(name, [*own])}',
        got=names,
        where=where,
        hint=f'give {", ".join(map(repr, known))}, in any order',
      )
  for name in own:
    if name not in known:
      raise UserError(
        f'each {what} by name must be one that the trainer learned,'
        f' {", ".join(map(repr, known))}{nearest(name, [*known])}',
        got=repr(name),
        where=where,
        hint='leave it out, or make another trainer',
      )
    if (known[name] or 1) != (own[name] or 1):
      raise UserError(
        f'{what} {name!r} must have {known[name] or 1} numbers per example, as'
        ' the trainer learned it',
        got=own[name] or 1,
        where=f'{where}, {name!r}',
        hint='give as many columns, or make another trainer',
      )
  if [*known] == [*own]:
    return None
  ends = np.cumsum([width or 1 for width in own.values()])
  spans = {
    name: np.arange(end - (own[name] or 1), end)
    for name, end in zip(own, ends.tolist(), strict=True)
  }
  return np.concatenate([spans[name] for name in known])


def _nameless(own: WidthByName, what: str, where: str) -> UserError:
  return UserError(
    f'a {what} by name needs a trainer that learned names, and this one'
    f' learned from an array, or from no {what}',
    got=', '.join(map(repr, own)),
    where=where,
    hint='give what it was given first, or make another trainer',
  )


def nearest(name: str, known: Sequence[str]) -> str:
  """A guess at what a wrong name was to be, in words."""
  close = difflib.get_close_matches(name, known, 1)
  return f' (did you mean {close[0]!r}?)' if close else ''
