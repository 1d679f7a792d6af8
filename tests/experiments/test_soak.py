"""Many short runs through caches of several sizes: nothing may pile up.

pytest -m slow tests/experiments/test_soak.py
SOAK_RUNS=3000 pytest -m slow tests/experiments/test_soak.py   # an hour
"""

import gc
import os
import random
import resource
import threading

import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.placement import cached, EVICTIONS
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from tests.support import small

RUNS, WARM_UP = int(os.environ.get('SOAK_RUNS', '300')), 100
CAPACITIES = (20, 200, 1000)  # few: each has programs of its own
MOST_GROWTH = 64 << 20  # bytes; a run's tables and threads would be 10 times it


def resident_bytes():
  """Of this process now, not at its peak."""
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
def test_neither_memory_nor_threads_pile_up():
  columns = small.columns(64 * 30)
  hot = small.hot(columns)
  rng = random.Random(0)
  threads, after_warm_up = threading.active_count(), 0
  for run in range(RUNS):
    eviction = rng.choice(list(EVICTIONS))
    placement = cached(rng.choice(CAPACITIES), eviction, rng.randint(0, 8))
    trainer = make_parts(
      small.recipe('adagrad'), placement, small.DENSE, hot=hot
    )
    source = ColumnBatches(columns, 64, shuffle_seed=run)
    with planned(trainer, source, rng.randint(0, 8)) as batches:
      for _ in train(trainer, batches, rng.randint(1, 39)):
        pass
    assert threading.active_count() <= threads
    gc.collect()
    if run == WARM_UP:  # by now every shape was compiled
      after_warm_up = resident_bytes()
  assert resident_bytes() < after_warm_up + MOST_GROWTH
