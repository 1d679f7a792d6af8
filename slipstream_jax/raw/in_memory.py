"""Any raw data set, held in memory: for files that fit, without preparing.

Its vocabulary is made from the part to train on, as that of a packed one is.
"""

from collections.abc import Iterator
import functools
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data import vocabulary
from slipstream_jax.data.base import ColumnBatches, Columns, Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.raw.base import Chunk, END, RawData
from slipstream_jax.tables import global_rows, tables_of
from slipstream_jax.types import Lookups


def in_memory(
  raw: RawData,
  *,
  min_count: int = 1,
  hash_rows: int | None = None,
  shuffle_seed: int | None = None,
) -> Dataset:
  """A data set of all inputs of `raw`, which takes 8 bytes per id.

  Args:
    raw: what to read; a validation part is left out.
    min_count: uses in the training part that earn an id a row of its own.
    hash_rows: R of every table, for hashed ids; None counts ids instead.
    shuffle_seed: seed of the order of training inputs; None is file order.

  Raises:
    UserError: a bad argument, an unreadable file, a bad line, or no inputs to
      train or to test on.
  """
  tables = len(raw.tables)
  fit = vocabulary.fit_by(
    tables,
    min_count=min_count,
    hash_rows=hash_rows,
    missing=raw.counted is None,
  )
  inputs, lengths = _read(raw)
  split = raw.split(len(inputs.labels), lengths)
  _check(raw, split)
  train, test = (inputs.part(*split[name]) for name in ('train', 'test'))
  words = fit(raw.counted() if raw.counted else train.id_columns())
  return Dataset(
    name=_name(raw, split),
    tables=tables_of(raw.tables, words.rows, raw.series),
    dense_features=raw.dense_features,
    train=functools.partial(
      ColumnBatches, train.columns(words), shuffle_seed=shuffle_seed
    ),
    test=functools.partial(
      ColumnBatches, test.columns(words), epochs=1, pad_remainder=True
    ),
    train_inputs=len(train.labels),
    base_rate=float(train.labels.mean(dtype=np.float64)),
  )


class _Inputs(NamedTuple):
  """Inputs whose ids have no rows yet: a long chunk."""

  labels: Float[np.ndarray, ' n']
  dense: Float[np.ndarray, 'n I']
  ids: Int[np.ndarray, 'n F'] | Int[np.ndarray, 'n F L']

  def part(self, first: int, end: int) -> '_Inputs':
    return _Inputs(*(array[first:end] for array in self))

  def id_columns(self) -> Iterator[vocabulary.Ids]:
    """Ids of each feature, without the ends of lists; i64, one at a time."""
    for table in range(self.ids.shape[1]):
      ids = np.ascontiguousarray(self.ids[:, table]).ravel()
      yield ids if self.ids.ndim == 2 else ids[ids != END]

  def columns(self, words: vocabulary.Vocabulary) -> Columns:
    rows = words.map(
      np.ascontiguousarray(self.ids[:, table]).ravel()
      for table in range(self.ids.shape[1])
    )
    local = _unravelled(rows, self.ids)
    return Columns(self.dense, global_rows(local, words.rows), self.labels)


def _unravelled(rows: np.ndarray, ids: np.ndarray) -> Lookups:
  """Rows [n * L, F] in the shape of their ids, -1 where a list has ended."""
  if ids.ndim == 2:
    return rows
  inputs, features, series = ids.shape
  local = rows.reshape(inputs, series, features).transpose(0, 2, 1)
  return np.where(ids == END, rows.dtype.type(-1), local)


def _read(raw: RawData) -> tuple[_Inputs, tuple[int, ...]]:
  """All inputs, and how many each part has."""
  chunks: list[Chunk] = []
  lengths = []
  for part in raw.parts:
    of_part = [chunk for chunk, _ in part.chunks()]
    lengths.append(sum(len(chunk.labels) for chunk in of_part))
    chunks += of_part
  if not sum(lengths):
    raise UserError(
      'a data set must have inputs',
      got='none',
      where=raw.name,
      mend='give a file with more than a header',
    )
  return _Inputs(*map(np.concatenate, zip(*chunks, strict=True))), tuple(
    lengths
  )


def _check(raw: RawData, split: dict[str, tuple[int, int]]) -> None:
  for name in 'train', 'test':
    first, end = split.get(name, (0, 0))
    if first >= end:
      raise UserError(
        'there must be inputs to train on and inputs to test on',
        got=f'none to {name} on',
        where=raw.name,
        mend='give more inputs or another split',
      )


def _name(raw: RawData, split: dict[str, tuple[int, int]]) -> str:
  ranges = [
    f'inputs {first + 1:,}-{end:,} to {name}'
    for name, (first, end) in split.items()
  ]
  skipped = raw.skipped()
  lines = [f'{skipped:,} bad lines skipped'] if skipped else []
  return ', '.join([raw.name, *ranges, *lines])
