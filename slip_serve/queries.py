"""Queries: examples as rows, made of raw ids and checked."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from slip_serve import vocabulary
from slip_serve.dense import inputs_of
from slip_serve.errors import ServeError
from slip_serve.layout import Feature, Layout
from slipstream_jax.files import Path

Values = np.ndarray | Mapping[str, Any]
"""An array [n, ...] with a column for each lookup or number, or by name."""


class Query(NamedTuple):
  """Examples to score."""

  dense: np.ndarray
  """Dense features f32[n, I], as the model gets them."""
  rows: np.ndarray
  """Row of each lookup in its table, i64[n, K]; -1 is padding."""
  weights: np.ndarray | None = None
  """Weights of the lookups, f32[n, K], if they have some. None: all are 1."""


class QueryMaker:
  """Makes queries of raw values, and checks queries.

  Attributes:
    firsts: for each column the row of its group that is its table's row 0,
      i64[K].
  """

  def __init__(self, folder: Path, layout: Layout) -> None:
    """Opens the vocabularies.

    Raises:
      ServeError: a vocabulary is damaged.
    """
    self._layout = layout
    self._words = vocabulary.open_words(folder, layout)
    columns = [
      (layout.tables[feature.table].rows, layout.tables[feature.table].first)
      for feature in layout.features
      for _ in range(feature.length)
    ]
    self._sizes, self.firsts = np.array(columns, np.int64).T

  def query(
    self, dense: Values | None, ids: Values, weights: Values | None
  ) -> Query:
    """Makes a query, as `Scorer.query`."""
    spread: Any = weights
    if isinstance(ids, Mapping):
      rows, spread = self._by_name(ids, weights)
    else:
      rows = self._by_column(np.asarray(ids))
    if dense is None:
      dense = np.empty((len(rows), 0), np.float32)
    if isinstance(dense, Mapping):
      dense = self._dense(dense, len(rows))
    return Query(np.asarray(dense), rows, spread)

  def _by_column(self, ids: np.ndarray) -> np.ndarray:
    _check_lookups(ids, self._layout.columns)
    rows = np.empty(ids.shape, np.int64)
    for feature in self._layout.features:
      span = slice(feature.first, feature.first + feature.length)
      part = ids[:, span].astype(np.int64).ravel()
      own = np.full(len(part), -1, np.int64)
      real = part != vocabulary.END
      words = self._words[feature.table]
      own[real] = vocabulary.rows_of(words, part[real])
      rows[:, span] = own.reshape(-1, feature.length)
    return rows

  def _by_name(
    self, ids: Mapping[str, Any], weights: Any
  ) -> tuple[np.ndarray, np.ndarray | None]:
    features = {feature.name: feature for feature in self._layout.features}
    _check_names('ids', ids, [*features])
    cells = {name: _cells(ids[name], features[name]) for name in features}
    counts = {len(real) for real, _ in cells.values()}
    if len(counts) > 1:
      raise _refused('ids must be of as many examples', sorted(counts), 'ids')
    shape = counts.pop(), self._layout.columns
    rows, spread = np.full(shape, -1, np.int64), np.ones(shape, np.float32)
    for name, feature in features.items():
      span = slice(feature.first, feature.first + feature.length)
      words, (real, values) = self._words[feature.table], cells[name]
      own = vocabulary.ids_of(words, values)
      rows[:, span][real] = vocabulary.rows_of(words, own)
      if weights is not None and name in weights:
        spread[:, span][real] = _weights(weights[name], feature, real)
    if weights is None:
      return rows, None
    _check_names('weights', weights, [*features], partial=True)
    return rows, spread

  def _dense(self, values: Mapping[str, Any], count: int) -> np.ndarray:
    """Makes dense features f32[n, I] of raw values by name."""
    widths = {one.name: one.columns for one in self._layout.dense}
    _check_names('dense', values, [*widths])
    blocks = {}
    for name, columns in widths.items():
      try:
        block = np.array(values[name], np.float64)  # None becomes NaN
        blocks[name] = block.reshape(count, columns)
      except (TypeError, ValueError) as error:
        rule = f'dense must be numbers [{count}, {columns}]'
        raise _refused(rule, str(error), name) from error
    return inputs_of(self._layout.dense, blocks, count)

  def checked(self, query: Query) -> Query:
    """Returns the query as arrays of the types that programs take.

    Raises:
      ServeError: other shapes, a row outside of its table, or dense features
        that are not finite.
    """
    rows, weights = np.asarray(query.rows), None
    _check_lookups(rows, self._layout.columns)
    shape = len(rows), self._layout.dense_features
    dense = _numbers('dense', query.dense, shape)
    if self._layout.weighted:
      given = np.ones(rows.shape) if query.weights is None else query.weights
      weights = _numbers('weights', given, rows.shape)
    bad = (rows < -1) | (rows >= self._sizes)
    if bad.any():
      at = tuple(int(i) for i in np.argwhere(bad)[0])
      raise ServeError(
        f'rows of column {at[1]} must be in [0, {self._sizes[at[1]]}) or -1',
        got=int(rows[at]),
        where=f'Query.rows{list(at)}',
        hint='map raw ids with `query`',
      )
    return Query(dense, rows.astype(np.int64), weights)


def _cells(values: Any, feature: Feature) -> tuple[np.ndarray, list[Any]]:
  """Returns which columns of a feature have a value, bool[n, L], and these."""
  if isinstance(values, np.ndarray) and values.ndim == 2:
    # As in training, -1 is padding in an array of integers.
    kept = (values != -1) | (values.dtype.kind != 'i')
    width, flat = values.shape[1], values[kept].tolist()
  else:
    several = list | tuple | np.ndarray
    if isinstance(values, str | bytes | dict) or not np.iterable(values):
      rule = f'ids of {feature.name!r} must be a list with one per example'
      raise _refused(rule, f'{values!r:.40}', 'ids')
    lists = [one if isinstance(one, several) else [one] for one in values]
    lengths = np.array([len(one) for one in lists], np.int64)
    width = int(lengths.max(initial=0))
    kept = np.arange(width) < lengths[:, None]
    flat = [value for one in lists for value in one]
  if width > feature.length:
    rule = f'feature {feature.name!r} has {feature.length} columns'
    raise _refused(f'{rule}, so at most as many ids per example', width, 'ids')
  real = np.zeros((len(kept), feature.length), bool)
  real[:, :width] = kept
  return real, flat


def _weights(values: Any, feature: Feature, real: np.ndarray) -> np.ndarray:
  """Returns the weights of the lookups that are real."""
  if isinstance(values, np.ndarray) and values.ndim == 2:
    if values.shape[0] == len(real) and values.shape[1] <= feature.length:
      short = feature.length - values.shape[1]
      return np.pad(values, [(0, 0), (0, short)])[real]
  else:
    own, flat = _cells(values, feature)
    if np.array_equal(own, real):
      return np.array(flat, np.float32)
  rule = f'weights of {feature.name!r} must be shaped as its ids'
  raise _refused(rule, 'another shape', 'weights')


def _check_names(
  what: str, given: Any, wanted: list[str], partial: bool = False
) -> None:
  names = [*given] if isinstance(given, Mapping) else None
  good = names is not None and {*names} <= {*wanted}
  if not good or not (partial or len(names or ()) == len(wanted)):
    raise _refused(
      f'{what} by name must be of {", ".join(wanted) or "no feature"}',
      type(given).__name__ if names is None else ', '.join(map(str, names)),
      what,
    )


def _refused(rule: str, got: object, where: str) -> ServeError:
  hint = 'give what Scorer.layout says that the model takes'
  return ServeError(rule, got=got, where=f'Scorer.query, {where}', hint=hint)


def _numbers(name: str, values: object, shape: tuple[int, ...]) -> np.ndarray:
  """Returns finite numbers of a shape as f32."""
  try:
    numbers = np.asarray(values, np.float32)
    bad = numbers[~np.isfinite(numbers)]
    got: object = bad[0] if len(bad) else None
  except (TypeError, ValueError) as error:
    numbers, got = np.empty(0, np.float32), str(error)
  if got is not None:
    raise ServeError(
      f'{name} must be finite numbers',
      got=got,
      where=f'Query.{name}',
      hint='fill what is missing as in the data trained on',
    )
  if numbers.shape != shape:
    raise ServeError(
      f'{name} must be {list(shape)}',
      got=list(numbers.shape),
      where=f'Query.{name}',
      hint='give one line per example',
    )
  return numbers


def _check_lookups(lookups: np.ndarray, columns: int) -> None:
  good = lookups.ndim == 2 and lookups.shape[1] == columns
  if not good or lookups.dtype.kind not in 'iu':
    raise ServeError(
      f'lookups must be whole numbers [n, {columns}]',
      got=f'{lookups.dtype} {list(lookups.shape)}',
      where='Query.rows',
      hint='give one column for each lookup of an example',
    )
