"""Taobao's log as raw data: series of raw ids, to be packed."""

from collections.abc import Iterator
import functools
import os
import pathlib

import numpy as np

from slipstream_jax.raw import text
from slipstream_jax.raw.base import Chunk, END, Part, RawData
from slipstream_jax.raw.series_batches import FEATURES, Series
from slipstream_jax.raw.taobao import Log, read_log

_CHUNK = 1 << 15  # inputs; 504 bytes each


def taobao_raw(
  path: str | os.PathLike[str],
  *,
  steps: int = 20,
  per_user: int = 10,
  min_history: int = 10,
  test_share: float = 0.2,
  bad_lines: int = 0,
  seed: int = 0,
) -> RawData:
  """Taobao's UserBehavior log as inputs of series; see `taobao_text`.

  The log itself is read whole, 12 bytes per event and as much again while it
  is sorted: a user's events lie all over it. Packed, ids are counted as the
  series use them, a user's in every step.

  Args:
    path: the file, plain or gzip.
    steps: most events of a history.
    per_user: most points of a user; each gives two inputs.
    min_history: earlier events that a point needs.
    test_share: share of the points to hold out, the latest ones.
    bad_lines: lines that break the format and may be skipped.
    seed: of the choice of points and of drawn items.

  Raises:
    UserError: once it is read, as `taobao_text`.
  """
  settings = {
    'steps': steps,
    'per_user': per_user,
    'min_history': min_history,
    'test_share': test_share,
    'seed': seed,
    'changed': text.changed(path),
  }

  @functools.cache
  def log() -> Log:
    return read_log(
      path,
      steps=steps,
      per_user=per_user,
      min_history=min_history,
      test_share=test_share,
      bad_lines=bad_lines,
      seed=seed,
    )

  def chunks(which: int) -> Iterator[tuple[Chunk, int]]:
    read = log()
    if which == 0:
      skipped[:] = [read.skipped]
    return _chunks(read, which, steps, size)

  skipped: list[int] = []  # the first part's count of the whole file
  size = os.stat(path).st_size if os.path.exists(path) else 0
  return RawData(
    name=f'Taobao user behaviour, {pathlib.Path(path).name}',
    tables=FEATURES,
    dense_features=steps + 1,
    parts=tuple(
      # The file is read once, for the first of them.
      Part(
        f'{path}, {name}', size * (which == 0), functools.partial(chunks, which)
      )
      for which, name in enumerate(('train', 'test'))
    ),
    split=lambda inputs, parts: {
      'train': (0, parts[0]),
      'test': (parts[0], inputs),
    },
    series=steps + 1,
    skipped=lambda: sum(skipped),
    settings=settings,
    format='taobao',
  )


def _chunks(
  log: Log, which: int, steps: int, size: int
) -> Iterator[tuple[Chunk, int]]:
  points, negatives = log.parts[which]
  series = Series(_ids(log.events), points, _ids(negatives)[1:], steps)
  count = 2 * len(points.candidates)
  for first in range(0, count, _CHUNK):
    inputs = np.arange(first, min(first + _CHUNK, count))
    ids = series.lookups(inputs)
    ids[ids < 0] = END
    chunk = Chunk(series.labels(inputs), series.dense(len(inputs)), ids)
    yield chunk, size * (first + len(inputs)) // count


def _ids(events: tuple[np.ndarray, ...]) -> np.ndarray:
  """Ids of users, items and categories as `Series` takes rows: i64[3, n]."""
  # Not i32: an id may have 32 bits, and negative ones are padding.
  return np.stack([column.astype(np.int64) for column in events[:3]])
