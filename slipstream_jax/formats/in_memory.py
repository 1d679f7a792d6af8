"""Raw data without preparation: in memory to train on, or in batches to score.

In memory, the vocabulary is made from the training part, as in packed data.
"""

from collections.abc import Iterator, Sequence
import functools
from typing import Any

import numpy as np

from slipstream_jax.columns.ids import Ids
from slipstream_jax.data.numbered import ColumnBatches, Columns, to_batch
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import (
  check_chunk,
  check_labelled,
  Chunk,
  END,
  RawData,
  Splits,
)
from slipstream_jax.tables import row_dtype, tables_of, TableSet
from slipstream_jax.types import Batch, TableVocabulary
from slipstream_jax.vocabulary.counted import fit_by


def in_memory(
  raw: RawData,
  *,
  min_count: int = 1,
  hash_rows: int | None = None,
  shuffle_seed: int | None = None,
) -> Dataset:
  """Reads all examples of `raw` into memory, which takes 8 bytes per id.

  Args:
    raw: the raw data. A validation part is left out.
    min_count: uses in the training part that an id needs to get its own row.
    hash_rows: R of every table, for hashed ids. None counts ids instead.
    shuffle_seed: seed of the order of training examples. None: file order.

  Raises:
    UserError: a bad argument, an unreadable file, a bad line, or no examples to
      train or to test on.
  """
  # `fit_by` checks its arguments, before minutes are spent on reading.
  check_labelled(raw)
  fit = fit_by(
    len(raw.tables),
    min_count=min_count,
    hash_rows=hash_rows,
    missing=raw.counted is None,  # a format that counts has no missing ids
  )
  examples, lengths = _read(raw)
  split = raw.split(len(examples.labels), lengths)
  _check(raw, split)
  train, test = (_take(examples, split[name]) for name in ('train', 'test'))
  words = fit(raw.counted() if raw.counted else _seen_ids(raw, train))
  tables = _tables(raw, words)
  return Dataset(
    name=_name(raw, split),
    sizes={n: table.vocabulary_size for n, table in tables.tables.items()},
    features=raw.features,
    dense_features=raw.dense_features,
    train=functools.partial(
      ColumnBatches,
      _columns(raw, train, words, tables),
      shuffle_seed=shuffle_seed,
    ),
    test=functools.partial(
      ColumnBatches,
      _columns(raw, test, words, tables),
      epochs=1,
      pad_remainder=True,
    ),
    train_examples=len(train.labels),
    base_rate=float(train.labels.mean(dtype=np.float64)),
    vocabulary=lambda: words,
  )


def new_batches(
  raw: RawData, words: Sequence[TableVocabulary], batch_size: int
) -> Iterator[Batch]:
  """Yields all examples of `raw` in order as batches to score.

  Reads a few chunks at a time. The last batch is padded. Labels are None if the
  data have none.

  Args:
    raw: the raw data, labelled or not. Its split does not matter.
    words: vocabularies of the training data, one per table.
    batch_size: B.

  Raises:
    UserError: the data cannot be read.
  """
  tables = _tables(raw, words)
  for columns in _of_length(_read_columns(raw, words, tables), batch_size):
    batch = to_batch(columns, batch_size)
    yield batch if raw.labelled else batch._replace(labels=None)


def _read_columns(
  raw: RawData, words: Sequence[TableVocabulary], tables: TableSet
) -> Iterator[Columns]:
  for part in raw.parts:
    for chunk, _ in part.chunks():
      check_chunk(raw, chunk, part.name)
      yield _columns(raw, chunk._replace(ids=chunk.flat_ids), words, tables)


def _of_length(pieces: Iterator[Columns], length: int) -> Iterator[Columns]:
  """Cuts the examples into pieces of `length`; the last may be shorter."""
  held: list[Columns] = []
  count = 0
  for piece in pieces:
    held, count = [*held, piece], count + len(piece.labels)
    if count < length:
      continue
    whole = _joined(held)
    for first in range(0, count - length + 1, length):
      yield whole.take(slice(first, first + length))
    rest = count % length
    held, count = [whole.take(slice(count - rest, None))], rest
  if count:
    yield _joined(held)


def _joined(pieces: list[Columns]) -> Columns:
  columns: list[Any] = [
    None if column[0] is None else np.concatenate(column)
    for column in zip(*pieces, strict=True)
  ]
  return Columns(*columns)


def _tables(raw: RawData, words: Sequence[TableVocabulary]) -> TableSet:
  sizes = [vocabulary.size for vocabulary in words]
  return tables_of(dict(zip(raw.tables, sizes, strict=True)), raw.features)


def _take(examples: Chunk, bounds: tuple[int, int]) -> Chunk:
  some, (labels, dense, ids, weights) = slice(*bounds), examples
  weights = None if weights is None else weights[some]
  return Chunk(labels[some], dense[some], ids[some], weights)


def _seen_ids(raw: RawData, examples: Chunk) -> Iterator[Ids]:
  """Yields the ids of each table's features, without the padding of lists."""
  for table in raw.tables:
    spans = [raw.columns[feature] for feature in raw.of_table(table)]
    ids = np.concatenate([examples.ids[:, span].ravel() for span in spans])
    yield ids[ids != END]


def _columns(
  raw: RawData,
  examples: Chunk,
  words: Sequence[TableVocabulary],
  tables: TableSet,
) -> Columns:
  lookups = np.empty(examples.ids.shape, row_dtype(tables.num_rows))
  for name, feature in raw.features.items():
    span = raw.columns[name]
    ids = examples.ids[:, span]
    rows = words[raw.tables.index(feature.table)].rows(ids.ravel())
    lookups[:, span] = rows.reshape(ids.shape)
    lookups[:, span] += tables.first_rows[feature.table]
  lookups[examples.ids == END] = -1
  shape = (len(lookups), *tables.example_shape)
  weights = examples.lookup_weights
  return Columns(
    examples.dense,
    lookups.reshape(shape),
    examples.labels,
    None if weights is None else weights.reshape(shape),
  )


def _read(raw: RawData) -> tuple[Chunk, tuple[int, ...]]:
  """Reads all examples as one chunk, ids [n, K], and counts each part's."""
  chunks: list[Chunk] = []
  lengths = []
  for part in raw.parts:
    of_part = []
    for chunk, _ in part.chunks():
      check_chunk(raw, chunk, part.name)
      of_part.append(chunk._replace(ids=chunk.flat_ids))
    lengths.append(sum(len(chunk.labels) for chunk in of_part))
    chunks += of_part
  if not sum(lengths):
    raise UserError(
      'a data set must have examples',
      got='none',
      where=raw.name,
      hint='give a file with more than a header',
    )
  labels, dense, ids, weights = zip(*chunks, strict=True)
  whole = Chunk(
    np.concatenate(labels),
    np.concatenate(dense),
    np.concatenate(ids),
    None if weights[0] is None else np.concatenate(weights),
  )
  return whole, tuple(lengths)


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
