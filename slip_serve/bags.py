"""Sums of the bags that queries have again and again.

This is the cache of pooled embeddings of "Supporting massive DLRM inference
through software defined memory" (arXiv 2110.11489). A bag that is found costs
one vector in place of a row for each of its lookups. To the model it is then a
bag of one lookup, whose row is that vector. So no program changes, and no bit
of a score. Means are not kept, because XLA may round their last product
together with what follows it.
"""

import secrets
import threading
from typing import NamedTuple

import numba
import numpy as np

from slip_serve.layout import Feature, Group
from slip_serve.rows import BOOKKEEPING, RecordCache
from slipstream_jax.hashing import hashed

_HASH = 8  # bytes of the second hash, before the vector

_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)


def can_keep(feature: Feature) -> bool:
  """Whether bags of a feature can be kept, if they have no weights."""
  return feature.combiner == 'sum' and feature.length > 1


class KnownBags(NamedTuple):
  """The bags of a query that have two lookups or more."""

  at: np.ndarray
  """Example, and number of the span of its feature, i64[n, 2]."""
  hashes: np.ndarray
  """Two hashes of each, i64[n, 2]. The first is at least 0."""
  query: int
  """Number of the query in the cache."""
  here: np.ndarray
  """Whether each was found, bool[n]."""
  vectors: np.ndarray
  """The sums of their rows, f32[found, D]."""


class BagSums:
  """Sums of the rows of bags of one group, by what they look up.

  A bag is known by 128 bits of hashes with a secret key, drawn by each process.
  """

  def __init__(
    self, group: Group, features: tuple[Feature, ...], nbytes: int
  ) -> None:
    """Makes an empty cache.

    Args:
      group: the rows that are added.
      features: those of the group, in order.
      nbytes: memory to take.
    """
    spans, first = [], 0
    for feature in features:
      if can_keep(feature):
        spans.append((first, first + feature.length))
      first += feature.length
    self._spans = np.array(spans, np.int64).reshape(-1, 2)
    self._keys = np.array([secrets.randbits(64) for _ in range(2)], np.uint64)
    record = _HASH + 4 * group.dim
    self._cache = RecordCache(nbytes // (record + BOOKKEEPING), record)
    self._lock = threading.Lock()

  def find(self, lookups: np.ndarray) -> KnownBags:
    """Finds bags of two lookups and more, and takes out those known.

    Args:
      lookups: i64[B, K], rows of the group, -1 for padding. Bags that are found
        become padding.
    """
    most = len(lookups) * len(self._spans)
    at = np.empty((most, 2), np.int64)
    hashes = np.empty((most, 2), np.int64)
    count = _list(lookups, self._spans, self._keys, at, hashes)
    at, hashes = at[:count], hashes[:count]
    records = np.empty((count, self._cache.record), np.uint8)
    with self._lock:
      tags = np.ascontiguousarray(hashes[:, 0])
      query, missing = self._cache.find(tags, np.arange(count), records)
    here = np.ones(count, bool)
    here[missing] = False
    here &= records[:, :_HASH].copy().view(np.int64)[:, 0] == hashes[:, 1]
    _take_out(lookups, self._spans, at[here])
    return KnownBags(
      at, hashes, query, here, records[here, _HASH:].copy().view(np.float32)
    )

  def give_back(
    self, known: KnownBags, block: np.ndarray, inverse: np.ndarray, used: int
  ) -> None:
    """Adds the vectors of bags to a block, and keeps those that were missing.

    Args:
      known: from `find`.
      block: f32[B * K, D], the rows of what was left, is filled up.
      inverse: i32[B, K], place of each lookup's row. Lookups of bags that were
        found get a place.
      used: U, rows of the block.
    """
    block[used : used + len(known.vectors)] = known.vectors
    at = known.at[known.here]
    inverse[at[:, 0], self._spans[at[:, 1], 0]] = used + np.arange(len(at))
    new = np.flatnonzero(~known.here)
    if not len(new):
      return
    vectors = np.zeros((len(new), block.shape[1]), np.float32)
    _add_up(block, inverse, self._spans, known.at[new], vectors)
    hashes = known.hashes[new]
    records = np.empty((len(new), self._cache.record), np.uint8)
    records[:, :_HASH] = hashes[:, 1:].copy().view(np.uint8)
    records[:, _HASH:] = vectors.view(np.uint8)
    tags = np.ascontiguousarray(hashes[:, 0])
    with self._lock:
      self._cache.put(known.query, tags, np.arange(len(new)), records)


@_kernel
def _list(
  lookups: np.ndarray,
  spans: np.ndarray,
  keys: np.ndarray,
  at: np.ndarray,
  hashes: np.ndarray,
) -> int:
  """Lists and hashes the bags with two lookups or more. Returns their number.

  Args:
    lookups: i64[B, K], -1 for padding.
    spans: i64[F, 2], the columns [first, end) of each feature.
    keys: u64[2], of the two hashes.
    at: out, as in `KnownBags`.
    hashes: out, as in `KnownBags`.
  """
  count = 0
  for i in range(len(lookups)):
    for f in range(len(spans)):
      (one, two), real = keys, 0
      for k in range(spans[f, 0], spans[f, 1]):
        if lookups[i, k] >= 0:
          one, two = hashed(one, lookups[i, k]), hashed(two, lookups[i, k])
          real += 1
      if real > 1:
        at[count, 0], at[count, 1] = i, f
        hashes[count, 0] = np.int64(one >> np.uint64(1))
        hashes[count, 1] = np.int64(two)
        count += 1
  return count


@_kernel
def _take_out(lookups: np.ndarray, spans: np.ndarray, at: np.ndarray) -> None:
  for j in range(len(at)):
    i, f = at[j]
    lookups[i, spans[f, 0] : spans[f, 1]] = -1


@_kernel
def _add_up(
  block: np.ndarray,
  inverse: np.ndarray,
  spans: np.ndarray,
  at: np.ndarray,
  vectors: np.ndarray,
) -> None:
  """Adds up the rows of bags in the order of lookups, as the program does.

  Args:
    block: f32[U, D], rows.
    inverse: i32[B, K], place of each lookup's row, -1 for padding.
    spans: as in `_list`.
    at: the bags, as in `KnownBags`.
    vectors: out, f32[n, D], zeros before.
  """
  for j in range(len(at)):
    i, f = at[j]
    for k in range(spans[f, 0], spans[f, 1]):
      if inverse[i, k] >= 0:
        for d in range(vectors.shape[1]):
          vectors[j, d] += block[inverse[i, k], d]
