"""Criteo's Terabyte click logs: one file per day, optionally subsampled.

Their lines have the format of `criteo`.
"""

from collections.abc import Iterator
import os
import pathlib
import re
from typing import no_type_check

import numpy as np

from slipstream_jax.errors import check_seed, UserError
from slipstream_jax.formats.base import BadLines, Chunk, RawData, split_by
from slipstream_jax.formats.criteo import hold_out, line_chunks, raw_clicks
from slipstream_jax.hashing import hashed, kernel, unit


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
  split = split_by(
    test_share,
    lambda examples, parts: hold_out(examples, parts[-1]),
    'terabyte_raw',
  )
  for name, share in (
    ('sample', sample),
    ('sample_negatives', sample_negatives),
  ):
    if not 0 < share <= 1:
      raise UserError(
        f'{name} must be above 0 and at most 1',
        got=share,
        where=f'terabyte_raw, {name}',
        hint='give the share of lines to keep',
      )
  check_seed(seed, 'terabyte_raw, seed')
  rates = (sample * sample_negatives, sample)

  def chunks(path: pathlib.Path) -> Iterator[tuple[Chunk, int]]:
    # A key per day, so its sample does not depend on the other days.
    key = hashed(np.uint64(seed), _day(path))
    first = 0  # counts good lines only
    for chunk, read in line_chunks(path, bad, missing_flags):
      keep = np.ones(len(chunk.labels), np.bool_)
      if min(rates) < 1:
        _sample(np.uint64(key), first, chunk.labels, *rates, keep)
      first += len(keep)
      yield _kept(chunk, keep), read

  return raw_clicks(
    f'Criteo Terabyte, {pathlib.Path(folder).name}',
    _days(pathlib.Path(folder)),
    chunks,
    split,
    bad,
    {
      'test_share': test_share,
      'missing_flags': missing_flags,
      'sample': sample,
      'sample_negatives': sample_negatives,
      'seed': seed,
    },
    'terabyte',
  )


_DAY_FILE = re.compile(r'day_([0-9]+)(\.gz)?')


def _day(path: pathlib.Path) -> int:
  match = _DAY_FILE.fullmatch(path.name)
  return int(match[1]) if match else -1


def _days(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folder's files of days, in order."""
  files = [p for p in folder.glob('day_*') if _day(p) >= 0]
  files.sort(key=lambda path: (_day(path), path.name))
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


def _kept(chunk: Chunk, keep: np.ndarray) -> Chunk:
  if keep.all():
    return chunk
  # Indexes the transpose, so that each column of ids stays contiguous.
  ids = chunk.ids.T[:, keep].T
  return Chunk(chunk.labels[keep], chunk.dense[keep], ids)
