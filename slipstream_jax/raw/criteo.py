"""Criteo's raw click logs, of the Kaggle challenge of 2014.

Their lines are those of `criteo_lines`. `criteo_text` holds a file in memory;
`criteo_raw` is for `prepare`, which holds little of it (`terabyte` has the days
of the larger logs).
"""

from collections.abc import Callable, Iterator
import functools
import os
import pathlib
from typing import NamedTuple

from jaxtyping import Bool, Float, UInt32
import numpy as np

from slipstream_jax.data import vocabulary
from slipstream_jax.data.ahead import ahead
from slipstream_jax.data.base import ColumnBatches, Columns, Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.raw import text
from slipstream_jax.raw.bad_lines import BadLines
from slipstream_jax.raw.base import Chunk, Part, RawData
from slipstream_jax.raw.criteo_lines import (
  check_ended,
  COLUMNS,
  dense_features,
  Fields,
  INTEGERS,
  parse,
  raw_ids,
  TABLES,
)
from slipstream_jax.tables import global_rows, Table

__all__ = [
  'COLUMNS',
  'INTEGERS',
  'TABLES',
  'Fields',
  'criteo_raw',
  'criteo_text',
  'dense_features',
  'parse',
]

DAYS = 7
"""Days in Kaggle's file, which does not say where one ends."""


def criteo_text(
  path: str | os.PathLike[str],
  *,
  test_share: float = 0.2,
  min_count: int = 1,
  hash_rows: int | None = None,
  missing_flags: bool = False,
  shuffle_seed: int | None = None,
  test_max: int | None = None,
  bad_lines: int = 0,
) -> Dataset:
  """A data set of Criteo's raw text, held in memory; tables C1 to C26.

  Args:
    path: the file, plain or gzip.
    test_share: share of the lines to hold out, from the end of the file.
    min_count: uses in the training part that earn an id a row of its own.
    hash_rows: R of every table, for hashed ids; None counts ids instead.
    missing_flags: adds 13 dense features that flag missing integers.
    shuffle_seed: seed of the order of training inputs; None is file order.
    test_max: most lines to test on, from the first one held out.
    bad_lines: lines that break the format and may be skipped.

  Raises:
    UserError: a bad argument, a file that cannot be read, or a bad line.
  """
  fit = vocabulary.fit_by(len(TABLES), min_count=min_count, hash_rows=hash_rows)
  _check_share(test_share)
  bad = BadLines(bad_lines)
  inputs = _read_inputs(path, missing_flags, bad)
  lines = len(inputs.labels)
  split = lines - round(lines * test_share)
  end = lines if test_max is None else min(lines, split + test_max)
  if not 0 < split < end:
    raise UserError(
      'there must be lines to train on and lines to test on',
      got=f'{lines} lines, test_share {test_share}, test_max {test_max}',
      where=str(path),
      mend='give more lines or another test_share or test_max',
    )
  train, test = inputs.part(0, split), inputs.part(split, end)
  words = fit(train.id_columns())
  return Dataset(
    name=f'{pathlib.Path(path).name}, lines 1-{split:,} to train,'
    f' {split + 1:,}-{end:,} to test'
    + f' (bad lines skipped: {bad.count})'
    * (bad.count > 0),
    tables=tuple(map(Table, TABLES, words.rows)),
    dense_features=train.dense.shape[1],
    train=functools.partial(
      ColumnBatches, train.columns(words), shuffle_seed=shuffle_seed
    ),
    test=functools.partial(
      ColumnBatches, test.columns(words), epochs=1, pad_remainder=True
    ),
    train_inputs=split,
    base_rate=float(train.labels.mean(dtype=np.float64)),
  )


class _Inputs(NamedTuple):
  """Inputs whose ids have no rows yet; 5 bytes per id while a file is read."""

  labels: Float[np.ndarray, ' n']
  dense: Float[np.ndarray, 'n I']
  ids: UInt32[np.ndarray, 'n 26']
  missing_ids: Bool[np.ndarray, 'n 26']

  def part(self, start: int, stop: int) -> '_Inputs':
    return _Inputs(*(array[start:stop] for array in self))

  def id_columns(self) -> Iterator[vocabulary.Ids]:
    for table in range(len(TABLES)):
      ids = self.ids[:, table].astype(np.int64)
      ids[self.missing_ids[:, table]] = vocabulary.MISSING
      yield ids

  def columns(self, words: vocabulary.Vocabulary) -> Columns:
    lookups = global_rows(words.map(self.id_columns()), words.rows)
    return Columns(self.dense, lookups, self.labels)


def _read_inputs(
  path: str | os.PathLike[str], missing_flags: bool, bad: BadLines
) -> _Inputs:
  parts = []
  for block in text.read_blocks(path):
    torn = check_ended(block)
    if torn is not None:
      bad.add(torn)
      continue
    fields = parse(block, bad)
    dense = dense_features(fields, missing_flags)
    missing = fields.missing[:, len(INTEGERS) :]
    parts.append(_Inputs(fields.labels, dense, fields.ids, missing))
  return _Inputs(*map(np.concatenate, zip(*parts, strict=True)))


def _check_share(test_share: float) -> None:
  if not 0 < test_share < 1:
    raise UserError(
      'test_share must be between 0 and 1, both excluded',
      got=test_share,
      where='config.data.test_share',
      mend='hold out a part of the lines',
    )


def criteo_raw(
  path: str | os.PathLike[str],
  *,
  missing_flags: bool = False,
  bad_lines: int = 0,
) -> RawData:
  """Kaggle's `train.txt`: 7 days, of which the last is held out.

  The file is in order of time, and a day is taken to be a seventh of its
  lines: six days train, the first half of the last one is `validation`, its
  second half `test`. (The DLRM reference tests on the first half.)

  Args:
    path: the file, plain or gzip.
    missing_flags: adds 13 dense features that flag missing integers.
    bad_lines: lines that break the format and may be skipped.

  Raises:
    UserError: no such file, or a negative number of bad lines; as it is read,
      what `text.read_blocks` and `parse` raise.
  """
  bad = BadLines(bad_lines)
  path = pathlib.Path(path)
  return raw_clicks(
    f'Criteo Kaggle, {path.name}',
    [path],
    lambda path: line_chunks(path, bad, missing_flags),
    lambda inputs, parts: hold_out(inputs, inputs // DAYS),
    bad,
    {'missing_flags': missing_flags},
    'criteo',
  )


def raw_clicks(
  name: str,
  paths: list[pathlib.Path],
  chunks: Callable[[pathlib.Path], Iterator[tuple[Chunk, int]]],
  split: Callable[[int, tuple[int, ...]], dict[str, tuple[int, int]]],
  bad: BadLines,
  settings: dict[str, object],
  format: str,
) -> RawData:
  """Raw data of files of Criteo's lines.

  Args:
    name: said in every summary.
    paths: one part each.
    chunks: reads one of them.
    split: as in `RawData`.
    bad: the budget that `chunks` spends.
    settings: as in `RawData`; its 'missing_flags' doubles the dense features.
    format: as in `RawData`.

  Raises:
    UserError: a file cannot be opened.
  """
  return RawData(
    name=name,
    tables=TABLES,
    dense_features=len(INTEGERS) * (1 + bool(settings['missing_flags'])),
    parts=tuple(
      Part(str(path), text.size(path), functools.partial(chunks, path))
      for path in paths
    ),
    split=split,
    skipped=lambda: bad.count,
    restore=bad.restore,
    settings=settings,
    format=format,
  )


def line_chunks(
  path: pathlib.Path, bad: BadLines, missing_flags: bool
) -> Iterator[tuple[Chunk, int]]:
  """Chunks of a file, with the bytes of it that were read so far.

  A chunk holds the lines of one block of 16 MiB (some 70,000), and is parsed
  while the next block is read and unpacked.

  Args:
    path: the file, plain or gzip.
    bad: takes bad lines.
    missing_flags: adds 13 dense features that flag missing integers.

  Raises:
    UserError: the file cannot be read, or has too many bad lines.
  """
  blocks = ahead(text.read_blocks(path))
  try:
    for block in blocks:
      torn = check_ended(block)
      if torn is not None:
        bad.add(torn)
        continue
      fields = parse(block, bad)
      dense = dense_features(fields, missing_flags)
      yield Chunk(fields.labels, dense, raw_ids(fields)), block.read
  finally:
    blocks.close()


def hold_out(inputs: int, last_day: int) -> dict[str, tuple[int, int]]:
  """Splits that train on all but the last day, and halve that.

  Args:
    inputs: all of them.
    last_day: the last ones of them.
  """
  first = inputs - last_day
  middle = first + last_day // 2
  return {
    'train': (0, first),
    'validation': (first, middle),
    'test': (middle, inputs),
  }
