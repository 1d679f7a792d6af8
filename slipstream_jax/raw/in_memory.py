"""Any raw data set, held in memory: for files that fit, without preparing.

Its vocabulary is made from the part to train on, as that of a packed one is.
"""

from collections.abc import Iterator
import functools

import numpy as np

from slipstream_jax.data import vocabulary
from slipstream_jax.data.base import ColumnBatches, Columns, Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.raw.base import Chunk, END, RawData, Splits
from slipstream_jax.row_space import global_rows
from slipstream_jax.table_set import features_of


def in_memory(
  raw: RawData,
  *,
  min_count: int = 1,
  hash_rows: int | None = None,
  shuffle_seed: int | None = None,
) -> Dataset:
  """A data set of all examples of `raw`, which takes 8 bytes per id.

  Args:
    raw: what to read; a validation part is left out.
    min_count: uses in the training part that earn an id a row of its own.
    hash_rows: R of every table, for hashed ids; None counts ids instead.
    shuffle_seed: seed of the order of training examples; None is file order.

  Raises:
    UserError: a bad argument, an unreadable file, a bad line, or no examples to
      train or to test on.
  """
  # Before anything is read, which may take minutes: it checks its arguments.
  fit = vocabulary.fit_by(
    len(raw.tables),
    min_count=min_count,
    hash_rows=hash_rows,
    missing=raw.counted is None,  # a format that counts has no missing ids
  )
  examples, lengths = _read(raw)
  split = raw.split(len(examples.labels), lengths)
  _check(raw, split)
  train, test = (
    Chunk(*(field[slice(*split[name])] for field in examples))
    for name in ('train', 'test')
  )
  words = fit(raw.counted() if raw.counted else _seen_ids(train))
  return Dataset(
    name=_name(raw, split),
    sizes=dict(zip(raw.tables, words.rows, strict=True)),
    features=features_of(raw.tables, raw.sequence_length),
    dense_features=raw.dense_features,
    train=functools.partial(
      ColumnBatches, _columns(train, words), shuffle_seed=shuffle_seed
    ),
    test=functools.partial(
      ColumnBatches, _columns(test, words), epochs=1, pad_remainder=True
    ),
    train_examples=len(train.labels),
    base_rate=float(train.labels.mean(dtype=np.float64)),
  )


def _ids(examples: Chunk) -> Iterator[vocabulary.Ids]:
  """Ids of each feature, i64[n] or i64[n * L]."""
  for table in range(examples.ids.shape[1]):
    yield np.ascontiguousarray(examples.ids[:, table]).ravel()


def _seen_ids(examples: Chunk) -> Iterator[vocabulary.Ids]:
  """The same without the ends of lists."""
  for ids in _ids(examples):
    yield ids if examples.ids.ndim == 2 else ids[ids != END]


def _columns(examples: Chunk, words: vocabulary.Vocabulary) -> Columns:
  rows, shape = words.map(_ids(examples)), examples.ids.shape
  if len(shape) == 3:
    # The vocabulary takes n L ids of each feature, the ends of lists among
    # them: whatever rows these got is replaced.
    lists = rows.reshape(shape[0], shape[2], shape[1]).transpose(0, 2, 1)
    rows = np.where(examples.ids == END, rows.dtype.type(-1), lists)
  return Columns(examples.dense, global_rows(rows, words.rows), examples.labels)


def _read(raw: RawData) -> tuple[Chunk, tuple[int, ...]]:
  """All examples as one chunk, and how many each part has."""
  chunks: list[Chunk] = []
  lengths = []
  for part in raw.parts:
    of_part = [chunk for chunk, _ in part.chunks()]
    lengths.append(sum(len(chunk.labels) for chunk in of_part))
    chunks += of_part
  if not sum(lengths):
    raise UserError(
      'a data set must have examples',
      got='none',
      where=raw.name,
      hint='give a file with more than a header',
    )
  fields = map(np.concatenate, zip(*chunks, strict=True))
  return Chunk(*fields), tuple(lengths)


def _check(raw: RawData, split: Splits) -> None:
  for name in 'train', 'test':
    first, end = split[name]
    if first >= end:
      raise UserError(
        'there must be examples to train on and examples to test on',
        got=f'none to {name} on',
        where=raw.name,
        hint='give more examples or another split',
      )


def _name(raw: RawData, split: Splits) -> str:
  ranges = [
    f'examples {first + 1:,}-{end:,} to {name}'
    for name, (first, end) in split.items()
  ]
  skipped = raw.skipped()
  lines = [f'{skipped:,} bad lines skipped'] if skipped else []
  return ', '.join([raw.name, *ranges, *lines])
