"""Data sets with fewer rows, in which ids share rows in one of several ways.

The first third of a stream is the past: ids are counted in it, and a pilot
model is trained on it. All ways then train on the rest.
"""

import collections
from collections.abc import Callable
import functools
from typing import NamedTuple

import ml_collections
import numpy as np

from experiments.common import build
from slipstream_jax.data.source import BatchSource, Dataset, SourceWrapper
from slipstream_jax.training.loop import train
from slipstream_jax.types import Batch
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.hashed import HashVocabulary
from slipstream_jax.vocabulary.learned import learned_hash
from slipstream_jax.vocabulary.state import integers

_LEAST = 16  # rows of a table, unless it has fewer
_PILOT_DIM = 4


class Past(NamedTuple):
  """Counts and pilot vectors of all rows, from the stream's first third."""

  counts: np.ndarray
  """Lookups of each global row: i64[N]."""
  vectors: np.ndarray
  """Rows of the pilot model: f32[N, d]."""

  def of(self, rows: slice) -> 'Past':
    """Returns what is known of some rows."""
    return Past(self.counts[rows], self.vectors[rows])


Share = Callable[[int, int, Past], np.ndarray]
"""From a table's rows, the most that it may have and its past, the new rows of
each: [R, 1], or [R, 2] of a way that adds two."""


def _hashed(table: int, rows: int, size: int) -> np.ndarray:
  return HashVocabulary(size, table).rows(np.arange(rows))


def _modulo(rows: int, size: int, past: Past) -> np.ndarray:
  return _hashed(0, rows, size)[:, None]


def _double(rows: int, size: int, past: Past) -> np.ndarray:
  return np.stack([_hashed(i, rows, size) for i in (0, 1)], axis=1)


def _quotient(rows: int, size: int, past: Past) -> np.ndarray:
  """Adds the rows of an id's quotient and remainder (arXiv 1909.02107).

  Quotients are hashed where they do not fit.
  """
  ids = np.random.default_rng(0).permutation(rows)
  remainders = size - min(-(-rows // size) * 2, size // 2)
  quotients = ids // remainders
  fits = quotients.max() < size - remainders
  own = quotients if fits else _hashed(0, rows, size - remainders)[quotients]
  return np.stack([ids % remainders, remainders + own], axis=1)


def _frequency(
  rows: int, size: int, past: Past, private: float = 0.75
) -> np.ndarray:
  words, ids = _seen(past), np.arange(rows)
  own = min(int(private * (size - 1)), words.size - 1)
  known = integers(words.known[:own])
  return _as_column(Vocabulary(known, size - 1 - own), ids)


def _learned(
  rows: int, size: int, past: Past, private: float = 0.75
) -> np.ndarray:
  words = _seen(past)
  if words.size <= size:  # the rest is for ids that the past has not
    return _frequency(rows, size, past, 1.0)
  at = np.append(0, words.known)
  counts, vectors = past.counts[at], past.vectors[at]
  words = learned_hash(words, counts, vectors, size, private=private)
  return _as_column(words, np.arange(rows))


def _seen(past: Past) -> Vocabulary:
  """Returns the vocabulary of the rows that the past looked up, but row 0."""
  rows = 1 + np.flatnonzero(past.counts[1:])
  order = np.argsort(-past.counts[rows], kind='stable')
  return Vocabulary(integers(rows[order]))


def _as_column(words: Vocabulary, ids: np.ndarray) -> np.ndarray:
  rows = words.rows(ids)[:, None]
  rows[0] = 0  # of missing ids
  return rows


WAYS: dict[str, Share | None] = {
  'learned': _learned,
  'frequency': _frequency,
  'modulo': _modulo,
  'double hash': _double,
  'quotient-remainder': _quotient,
  'vectors alone': functools.partial(_learned, private=0.0),
  'all rows': None,
}
"""How ids share rows, by name. None: they do not."""
LONGER = 'frequency', 'modulo', 'all rows'
"""Ways that are also trained on the past, as they need no pilot model."""


class _Later(SourceWrapper):
  """A source after its first batches, with other rows."""

  def __init__(
    self, source: BatchSource, left_out: int, change: Callable[[Batch], Batch]
  ) -> None:
    """Takes over `source`, and reads the batches to leave out."""
    super().__init__(source)
    for _ in range(left_out):
      next(source)
    self._change = change

  def __next__(self) -> Batch:
    return self._change(super().__next__())


def past_steps(steps: int) -> int:
  """Returns how many of a stream's batches are its past."""
  return steps // 3


def past_of(config: ml_collections.ConfigDict, data: Dataset) -> Past:
  """Trains the pilot model on the past, and counts its lookups."""
  own = config.copy_and_resolve_references()
  with own.unlocked():
    less = own.model.dim - _PILOT_DIM
    own.model.dim -= less
    own.model.bottom = (*own.model.bottom[:-1], own.model.bottom[-1] - less)
  steps = past_steps(build.total_steps(own, data))
  recipe = build.recipe(own, data, steps)
  trainer = build.trainer(own, data, recipe, build.hot(own, data, recipe))
  with build.batches(own, trainer, data, steps) as planned:
    collections.deque(train(trainer, planned, steps), maxlen=0)
  rows = sum(data.sizes.values())
  counts = np.zeros(rows, np.int64)
  source = data.train(own.data.batch_size)
  for _ in range(steps):
    lookups = next(source).lookups
    counts += np.bincount(lookups[lookups >= 0], minlength=rows)
  source.close()
  vectors = np.concatenate(
    [trainer.engine.rows_of(name) for name in data.sizes]
  )
  return Past(counts, vectors)


def shared(
  data: Dataset, share: Share | None, fewer: int, steps: int, past: Past
) -> Dataset:
  """Returns the data set after its past, with fewer rows.

  Args:
    data: whose tables are made smaller.
    share: gives rows to ids.
    fewer: by which the rows of each table are divided.
    steps: batches of the past.
    past: what it says.
  """
  maps, sizes, first, start = [], {}, 0, 0
  for name, rows in data.sizes.items():
    size = max(min(rows, _LEAST), rows // fewer)
    if share is None or size == rows:
      size, own = rows, np.arange(rows)[:, None]
    else:
      own = share(rows, size, past.of(slice(first, first + rows)))
    maps.append(own + start)
    sizes[name], first, start = size, first + rows, start + size
  width = max(one.shape[1] for one in maps)
  # A table that keeps its rows looks up each once.
  padded = [
    np.pad(one, ((0, 0), (0, width - one.shape[1])), constant_values=-1)
    for one in maps
  ]
  to = np.concatenate([*padded, np.full((1, width), -1)]).astype(np.int32)

  equal = len({feature.max_length for feature in data.features.values()}) == 1
  shape = (len(data.features),) * (equal and width > 1)

  def change(batch: Batch) -> Batch:
    lookups = to[batch.lookups]
    if width == 1:
      return batch._replace(lookups=lookups[..., 0])
    whole = lookups.reshape(len(lookups), *shape, -1)
    return batch._replace(lookups=whole)

  def later(size: int) -> BatchSource:
    return _Later(data.train(size), steps, change)

  features = {
    name: one._replace(max_length=one.max_length * width)
    for name, one in data.features.items()
  }
  return data._replace(
    sizes=sizes,
    features=features,
    train=later,
    test=lambda size: _Later(data.test(size), 0, change),
    profile=None,
    counts=None,
    vocabulary=None,
  )
