"""Columns as their owner has them, by name: read, and found to be in order."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

from slipstream_jax.data.source import Known, WidthByName
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.columns import Lists, names_of, plain, read
from slipstream_jax.inputs.known import nearest, Order, order_of
from slipstream_jax.inputs.numbers import (
  check_lengths,
  check_range,
  read_matrix,
)
from slipstream_jax.inputs.rows import with_weights
from slipstream_jax.tables import TableSet

Names = str | tuple[str, ...]

_ORDERED = 'dense', 'labels'  # the columns that may have names
_DENSE, _LABEL = 'dense', 'label'  # the usual names, which say nothing


class Given(NamedTuple):
  """Columns as their owner has them, sorted by what they are."""

  dense: Any
  """None, [n, I], or columns by name."""
  dense_by_name: bool
  """Whether the model is to get them by name, too."""
  features: Mapping[str, Any]
  """Ids by feature."""
  all_features: bool
  """Whether these are all features; else there may be columns of no feature."""
  labels: Any
  """None, [n], [n, T], or columns by name."""
  weights: Any
  """None, or [n], of examples."""
  lookup_weights: Mapping[str, Any]
  """By feature, of those that have some."""


class Fields(NamedTuple):
  """Which column of a frame is what."""

  features: tuple[str, ...] | None
  """None: those of the tables, whatever columns there are beside them."""
  dense: Names | None
  """None: the column 'dense', if there is one."""
  labels: Names | None
  """None: the column 'label', if there is one."""
  weights: str | None
  lookup_weights: Mapping[str, str]
  """By feature."""

  def sort(self, frame: Any, where: str) -> Given:
    """The columns of a frame, or of a dict, by what they are.

    Raises:
      UserError: no frame, or a name of no column of it.
    """
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
      if isinstance(names, str):
        check_known([names], known, f'{where}, {what}')
        return frame[names]
      check_known(names, known, f'{where}, {what}')
      return {name: frame[name] for name in names}

    dense = one(self.dense, _DENSE, 'dense')
    if isinstance(self.dense, str) and self.dense != _DENSE:
      # What the user named has this name, as in a list of one.
      dense = {self.dense: dense} if names_of(dense) is None else dense
    features = known if self.features is None else self.features
    check_known(features, known, f'{where}, features')
    check_known([*self.lookup_weights], known, f'{where}, lookup_weights')
    return Given(
      dense,
      False,
      {name: frame[name] for name in features},
      self.features is not None,
      one(self.labels, _LABEL, 'label'),
      one(self.weights, None, 'weights'),
      {
        name: one(column, None, 'lookup_weights')
        for name, column in self.lookup_weights.items()
      },
    )


class Numbers(NamedTuple):
  """What examples hold beside ids, looked at."""

  dense: Float[np.ndarray, 'n I'] | None
  labels: Float[np.ndarray, ' n'] | Float[np.ndarray, 'n T'] | None
  weights: Float[np.ndarray, ' n'] | None
  names: Known
  """Names of dense features and labels; None for labels that are not there."""
  dense_by_name: bool
  """Whether the model gets dense features by name, too."""

  def arranged(self, known: Known, where: str) -> 'Numbers':
    """The same with the columns in the order of the names that are known.

    Raises:
      UserError: names that are missing or not known.
    """
    own: Any = self
    for name, order in zip(
      _ORDERED, orders_of(known, self, where), strict=True
    ):
      if order is not None:
        own = own._replace(**{name: getattr(self, name)[:, order]})
    return own


def orders_of(
  known: Known, numbers: Numbers, where: str
) -> tuple[Order | None, Order | None]:
  """Returns the places of known columns among dense features, and labels.

  Raises:
    UserError: names that are missing or not known.
  """
  dense, labels = numbers.names
  absent = numbers.dense is None
  what, at = 'dense feature', f'{where}, dense'
  return (
    order_of(known.dense, dense, what, at, absent=absent),
    order_of(known.labels, labels, 'label', f'{where}, label'),
  )


def read_numbers(
  given: Given, where: str, *, copied: bool = False
) -> tuple[Numbers, int | None]:
  """What columns hold beside ids, and how many examples there are, if any do.

  Args:
    given: the columns.
    where: the source.
    copied: whether nobody else may change the arrays of the result.

  Raises:
    UserError: columns of unlike lengths, or values that are none.
  """
  lengths = {}
  dense, names = None, dict[str, int | None]()
  if given.dense is not None:
    dense, names = read_matrix(
      given.dense, 'dense features', f'{where}, dense', copied=copied
    )
    lengths['dense'] = len(dense)
  labels, heads = _labels(given.labels, f'{where}, label', copied)
  if labels is not None:
    lengths['labels'] = len(labels)
  weights = _example_weights(given.weights, f'{where}, weights', copied)
  if weights is not None:
    lengths['weights'] = len(weights)
  count = check_lengths(lengths, where) if lengths else None
  by_name = given.dense_by_name and bool(names)
  return Numbers(dense, labels, weights, Known(names, heads), by_name), count


def read_features(
  given: Given, names: Sequence[str], count: int | None, where: str
) -> tuple[dict[str, Lists], int]:
  """Ids of the features of these names, as arrays, and the number of examples.

  Args:
    given: has a column of each name.
    names: of features, at least one.
    count: examples there are, where it is known.
    where: the source.

  Raises:
    UserError: columns of unlike lengths, or that hold no ids.
  """
  lists = {}
  for name in names:
    place = f'{where}, feature {name!r}'
    values = read(given.features[name], place)
    lists[name] = with_weights(values, given.lookup_weights.get(name), place)
  lengths = {} if count is None else {'dense and labels': count}
  lengths |= {f'feature {n!r}': values.examples for n, values in lists.items()}
  return lists, check_lengths(lengths, where)


def check_names(given: Given, tables: TableSet, where: str) -> None:
  """Looks whether there are ids of each feature, and of no others.

  Raises:
    UserError: one that is missing, or that the tables do not know.
  """
  wanted, got = list(tables.features), [*given.features]
  for name in wanted:
    if name not in got:
      raise UserError(
        f'there must be ids of feature {name!r}{nearest(name, got)}',
        got=', '.join(map(repr, got)) or 'no features',
        where=f'{where}, features',
        hint='give them by the names of the features',
      )
  for name in got if given.all_features else ():
    if name not in wanted:
      raise UserError(
        f'each feature given must be one of {", ".join(wanted)}'
        f'{nearest(name, wanted)}',
        got=repr(name),
        where=f'{where}, features',
        hint='give it a Feature or a Table, or leave it out',
      )


def check_known(names: Sequence[str], known: Sequence[str], where: str) -> None:
  """Looks whether all names are known.

  Raises:
    UserError: the first that is not, and the nearest that is.
  """
  for name in names:
    if name not in known:
      raise UserError(
        f'a name here must be one of {", ".join(known)}{nearest(name, known)}',
        got=repr(name),
        where=where,
        hint='correct the name',
      )


def _labels(
  labels: Any, where: str, copied: bool
) -> tuple[np.ndarray | None, WidthByName | None]:
  if labels is None:
    return None, None
  if names_of(labels) is None:
    labels = plain(labels, where)
  matrix, names = read_matrix(labels, 'labels', where, copied=copied)
  good = (matrix >= 0) & (matrix <= 1)
  hint = 'give 1 for a click and 0 for none, or the chance of one'
  check_range(matrix, good, 'labels must be in [0, 1]', where, hint)
  # [n, 1] is one of several heads, as by name; [n] stays what it is.
  one = isinstance(labels, np.ndarray) and labels.ndim == 1
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
  check_range(matrix, matrix >= 0, rule, where, hint)
  return matrix[:, 0]
