"""What is asked: examples with rows, made of raw ids and looked at."""

import os
from typing import NamedTuple

import numpy as np

from slip_serve import vocabulary
from slip_serve.errors import ServeError
from slip_serve.layout import Layout


class Query(NamedTuple):
  """Examples to score."""

  dense: np.ndarray
  """Dense features f32[n, I], as a model gets them."""
  rows: np.ndarray
  """Row of each lookup, i64[n, K], local to its table; -1 is padding."""
  weights: np.ndarray | None = None
  """Of the lookups, f32[n, K], where they have some; None: all 1."""


class Door:
  """Looks at queries, and makes them of raw ids.

  Attributes:
    firsts: row of its group that row 0 of each column's table is, i64[K].
  """

  def __init__(self, folder: str | os.PathLike[str], layout: Layout) -> None:
    """Opens the vocabularies.

    Raises:
      ServeError: one is damaged.
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
    self, dense: np.ndarray, ids: np.ndarray, weights: np.ndarray | None
  ) -> Query:
    """As `Scorer.query`."""
    ids = np.asarray(ids)
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
    return Query(np.asarray(dense), rows, weights)

  def checked(self, query: Query) -> Query:
    """The query as arrays of the types that programs take.

    Raises:
      ServeError: other shapes, rows that there are not, or dense features that
        are not finite.
    """
    dense, rows = _numbers('dense', query.dense), np.asarray(query.rows)
    _check_lookups(rows, self._layout.columns)
    _check_shape('dense', dense, (len(rows), self._layout.dense_features))
    weights = None
    if self._layout.weighted:
      given = query.weights
      weights = _numbers(
        'weights', np.ones(rows.shape) if given is None else given
      )
      _check_shape('weights', weights, rows.shape)
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


def _numbers(name: str, values: object) -> np.ndarray:
  """Finite numbers as f32."""
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
      hint='fill what is missing as the data trained on were filled',
    )
  return numbers


def _check_shape(
  name: str, values: np.ndarray, wanted: tuple[int, ...]
) -> None:
  if values.shape != wanted:
    raise ServeError(
      f'{name} must be {list(wanted)}',
      got=list(values.shape),
      where=f'Query.{name}',
      hint='give one line per example',
    )


def _check_lookups(lookups: np.ndarray, columns: int) -> None:
  good = lookups.ndim == 2 and lookups.shape[1] == columns
  if not good or lookups.dtype.kind not in 'iu':
    raise ServeError(
      f'lookups must be whole numbers [n, {columns}]',
      got=f'{lookups.dtype} {list(lookups.shape)}',
      where='Query.rows',
      hint='give one column for each lookup of an example',
    )
