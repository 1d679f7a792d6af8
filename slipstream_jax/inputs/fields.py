"""Columns by name: what each holds, and in which order a trainer takes them.

A trainer learns the names of dense features and labels from the first source
that has them, and finds the columns of later sources by name. Columns of an
array have no names. They are taken in the trainer's order.
"""

from collections.abc import Mapping, Sequence
import difflib
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.columns.numbers import (
  check_lengths,
  check_range,
  Fill,
  read_matrix,
)
from slipstream_jax.columns.read import (
  Lists,
  names_of,
  place_in,
  read,
  read_plain,
)
from slipstream_jax.data.source import ColumnNames, WidthByName, Widths
from slipstream_jax.errors import UserError
from slipstream_jax.tables import TableSet

Names = str | tuple[str, ...]

# An underscore: dense features and labels have unequal numbers of columns.
Order = Int[np.ndarray, ' _w']
"""For each column that the trainer has, the column of the source."""

_DENSE, _LABEL = 'dense', 'label'  # names of columns, if none are given


class NamedColumns(NamedTuple):
  """Columns from the user, sorted by what they hold."""

  dense: Any
  """None, [n, I], or columns by name."""
  dense_by_name: bool
  """Whether the model gets them by name, too."""
  features: Mapping[str, Any]
  """Ids by feature."""
  all_features: bool
  """Whether `features` holds no other columns."""
  labels: Any
  """None, [n], [n, T], or columns by name."""
  weights: Any
  """None, or [n], of examples."""
  lookup_weights: Mapping[str, Any]
  """Weights by feature, for features that have some."""
  fill: Fill = None
  """Replaces missing values of dense features. None: they are errors."""


class Fields(NamedTuple):
  """Names of a frame's columns, by what the columns hold."""

  features: tuple[str, ...] | None
  """None: those of the tables. There may be other columns."""
  dense: Names | None
  """None: the column 'dense', if there is one."""
  label: Names | None
  """None: the column 'label', if there is one."""
  weights: str | None
  lookup_weights: Mapping[str, str]
  """By feature."""
  fill: Mapping[str, float]
  """Replaces missing values of the columns that `dense` names."""

  def sort(self, frame: Any, where: str) -> NamedColumns:
    """Sorts the columns of a frame, or of a dict, by what they hold."""
    known = names_of(frame)
    if known is None:
      raise UserError(
        'a batch must be a dict of columns by name, or a frame',
        got=type(frame).__name__,
        where=where,
        hint="give dicts such as {'user': ids, 'dense': ..., 'label': ...}",
      )

    def one(names: Names | None, usual: str | None, what: str) -> Any:
      if names is None:
        return frame[usual] if usual in known else None
      several = (names,) if isinstance(names, str) else names
      check_known(several, known, f'{where}, {what}')
      if isinstance(names, str):
        return frame[names]
      return {name: frame[name] for name in names}

    dense = one(self.dense, _DENSE, 'dense')
    if isinstance(self.dense, str) and self.dense != _DENSE:
      # What the user named has this name, as in a list of one.
      dense = {self.dense: dense} if names_of(dense) is None else dense
    features = known if self.features is None else self.features
    check_known(features, known, f'{where}, features')
    check_known([*self.lookup_weights], known, f'{where}, lookup_weights')
    return NamedColumns(
      dense,
      False,
      {name: frame[name] for name in features},
      self.features is not None,
      one(self.label, _LABEL, 'label'),
      one(self.weights, None, 'weights'),
      {
        name: one(column, None, 'lookup_weights')
        for name, column in self.lookup_weights.items()
      },
      self.fill.get(_DENSE) if self.dense in (None, _DENSE) else self.fill,
    )


class Numbers(NamedTuple):
  """Dense features, labels and weights of examples, after all checks."""

  dense: Float[np.ndarray, 'n I'] | None
  labels: Float[np.ndarray, ' n'] | Float[np.ndarray, 'n T'] | None
  weights: Float[np.ndarray, ' n'] | None
  names: ColumnNames
  """Names of dense features, and of labels if there are labels."""

  def arranged(self, known: ColumnNames, where: str) -> 'Numbers':
    """Returns the same numbers with columns in the order of known names.

    Columns are copied when rows are taken, not here.
    """
    absent = self.dense is None
    orders = orders_of(known, self.names, where, absent=absent)
    columns: list[Any] = [self.dense, self.labels]
    dense: Any
    labels: Any
    dense, labels = (
      column if order is None else Reordered(column, order)
      for column, order in zip(columns, orders, strict=True)
    )
    return self._replace(dense=dense, labels=labels)


class Reordered:
  """Matrix whose columns get another order when rows are taken."""

  def __init__(self, matrix: np.ndarray, order: Order) -> None:
    """Takes the columns `order` of `matrix`, which are all of them."""
    self._matrix, self._order = matrix, order
    self.dtype, self.shape = matrix.dtype, matrix.shape
    self.size = matrix.size

  def __len__(self) -> int:
    return len(self._matrix)

  def __getitem__(self, rows: Any) -> np.ndarray:
    return self._matrix[rows].take(self._order, axis=1)

  def take(self, rows: Int[np.ndarray, ' m'], axis: int) -> np.ndarray:
    """Returns rows, as `numpy.ndarray.take` does with axis 0."""
    del axis
    return self[rows]


def read_numbers(
  given: NamedColumns, where: str, *, copied: bool = False
) -> tuple[Numbers, int | None]:
  """Reads dense features, labels and weights, and counts the examples.

  The count is None if there are no such columns. With `copied`, the result
  shares no memory that its owner can write.

  Raises:
    UserError: columns have unequal lengths, or a value is invalid.
  """
  dense, names = None, dict[str, int | None]()
  if given.dense is not None:
    what, at = 'dense features', f'{where}, dense'
    dense, names = read_matrix(
      given.dense, what, at, fill=given.fill, copied=copied
    )
  labels, heads = _labels(given.labels, f'{where}, label', copied)
  weights = _example_weights(given.weights, f'{where}, weights', copied)
  columns = {'dense': dense, 'labels': labels, 'weights': weights}
  lengths = {name: len(c) for name, c in columns.items() if c is not None}
  count = check_lengths(lengths, where) if lengths else None
  return Numbers(dense, labels, weights, ColumnNames(names, heads)), count


def read_features(
  given: NamedColumns, names: Sequence[str], count: int | None, where: str
) -> tuple[dict[str, Lists], int]:
  """Reads the ids of some features, and counts the examples.

  `count` is their number, if it is known.

  Raises:
    UserError: columns have unequal lengths, or hold no ids.
  """
  lists = {}
  for name in names:
    place = place_in(f'{where}, feature {name!r}')
    lists[name] = read(given.features[name], place)
    weights = given.lookup_weights.get(name)
    if weights is None:
      continue
    if lists[name].weights is not None:
      raise UserError(
        'weights of lookups must be given once',
        got='some with the ids, and lookup_weights',
        where=place(None),
        hint='leave one of them out',
      )
    place = place_in(f'{where}, feature {name!r}, lookup_weights')
    lists[name] = lists[name]._replace(weights=read(weights, place))
  lengths = {} if count is None else {'dense and labels': count}
  lengths |= {f'feature {n!r}': values.examples for n, values in lists.items()}
  return lists, check_lengths(lengths, where)


def check_names(given: NamedColumns, tables: TableSet, where: str) -> None:
  """Raises a `UserError` if there are no ids of a feature, or of another."""
  where = f'{where}, features'
  _check_present([*tables.features], [*given.features], 'ids of feature', where)
  if given.all_features:
    hint = 'give it a Feature or a Table, or leave it out'
    names = [*given.features]
    check_known(names, [*tables.features], where, 'feature', hint)


def _check_present(
  wanted: Sequence[str], given: Sequence[str], what: str, where: str
) -> None:
  for name in wanted:
    if name not in given:
      raise UserError(
        f'there must be {what} {name!r}{_nearest(name, given)}',
        got=', '.join(map(repr, given)) or 'none',
        where=where,
        hint=f'give {", ".join(map(repr, wanted))}, in any order',
      )


def check_known(
  names: Sequence[str],
  known: Sequence[str],
  where: str,
  what: str = 'name here',
  hint: str = 'correct the name',
) -> None:
  """Raises a `UserError` for the first name that is not known."""
  for name in names:
    if name not in known:
      nearest = _nearest(name, known)
      raise UserError(
        f'a {what} must be one of {", ".join(known)}{nearest}',
        got=repr(name),
        where=where,
        hint=hint,
      )


def _nearest(name: str, known: Sequence[str]) -> str:
  close = difflib.get_close_matches(name, known, 1)
  return f' (did you mean {close[0]!r}?)' if close else ''


def completed(
  known: ColumnNames, own: ColumnNames, widths: Widths | None = None
) -> ColumnNames:
  """Returns the known names, completed by a source's `own` names.

  Names that have other `widths` in total are not learned.
  """
  names = []
  for at, (old, new) in enumerate(zip(known, own, strict=True)):
    if new and widths is not None:
      width = sum(one or 1 for one in new.values())
      new = new if width == widths[at] else None
    names.append(new if old is None else old)
  return ColumnNames(*names)


def orders_of(
  known: ColumnNames, own: ColumnNames, where: str, *, absent: bool = False
) -> tuple[Order | None, Order | None]:
  """Returns the places of known columns in a source: dense features and labels.

  None stands for columns that are in order. `absent` says that the source has
  no dense features at all.

  Raises:
    UserError: a name is missing or not known, or has another width.
  """
  place, at = f'{where}, dense', f'{where}, label'
  return (
    _order_of(known.dense, own.dense, 'dense feature', place, absent),
    _order_of(known.labels, own.labels, 'label', at, False),
  )


def _order_of(
  known: WidthByName | None,
  own: WidthByName | None,
  what: str,
  where: str,
  absent: bool,
) -> Order | None:
  if known is None or own is None or (not own and not absent):
    return None
  if not known:
    if len(own) > 1:  # a single column cannot be confused
      raise UserError(
        f'a {what} by name needs a trainer that learned names, and this one'
        f' learned from an array, or from no {what}',
        got=', '.join(map(repr, own)),
        where=where,
        hint='give what it was given first, or make another trainer',
      )
    return None
  hint = 'leave it out, or make another trainer'
  _check_present([*known], [*own], f"the trainer's {what}", where)
  check_known([*own], [*known], where, what, hint)
  for name in own:
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


def _labels(
  labels: Any, where: str, copied: bool
) -> tuple[np.ndarray | None, WidthByName | None]:
  if labels is None:
    return None, None
  place, by_name = place_in(where), names_of(labels) is not None
  if not by_name:
    labels = read_plain(labels, place)
  matrix, names = read_matrix(labels, 'labels', where, copied=copied)
  # [n, 1] is one of several heads, as by name. [n] stays what it is.
  one = not by_name and len(labels.shape) == 1
  return matrix[:, 0] if one else matrix, names


def _example_weights(
  weights: Any, where: str, copied: bool
) -> np.ndarray | None:
  if weights is None:
    return None
  matrix, _ = read_matrix(weights, 'weights', where, copied=copied)
  if matrix.shape[1] != 1:
    raise UserError(
      'there must be one weight per example',
      got=matrix.shape[1],
      where=where,
      hint='give an array [n]',
    )
  hint = 'give 1 to an example that counts once'
  rule = 'weights of examples must be at least 0'
  check_range(matrix, matrix >= 0, rule, place_in(where), hint)
  return matrix[:, 0]
