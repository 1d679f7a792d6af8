"""Learned hash functions: rare ids share a row with ids that behave alike.

A pilot model with few dimensions is trained on an earlier part of the log. The
most frequent ids keep rows of their own. The others are clustered by their
vectors in the pilot model, and a cluster shares a row.
Source: arXiv 2203.15837. It clusters by frequency as well, which had no effect
on our data.
"""

import math
from typing import Any

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.columns.ids import raw_ids
from slipstream_jax.errors import check_seed, check_whole, UserError
from slipstream_jax.tables import as_array
from slipstream_jax.vocabulary.counted import by_count, Vocabulary

Points = Float[np.ndarray, 'n D']
Weights = Float[np.ndarray, ' n']
Centers = Float[np.ndarray, 'k D']
_WHERE = 'learned_hash, '
_AT_ONCE = 512  # clusters of more are clustered in two levels
_ROUNDS = 20
_SAMPLE = 16  # points for each of the first centers
_DISTANCES = 1 << 22  # computed at once


def learned_hash(
  words: Vocabulary,
  counts: Any,
  vectors: Any,
  size: int,
  *,
  private: float = 0.75,
  seed: int = 0,
) -> Vocabulary:
  """Returns a vocabulary of fewer rows, in which similar rare ids share one.

  Ids that `words` does not know get one of the shared rows by a hash. Fit it on
  examples that come before those to train on.

  Args:
    words: the vocabulary of the pilot model, without `hash_rows`.
    counts: lookups of each row of `words`, integers [R].
    vectors: the pilot model's embeddings, floats [R, D], such as
      `trainer.rows('item')`.
    size: rows in total. If `words` has no more, it is returned.
    private: share of the rows that belong to one id each, in [0, 1). The most
      frequent ids have them.
    seed: of the centers that clustering starts from.

  Raises:
    UserError: an argument has another shape or is out of range.
  """
  _check(words, size, private, seed)
  counts, vectors = _arrays(words.size, counts, vectors)
  if size >= words.size:
    return words
  own = int(private * (size - 1))
  order = by_count(counts[words.known_rows])
  rare = words.known_rows[order[own:]]
  weights = np.maximum(counts[rare], 1).astype(np.float64)
  points = vectors[rare].astype(np.float64)
  drawn = np.random.default_rng(seed)
  clusters = cluster(points, weights, size - 1 - own, drawn)
  known = raw_ids(words.known[order], _WHERE + 'words')
  shared = (1 + clusters).astype(np.int32)
  return Vocabulary(known, size - 1 - own, size, shared)


def _check(words: Any, size: Any, private: Any, seed: Any) -> None:
  """Checks the arguments of `learned_hash` that are no arrays."""
  if not isinstance(words, Vocabulary):
    raise UserError(
      'a learned hash is made of the vocabulary of a pilot model',
      got=type(words).__name__,
      where=_WHERE + 'words',
      hint='fit one with Vocabulary.fit(ids)',
    )
  check_whole(size, 2, _WHERE + 'size', 'give row 0 and a row to share')
  check_seed(seed, _WHERE + 'seed')
  if not (isinstance(private, int | float | np.floating) and 0 <= private < 1):
    raise UserError(
      'a share of rows must be a number in [0, 1)',
      got=repr(private),
      where=_WHERE + 'private',
      hint='leave it out for 0.75',
    )
  if words.first_row > 1:
    raise UserError(
      'a pilot model must have a row for each id',
      got=f'hash_rows {words.first_row - 1}',
      where=_WHERE + 'words',
      hint='fit the vocabulary without hash_rows',
    )


def _arrays(
  rows: int, counts: Any, vectors: Any
) -> tuple[np.ndarray, np.ndarray]:
  """Returns counts [R] and vectors [R, D] as arrays."""
  counts = as_array(counts, _WHERE + 'counts')
  good = counts.shape == (rows,) and counts.dtype.kind in 'iu'
  good = good and bool(counts.min() >= 0)
  rule = f'integers from 0 on, [{rows}]'
  _check_array(good, rule, counts, 'counts')
  vectors = as_array(vectors, _WHERE + 'vectors')
  good = vectors.dtype.kind == 'f' or vectors.dtype.name == 'bfloat16'
  good = good and vectors.ndim == 2 and len(vectors) == rows
  good = good and bool(np.isfinite(vectors).all())
  rule = f'finite floats [{rows}, D]'
  _check_array(good, rule, vectors, 'vectors')
  return counts, vectors


def _check_array(good: bool, rule: str, array: np.ndarray, name: str) -> None:
  if not good:
    raise UserError(
      f'{name} must be {rule}, one for each row of words',
      got=f'{array.dtype}{list(array.shape)}',
      where=_WHERE + name,
      hint='count words.rows(ids), and give trainer.rows(table)',
    )


def cluster(
  points: Points, weights: Weights, clusters: int, rng: np.random.Generator
) -> Int[np.ndarray, ' n']:
  """Returns the cluster of each point by weighted k-means. None is empty.

  With many clusters, a few large ones come first, and each is divided.

  Args:
    points: to cluster, at least as many as clusters.
    weights: positive.
    clusters: k.
    rng: draws the first centers.
  """
  if clusters <= _AT_ONCE:
    return _k_means(points, weights, clusters, rng)
  large = _k_means(points, weights, math.isqrt(clusters), rng)
  order = np.argsort(large, kind='stable')
  members = np.split(order, np.cumsum(np.bincount(large))[:-1])
  spread = [_spread(points[own], weights[own]) for own in members]
  sizes = np.array([len(own) for own in members])
  parts = _allotted(np.array(spread), sizes, clusters)
  of_point, first = np.empty(len(points), np.int64), 0
  for own, part in zip(members, parts.tolist(), strict=True):
    of_point[own] = first + cluster(points[own], weights[own], part, rng)
    first += part
  return of_point


def _spread(points: Points, weights: Weights) -> float:
  """Returns the weighted sum of squared distances to the mean."""
  around = points - np.average(points, axis=0, weights=weights)
  return float(weights @ np.square(around).sum(axis=1))


def _allotted(
  spread: Weights, sizes: Int[np.ndarray, ' n'], clusters: int
) -> Int[np.ndarray, ' n']:
  """Returns how many clusters each part gets, from 1 up to its size.

  They are proportional to the spread as far as sizes allow.
  """
  parts = np.ones(len(sizes), np.int64)
  while left := clusters - int(parts.sum()):
    room = sizes - parts
    wanted = spread * (room > 0)
    if not wanted.any():
      wanted = room.astype(np.float64)
    more = np.minimum((left * (wanted / wanted.sum())).astype(np.int64), room)
    if not more.any():
      first = np.argsort(-wanted, kind='stable')[:left]
      more[first] = wanted[first] > 0
    parts += more
  return parts


def _k_means(
  points: Points, weights: Weights, clusters: int, rng: np.random.Generator
) -> Int[np.ndarray, ' n']:
  if clusters >= len(points):
    return np.arange(len(points))
  centers = _first_centers(points, weights, clusters, rng)
  before = None
  for _ in range(_ROUNDS):
    of_point, distances = _nearest(points, centers)
    _fill(of_point, distances * weights, clusters)
    if before is not None and (of_point == before).all():
      break
    before = of_point
    whole = np.bincount(of_point, weights, clusters)
    for axis, column in enumerate(points.T):
      sums = np.bincount(of_point, weights * column, clusters)
      centers[:, axis] = sums / whole
  return of_point


def _first_centers(
  points: Points, weights: Weights, clusters: int, rng: np.random.Generator
) -> Centers:
  """Draws centers by greedy k-means++, from a sample of the points.

  Source: Arthur and Vassilvitskii, SODA 2007, section 2.2. Each is the best of
  several that are drawn by their weighted squared distance to those before.
  """
  sample = min(len(points), _SAMPLE * clusters)
  some = np.sort(rng.permutation(len(points))[:sample])
  points, weights = points[some], weights[some]
  tries = 2 + int(math.log(clusters))
  distances = np.full(len(points), np.inf)
  centers = np.empty((clusters, points.shape[1]))
  chances = np.cumsum(weights)
  for number in range(clusters):
    drawn = np.searchsorted(chances, rng.random(tries) * chances[-1])
    drawn = np.minimum(drawn, len(points) - 1)
    apart = np.square(points[drawn][:, None] - points).sum(axis=2)
    apart = np.minimum(apart, distances)
    best = int(np.argmin(apart @ weights))
    centers[number], distances = points[drawn[best]], apart[best]
    chances = np.cumsum(weights * distances)
  return centers


def _nearest(
  points: Points, centers: Centers
) -> tuple[Int[np.ndarray, ' n'], Weights]:
  """Returns the nearest center of each point, and the squared distances."""
  of_point = np.empty(len(points), np.int64)
  distances = np.empty(len(points))
  squares = np.square(centers).sum(axis=1)
  some = max(1, _DISTANCES // len(centers))
  for start in range(0, len(points), some):
    part = slice(start, start + some)
    apart = squares - 2 * points[part] @ centers.T
    of_point[part] = apart.argmin(axis=1)
    least = apart.min(axis=1) + np.square(points[part]).sum(axis=1)
    distances[part] = np.maximum(least, 0)
  return of_point, distances


def _fill(
  of_point: Int[np.ndarray, ' n'], costs: Weights, clusters: int
) -> None:
  """Moves the points that cost most into the empty clusters, one into each."""
  members = np.bincount(of_point, minlength=clusters)
  empty = np.flatnonzero(members == 0).tolist()
  for point in np.argsort(-costs, kind='stable') if empty else ():
    if not empty:
      break
    if members[of_point[point]] > 1:
      members[of_point[point]] -= 1
      of_point[point] = empty.pop()
