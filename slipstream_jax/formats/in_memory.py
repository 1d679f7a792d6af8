"""Raw data without preparation: in memory to train on, or in batches to score.

Examples are `Columns`. Their lookups are raw ids [n, K] until they have rows.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any

import numpy as np

from slipstream_jax.columns.ids import Ids
from slipstream_jax.data.numbered import ColumnBatches, Columns, to_batch
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import choose
from slipstream_jax.formats.base import (
  check_chunk,
  check_labelled,
  checked_splits,
  END,
  Part,
  RawData,
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
  test_split: str = 'test',
) -> Dataset:
  """Reads all examples of `raw` into memory, which takes 8 bytes per id.

  Args:
    raw: the raw data.
    min_count: uses in the training part that an id needs to get its own row.
    hash_rows: R of every table, for hashed ids. None counts ids instead.
    shuffle_seed: seed of the order of training examples. None: file order.
    test_split: the part to evaluate on: 'test', or 'validation' if there is
      one.

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
  pieces = [[*_read(raw, part)] for part in raw.parts]
  lengths = tuple(sum(len(p.labels) for p in part) for part in pieces)
  split = checked_splits(raw, lengths)
  examples = _joined([piece for part in pieces for piece in part])
  del pieces  # frees the memory
  choose(split, test_split, 'in_memory, test_split')
  train, test = (examples.take(slice(*split[n])) for n in ('train', test_split))
  words = fit(raw.counted() if raw.counted else _seen_ids(raw, train))
  tables = _tables(raw, words)

  def one_pass(columns: Columns) -> Callable[[int], ColumnBatches]:
    return functools.partial(
      ColumnBatches, columns, epochs=1, pad_remainder=True
    )

  with_rows = functools.partial(_with_rows, raw, words=words, tables=tables)
  trained = with_rows(train)
  known = [trained]
  if test_split == 'test' and 'validation' in split:
    known.append(with_rows(examples.take(slice(*split['validation']))))
  name = [raw.name]
  for of_split, (first, end) in split.items():
    name.append(f'examples {first + 1:,}-{end:,} to {of_split}')
  if raw.bad is not None and raw.bad.count:
    name.append(f'{raw.bad.count:,} bad lines skipped')
  return Dataset(
    name=', '.join(name),
    sizes={n: table.vocabulary_size for n, table in tables.tables.items()},
    features=raw.features,
    dense_features=raw.dense_features,
    train=functools.partial(ColumnBatches, trained, shuffle_seed=shuffle_seed),
    test=one_pass(with_rows(test)),
    known=tuple(map(one_pass, known)),
    train_examples=len(train.labels),
    base_rate=float(train.labels.mean(dtype=np.float64)),
    vocabulary=lambda: words,
    format=raw.format,
    settings=raw.settings,
  )


def new_batches(
  raw: RawData, words: Sequence[TableVocabulary], batch_size: int
) -> Iterator[Batch]:
  """Yields all examples of `raw` in order as batches of B to score.

  Reads a few chunks at a time. The last batch is padded. Labels are None if the
  data have none. `words` are the vocabularies of the training data, one per
  table.

  Raises:
    UserError: the data cannot be read.
  """
  tables = _tables(raw, words)
  pieces = (
    _with_rows(raw, examples, words, tables)
    for part in raw.parts
    for examples in _read(raw, part)
  )
  for columns in _of_length(pieces, batch_size):
    batch = to_batch(columns, batch_size)
    yield batch if raw.labelled else batch._replace(labels=None)


def _read(raw: RawData, part: Part) -> Iterator[Columns]:
  for chunk, _ in part.chunks():
    check_chunk(raw, chunk, part.name)
    labels, dense, ids, weights = chunk
    yield Columns(dense, ids, labels, weights)


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


def _seen_ids(raw: RawData, examples: Columns) -> Iterator[Ids]:
  """Yields the ids of each table's features, without the padding of lists."""
  for table in raw.tables:
    spans = [raw.columns[feature] for feature in raw.of_table(table)]
    ids = np.concatenate([examples.lookups[:, span].ravel() for span in spans])
    yield ids[ids != END]


def _with_rows(
  raw: RawData,
  examples: Columns,
  words: Sequence[TableVocabulary],
  tables: TableSet,
) -> Columns:
  """Returns the examples with global rows in place of ids."""
  all_ids = examples.lookups
  rows = np.empty(all_ids.shape, row_dtype(tables.num_rows))
  for name, feature in raw.features.items():
    ids = all_ids[:, raw.columns[name]]
    of_table = words[raw.tables.index(feature.table)].rows(ids.ravel())
    first = tables.first_rows[feature.table]
    rows[:, raw.columns[name]] = of_table.reshape(ids.shape)
    rows[:, raw.columns[name]] += first
  rows[all_ids == END] = -1
  shape, weights = (len(rows), *tables.example_shape), examples.lookup_weights
  return examples._replace(
    lookups=rows.reshape(shape),
    lookup_weights=None if weights is None else weights.reshape(shape),
  )
