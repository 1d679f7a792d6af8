"""Criteo's click logs: label, 13 integers and 26 hex ids, separated by tabs.

There is no header. Any field but the label may be empty (missing). Kaggle's
challenge of 2014 is one such file. The Terabyte logs have one file per day.
"""

from collections.abc import Callable, Iterator
import functools
import os
import pathlib
import re
from typing import Any, no_type_check

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.errors import check_seed, UserError
from slipstream_jax.formats import lines, text
from slipstream_jax.formats.base import (
  BadLines,
  Chunk,
  MISSING,
  Part,
  RawData,
  Split,
  split_at_end,
  Splits,
)
from slipstream_jax.formats.lines import Schema
from slipstream_jax.hashing import hashed, kernel, unit
from slipstream_jax.tables import features_of

INTEGERS = tuple(f'I{i}' for i in range(1, 14))
TABLES = tuple(f'C{i}' for i in range(1, 27))
COLUMNS = ('label', *INTEGERS, *TABLES)
DAYS = 7
"""Days in Kaggle's file, which does not mark their ends."""
SCHEMA = Schema(
  (
    lines.click('label'),
    *(lines.DECIMAL._replace(name=name) for name in INTEGERS),
    *(lines.HEX._replace(name=name) for name in TABLES),
  ),
  delimiter=b'\t',
  whole=8,  # digits that all ids of the published files have
)
UNLABELLED = SCHEMA._replace(columns=SCHEMA.columns[1:])
"""The schema of Kaggle's `test.txt`."""

_DAY_FILE = re.compile(r'day_([0-9]+)(\.gz)?')


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
  The first half of the last day is `validation`, the second half `test`. (The
  DLRM reference tests on the first half.)

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
    # Reading reports any other number of fields as an error.
    fields = text.first_line(path).split(SCHEMA.delimiter)
    labelled = len(fields) != len(UNLABELLED.columns)
  schema = SCHEMA if labelled else UNLABELLED
  raw = _raw(
    *('criteo', f'Criteo Kaggle, {path.name}', [path], bad),
    chunks=lambda path: _chunks(path, bad, missing_flags, schema),
    split=lambda examples, parts: _hold_out(examples, examples // DAYS),
    settings={'test_share': test_share, 'missing_flags': missing_flags},
  )
  return raw._replace(labelled=labelled)


def terabyte_raw(
  folder: str | os.PathLike[str],
  *,
  test_share: float | None = None,
  missing_flags: bool = False,
  bad_lines: int = 0,
  sample: float = 1.0,
  sample_negatives: float = 1.0,
  seed: int = 0,
) -> RawData:
  """Returns the Terabyte logs: a folder of `day_0` to `day_23`.

  The last day is held out: its first half is `validation`, its second `test`.

  Args:
    folder: folder of the days, each plain or gzip. Fewer days will do.
    test_share: share of the lines kept to test on, from the end. It replaces
      the split by day.
    missing_flags: adds 13 dense features that flag missing integers.
    bad_lines: number of malformed lines that may be skipped.
    sample: share of the lines to keep. 0.0183 keeps 80 M of all lines.
    sample_negatives: share of the sampled lines without a click to keep. It
      changes the base rate, also of the held-out day.
    seed: seed of the sample, which depends only on a line's place in its day.

  Raises:
    UserError: a day is missing or there twice, or a bad argument. Reading
      raises the errors of `lines.read`.
  """
  bad = BadLines(bad_lines, 'terabyte_raw')
  shares = {'sample': sample, 'sample_negatives': sample_negatives}
  for name, share in shares.items():
    if not 0 < share <= 1:
      raise UserError(
        f'{name} must be above 0 and at most 1',
        got=share,
        where=f'terabyte_raw, {name}',
        hint='give the share of lines to keep',
      )
  check_seed(seed, 'terabyte_raw, seed')

  def chunks(path: pathlib.Path) -> Iterator[tuple[Chunk, int]]:
    of_day = _chunks(path, bad, missing_flags)
    if min(sample * sample_negatives, sample) == 1:
      return of_day
    # A key per day, so its sample does not depend on the other days.
    key = np.uint64(hashed(np.uint64(seed), _day(path)))
    return _sampled(of_day, key, sample * sample_negatives, sample)

  folder = pathlib.Path(folder)
  settings = {'test_share': test_share, 'missing_flags': missing_flags}
  return _raw(
    *('terabyte', f'Criteo Terabyte, {folder.name}', _days(folder), bad),
    chunks=chunks,
    split=lambda examples, parts: _hold_out(examples, parts[-1]),
    settings={**settings, **shares, 'seed': seed},
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


def _raw(
  format: str,
  name: str,
  paths: list[pathlib.Path],
  bad: BadLines,
  *,
  chunks: Callable[[pathlib.Path], Iterator[tuple[Chunk, int]]],
  split: Split,
  settings: dict[str, Any],
) -> RawData:
  """Returns raw data of files with Criteo's lines, one part each."""
  if settings['test_share'] is not None:
    split = split_at_end(settings['test_share'], f'{format}_raw')
  return RawData(
    name=name,
    features=features_of(TABLES),
    dense_features=len(INTEGERS) * (1 + bool(settings['missing_flags'])),
    parts=tuple(
      Part(str(path), text.size(path), functools.partial(chunks, path))
      for path in paths
    ),
    split=split,
    bad=bad,
    settings=settings,
    format=format,
  )


def _chunks(
  path: pathlib.Path,
  bad: BadLines,
  missing_flags: bool,
  schema: Schema = SCHEMA,
) -> Iterator[tuple[Chunk, int]]:
  """Yields chunks of some 70,000 lines, with the bytes read so far."""
  for block, (values, numbers) in lines.read(path, schema, bad):
    first = len(values) - len(TABLES)
    at = first - len(INTEGERS)
    labels = values[0] if at else np.empty((len(numbers), 0))
    dense = dense_features(values[at:first], missing_flags)
    yield Chunk(labels.astype(np.float32), dense, values[first:].T), block.read


def _hold_out(examples: int, last_day: int) -> Splits:
  """Returns splits that train on all but the last day, and halve that day."""
  first = examples - last_day
  middle = first + last_day // 2
  return {
    'train': (0, first),
    'validation': (first, middle),
    'test': (middle, examples),
  }


def _day(path: pathlib.Path) -> int:
  match = _DAY_FILE.fullmatch(path.name)
  return int(match[1]) if match else -1


def _days(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folder's files of days, in order."""
  files = sorted(p for p in folder.glob('day_*') if _day(p) >= 0)
  files.sort(key=_day)
  days = [_day(path) for path in files]
  if len(days) < 2 or days != list(range(days[0], days[0] + len(days))):
    raise UserError(
      'a folder of the Terabyte logs must hold two or more consecutive days,'
      ' day_0 or day_0.gz and so on, each once',
      got=', '.join(path.name for path in files) or 'none',
      where=str(folder),
      hint='fetch the days that are missing, or remove what is there twice',
    )
  return files


def _sampled(
  chunks: Iterator[tuple[Chunk, int]],
  key: np.uint64,
  negatives: float,
  positives: float,
) -> Iterator[tuple[Chunk, int]]:
  """Yields the chunks of a day with only the sampled examples."""
  first = 0  # counts good lines only
  for (labels, dense, ids, _), read in chunks:
    keep = np.empty(len(labels), np.bool_)
    _sample(key, first, labels, negatives, positives, keep)
    first += len(keep)
    # Indexes the transpose, so that each column of ids stays contiguous.
    yield Chunk(labels[keep], dense[keep], ids.T[:, keep].T), read


@kernel
@no_type_check
def _sample(
  key: np.uint64,
  first: int,
  labels: np.ndarray,
  negatives: float,
  positives: float,
  keep: np.ndarray,
) -> None:
  """Fills bool[n]: which lines of a day, from number `first` on, to keep."""
  for i in range(len(labels)):
    # One draw for either rate, so a larger share contains a smaller one.
    rate = positives if labels[i] > 0 else negatives
    keep[i] = unit(hashed(key, first + i)) < rate
