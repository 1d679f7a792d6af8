"""The engine by itself: what placements move, and how fast rows are found.

Counts need no device: plans are pure, so the planner is the simulator.
"""

from collections.abc import Iterator, Sequence
import itertools
import os
import time
from typing import NamedTuple

import ml_collections
import numpy as np

from experiments.common import build
from slipstream_jax.data.source import Dataset
from slipstream_jax.placement import (
  bucket,
  cached,
  EVICTIONS,
  Placement,
  PLACEMENTS,
)
from slipstream_jax.placement.sizing import simulate
from slipstream_jax.selection.hot import hot_rows, popular_rows
from slipstream_jax.store import host_table
from slipstream_jax.store.base import FirstRows
from slipstream_jax.store.memory import MemoryStore
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.types import Lookups, RowBlock, RowIds

CAPACITIES = (0.001, 0.01, 0.015, 0.05)
"""Of the caches, as shares of all rows."""
LOOK_AHEADS = (16, 128)
"""Batches."""
SIZES = [1_000_000, 10_000_000, 100_000_000, 200_000_000]
"""Rows of the tables that the engine alone is tried on."""
_EXPONENT = 1.05
_DIM = 16


class MovedBy(NamedTuple):
  """What a placement moves in a step, in the mean over many."""

  placement: str
  policy: str
  """Who leaves a cache, and how many batches it looks ahead."""
  capacity: float
  """Share of all rows that the device keeps."""
  hit_rate: float
  rows_loaded: float
  rows_stored: float
  plan_ms: float


def moved_by_placements(
  config: ml_collections.ConfigDict, data: Dataset, num_rows: int, steps: int
) -> Iterator[MovedBy]:
  """Counts of every placement, capacity and policy, on the same batches."""
  size = config.data.batch_size
  counts = build.row_counts(config, data, num_rows)
  source = data.train(size)
  lookups = [batch.lookups for batch in itertools.islice(source, steps)]
  source.close()
  (size_of_row,) = compiled_of(build.recipe(config, data, steps)).row_bytes
  hot = popular_rows(counts, config.hot.bytes, size_of_row)
  shares = {'resident': 1.0, 'streamed': 0.0, 'pinned': len(hot) / num_rows}
  kept = {name: (PLACEMENTS[name], '', share) for name, share in shares.items()}
  yield from _moved(kept, lookups, hot, num_rows)
  for share in CAPACITIES:
    rows = round(share * num_rows)
    caches = {
      f'{name} {ahead}'.removesuffix(' 0'): cached(rows, name, ahead)
      for name in EVICTIONS
      for ahead in (LOOK_AHEADS if name == 'look_ahead' else (0,))
    }
    kept = {name: (cache, name, share) for name, cache in caches.items()}
    yield from _moved(kept, lookups, popular_rows(counts, rows, 1), num_rows)


def _moved(
  placements: dict[str, tuple[Placement, str, float]],
  lookups: Sequence[Lookups],
  hot: RowIds,
  num_rows: int,
) -> Iterator[MovedBy]:
  chosen = hot_rows(hot, num_rows)
  batches = [
    host_table.unique_rows(batch, num_rows, chosen) for batch in lookups
  ]
  for placement, policy, share in placements.values():
    moved = simulate(placement, batches, num_rows, chosen)
    yield MovedBy(placement.name, policy, share, *moved)


def sizes_that_fit() -> list[int]:
  """Those of `SIZES` whose tables take 4/5 of the free memory at most."""
  free = os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  return [size for size in SIZES if 5 * _DIM * size <= free] or SIZES[:1]


def engine_speed(size: int, batch: int = 1 << 16, turns: int = 12) -> float:
  """Lookups per second, deduped, planned and gathered, by one thread.

  Args:
    size: rows of the table, of D = 16, f32; filled, so that it takes memory.
    batch: lookups of a batch, ids by Zipf's law.
    turns: batches to take the median of.
  """
  rng = np.random.default_rng(0)
  rows = np.empty((size, _DIM), np.float32)
  rows.fill(1)
  streamed = PLACEMENTS['streamed']
  table = RowBlock(rows, ())
  first = FirstRows(size, lambda some: RowBlock(rows[some], ()), lambda: table)
  store = MemoryStore(first)
  store.reset(first)
  seconds = []
  for _ in range(turns + 2):
    lookups = zipf(rng, size, batch).reshape(-1, 32)
    started = time.perf_counter()
    unique = host_table.unique_rows(lookups, size)
    _, plan = streamed.plan(None, [unique])
    store.gather(plan.rows[plan.load], bucket(len(plan.load)))
    seconds.append(time.perf_counter() - started)
  return batch / float(np.median(seconds[2:]))


def zipf(rng: np.random.Generator, size: int, count: int) -> np.ndarray:
  """Ids in [0, size) of bounded Zipf, i64[count]; the popular ones scattered.

  By inverting the law's continuous kin.
  """
  power = 1 - _EXPONENT
  uniform = rng.random(count)
  ranks = (1 + uniform * ((size + 1.0) ** power - 1)) ** (1 / power)
  # Popular rows of real tables do not lie side by side.
  scattered = (ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> 11
  return (scattered % np.uint64(size)).astype(np.int64)
