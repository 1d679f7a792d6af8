"""What a placement would move: its own plans, added up, without a device.

A plan is pure, so the planner is the simulator: the counts are those that a
run over the same batches makes, exactly.
"""

from collections.abc import Sequence
import time
from typing import NamedTuple

import numpy as np

from slipstream_jax.placement.base import Placement
from slipstream_jax.types import HotRows, Unique


class Moved(NamedTuple):
  """What a placement does in a step, in the mean over many."""

  hit_rate: float
  """Share of the lookups whose row was on the device before the step."""
  rows_loaded: float
  rows_stored: float
  plan_ms: float
  """Median time of making a plan, the unique rows given."""


def simulate(
  placement: Placement,
  batches: Sequence[Unique],
  num_rows: int,
  hot: HotRows | None,
) -> Moved:
  """Plans all batches, from the placement's start on.

  Args:
    placement: any.
    batches: at least one, found with `hot`.
    num_rows: N, rows of all tables.
    hot: what the device starts with, if any were chosen.
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
