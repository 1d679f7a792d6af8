"""Criteo's click logs: label, 13 integers and 26 hex ids, separated by tabs.

There is no header. Any field but the label may be empty (missing). Kaggle's
challenge of 2014 is one such file (`criteo_raw`). `terabyte` reads the days of
the larger logs.
"""

from collections.abc import Callable, Iterator
import functools
import os
import pathlib

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.formats import lines, text
from slipstream_jax.formats.base import (
  BadLines,
  Chunk,
  MISSING,
  Part,
  RawData,
  Split,
  split_by,
  Splits,
)
from slipstream_jax.formats.lines import Column, Schema
from slipstream_jax.tables import features_of

INTEGERS = tuple(f'I{i}' for i in range(1, 14))
TABLES = tuple(f'C{i}' for i in range(1, 27))
COLUMNS = ('label', *INTEGERS, *TABLES)
DAYS = 7
"""Days in Kaggle's file, which does not mark where a day ends."""

_LABEL = Column(
  'label', 'a label must be 0 or 1', 'write 1 for a click, else 0', 2, (1, 1)
)
_INTEGER = Column(
  '',
  'an integer field must be empty or hold up to 18 decimal digits',
  'write a whole number, or nothing where it is missing',
  10,
  (0, 18),  # some integers of 19 digits do not fit i64
  sign=True,
)
_ID = Column(
  '',
  'an id field must be empty or hold up to 8 hex digits',
  'write a 32-bit hex number, or nothing where it is missing',
  16,
  (0, 8),
)
SCHEMA = Schema(
  (
    _LABEL,
    *(_INTEGER._replace(name=name) for name in INTEGERS),
    *(_ID._replace(name=name) for name in TABLES),
  ),
  delimiter=b'\t',
  whole=8,  # digits that all ids of the published files have
)
UNLABELLED = SCHEMA._replace(columns=SCHEMA.columns[1:])
"""The schema of Kaggle's `test.txt`."""


def criteo_raw(
  path: str | os.PathLike[str],
  *,
  test_share: float | None = None,
  missing_flags: bool = False,
  bad_lines: int = 0,
  labelled: bool | None = True,
) -> RawData:
  """Returns Kaggle's `train.txt`: 7 days, of which the last is held out.

  The file is in time order, and each seventh of its lines is taken as a day.
  Six days are to train on. The first half of the last day is `validation`, the
  second half `test`. (The DLRM reference tests on the first half.)

  Args:
    path: the file, plain or gzip.
    test_share: share of the lines to test on, from the end. It replaces the
      split by day.
    missing_flags: adds 13 dense features that flag missing integers.
    bad_lines: number of malformed lines that may be skipped.
    labelled: whether lines begin with a label, which training needs. None:
      decided by the first line.

  Raises:
    UserError: a bad argument, or no such file. Reading raises the errors of
      `lines.read`.
  """
  bad = BadLines(bad_lines, 'criteo_raw')
  path = pathlib.Path(path)
  if labelled is None:
    labelled = _has_labels(path)
  schema = SCHEMA if labelled else UNLABELLED
  raw = raw_clicks(
    f'Criteo Kaggle, {path.name}',
    [path],
    lambda path: line_chunks(path, bad, missing_flags, schema),
    split_by(
      test_share,
      lambda examples, parts: hold_out(examples, examples // DAYS),
      'criteo_raw',
    ),
    bad,
    {'test_share': test_share, 'missing_flags': missing_flags},
    'criteo',
  )
  return raw._replace(labelled=labelled)


def _has_labels(path: pathlib.Path) -> bool:
  # Reading reports any other number of fields as an error.
  fields = text.first_line(path).split(SCHEMA.delimiter)
  return len(fields) != len(UNLABELLED.columns)


def raw_clicks(
  name: str,
  paths: list[pathlib.Path],
  chunks: Callable[[pathlib.Path], Iterator[tuple[Chunk, int]]],
  split: Split,
  bad: BadLines,
  settings: dict[str, object],
  format: str,
) -> RawData:
  """Returns raw data of files with Criteo's lines.

  Args:
    name: shown in every summary.
    paths: files, one part each.
    chunks: reads a file.
    split: as in `RawData`.
    bad: the budget that `chunks` uses.
    settings: as in `RawData`. If 'missing_flags' is set, there are twice as
      many dense features.
    format: as in `RawData`.

  Raises:
    UserError: a file cannot be opened.
  """
  return RawData(
    name=name,
    features=features_of(TABLES),
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
  path: pathlib.Path,
  bad: BadLines,
  missing_flags: bool,
  schema: Schema = SCHEMA,
) -> Iterator[tuple[Chunk, int]]:
  """Yields chunks of some 70,000 lines, with the bytes read so far."""
  for block, fields in lines.read(path, schema, bad):
    yield chunk(fields, missing_flags), block.read


def chunk(fields: lines.Fields, missing_flags: bool) -> Chunk:
  """Returns the examples of some lines."""
  first = len(fields.values) - len(TABLES)
  at = first - len(INTEGERS)
  labels = fields.values[0] if at else np.empty((len(fields.lines), 0))
  return Chunk(
    labels.astype(np.float32),
    dense_features(fields.values[at:first], missing_flags),
    fields.values[first:].T,
  )


def dense_features(
  integers: Int[np.ndarray, '13 n'], missing_flags: bool = False
) -> Float[np.ndarray, 'n I']:
  """Returns `log1p(max(x, 0))` of the integers, f32[n, 13]; 0 if missing.

  With `missing_flags`, 13 more columns are 1 where an integer is missing.
  """
  count, size = integers.shape
  dense = np.empty((size, count * (1 + missing_flags)), np.float32)
  # `MISSING` and encoded negative numbers are below 0 too.
  dense[:, :count] = np.log1p(np.maximum(integers, 0)).T
  if missing_flags:
    dense[:, count:] = (integers == MISSING).T
  return dense


def hold_out(examples: int, last_day: int) -> Splits:
  """Returns splits that train on all but the last day, and halve that day.

  Args:
    examples: number of all examples.
    last_day: number of examples of the last day.
  """
  first = examples - last_day
  middle = first + last_day // 2
  return {
    'train': (0, first),
    'validation': (first, middle),
    'test': (middle, examples),
  }
