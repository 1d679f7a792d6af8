"""Any TensorFlow Datasets set of scalar features, by a map of its features.

Reads array_record files, at random access and without TensorFlow. Sets in
another format, or whose builders need TensorFlow, are prepared once elsewhere.
The builder's code is not needed here.
"""

from collections.abc import Callable, Iterator
import functools
import operator
import os
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.columns.ids import text_ids
from slipstream_jax.errors import UserError
from slipstream_jax.formats import tfds_sets
from slipstream_jax.formats.base import (
  Chunk,
  Part,
  RawData,
  train_and_test,
)
from slipstream_jax.tables import features_of

CHUNK_EXAMPLES = 8192
"""Examples read at a time."""

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
  '>=': operator.ge,
  '>': operator.gt,
  '<=': operator.le,
  '<': operator.lt,
  '==': operator.eq,
  '!=': operator.ne,
}
"""Comparisons that a label rule may use."""

TRANSFORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
  'none': lambda values: values,
  'log1p': lambda values: np.log1p(np.maximum(values, 0)),
}
"""Transformations of the dense features, f64[n, I] to f64[n, I]."""


class FeatureMap(NamedTuple):
  """The role of each feature of a set. 'a/b' names feature b inside of a."""

  tables: tuple[str, ...]
  """Features with a table each: integers, booleans or text."""
  label: tuple[str, str, Any]
  """Feature, comparison, value: an example is a click if it holds, e.g.
  ('user_rating', '>=', 4.0)."""
  dense: tuple[str, ...] = ()
  """Numbers, or arrays of a known shape, one column per element. If empty,
  there is one column of zeros, because a bottom MLP needs a column."""
  transform: str = 'none'
  """Name of the transformation of all dense features."""


def tfds_raw(
  name: str,
  features: FeatureMap,
  *,
  train: str = 'train[:80%]',
  test: str = 'train[80%:]',
  data_dir: str | os.PathLike[str] | None = None,
) -> RawData:
  """Returns a TensorFlow Datasets set as a raw data set, a part per split.

  Integers are ids, but a negative v becomes v - 2, because `MISSING` and `END`
  are not ids. The id of a text is the first 63 bits of its BLAKE2b digest (8
  bytes, little-endian, UTF-8); an empty text is `MISSING`. Builders shuffle
  their set unless they say otherwise, so by default a random fifth is held out.

  Args:
    name: name of the prepared set, e.g. 'movielens/100k-ratings'.
    features: the features to read.
    train: split to train on, in TFDS's notation.
    test: split to test on.
    data_dir: folder of prepared sets. None: TFDS's own.

  Raises:
    UserError: there is no such set, split or feature, it is not prepared as
      array_record, or the map is invalid. Reading raises it for values that do
      not fit the map.
  """
  _check_map(features)
  label, *_ = features.label
  prepared = tfds_sets.find(name, data_dir)
  tfds_sets.check_scalars(prepared, (*features.tables, label))
  width = tfds_sets.check_numbers(prepared, features.dense)
  mapped = (*features.tables, label, *features.dense)
  parts = []
  for split in train, test:
    source = tfds_sets.open_split(prepared, split, mapped)
    read = functools.partial(_chunks, source, features)
    parts.append(Part(source.place, source.num_bytes, read))
  # After opening, which gives a better error for a split that does not exist.
  tfds_sets.check_apart(prepared, train, test)
  return RawData(
    name=f'TFDS {prepared.full_name}, {train} to train, {test} to test',
    features=features_of(features.tables),
    dense_features=max(width, 1),
    parts=tuple(parts),
    split=lambda examples, of_parts: train_and_test(examples, of_parts[1]),
    settings=features._asdict(),
    format='tfds',
  )


def _chunks(
  source: tfds_sets.Source, features: FeatureMap
) -> Iterator[tuple[Chunk, int]]:
  examples = source.examples
  for first in range(0, examples, CHUNK_EXAMPLES):
    end = min(first + CHUNK_EXAMPLES, examples)
    column = _Columns(source.columns(range(first, end)), source.place)
    ids = [column.ids(key) for key in features.tables]
    dense = [column.numbers(key) for key in features.dense]
    chunk = Chunk(
      column.labels(*features.label),
      _dense(dense, end - first, features.transform),
      np.stack(ids).T,  # ids of one feature stay contiguous
    )
    yield chunk, source.num_bytes * end // examples


def _dense(
  columns: list[np.ndarray], examples: int, transform: str
) -> Float[np.ndarray, 'n I']:
  if not columns:
    return np.zeros((examples, 1), np.float32)
  flat = np.concatenate(columns, axis=1)
  return TRANSFORMS[transform](flat).astype(np.float32)


class _Columns:
  """Values of mapped features; checks and converts them."""

  def __init__(self, values: dict[str, list[Any]], place: str):
    self._values, self._place = values, place

  def ids(self, key: str) -> Int[np.ndarray, ' n']:
    values = self._values[key]
    if isinstance(values[0], bytes):
      return text_ids(values)
    numbers = np.asarray(values)
    with np.errstate(invalid='ignore'):  # a NaN; the check below names it
      whole = numbers.astype(np.int64)
    if numbers.dtype.kind == 'f':
      self._check(key, whole == numbers, values, 'a table must hold whole')
    return np.where(whole < 0, whole - 2, whole)

  def numbers(self, key: str) -> Float[np.ndarray, 'n _']:
    values = np.asarray(self._values[key], np.float64)
    values = values.reshape(len(values), -1)
    finite = np.isfinite(values).all(axis=1)
    self._check(key, finite, values, 'a dense feature must hold finite')
    return values

  def labels(
    self, key: str, comparison: str, value: Any
  ) -> Float[np.ndarray, ' n']:
    values = self._values[key]
    if isinstance(values[0], bytes):
      texts = np.array([v.decode('utf-8', 'replace') for v in values])
      return COMPARISONS[comparison](texts, str(value)).astype(np.float32)
    numbers = np.asarray(values)
    known = numbers == numbers  # NaN alone is not equal to itself
    self._check(key, known, values, 'the values of a label must be')
    return COMPARISONS[comparison](numbers, value).astype(np.float32)

  def _check(self, key: str, good: Any, values: Any, rule: str) -> None:
    if good.all():
      return
    at = int(np.argmin(good))
    raise UserError(
      f'{rule} numbers',
      got=values[at],
      where=f'{self._place}, feature {key}',
      hint='leave that feature out of the map',
    )


def _check_map(features: FeatureMap) -> None:
  where = 'tfds_raw, features'
  if not features.tables or len({*features.tables}) < len(features.tables):
    raise UserError(
      'a feature map must name at least one table, and none twice',
      got=features.tables,
      where=f'{where}.tables',
      hint='name the features that have a table',
    )
  if len(features.label) != 3 or features.label[1] not in COMPARISONS:
    raise UserError(
      'a label must be (feature, comparison, value), the comparison one of'
      f' {" ".join(COMPARISONS)}',
      got=features.label,
      where=f'{where}.label',
      hint="write one such as ('user_rating', '>=', 4.0)",
    )
  if features.transform not in TRANSFORMS:
    raise UserError(
      f'transform must be one of {", ".join(TRANSFORMS)}',
      got=repr(features.transform),
      where=f'{where}.transform',
      hint='pick one of them',
    )
