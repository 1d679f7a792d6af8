"""A packed folder as a data set, and as inputs by number."""

import functools
import os
import pathlib
from typing import SupportsIndex

import numpy as np

from slipstream_jax.data.base import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.packed.batches import PackedBatches
from slipstream_jax.packed.columns import MANIFEST, open_packed, Packed
from slipstream_jax.packed.reader import check_label, form_of
from slipstream_jax.tables import global_rows
from slipstream_jax.types import Batch


def packed_dataset(
  folder: str | os.PathLike[str],
  *,
  shuffle_seed: int | None = None,
  test_split: str = 'test',
  shard: tuple[int, int] = (0, 1),
) -> Dataset:
  """The data set that `experiments.prepare` left in a folder.

  Args:
    folder: holds a manifest and its columns.
    shuffle_seed: seed of the order of training inputs; None is file order.
    test_split: which split to hold out: 'test', or 'validation' where the
      data set has one.
    shard: (index, count): which share of the inputs to read, of both splits;
      each has as many batches.

  Returns:
    A data set that reads what it needs, when it is needed; its `counts` are
    those of the whole split to train on.

  Raises:
    UserError: the folder is not finished, has no such split, or holds
      something else.
  """
  packed = open_packed(folder)
  form = form_of(packed)
  train, test = _split(packed, 'train'), _split(packed, test_split)
  name = packed.manifest.get('name', 'inputs')
  return Dataset(
    name=f'{name} packed in {pathlib.Path(folder).name}, inputs'
    f' {_said(train)} to train, {_said(test)} to test',
    tables=form.tables,
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
    train_inputs=(train[1] - train[0]) // shard[1],
    base_rate=packed.manifest.get('base_rate'),
    counts=functools.partial(_counts, packed),
  )


class PackedInputs:
  """Inputs one at a time: a random-access source, as grain takes them.

  Convenient rather than fast: each input touches every column's file.
  `PackedBatches` reads a thousand times as many a second.
  """

  def __init__(self, packed: Packed, first: int = 0, end: int | None = None):
    """Inputs [first, end) of `packed`; all, if no end is given.

    Raises:
      UserError: columns that are none of a packed data set.
    """
    form = form_of(packed)
    self._packed = packed
    self._inputs = range(form.inputs)[first:end]
    self._tables = form.tables

  def __repr__(self) -> str:  # grain compares it when it resumes
    return f'PackedInputs({str(self._packed.folder)!r}, {self._inputs})'

  def __len__(self) -> int:
    return len(self._inputs)

  def __getitem__(self, index: SupportsIndex) -> Batch:
    """An input as a batch without its first axis; stacked, they make one.

    That is dense f32[I], lookups [F] or [F, L], label f32[] and weight f32[].
    IndexError past the end, as of a list; UserError where a stored label or
    row cannot be.
    """
    at = self._inputs[index]
    columns, tables = self._packed.columns, self._tables
    ids = np.stack([columns[t.name][at] for t in tables]).astype(np.int64)
    sizes = np.reshape([t.rows for t in tables], (-1,) + (1,) * (ids.ndim - 1))
    local = np.where(ids == sizes, -1, ids)[np.newaxis]
    label = columns['labels'][at]
    check_label(int(label), f'{self._packed.folder}, input {at}')
    return Batch(
      np.array(columns['dense'][at]),
      global_rows(local, sizes.reshape(-1).tolist())[0],
      np.float32(label),
      np.float32(1),
    )


def _split(packed: Packed, name: str) -> tuple[int, int]:
  splits = packed.manifest.get('splits', {})
  try:
    first, end = (int(bound) for bound in splits[name])
  except (KeyError, TypeError, ValueError) as error:
    raise UserError(
      f'a packed data set to use so must have a split {name!r}',
      got=', '.join(splits) or 'no splits',
      where=str(packed.folder / MANIFEST),
      mend='name another split, or prepare the data set with one',
    ) from error
  return first, end


def _said(split: tuple[int, int]) -> str:
  return f'{split[0] + 1:,}-{split[1]:,}'


def _counts(packed: Packed) -> np.ndarray:
  """Uses of each global row in the split to train on: integer[N]."""
  tables = form_of(packed).tables
  counts = []
  for table in tables:
    column = packed.columns.get(f'frequency_{table.name}')
    if column is None or column.shape != (table.rows,):
      raise UserError(
        f'column frequency_{table.name} must be of shape [{table.rows}]',
        got='no column' if column is None else list(column.shape),
        where=str(packed.folder),
        mend='prepare the data set with experiments.prepare',
      )
    counts.append(column)
  return np.concatenate(counts)
