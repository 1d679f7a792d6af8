"""Prepared sets of TensorFlow Datasets: finds, checks and opens them.

Nothing here imports TensorFlow, directly or indirectly.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
import operator
import os
import sys
from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.errors import UserError


class Prepared(NamedTuple):
  """A prepared set."""

  builder: Any
  """TFDS's builder, or a read-only one if its code is not known here."""

  @property
  def full_name(self) -> str:
    """Name, config and version."""
    return self.builder.info.full_name

  def feature(self, key: str) -> Any:
    """Returns the feature of that name; 'a/b' is b inside of a.

    Raises:
      UserError: there is no such feature.
    """
    features = self.builder.info.features
    try:
      return functools.reduce(operator.getitem, key.split('/'), features)
    except (KeyError, TypeError) as error:
      raise UserError(
        f'a mapped feature must be one of {", ".join(features)}',
        got=repr(key),
        where=f'tfds_raw, features, of {self.full_name}',
        hint='name one of them',
      ) from error


class Source(NamedTuple):
  """A split, open for reading."""

  place: str
  """Name of the split in errors."""
  examples: int
  """Number of examples."""
  num_bytes: int
  """Size of its files, estimated from its share of the set's examples."""
  columns: Callable[[Sequence[int]], dict[str, list[Any]]]
  """Maps indices in the split to the values of each mapped feature."""


def find(name: str, data_dir: str | os.PathLike[str] | None) -> Prepared:
  """Finds the prepared set of that name. Its builder's code is not needed.

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
  return Prepared(builder)


def open_split(
  prepared: Prepared, split: str, features: Sequence[str]
) -> Source:
  """Opens a split, of whose examples only `features` will be used.

  Raises:
    UserError: there is no such split.
  """
  import tensorflow_datasets as tfds

  info = prepared.builder.info
  try:
    # Not decoded, because most features of a record may not be mapped.
    source = prepared.builder.as_data_source(
      split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
    )
  except (ValueError, KeyError) as error:
    raise UserError(
      f'a split must be made of {", ".join(info.splits)}',
      got=f'{split!r}, "{_first_line(error)}"',
      where=prepared.full_name,
      hint="write one such as 'train[:80%]'",
    ) from error
  read = _plain_reader(prepared, features) or _any_reader(prepared, features)

  def columns(places: Sequence[int]) -> dict[str, list[Any]]:
    # One request for all examples instead of one disk access for each.
    return read(source.__getitems__(list(places)))

  place = f'{prepared.full_name}, {split}'
  # Only whole splits know their size.
  total = sum(whole.num_examples for whole in info.splits.values())
  num_bytes = info.dataset_size * len(source) // max(total, 1)
  return Source(place, len(source), num_bytes, columns)


_LISTS = {
  'f': 'float_list.value',
  'O': 'bytes_list.value',
  **dict.fromkeys('biu', 'int64_list.value'),
}
"""Where a record holds values of each numpy kind."""
_Reader = Callable[[Sequence[bytes]], dict[str, list[Any]]]
"""Maps serialized records to the values of each mapped feature."""


def check_apart(prepared: Prepared, one: str, other: str) -> None:
  """Checks that two splits share no examples.

  Raises:
    UserError: they share some.
  """
  splits = prepared.builder.info.splits
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


def _any_reader(prepared: Prepared, keys: Sequence[str]) -> _Reader:
  """Returns a reader that decodes as TFDS does, for any features."""
  import tensorflow_datasets as tfds

  features = prepared.builder.info.features
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


def _plain_reader(prepared: Prepared, keys: Sequence[str]) -> _Reader | None:
  """Returns a reader of the records' protos, several times as fast.

  Returns None if a feature is not stored as its plain values.
  """
  from tensorflow_datasets.proto import tf_example_pb2

  fields = []
  for key in keys:
    feature = prepared.feature(key)
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


def check_scalars(prepared: Prepared, keys: Sequence[str]) -> None:
  """Checks that features have one value each: a number, boolean or text.

  Raises:
    UserError: a feature does not exist, or has another type.
  """
  for key in keys:
    shape = getattr(prepared.feature(key), 'shape', None)
    if shape != ():
      raise _unfit(prepared, key, 'a table or label must have one value')


def check_numbers(prepared: Prepared, keys: Sequence[str]) -> int:
  """Returns the number of columns that the dense features make.

  Raises:
    UserError: a feature does not exist, is text, or has no known shape.
  """
  width = 0
  for key in keys:
    feature = prepared.feature(key)
    shape: Any = getattr(feature, 'shape', None)
    known = isinstance(shape, tuple) and None not in shape
    if not known or np.dtype(feature.np_dtype).kind not in 'biuf':
      raise _unfit(prepared, key, 'a dense feature must be of numbers')
    width += int(np.prod(shape))
  return width


def _unfit(prepared: Prepared, key: str, rule: str) -> UserError:
  return UserError(
    f'{rule}, of a known shape',
    got=f'{key!r}, {prepared.feature(key)!r}',
    where=f'tfds_raw, features, of {prepared.full_name}',
    hint='map another feature',
  )


def _first_line(error: BaseException) -> str:
  return (str(error).splitlines() or [''])[0]
