"""Slots and positions as numpy would make them, check them and take them."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.engine import apply
from slipstream_jax.engine.device_rows import DeviceRows
from slipstream_jax.errors import UserError
from slipstream_jax.placement import bucket, Plan
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.types import RowBlock

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
