"""A chain that ends with `skip_stale` trains the rows of an engine."""

import jax
import numpy as np
import optax
import pytest

from slipstream_jax.data.base import ColumnBatches
from slipstream_jax.training.loop import take_step
from slipstream_jax.training.parts import make_parts, planned
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from slipstream_jax.transforms.skip import skip_stale
from tests.laws.test_placements import ALL, assert_same_bits, everything_after
from tests.support import small

EVERY, WINDOW, THRESHOLD = 8, 3, 0.02
COLUMNS = small.columns(64 * 20)


def recipe(optimizer):
  chain = optax.chain(
    ROW_OPTIMIZERS[optimizer](0.05), skip_stale(THRESHOLD, EVERY, WINDOW)
  )
  return small.recipe()._replace(row_optimizer=chain)


@pytest.mark.parametrize('placement', ['pinned', 'look_ahead_200'])
def test_placement_changes_no_number(placement):
  expected, got = (
    everything_after(name, 'lazy_adam', COLUMNS, steps=20, recipe=recipe)
    for name in ('streamed', placement)
  )
  assert_same_bits(expected, got)


def test_rows_stand_still_by_what_all_rows_did():
  """As a bystander sees it, who compares whole tables."""
  trainer = make_parts(
    recipe('rowwise_adagrad'), ALL['streamed'], small.DENSE, seed=3
  )
  snapshot = touches = stale = None
  stood, moved = 0, 0
  with planned(trainer, ColumnBatches(COLUMNS, 64, shuffle_seed=1)) as batches:
    for step in range(5 * EVERY):
      item = batches.peek()
      before = np.array(trainer.engine.read_back()[0].rows)
      if step and step % EVERY == 0:
        change = np.abs(before - snapshot).max(1)
        stale = (change < np.float32(THRESHOLD)) & (touches > 0)
      if step % EVERY == EVERY - WINDOW:
        snapshot, touches, stale = before, np.zeros(len(before), int), None
      take_step(trainer, item, batches.advance)
      after = trainer.engine.read_back()[0].rows
      rows = np.zeros(len(after), bool)
      rows[item.plans[0].rows] = True
      if touches is not None:
        touches += rows
      held = rows & (False if stale is None else stale)
      changed = (before != after).any(1)
      np.testing.assert_array_equal(changed, rows & ~held)
      stood, moved = stood + held.sum(), moved + changed.sum()
  jax.block_until_ready(trainer.state)
  assert 100 < stood < moved
