"""Simulates what a placement moves, by its own plans, without a device.

Plans are pure, so the counts equal those of a run over the same batches.
"""

from collections.abc import Sequence
import time
from typing import NamedTuple

import numpy as np

from slipstream_jax.placement.base import Placement
from slipstream_jax.types import HotRows, Unique


class Moved(NamedTuple):
  """Means over the steps of a simulation."""

  hit_rate: float
  """Share of the lookups whose row was on the device before the step."""
  rows_loaded: float
  rows_stored: float
  plan_ms: float
  """Median milliseconds per plan, without finding the unique rows."""


def simulate(
  placement: Placement,
  batches: Sequence[Unique],
  num_rows: int,
  hot: HotRows | None,
) -> Moved:
  """Plans all batches from the placement's start and averages what they move.

  Args:
    placement: any placement.
    batches: at least one, made with `hot`.
    num_rows: N, rows of all tables.
    hot: the hot rows, if any were chosen.
  """
  state = placement.start(num_rows, hot, None)
  counts, seconds = [], []
  for step in range(len(batches)):
    upcoming = batches[step : step + 1 + placement.look_ahead]
    started = time.perf_counter()
    state, plan = placement.plan(state, upcoming)
    seconds.append(time.perf_counter() - started)
    stored = len(plan.store) + len(plan.evict)
    counts.append((plan.lookups, plan.hits, len(plan.load), stored))
  lookups, hits, loaded, stored = np.sum(counts, axis=0)
  return Moved(
    float(hits / max(lookups, 1)),
    float(loaded / len(batches)),
    float(stored / len(batches)),
    1e3 * float(np.median(seconds)),
  )
