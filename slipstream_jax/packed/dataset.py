"""A packed folder as a data set for training and evaluation."""

from collections.abc import Callable
import functools
import pathlib
from typing import Any
import warnings

import numpy as np

from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.files import Path
from slipstream_jax.packed.batches import PackedBatches
from slipstream_jax.packed.columns import (
  Column,
  DamagedError,
  open_packed,
  PackedData,
)
from slipstream_jax.packed.reader import Form, form_of
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.hashed import RankedHashVocabulary
from slipstream_jax.vocabulary.state import integers


def packed_dataset(
  folder: Path,
  *,
  shuffle_seed: int | None = None,
  test_split: str = 'test',
  shard: tuple[int, int] = (0, 1),
) -> Dataset:
  """Opens a data set that `prepare` has finished.

  Args:
    folder: folder of the data set.
    shuffle_seed: seed of the order of training examples. None: file order.
    test_split: split to evaluate on: 'test', or 'validation' if there is one.
    shard: (index, count), the share of both splits to read. All shards have as
      many batches.

  Returns:
    A data set that reads its files when they are needed, and then compares each
    block with its checksum. Its `counts` are those of the whole training split.
    Older folders have no checksums of blocks, which a warning says.

  Raises:
    UserError: the folder is not a finished data set, or has no such split.
  """
  packed = open_packed(folder)
  if packed.blocks is None:
    warnings.warn(
      f'{packed.folder} was packed before blocks had checksums, so its examples'
      ' are not compared with checksums as they are read. Verify the folder, or'
      ' pack the data again.',
      stacklevel=2,
    )
  form = form_of(packed)
  train, test = _split(packed, 'train'), _split(packed, test_split)
  known = [train]
  if test_split == 'test' and 'validation' in packed.manifest['splits']:
    known.append(_split(packed, 'validation'))
  name = packed.manifest.get('name', 'examples')
  settings = packed.manifest.get('settings')
  batches = functools.partial(PackedBatches, packed, shard=shard)

  def one_pass(part: tuple[int, int]) -> Callable[[int], PackedBatches]:
    span = {'first': part[0], 'end': part[1]}
    return functools.partial(batches, **span, epochs=1, pad_remainder=True)

  return Dataset(
    name=f'{name} packed in {pathlib.Path(folder).name}, examples'
    f' {train[0] + 1:,}-{train[1]:,} to train,'
    f' {test[0] + 1:,}-{test[1]:,} to test',
    sizes={name: t.vocabulary_size for name, t in form.tables.tables.items()},
    features=form.tables.features,
    dense_features=form.columns[1].shape[1],
    train=functools.partial(
      batches, first=train[0], end=train[1], shuffle_seed=shuffle_seed
    ),
    test=one_pass(test),
    known=tuple(one_pass(part) for part in known),
    train_examples=(train[1] - train[0]) // shard[1],
    base_rate=packed.manifest.get('base_rate'),
    counts=lambda: np.concatenate(
      [packed.whole(table.frequency) for table in form.of_tables]
    ),
    vocabulary=functools.partial(packed_vocabulary, folder),
    names=_names(packed, form),
    heads=form.columns[0].shape[1] if len(form.columns[0].shape) > 1 else None,
    format=str(packed.manifest.get('format', '')),
    settings=settings if isinstance(settings, dict) else {},
  )


def packed_vocabulary(
  folder: Path,
) -> tuple[Vocabulary | RankedHashVocabulary, ...]:
  """Returns the vocabulary of each table, to score or evaluate other examples.

  Its `rows` takes raw ids i64, as in the format's `RawData`, and returns local
  rows i32. Ids that training did not see get row 0.

  Raises:
    UserError: the folder is not finished, or a column of its vocabulary is
      missing or has changed.
  """
  packed = open_packed(folder)
  form = form_of(packed)
  hashed = packed.manifest.get('hash_rows') is not None
  words: list[Vocabulary | RankedHashVocabulary] = []
  for number, (name, own) in enumerate(
    zip(form.tables.tables, form.of_tables, strict=True)
  ):
    values = np.asarray(packed.whole(own.vocabulary))
    if own.shared is not None and form.vocabularies is not None:
      hash_rows = form.vocabularies[name].hash_rows
      size, shared = form.tables.tables[name].rows, packed.whole(own.shared)
      if not 0 <= hash_rows < size:
        rule = f'rows that ids of table {name} share must be below {size}'
        raise DamagedError(rule, hash_rows, packed.folder)
      known = integers(values)
      words.append(Vocabulary(known, hash_rows, size, np.asarray(shared)))
    elif hashed:
      words.append(RankedHashVocabulary(values, number))
    else:
      words.append(Vocabulary(integers(values)))
  return tuple(words)


def _names(
  packed: PackedData, form: Form
) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns the names of dense features and labels if `pack` wrote them."""
  settings = packed.manifest.get('settings')
  if not isinstance(settings, dict) or 'one_label' not in settings:
    return (), ()

  def checked(names: Any, column: Column) -> tuple[str, ...]:
    if not isinstance(names, dict | list) or column.shape[1:] != (len(names),):
      return ()
    return tuple(names) if all(isinstance(n, str) for n in names) else ()

  labels, dense = form.columns[:2]
  return (
    checked(settings.get('dense'), dense),
    checked(settings.get('labels'), labels),
  )


def _split(packed: PackedData, name: str) -> tuple[int, int]:
  splits = packed.manifest.get('splits', {})
  try:
    first, end = (int(bound) for bound in splits[name])
  except (KeyError, TypeError, ValueError, OverflowError) as error:
    names = [*splits] if isinstance(splits, dict) else []
    raise UserError(
      f'{packed.folder} must have a split {name!r}',
      got=', '.join(names) or 'no splits',
      where='packed_dataset, test_split',
      hint='name another split, or prepare the data set with one',
    ) from error
  return first, end
