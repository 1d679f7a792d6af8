"""A device budget in bytes, split over groups of tables by their curves.

Each group's curve says what a cache of each capacity would load. Bytes are
given where the next one saves most: along the lower convex hull of each curve,
which is the best that capacities on the hulls can do together.
"""

from collections.abc import Sequence
import itertools
from typing import NamedTuple

import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.placement.base import Placement
from slipstream_jax.placement.cached import cached
from slipstream_jax.placement.curves import Curve
from slipstream_jax.placement.streamed import STREAMED


class _Step(NamedTuple):
  """From one corner of a hull to the next."""

  saved: float
  """Bytes less to load in a batch, for each byte more to keep."""
  group: int
  first: int
  """Rows kept before."""
  rows: int
  """And after."""


def split_budget(
  curves: Sequence[Curve], row_bytes: Sequence[int], budget_bytes: int
) -> tuple[int, ...]:
  """Rows that the device keeps of each group.

  Args:
    curves: per group, of `lru_curve` or `static_curve` over its own rows.
    row_bytes: per group, of a row with the row state that moves with it.
    budget_bytes: device memory for all of them.

  Returns:
    Capacities of at most `budget_bytes` together; 0 where nothing is worth it.

  Raises:
    UserError: the budget is negative, or there are not as many sizes as
      curves.
  """
  if len(curves) != len(row_bytes) or min(row_bytes, default=0) < 1:
    raise UserError(
      'each curve needs the bytes of a row, at least 1',
      got=f'{len(curves)} curves and sizes {list(row_bytes)}',
      where='split_budget, row_bytes',
      hint='give one of each for every group of tables',
    )
  if budget_bytes < 0:
    raise UserError(
      'a budget must be at least 0 bytes',
      got=budget_bytes,
      where='split_budget, budget_bytes',
      hint='give the device memory that rows may take',
    )
  capacities = [0] * len(curves)
  steps = [
    step for group, curve in enumerate(curves) for step in _hull(group, curve)
  ]
  left = budget_bytes
  # Of one hull, each step saves less than the one before: in this order none
  # comes before its own.
  for step in sorted(steps, key=lambda step: (-step.saved, step[1:])):
    size = row_bytes[step.group]
    rows = min(step.rows - step.first, left // size)
    # What did not fit goes to those that save less.
    if capacities[step.group] == step.first:
      capacities[step.group] += rows
      left -= rows * size
  return tuple(capacities)


def _hull(group: int, curve: Curve) -> list[_Step]:
  """The lower convex hull of loads over capacities, from no row on."""
  capacities = np.concatenate([[0], curve.capacities])
  loads = np.concatenate([[curve.rows_used], curve.loads])
  corners: list[int] = []
  for k in range(len(capacities)):
    while len(corners) > 1 and _is_above(capacities, loads, corners, k):
      corners.pop()
    corners.append(k)
  steps = []
  for a, b in itertools.pairwise(corners):
    rows = capacities[b] - capacities[a]
    # A row takes as many bytes on the link as it does where it is kept: so
    # bytes saved for a byte are rows saved for a row.
    saved = (loads[a] - loads[b]) / rows
    if saved > 0:
      first, last = int(capacities[a]), int(capacities[b])
      steps.append(_Step(float(saved), group, first, last))
  return steps


def _is_above(
  x: np.ndarray, y: np.ndarray, corners: Sequence[int], last: int
) -> bool:
  """Whether the last corner lies on or above the line from that before it."""
  first, middle = corners[-2:]
  left = (y[middle] - y[first]) * (x[last] - x[first])
  right = (y[last] - y[first]) * (x[middle] - x[first])
  return bool(left >= right)


def caches(
  capacities: Sequence[int],
  eviction: str = 'look_ahead',
  look_ahead: int = 16,
) -> tuple[Placement, ...]:
  """A cache of each capacity; where it is 0, rows are streamed.

  Args:
    capacities: per group, as of `split_budget`.
    eviction: as in `cached`.
    look_ahead: as in `cached`.

  Raises:
    UserError: as `cached`.
  """
  return tuple(
    cached(rows, eviction, look_ahead) if rows else STREAMED
    for rows in capacities
  )
