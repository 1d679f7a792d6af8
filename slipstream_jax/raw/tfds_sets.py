"""Prepared sets of TensorFlow Datasets, found, checked and opened.

Nothing here, or called from here, imports TensorFlow.
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
  """TFDS's builder of it, or what stands for one that is not known here."""

  @property
  def full_name(self) -> str:
    """Name, config and version."""
    return self.builder.info.full_name

  def feature(self, key: str) -> Any:
    """The feature of that name; 'a/b' is b inside of a.

    Raises:
      UserError: there is none.
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
  """Names it in errors."""
  examples: int
  """Examples."""
  num_bytes: int
  """Of its files, estimated from its share of the set's examples."""
  columns: Callable[[Sequence[int]], dict[str, list[Any]]]
  """Places in the split to the values of each mapped feature there."""


def find(name: str, data_dir: str | os.PathLike[str] | None) -> Prepared:
  """The prepared set of that name; its builder's code need not be known.

  Raises:
    UserError: there is none, or it was not prepared as array_record.
  """
  # Imported here, as it takes a third of a second that no other format needs.
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
  """A split of it, of whose examples only `features` will be used.

  Raises:
    UserError: there is no such split.
  """
  import tensorflow_datasets as tfds

  info = prepared.builder.info
  try:
    # Undecoded, as most features of a record may not be mapped.
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
    # One request for all: each by itself would be one to the disk.
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
"""Where a record has the values of a kind of numpy's."""
_Reader = Callable[[Sequence[bytes]], dict[str, list[Any]]]
"""Records as they are on the disk, to the values of each mapped feature."""


def check_apart(prepared: Prepared, one: str, other: str) -> None:
  """Looks whether two splits share examples, which would be tested on.

  Raises:
    UserError: they do.
  """
  splits = prepared.builder.info.splits
  ranges = [_ranges(splits[split].file_instructions) for split in (one, other)]
  for file, first, end in ranges[0]:
    for same, start, stop in ranges[1]:
      if file == same and max(first, start) < min(end, stop):
        raise UserError(
          'what is tested on must not be trained on',
          got=f'splits {one!r} and {other!r}',
          where='tfds_raw, train and test',
          hint="let them share no examples, as 'train[:80%]' and 'train[80%:]'",
        )


def _ranges(instructions: Iterable[Any]) -> list[tuple[str, int, int]]:
  """File, first example and the one after the last, of each."""
  # TFDS takes -1 for all that follow.
  return [
    (part.filename, part.skip, part.skip + part.take)
    if part.take >= 0
    else (part.filename, part.skip, sys.maxsize)
    for part in instructions
  ]


def _any_reader(prepared: Prepared, keys: Sequence[str]) -> _Reader:
  """Decodes as TFDS does, whatever the features are."""
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
  """Takes values from the records' protos, several times as fast.

  None where a feature is stored in another way than as its values.
  """
  from tensorflow_datasets.proto import tf_example_pb2

  fields = []
  for key in keys:
    feature = prepared.feature(key)
    stored = feature.get_serialized_info()
    kind, kept = (np.dtype(f.np_dtype).kind for f in (feature, stored))
    # Images are stored as bytes, for one: those only TFDS can decode.
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
  """Looks for features of one value each: numbers, truth values or text.

  Raises:
    UserError: one does not exist, or is none of these.
  """
  for key in keys:
    shape = getattr(prepared.feature(key), 'shape', None)
    if shape != ():
      raise _unfit(prepared, key, 'a table or label must have one value')


def check_numbers(prepared: Prepared, keys: Sequence[str]) -> int:
  """Columns that the features make, which must be numbers of known shapes.

  Raises:
    UserError: one does not exist, or is of text or of no known shape.
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
