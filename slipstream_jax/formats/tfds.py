"""Any TensorFlow Datasets set of scalar features, by a map of its features.

Reads array_record files, at random access and without TensorFlow. Sets in
another format, or whose builders need TensorFlow, are prepared once elsewhere.
The builder's code is not needed here. Nothing here imports TensorFlow, directly
or indirectly.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
import operator
import os
import sys
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.columns.ids import text_ids
from slipstream_jax.errors import UserError
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
  builder = _find(name, data_dir)
  info = builder.info
  width = _check_types(info, features)
  parts = tuple(_part(builder, split, features) for split in (train, test))
  # After opening, which gives a better error for a split that does not exist.
  _check_apart(info.splits, train, test)
  return RawData(
    name=f'TFDS {info.full_name}, {train} to train, {test} to test',
    features=features_of(features.tables),
    dense_features=max(width, 1),
    parts=parts,
    split=lambda examples, of_parts: train_and_test(examples, of_parts[1]),
    settings=features._asdict(),
    format='tfds',
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


def _find(name: str, data_dir: str | os.PathLike[str] | None) -> Any:
  """Returns TFDS's builder of the prepared set of that name.

  Raises:
    UserError: there is none, or it was not prepared as array_record.
  """
  # Imported here, because it takes a third of a second.
  import tensorflow_datasets as tfds

  folder = None if data_dir is None else os.path.expanduser(data_dir)
  where = f'tfds_raw, name, in {folder or "the default data_dir"}'
  try:
    builder = tfds.builder(name, data_dir=folder)
  except (ValueError, AssertionError, OSError) as error:
    raise UserError(
      'a TFDS set must be prepared, or have a builder that is imported',
      got=f'{name!r}, "{_first_line(error)}"',
      where=where,
      hint='give the data_dir that holds it',
    ) from error
  info = builder.info
  formats = {f.value for f in info.available_file_formats() if info.splits}
  if 'array_record' not in formats:
    raise UserError(
      'a TFDS set must be prepared in the format array_record',
      got=f'{name!r} in {", ".join(sorted(formats)) or "none"}',
      where=where,
      hint=f'call tensorflow_datasets.builder({name!r},'
      " file_format='array_record').download_and_prepare() once",
    )
  return builder


def _feature(info: Any, key: str) -> Any:
  """Returns the feature of that name. 'a/b' is b inside of a.

  Raises:
    UserError: there is no such feature.
  """
  try:
    return functools.reduce(operator.getitem, key.split('/'), info.features)
  except (KeyError, TypeError) as error:
    raise UserError(
      f'a mapped feature must be one of {", ".join(info.features)}',
      got=repr(key),
      where=f'tfds_raw, features, of {info.full_name}',
      hint='name one of them',
    ) from error


def _check_types(info: Any, features: FeatureMap) -> int:
  """Checks the types of mapped features. Returns the columns of dense ones.

  Raises:
    UserError: a feature does not exist. A table or label has not one number,
      boolean or text. A dense feature has no known shape, or not numbers.
  """
  single = (*features.tables, features.label[0])
  width = 0
  for at, key in enumerate((*single, *features.dense)):
    feature = _feature(info, key)
    shape: Any = getattr(feature, 'shape', None)
    if at < len(single):
      good, rule = shape == (), 'a table or label must have one value'
    else:
      rule = 'a dense feature must be of numbers'
      good = isinstance(shape, tuple) and None not in shape
      good = good and np.dtype(feature.np_dtype).kind in 'biuf'
      width += int(np.prod(shape)) if good else 0
    if not good:
      raise UserError(
        f'{rule}, of a known shape',
        got=f'{key!r}, {feature!r}',
        where=f'tfds_raw, features, of {info.full_name}',
        hint='map another feature',
      )
  return width


def _check_apart(splits: Any, one: str, other: str) -> None:
  """Checks that two splits share no examples.

  Raises:
    UserError: they share some.
  """
  ranges = [_ranges(splits[split].file_instructions) for split in (one, other)]
  for file, first, end in ranges[0]:
    for same, start, stop in ranges[1]:
      if file == same and max(first, start) < min(end, stop):
        raise UserError(
          'examples to test on must not be trained on',
          got=f'splits {one!r} and {other!r}',
          where='tfds_raw, train and test',
          hint="let them share no examples, as 'train[:80%]' and 'train[80%:]'",
        )


def _ranges(instructions: Iterable[Any]) -> list[tuple[str, int, int]]:
  """Returns file, first example and end of each instruction."""
  # In TFDS, -1 takes all that follow.
  return [
    (part.filename, part.skip, part.skip + part.take)
    if part.take >= 0
    else (part.filename, part.skip, sys.maxsize)
    for part in instructions
  ]


def _part(builder: Any, split: str, features: FeatureMap) -> Part:
  """Returns a split as a part, whose name is that of the split in errors.

  Raises:
    UserError: there is no such split.
  """
  import tensorflow_datasets as tfds

  info = builder.info
  keys = (*features.tables, features.label[0], *features.dense)
  place = f'{info.full_name}, {split}'
  try:
    # Not decoded, because most features of a record may not be mapped.
    source = builder.as_data_source(
      split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
    )
  except (ValueError, KeyError) as error:
    raise UserError(
      f'a split must be made of {", ".join(info.splits)}',
      got=f'{split!r}, "{_first_line(error)}"',
      where=info.full_name,
      hint="write one such as 'train[:80%]'",
    ) from error
  read = _plain_reader(info, keys) or _any_reader(info, keys)
  # Estimated from the split's share, because only whole splits have a size.
  total = sum(whole.num_examples for whole in info.splits.values())
  num_bytes = info.dataset_size * len(source) // max(total, 1)

  def chunks() -> Iterator[tuple[Chunk, int]]:
    for first in range(0, len(source), CHUNK_EXAMPLES):
      end = min(first + CHUNK_EXAMPLES, len(source))
      # One request for all examples instead of one disk access for each.
      records = source.__getitems__([*range(first, end)])
      column = _Columns(read(records), place)
      ids = [column.ids(key) for key in features.tables]
      dense = [column.numbers(key) for key in features.dense]
      chunk = Chunk(
        column.labels(*features.label),
        _dense(dense, end - first, features.transform),
        np.stack(ids).T,  # ids of one feature stay contiguous
      )
      yield chunk, num_bytes * end // len(source)

  return Part(place, num_bytes, chunks)


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


_LISTS = {
  'f': 'float_list.value',
  'O': 'bytes_list.value',
  **dict.fromkeys('biu', 'int64_list.value'),
}
"""Where a record holds values of each numpy kind."""
_Reader = Callable[[Sequence[bytes]], dict[str, list[Any]]]
"""Maps serialized records to the values of each mapped feature."""


def _any_reader(info: Any, keys: Sequence[str]) -> _Reader:
  """Returns a reader that decodes as TFDS does, for any features."""
  import tensorflow_datasets as tfds

  features = info.features
  top = {key.split('/')[0] for key in keys}
  used = tfds.features.FeaturesDict({key: features[key] for key in top})
  path_of = {key: key.split('/') for key in keys}

  def read(records: Sequence[bytes]) -> dict[str, list[Any]]:
    examples = [used.deserialize_example_np(record) for record in records]
    return {
      key: [functools.reduce(operator.getitem, path, e) for e in examples]
      for key, path in path_of.items()
    }

  return read


def _plain_reader(info: Any, keys: Sequence[str]) -> _Reader | None:
  """Returns a reader of the records' protos, several times as fast.

  Returns None if a feature is not stored as its plain values.
  """
  from tensorflow_datasets.proto import tf_example_pb2

  fields = []
  for key in keys:
    feature = _feature(info, key)
    stored = feature.get_serialized_info()
    kind, kept = (np.dtype(f.np_dtype).kind for f in (feature, stored))
    # Some features, such as encoded images, can only be decoded by TFDS.
    if kind != kept or kind not in _LISTS or stored.shape != feature.shape:
      return None
    fields.append((key, operator.attrgetter(_LISTS[kind]), feature.shape == ()))

  def read(records: Sequence[bytes]) -> dict[str, list[Any]]:
    decode = tf_example_pb2.Example.FromString
    examples = [decode(record).features.feature for record in records]
    return {
      key: [
        values(e[key])[0] if scalar else [*values(e[key])] for e in examples
      ]
      for key, values, scalar in fields
    }

  return read


def _first_line(error: BaseException) -> str:
  return (str(error).splitlines() or [''])[0]
