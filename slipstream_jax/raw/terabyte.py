"""Criteo's Terabyte click logs: one file per day, too many lines to keep all.

Their lines are those of `criteo`.
"""

from collections.abc import Iterator
import os
import pathlib
import re
from typing import no_type_check

import numpy as np

from slipstream_jax.errors import check_seed, UserError
from slipstream_jax.hashing import hashed, kernel, unit
from slipstream_jax.raw.base import BadLines, Chunk, RawData, split_by
from slipstream_jax.raw.criteo import hold_out, line_chunks, raw_clicks


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
  """The Terabyte logs: a folder of `day_0` to `day_23`.

  The last day is held out: its first half is `validation`, its second `test`.

  Args:
    folder: holds the days, each plain or gzip; fewer days will do.
    test_share: share of the lines kept to test on, from the end, instead.
    missing_flags: adds 13 dense features that flag missing integers.
    bad_lines: lines that break the format and may be skipped.
    sample: share of the lines to keep; 0.0183 keeps 80 M of them all.
    sample_negatives: share to keep of those without a click, moreover; it
      moves the base rate, of the held-out day too.
    seed: of the choice, which depends on a line's place in its day only.

  Raises:
    UserError: days that are missing or there twice, or a bad argument; then
      as `criteo_raw`.
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
    # A key per day: its choice is the same whichever days are there.
    key = hashed(np.uint64(seed), _day(path))
    first = 0  # among the good lines: bad ones that are skipped have no number
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
  """The folder's files of days, in order."""
  files = [p for p in folder.glob('day_*') if _day(p) >= 0]
  files.sort(key=lambda path: (_day(path), path.name))
  days = [_day(path) for path in files]
  # A day that was not fetched must not go unnoticed.
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
  """Fills bool[n]: which of a day's lines, from number `first` on, to keep."""
  for i in range(len(labels)):
    # One draw against either rate: a larger share has all lines of a smaller.
    rate = positives if labels[i] > 0 else negatives
    keep[i] = unit(hashed(key, first + i)) < rate


def _kept(chunk: Chunk, keep: np.ndarray) -> Chunk:
  if keep.all():
    return chunk
  # Of the transpose, as columns of ids, which are used one by one, then stay
  # contiguous.
  ids = chunk.ids.T[:, keep].T
  return Chunk(chunk.labels[keep], chunk.dense[keep], ids)
