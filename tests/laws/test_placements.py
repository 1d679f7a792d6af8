"""Laws that every member of PLACEMENTS obeys."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import numpy as np
import pytest

from slipstream_jax.data.batches import ColumnBatches
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.store.host_table import distinct
from slipstream_jax.train.loop import create_trainer, planned, train
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from tests import examples

placements = pytest.mark.parametrize('name', PLACEMENTS)


def everything_after(placement, optimizer, columns, steps=50, depth=2):
  trainer = create_trainer(
    examples.recipe(optimizer), PLACEMENTS[placement], examples.DENSE, seed=3
  )
  source = ColumnBatches(columns, 64, shuffle_seed=1)
  batches = planned(trainer, source, depth)
  records = list(train(trainer, batches, steps))
  batches.close()
  assert len(records) == steps
  table = jax.tree.map(np.array, trainer.engine.read_back())
  state = jax.tree.map(np.asarray, jax.device_get(trainer.state))
  return table, state, [record.loss for record in records]


def assert_same_bits(one, other):
  leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
  assert len(leaves) == len(others) > 0
  for a, b in zip(leaves, others, strict=True):
    np.testing.assert_array_equal(a, b, strict=not np.isscalar(a))


@pytest.mark.parametrize('length', [None, 3], ids=['one_hot', 'multi_hot'])
@pytest.mark.parametrize('optimizer', ROW_OPTIMIZERS)
def test_placement_changes_no_number(optimizer, length):
  columns = examples.columns(64 * 20, length=length)
  lookups = columns.lookups[:64]
  assert len(np.unique(lookups)) < lookups.size  # there are duplicates
  first, *others = (
    everything_after(name, optimizer, columns) for name in PLACEMENTS
  )
  for other in others:
    assert_same_bits(first, other)


@placements
def test_prefetch_depth_changes_no_number(name):
  columns = examples.columns(64 * 7)
  runs = [
    everything_after(name, 'adagrad', columns, 20, depth) for depth in (0, 1, 8)
  ]
  assert_same_bits(runs[0], runs[1])
  assert_same_bits(runs[0], runs[2])


@placements
@given(
  lookups=hnp.arrays(
    np.int64,
    hnp.array_shapes(min_dims=2, max_dims=3),
    elements=st.integers(-1, 30),
  )
)
def test_plan_covers_the_batch(name, lookups):
  placement = PLACEMENTS[name]
  batch = distinct(lookups, 31)
  _, plan = placement.plan(placement.start(40), [batch])
  kept = placement.device_rows(40)
  used = set(lookups[lookups >= 0].tolist())
  assert set(plan.rows.tolist()) == used
  assert set(plan.load.tolist()) <= used
  assert set(plan.store.tolist()) <= used
  assert plan.lookups == (lookups >= 0).sum() >= plan.hits
  real = lookups >= 0
  np.testing.assert_array_equal(plan.rows[plan.inverse[real]], lookups[real])
  assert (plan.inverse[~real] == -1).all()
  if kept:
    assert len(plan.slots) == len(plan.rows)
    assert ((plan.slots >= 0) & (plan.slots < kept)).all()
    assert len(set(plan.slots.tolist())) == len(plan.slots)
  else:
    assert set(plan.load.tolist()) == set(plan.store.tolist()) == used


@placements
def test_counts_equal_a_brute_force_count(name):
  columns = examples.columns(64 * 5, length=2)
  trainer = create_trainer(
    examples.recipe('adagrad'), PLACEMENTS[name], examples.DENSE
  )
  batches = planned(trainer, ColumnBatches(columns, 64), 2)
  counters = list(train(trainer, batches, 5))[-1].counters
  batches.close()
  lookups = moved = 0
  for start in range(0, 320, 64):
    part = columns.lookups[start : start + 64]
    lookups += int((part >= 0).sum())
    moved += len(set(part[part >= 0].tolist()))
  on_device = name == 'resident'
  row_bytes = 4 * (8 + 8)  # the row and Adagrad's accumulators
  assert counters.lookups == lookups
  assert counters.hits == (lookups if on_device else 0)
  assert counters.rows_loaded == (0 if on_device else moved)
  assert counters.rows_stored == counters.rows_loaded
  assert counters.bytes_loaded == counters.rows_loaded * row_bytes
  assert counters.bytes_stored == counters.bytes_loaded
  assert counters.inputs_trained == counters.inputs_seen == 320
