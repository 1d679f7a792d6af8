"""A small raw data set in memory, whose reader can be made to fail."""

import numpy as np

from slipstream_jax.raw.base import Chunk, END, MISSING, Part, RawData

CHUNK = 37


def fields(inputs=1000, series=None, tables=3, seed=0):
  """Labels f32[n], dense f32[n, 2], ids i64[n, F] or [n, F, L]: skewed."""
  rng = np.random.default_rng(seed)
  shape = (inputs, tables) + ((series,) if series else ())
  scale = np.reshape([4, 60, 3000, 10][:tables], (1, -1) + (1,) * bool(series))
  ids = (rng.random(shape) ** 3 * scale).astype(np.int64)
  # Ids at both ends of i64, and negative ones, are ids like any other.
  ids[ids == 1] = np.iinfo(np.int64).max
  ids[ids == 2] = np.iinfo(np.int64).min
  ids[ids == 3] = -3
  ids[:, 1:][rng.random(ids[:, 1:].shape) < 0.1] = MISSING
  if series:  # a list ends somewhere
    length = rng.integers(0, series + 1, (inputs, 1, 1))
    ids = np.where(np.arange(series) < length, ids, END)
  return Chunk(
    (rng.random(inputs) < 0.3).astype(np.float32),
    rng.normal(size=(inputs, 2)).astype(np.float32),
    ids,
  )


def split(inputs, parts):
  return {
    'train': (0, inputs * 7 // 10),
    'validation': (inputs * 7 // 10, inputs * 8 // 10),
    'test': (inputs * 8 // 10, inputs),
  }


def raw_of(whole, parts=(1.0,), fail_at=None, settings=None):
  """Raw data of these fields, as parts that are these shares of them.

  Chunk number `fail_at`, of all that are read in this process, fails.
  """
  ends = np.rint(np.cumsum(parts) * len(whole.labels)).astype(int)
  firsts = np.append(0, ends[:-1])
  read = [0]

  def chunks(first, end):
    for start in range(first, end, CHUNK):
      stop = min(end, start + CHUNK)
      read[0] += 1
      if read[0] == fail_at:
        raise _Failure(fail_at)
      yield Chunk(*(each[start:stop] for each in whole)), stop - first

  return RawData(
    name='example',
    tables=('a', 'b', 'c', 'd')[: whole.ids.shape[1]],
    dense_features=2,
    parts=tuple(
      Part(f'part{i}', int(b - a), lambda a=a, b=b: chunks(a, b))
      for i, (a, b) in enumerate(zip(firsts, ends, strict=True))
    ),
    split=split,
    series=whole.ids.shape[2] if whole.ids.ndim == 3 else None,
    settings=settings or {},
  )


class _Failure(Exception):
  """What a reader may raise."""


Failure = _Failure
