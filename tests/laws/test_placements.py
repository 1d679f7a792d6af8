"""Laws that every placement obeys."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.placement import cached, EVICTIONS, PLACEMENTS
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.host_table import unique_rows
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from tests.support import small
from tests.support.small import assert_same_bits, BATCH

placements = pytest.mark.parametrize('name', PLACEMENTS)
# Room for fewer rows than a batch has, for hardly more, and for all of them.
CACHES = {
  f'{name}_{rows}': cached(rows, name, look_ahead=3)
  for name in EVICTIONS
  for rows in (20, 100, 10_000)
}
ALL = PLACEMENTS | CACHES


def everything_after(
  placement,
  optimizer,
  columns,
  steps=30,
  depth=2,
  workers=None,
  recipe=small.recipe,
  storage=MEMORY,
  **model,
):
  """Of a small recipe, with arguments of its own."""
  trainer = make_parts(
    recipe(optimizer, **model),
    ALL[placement],
    small.DENSE,
    seed=3,
    hot=small.hot(columns),
    storage=storage,
  )
  source = ColumnBatches(columns, BATCH, shuffle_seed=1)
  batches = planned(trainer, source, depth, workers)
  records = list(train(trainer, batches, steps))
  batches.close()
  assert len(records) == steps
  return *small.everything(trainer), [record.loss for record in records]


@pytest.mark.parametrize(
  ('optimizer', 'length'), [*zip(ROW_OPTIMIZERS, [None, 2] * 2, strict=True)]
)
def test_placement_changes_no_number(optimizer, length):
  columns = small.columns(BATCH * 20, length=length)
  lookups = columns.lookups[:BATCH]
  assert len(np.unique(lookups)) < lookups.size  # there are duplicates
  are_the_same(
    everything_after(name, optimizer, columns, length=length)
    for name in PLACEMENTS
  )


def are_the_same(runs):
  first, *others = runs
  for other in others:
    assert_same_bits(first, other)


@pytest.fixture(scope='module')
def streamed():
  columns = small.columns(BATCH * 20, length=2)
  return columns, everything_after('streamed', 'adagrad', columns, length=2)


@pytest.mark.parametrize('name', CACHES)
def test_no_cache_changes_a_number(name, streamed):
  columns, expected = streamed
  found = everything_after(name, 'adagrad', columns, length=2)
  assert_same_bits(expected, found)


def test_placement_changes_no_number_of_batch_normalization():
  columns = small.columns(BATCH * 20)
  are_the_same(
    everything_after(name, 'adagrad', columns, 20, normalization='batch')
    for name in PLACEMENTS
  )


@pytest.mark.parametrize('name', ['streamed', 'pinned', 'look_ahead_100'])
def test_prefetch_depth_and_workers_change_no_number(name):
  columns = small.columns(BATCH * 7)
  are_the_same(
    everything_after(name, 'adagrad', columns, 20, *ahead)
    for ahead in ((0, 1), (1, 1), (8, 1), (2, 2), (1, 4))
  )


@placements
@given(
  lookups=hnp.arrays(
    np.int64,
    hnp.array_shapes(min_dims=2, max_dims=3),
    elements=st.integers(-1, 30),
  ),
  frozen=st.none() | hnp.arrays(bool, 12),
)
def test_plan_covers_the_batch(name, lookups, frozen):
  placement, hot = PLACEMENTS[name], hot_rows(np.arange(5, 29, 2), 31)
  state = placement.freeze(placement.start(31, hot, None), frozen)
  batch = unique_rows(lookups, 31, hot)
  state, first = placement.plan(state, [batch])
  _, plan = placement.plan(state, [batch])
  if frozen is not None and placement.copies_frozen:
    # The device gets its copies with the first step that uses their rows.
    np.testing.assert_array_equal(first.slots, plan.slots)
    np.testing.assert_array_equal(first.load, np.arange(len(first.rows)))
    np.testing.assert_array_equal(first.store, plan.store)
    assert first.hits == 0
  keeps = placement.keeps(31, hot)
  slot_rows = np.arange(31) if keeps is None else keeps
  if frozen is not None and placement.copies_frozen:
    slot_rows = np.where(frozen, hot.rows, -9)
  used = set(lookups[lookups >= 0].tolist())
  assert sorted(plan.rows.tolist()) == sorted(used)
  has_slot = plan.slots >= 0
  np.testing.assert_array_equal(
    slot_rows[plan.slots[has_slot]], plan.rows[has_slot]
  )
  there = np.isin(plan.rows, slot_rows)
  np.testing.assert_array_equal(has_slot, there)
  np.testing.assert_array_equal(plan.load, np.flatnonzero(~there))
  np.testing.assert_array_equal(plan.store, plan.load)
  real = lookups >= 0
  assert plan.lookups == real.sum()
  assert plan.hits == np.isin(lookups[real], slot_rows).sum()
  np.testing.assert_array_equal(plan.rows[plan.inverse[real]], lookups[real])
  assert (plan.inverse[~real] == -1).all()


@placements
def test_counts_equal_a_brute_force_count(name):
  columns = small.columns(BATCH * 5, length=2)
  hot = small.hot(columns)
  trainer = make_parts(
    small.recipe('adagrad', length=2), PLACEMENTS[name], small.DENSE, hot=hot
  )
  with planned(trainer, ColumnBatches(columns, BATCH), 2) as batches:
    counters = list(train(trainer, batches, 5))[-1].counters
  on_device = {
    'resident': set(range(sum(small.ROWS))),
    'streamed': set(),
    'swapped': set(),  # under a schedule that never says so
    'pinned': set(hot.rows.tolist()),
  }[name]
  lookups = hits = moved = 0
  for start in range(0, 5 * BATCH, BATCH):
    part = columns.lookups[start : start + BATCH]
    used = part[part >= 0].tolist()
    lookups += len(used)
    hits += sum(row in on_device for row in used)
    moved += len(set(used) - on_device)
  row_bytes = 4 * (8 + 8)  # the row and Adagrad's accumulators
  assert counters.lookups == lookups
  assert counters.hits == hits
  assert counters.rows_loaded == moved + len(on_device)  # once, at the start
  assert counters.rows_stored == moved
  assert counters.bytes_loaded == counters.rows_loaded * row_bytes
  assert counters.bytes_stored == counters.rows_stored * row_bytes
  assert counters.examples_trained == counters.examples_seen == 5 * BATCH
