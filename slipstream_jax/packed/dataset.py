"""A packed folder as a data set to train on and to evaluate with."""

import functools
import pathlib
from typing import Any
import warnings

import numpy as np

from slipstream_jax.data.base import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.files import Path
from slipstream_jax.packed.batches import PackedBatches
from slipstream_jax.packed.columns import open_packed, Packed
from slipstream_jax.packed.reader import Form, form_of
from slipstream_jax.packed.vocabulary import packed_vocabulary


def packed_dataset(
  folder: Path,
  *,
  shuffle_seed: int | None = None,
  test_split: str = 'test',
  shard: tuple[int, int] = (0, 1),
) -> Dataset:
  """The data set that `prepare` left in a folder.

  Args:
    folder: holds a manifest and its columns.
    shuffle_seed: seed of the order of training examples; None is file order.
    test_split: which split to hold out: 'test', or 'validation' where the
      data set has one.
    shard: (index, count): which share of the examples to read, of both splits;
      each has as many batches.

  Returns:
    A data set that reads what it needs, when it is needed; its `counts` are
    those of the whole split to train on. Each block of a column is compared
    with its checksum when it is first read. A folder that was written before
    blocks had checksums is read without, and a warning says so.

  Raises:
    UserError: the folder is not finished, has no such split, or holds
      something else.
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
  name = packed.manifest.get('name', 'examples')
  return Dataset(
    name=f'{name} packed in {pathlib.Path(folder).name}, examples'
    f' {_from_one(train)} to train, {_from_one(test)} to test',
    sizes={name: t.vocabulary_size for name, t in form.tables.tables.items()},
    features=form.tables.features,
    dense_features=form.columns[1].shape[1],
    train=functools.partial(
      PackedBatches,
      packed,
      first=train[0],
      end=train[1],
      shuffle_seed=shuffle_seed,
      shard=shard,
    ),
    test=functools.partial(
      PackedBatches,
      packed,
      first=test[0],
      end=test[1],
      epochs=1,
      remainder='pad',
      shard=shard,
    ),
    train_examples=(train[1] - train[0]) // shard[1],
    base_rate=packed.manifest.get('base_rate'),
    counts=functools.partial(_counts, packed, form),
    vocabulary=functools.partial(packed_vocabulary, folder),
    names=_names(packed, form),
    heads=form.columns[0].shape[1] if len(form.columns[0].shape) > 1 else None,
  )


def _names(
  packed: Packed, form: Form
) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """The names of dense features and labels, if `pack` wrote the folder."""
  settings = packed.manifest.get('settings')
  settings = settings if isinstance(settings, dict) else {}
  labels, dense = form.columns[:2]

  def checked(names: Any, shape: tuple[int, ...]) -> tuple[str, ...]:
    if not isinstance(names, dict | list) or shape[1:] != (len(names),):
      return ()
    return tuple(names) if all(isinstance(n, str) for n in names) else ()

  dense_names = settings.get('dense')
  by_name = isinstance(dense_names, dict) and 'one_label' in settings
  return (
    checked(dense_names, dense.shape) if by_name else (),
    checked(settings.get('labels'), labels.shape) if by_name else (),
  )


def _split(packed: Packed, name: str) -> tuple[int, int]:
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


def _from_one(split: tuple[int, int]) -> str:
  return f'{split[0] + 1:,}-{split[1]:,}'


def _counts(packed: Packed, form: Form) -> np.ndarray:
  """Uses of each global row in the split to train on: integer[N]."""
  columns = [packed.whole(table.frequency) for table in form.of_tables]
  return np.concatenate(columns)
