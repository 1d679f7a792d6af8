"""Any TensorFlow Datasets set of scalar features, by a map of its features.

Reads array_record files at random access, without TensorFlow and without the
code of the set's builder. Sets in another format, or whose builders need
TensorFlow, are prepared once elsewhere.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import itertools
import math
import operator
import os
import sys
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.columns.ids import text_ids
from slipstream_jax.errors import choose, UserError
from slipstream_jax.formats.base import Chunk, Part, RawData, train_and_test
from slipstream_jax.formats.delimited import first_line
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
  choose(TRANSFORMS, features.transform, f'{where}.transform')


def _find(name: str, data_dir: str | os.PathLike[str] | None) -> Any:
  """Returns TFDS's builder of the set prepared as array_record."""
  # Imported here, because it takes a third of a second.
  import tensorflow_datasets as tfds

  folder = None if data_dir is None else os.path.expanduser(data_dir)
  where = f'tfds_raw, name, in {folder or "the default data_dir"}'
  try:
    builder = tfds.builder(name, data_dir=folder)
  except (ValueError, AssertionError, OSError) as error:
    raise UserError(
      'a TFDS set must be prepared, or have a builder that is imported',
      got=f'{name!r}, {first_line(error)}',
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
  """Checks the types of mapped features. Returns the columns of dense ones."""

  def check(good: bool, key: str, rule: str) -> None:
    if not good:
      raise UserError(
        f'{rule}, of a known shape',
        got=f'{key!r}, {_feature(info, key)!r}',
        where=f'tfds_raw, features, of {info.full_name}',
        hint='map another feature',
      )

  for key in *features.tables, features.label[0]:
    shape: Any = getattr(_feature(info, key), 'shape', None)
    check(shape == (), key, 'a table or label must have one value')
  width = 0
  for key in features.dense:
    feature = _feature(info, key)
    shape = getattr(feature, 'shape', None)
    known = isinstance(shape, tuple) and None not in shape
    good = known and np.dtype(feature.np_dtype).kind in 'biuf'
    check(good, key, 'a dense feature must be of numbers')
    width += math.prod(shape)
  return width


def _check_apart(splits: Any, one: str, other: str) -> None:
  """Raises a `UserError` if two splits share examples."""
  parts = (splits[split].file_instructions for split in (one, other))
  for a, b in itertools.product(*parts):
    # In TFDS, -1 takes all that follow.
    ends = [x.skip + x.take if x.take >= 0 else sys.maxsize for x in (a, b)]
    if a.filename == b.filename and max(a.skip, b.skip) < min(ends):
      raise UserError(
        'examples to test on must not be trained on',
        got=f'splits {one!r} and {other!r}',
        where='tfds_raw, train and test',
        hint="let them share no examples, as 'train[:80%]' and 'train[80%:]'",
      )


def _part(builder: Any, split: str, features: FeatureMap) -> Part:
  """Returns a split as a part."""
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
      got=f'{split!r}, {first_line(error)}',
      where=info.full_name,
      hint="write one such as 'train[:80%]'",
    ) from error
  read = _plain_reader(info, keys) or _any_reader(info, keys)
  # Estimated from the split's share, because only whole splits have a size.
  total = sum(whole.num_examples for whole in info.splits.values())
  num_bytes = info.dataset_size * len(source) // max(total, 1)

  def chunk_of(values: _Values) -> Chunk:
    key, comparison, bound = features.label
    labels = _labels(values[key], comparison, bound, where(key))
    dense = np.zeros((len(labels), 1))
    if features.dense:
      numbers = [_numbers(values[key], where(key)) for key in features.dense]
      dense = TRANSFORMS[features.transform](np.concatenate(numbers, axis=1))
    ids = [_ids(values[key], where(key)) for key in features.tables]
    # Transposed, so that ids of one feature stay contiguous.
    return Chunk(labels, dense.astype(np.float32), np.stack(ids).T)

  def where(key: str) -> str:
    return f'{place}, feature {key}'

  def chunks() -> Iterator[tuple[Chunk, int]]:
    for first in range(0, len(source), CHUNK_EXAMPLES):
      end = min(first + CHUNK_EXAMPLES, len(source))
      # One request for all examples instead of one disk access for each.
      records = source.__getitems__([*range(first, end)])
      yield chunk_of(read(records)), num_bytes * end // len(source)

  return Part(place, num_bytes, chunks)


_Values = dict[str, list[Any]]
"""Values of each mapped feature."""


def _ids(values: list[Any], where: str) -> Int[np.ndarray, ' n']:
  if isinstance(values[0], bytes):
    return text_ids(values)
  numbers = np.asarray(values)
  with np.errstate(invalid='ignore'):  # a NaN; the check below names it
    whole = numbers.astype(np.int64)
  if numbers.dtype.kind == 'f':
    _check(whole == numbers, numbers, 'a table must hold whole', where)
  return np.where(whole < 0, whole - 2, whole)


def _numbers(values: list[Any], where: str) -> Float[np.ndarray, 'n _']:
  numbers = np.asarray(values, np.float64).reshape(len(values), -1)
  finite = np.isfinite(numbers).all(axis=1)
  _check(finite, numbers, 'a dense feature must hold finite', where)
  return numbers


def _labels(
  values: list[Any], comparison: str, bound: Any, where: str
) -> Float[np.ndarray, ' n']:
  if isinstance(values[0], bytes):
    numbers = np.array([v.decode('utf-8', 'replace') for v in values])
    bound = str(bound)
  else:
    numbers = np.asarray(values)
    known = ~np.isnan(numbers)
    _check(known, numbers, 'the values of a label must be', where)
  return COMPARISONS[comparison](numbers, bound).astype(np.float32)


def _check(good: Any, values: np.ndarray, rule: str, where: str) -> None:
  if not good.all():
    raise UserError(
      f'{rule} numbers',
      got=values[np.argmin(good)],
      where=where,
      hint='leave that feature out of the map',
    )


_LISTS = {
  'f': 'float_list.value',
  'O': 'bytes_list.value',
  **dict.fromkeys('biu', 'int64_list.value'),
}
"""Where a record holds values of each numpy kind."""
_Reader = Callable[[Sequence[bytes]], _Values]
"""Reads serialized records."""


def _any_reader(info: Any, keys: Sequence[str]) -> _Reader:
  """Returns a reader that decodes as TFDS does, for any features."""
  import tensorflow_datasets as tfds

  features = info.features
  top = {key.split('/')[0] for key in keys}
  used = tfds.features.FeaturesDict({key: features[key] for key in top})
  path_of = {key: key.split('/') for key in keys}

  def read(records: Sequence[bytes]) -> _Values:
    examples = [used.deserialize_example_np(record) for record in records]
    return {
      key: [functools.reduce(operator.getitem, path, e) for e in examples]
      for key, path in path_of.items()
    }

  return read


def _plain_reader(info: Any, keys: Sequence[str]) -> _Reader | None:
  """Returns a reader of the records' protos, several times as fast.

  None if a feature is not stored as its plain values.
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

  def read(records: Sequence[bytes]) -> _Values:
    decode = tf_example_pb2.Example.FromString
    examples = [decode(record).features.feature for record in records]
    return {
      key: [
        values(e[key])[0] if scalar else [*values(e[key])] for e in examples
      ]
      for key, values, scalar in fields
    }

  return read
