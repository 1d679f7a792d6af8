"""Measures how fast the engine alone finds the rows of a batch."""

from collections.abc import Iterator
import os
from typing import Any

import numpy as np

from experiments.bench.contest import seconds_of
from slipstream_jax.placement import bucket, PLACEMENTS
from slipstream_jax.store import host_table
from slipstream_jax.store.base import FirstRows
from slipstream_jax.store.memory import MemoryStore
from slipstream_jax.types import RowBlock

_SIZES = (1_000_000, 10_000_000, 100_000_000, 200_000_000)  # rows of tables
_EXPONENT = 1.05
_DIM = 16


def engine_speeds() -> Iterator[dict[str, Any]]:
  """Yields lookups/s by table size, up to 4/5 of the free memory."""
  free = os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  for size in _SIZES:
    if size == _SIZES[0] or 5 * _DIM * size <= free:
      yield {'rows': size, 'lookups_per_s': engine_speed(size)}


def engine_speed(size: int, batch: int = 1 << 16, turns: int = 12) -> float:
  """Returns lookups per second, deduped, planned and gathered by one thread.

  Args:
    size: rows of the table, of D = 16, f32. They are filled, to take memory.
    batch: lookups of a batch, with ids by Zipf's law.
    turns: batches to take the median of.
  """
  rng = np.random.default_rng(0)
  rows = np.empty((size, _DIM), np.float32)
  rows.fill(1)
  table = RowBlock(rows, ())
  first = FirstRows(size, lambda some: RowBlock(rows[some], ()), lambda: table)
  store = MemoryStore(first)
  store.reset(first)

  def find(lookups: np.ndarray) -> None:
    unique = host_table.unique_rows(lookups, size)
    _, plan = PLACEMENTS['streamed'].plan(None, [unique])
    store.gather(plan.rows[plan.load], bucket(len(plan.load)))

  seconds = [
    seconds_of(find, zipf(rng, size, batch).reshape(-1, 32))
    for _ in range(turns + 2)
  ]
  return batch / float(np.median(seconds[2:]))


def zipf(rng: np.random.Generator, size: int, count: int) -> np.ndarray:
  """Draws ids in [0, size) by a bounded Zipf law, i64[count].

  Inverts the law's continuous version. Popular ids are scattered.
  """
  power = 1 - _EXPONENT
  uniform = rng.random(count)
  ranks = (1 + uniform * ((size + 1.0) ** power - 1)) ** (1 / power)
  # Popular rows of real tables are not side by side.
  scattered = (ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> 11
  return (scattered % np.uint64(size)).astype(np.int64)
