"""A small raw data set in memory, whose reader can be made to fail."""

import numpy as np

from slipstream_jax.formats.base import Chunk, END, MISSING, Part, RawData
from slipstream_jax.tables import features_of

CHUNK = 37


def fields(examples=1000, sequence_length=None, tables=3, seed=0):
  """Labels f32[n], dense f32[n, 2], ids i64[n, F] or [n, F, L]: skewed."""
  rng = np.random.default_rng(seed)
  shape = (examples, tables) + ((sequence_length,) if sequence_length else ())
  scale = np.reshape(
    [4, 60, 3000, 10][:tables], (1, -1) + (1,) * bool(sequence_length)
  )
  ids = (rng.random(shape) ** 3 * scale).astype(np.int64)
  # Ids at both ends of i64, and negative ones, are ids like any other.
  ids[ids == 1] = np.iinfo(np.int64).max
  ids[ids == 2] = np.iinfo(np.int64).min
  ids[ids == 3] = -3
  ids[:, 1:][rng.random(ids[:, 1:].shape) < 0.1] = MISSING
  if sequence_length:  # a list ends somewhere
    length = rng.integers(0, sequence_length + 1, (examples, 1, 1))
    ids = np.where(np.arange(sequence_length) < length, ids, END)
  return Chunk(
    (rng.random(examples) < 0.3).astype(np.float32),
    rng.normal(size=(examples, 2)).astype(np.float32),
    ids,
  )


def split(examples, parts):
  return {
    'train': (0, examples * 7 // 10),
    'validation': (examples * 7 // 10, examples * 8 // 10),
    'test': (examples * 8 // 10, examples),
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
        raise Failure(fail_at)
      labels, dense, ids = (field[start:stop] for field in whole[:3])
      yield Chunk(labels, dense, ids.reshape(len(ids), -1)), stop - first

  return RawData(
    name='example',
    features=features_of(
      ('a', 'b', 'c', 'd')[: whole.ids.shape[1]],
      whole.ids.shape[2] if whole.ids.ndim == 3 else None,
    ),
    dense_features=2,
    parts=tuple(
      Part(f'part{i}', int(b - a), lambda a=a, b=b: chunks(a, b))
      for i, (a, b) in enumerate(zip(firsts, ends, strict=True))
    ),
    split=split,
    settings=settings or {},
  )


class Failure(Exception):
  """What a reader may raise."""
