"""Towers of features that belong together, for DMT (arXiv 2403.00877).

Two features belong together if the rows that a pilot has learned for them point
in similar directions: their affinity is the absolute cosine. 'coherent' towers
have much affinity within, 'diverse' ones little.

The paper embeds features in a plane and clusters them there. Ours swaps pairs
of features between towers as long as the affinity within towers rises, from
several starts, and keeps the best. Towers have equal numbers of features, but
for one, and if loads are given, the largest load is at most 1.1 times the mean
wherever swaps can reach that.
"""

from jaxtyping import Float
import numpy as np

MOST_LOAD = 1.1
"""Largest load of a tower over the mean, if it can be had."""

Towers = tuple[tuple[int, ...], ...]


def affinity(vectors: Float[np.ndarray, 'F D']) -> Float[np.ndarray, 'F F']:
  """Returns the absolute cosines of features' vectors. Those of zeros are 0."""
  vectors = np.asarray(vectors, np.float64)
  length = np.linalg.norm(vectors, axis=1, keepdims=True)
  directions = vectors / np.where(length > 0, length, 1)
  return np.abs(directions @ directions.T)


def within(towers: Towers, between: Float[np.ndarray, 'F F']) -> float:
  """Returns the mean affinity of two features of one tower."""
  tower = _tower_of(towers)
  pairs = np.triu(tower[:, None] == tower, 1)
  return float(between[pairs].mean()) if pairs.any() else 0.0


def partition(
  between: Float[np.ndarray, 'F F'],
  towers: int,
  loads: Float[np.ndarray, ' F'] | None = None,
  coherent: bool = True,
  starts: int = 20,
) -> Towers:
  """Divides features into towers. Equal arguments give equal towers.

  Args:
    between: affinity of each pair of features.
    towers: T, at most F.
    loads: work of each feature, such as its unique rows in a step. None: only
      the numbers of features are balanced.
    coherent: whether much affinity is wanted within towers, or little.
    starts: random starts. More may find more.

  Returns:
    The features of each tower, ascending. The one with feature 0 comes first.
  """
  features = len(between)
  wanted = between if coherent else -between
  loads = np.zeros(features) if loads is None else np.asarray(loads, float)
  rng = np.random.default_rng(0)
  best: tuple[float, float] | None = None
  for _ in range(starts):
    tower = rng.permutation(np.arange(features) % towers)
    value = _improve(tower, wanted, loads, towers)
    if best is None or value > best:
      best, kept = value, tower
  groups = [np.flatnonzero(kept == number).tolist() for number in range(towers)]
  return tuple(sorted(map(tuple, groups)))


def _tower_of(towers: Towers) -> np.ndarray:
  tower = np.empty(sum(map(len, towers)), int)
  for number, own in enumerate(towers):
    tower[[*own]] = number
  return tower


def _improve(
  tower: np.ndarray, wanted: np.ndarray, loads: np.ndarray, towers: int
) -> tuple[float, float]:
  """Swaps features while that helps. Returns balance and affinity, to compare.

  Balance comes first: it is 0 if no load is over the most, else below.
  """

  def value() -> tuple[float, float]:
    sums = np.bincount(tower, loads, towers)
    over = max(0.0, float(sums.max() - MOST_LOAD * sums.mean()))
    same = tower[:, None] == tower
    return -round(over, 9), round(float(wanted[same].sum()), 9)

  now, changed = value(), True
  while changed:
    changed = False
    for one in range(len(tower)):
      for other in range(one):
        if tower[one] == tower[other]:
          continue
        tower[[one, other]] = tower[[other, one]]
        then = value()
        if then > now:
          now, changed = then, True
        else:
          tower[[one, other]] = tower[[other, one]]
  return now
