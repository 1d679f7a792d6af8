"""Slots and positions as numpy would make them, check them and take them."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.engine import apply
from slipstream_jax.engine.buffers import handing_over, to_device
from slipstream_jax.engine.device_rows import DeviceRows
from slipstream_jax.errors import UserError
from slipstream_jax.placement import bucket, PLACEMENTS, Plan
from slipstream_jax.placement.base import NO_ROWS, plan_with
from slipstream_jax.types import RowBlock, Unique

SEEDS = st.integers(0, 1 << 32)


def slots_of(rng, rows, capacity):
  """Unique slots of some rows, -1 for the others."""
  slots = np.full(rows, -1)
  slots[: min(rows, capacity)] = rng.permutation(capacity)[:rows]
  slots[rng.random(rows) < 0.3] = -1
  return rng.permutation(slots)


@given(SEEDS, st.integers(0, 600), st.integers(1, 900))
def test_padding_is_past_the_last_row_and_never_twice(seed, rows, capacity):
  slots = slots_of(np.random.default_rng(seed), rows, capacity)
  padded = apply.pad_slots(slots, capacity)
  assert padded.dtype == np.int32
  assert len(padded) == bucket(rows) == len(np.unique(padded))
  there = slots >= 0
  np.testing.assert_array_equal(padded[:rows][there], slots[there])
  assert (padded[rows:] >= capacity).all()
  assert (padded[:rows][~there] >= capacity).all()

  places = np.flatnonzero(there)
  positions = apply.pad_positions(places, rows)
  assert len(positions) == bucket(len(places), smallest=1024)
  np.testing.assert_array_equal(positions[: len(places)], places)
  past = np.arange(len(positions) - len(places))
  np.testing.assert_array_equal(positions[len(places) :], rows + past)


@given(SEEDS, st.integers(1, 300), st.integers(1, 400))
def test_a_row_elsewhere_is_refused(seed, rows, capacity):
  rng = np.random.default_rng(seed)
  slots, ids = slots_of(rng, rows, capacity), rng.permutation(1000)[:rows]
  load = np.flatnonzero(rng.random(rows) < 0.4)
  held = np.full(capacity, -1)
  stays = np.setdiff1d(np.flatnonzero(slots >= 0), load)
  held[slots[stays]] = ids[stays]

  def check(held, slots):
    block = RowBlock(np.zeros((capacity, 1), np.float32), ())
    no = np.zeros((0, 1), np.int32)
    plan = Plan(ids, no, slots, load, NO_ROWS, no[:, 0], 0, 0)
    DeviceRows(block, held).check(plan)

  def refuse(at, held, slots):
    said = f'expects row {ids[at]} in slot {slots[at]},'
    with pytest.raises(UserError, match=said):
      check(held, slots)

  check(held, slots)
  if len(stays):
    wrong = rng.choice(stays)
    moved, past = held.copy(), slots.copy()
    moved[slots[wrong]] = 2000
    past[wrong] = capacity
    refuse(wrong, moved, slots)
    refuse(wrong, held, past)
  if len(load):  # its slot is written to, so it must be there
    past = slots.copy()
    past[load[0]] = capacity + rng.integers(1 << 30)
    refuse(load[0], held, past)


@given(SEEDS, st.integers(1, 60), st.sampled_from([0.0, 0.5, 1.0]))
def test_lookups_and_hits_are_counted_one_by_one(seed, rows, absent):
  rng = np.random.default_rng(seed)
  slots = np.where(rng.random(rows) < absent, -1, np.arange(rows))
  inverse = rng.integers(-1, rows, (7, 5)).astype(np.int32)
  plan = plan_with(Unique(np.arange(rows), inverse), slots)
  np.testing.assert_array_equal(plan.load, np.flatnonzero(slots < 0))
  used = inverse[inverse >= 0]
  assert plan.lookups == len(used)
  assert plan.hits == sum(slots[place] >= 0 for place in used)


@given(SEEDS, st.integers(1, 40))
def test_pinned_slots_are_places_among_the_hot_rows(seed, num_hot):
  rng = np.random.default_rng(seed)
  hot = rng.integers(0, num_hot + 1, 30).astype(np.int32)
  batch = Unique(np.arange(30), np.zeros((3, 2), np.int32), hot)
  _, plan = PLACEMENTS['pinned'].plan(num_hot, [batch])
  expected = np.where(hot < num_hot, hot, -1)
  np.testing.assert_array_equal(plan.slots, expected)


def test_slots_come_back_from_the_program_that_reads_by_them():
  rng = np.random.default_rng(0)
  values = rng.random((900, 4), np.float32)
  block = to_device(RowBlock(values, ()))
  for _ in range(5):
    slots = slots_of(rng, 200, 900)
    padded = apply.pad_slots(slots, 900)
    with handing_over():
      rows, handed = apply.gather_at(block, padded)
    np.testing.assert_array_equal(np.asarray(handed), padded)
    wanted = np.zeros((len(padded), 4), np.float32)
    wanted[:200] = np.where(slots[:, None] < 0, 0, values[slots])
    np.testing.assert_array_equal(np.asarray(rows.rows), wanted)
