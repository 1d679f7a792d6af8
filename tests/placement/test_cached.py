"""Plans of the device cache: against brute force, and carried out."""

import importlib

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.placement import cached, EVICTIONS
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.host_table import unique_rows
from tests.placement.cache_oracle import fewest_loads, Oracle

evictions = pytest.mark.parametrize('eviction', EVICTIONS)
KEEP = 'keep'  # what is frozen stays so


@st.composite
def lookups_of(draw, num_rows):
  shape = draw(hnp.array_shapes(min_dims=2, max_dims=3, max_side=4))
  return draw(
    hnp.arrays(np.int64, shape, elements=st.integers(-1, num_rows - 1))
  )


@st.composite
def runs(draw, eviction):
  """Capacity, look-ahead, tables, hot rows, and batches with what freezes."""
  num_rows = draw(st.integers(1, 14))
  hot, freezes = None, st.just(KEEP)
  if eviction == 'static' or draw(st.booleans()):
    order = draw(st.permutations(range(num_rows)))
    hot = hot_rows(np.array(order[: draw(st.integers(1, num_rows))]), num_rows)
    masks = hnp.arrays(bool, len(hot.rows))
    freezes = st.just(KEEP) | st.none() | masks
  batch = st.tuples(lookups_of(num_rows), freezes)
  return (
    draw(st.integers(1, num_rows + 2)),
    draw(st.integers(0, 5)),
    num_rows,
    hot,
    draw(st.lists(batch, min_size=1, max_size=12)),
  )


def plans_of(eviction, run, contents=None):
  """Each plan with its rows that stand still, and the planner's cache."""
  capacity, ahead, num_rows, hot, batches = run
  placement = cached(capacity, eviction, ahead)
  found = [unique_rows(lookups, num_rows, hot) for lookups, _ in batches]
  state = placement.start(num_rows, hot, contents)
  frozen = np.empty(0, np.int64)
  for i, (_, stale) in enumerate(batches):
    if stale is not KEEP:
      state = placement.freeze(state, stale)
      frozen = hot.rows[stale] if stale is not None else np.empty(0, np.int64)
    state, plan = placement.plan(state, found[i : i + 1 + ahead])
    yield plan, set(frozen.tolist()), state.cache


def assert_equals_oracle(eviction, run, contents=None):
  capacity, ahead, num_rows, hot, batches = run
  ranked = None if hot is None else hot.rows.tolist()
  first = None if contents is None else contents.tolist()
  oracle = Oracle(capacity, eviction, num_rows, ranked, first)
  rows = [
    unique_rows(lookups, num_rows).rows.tolist() for lookups, _ in batches
  ]
  plans = plans_of(eviction, run, contents)
  for i, (plan, _, _) in enumerate(plans):
    if batches[i][1] is not KEEP:
      oracle.freeze(batches[i][1])
    before = set(oracle.rows)
    expected = oracle.plan(rows[i], rows[i + 1 : i + 1 + ahead])
    evicted = zip(plan.evict.tolist(), plan.evict_slots.tolist(), strict=True)
    got = (plan.slots.tolist(), plan.load.tolist(), plan.store.tolist())
    assert (*got, list(evicted)) == expected
    real = batches[i][0][batches[i][0] >= 0].tolist()
    assert plan.lookups == len(real)
    assert plan.hits == sum(row in before for row in real)


@evictions
@settings(max_examples=150)
@given(data=st.data())
def test_plans_equal_a_brute_force_simulator(eviction, data):
  assert_equals_oracle(eviction, data.draw(runs(eviction)))


@evictions
@given(data=st.data())
def test_plans_from_what_the_device_holds_equal_a_simulator(eviction, data):
  run = data.draw(runs(eviction))
  size = min(run[0], run[2])
  order = data.draw(st.permutations([*range(run[2]), *[-1] * size]))
  contents = np.array(order[:size])
  given_contents = contents.copy()
  assert_equals_oracle(eviction, run, contents)
  np.testing.assert_array_equal(contents, given_contents)


def long_run(eviction, capacity, ahead, steps=80, num_rows=400, seed=0):
  """Skewed ids, with rows freezing and thawing on the way."""
  rng = np.random.default_rng(seed)
  hot = hot_rows(rng.permutation(num_rows)[:60], num_rows)
  masks = {30: rng.random(60) < 0.6, 50: rng.random(60) < 0.3, 65: None}
  return (
    capacity,
    ahead,
    num_rows,
    hot,
    [
      ((rng.random((12, 2)) ** 3 * num_rows).astype(int), masks.get(i, KEEP))
      for i in range(steps)
    ],
  )


@evictions
@pytest.mark.parametrize(
  ('capacity', 'ahead'), [(10, 0), (10, 8), (40, 2), (90, 0), (90, 8)]
)
def test_long_runs_equal_a_simulator(eviction, capacity, ahead):
  assert_equals_oracle(eviction, long_run(eviction, capacity, ahead))


@evictions
@pytest.mark.parametrize('ahead', [0, 3])
def test_low_keys_may_be_guessed_from_few_slots(eviction, ahead, monkeypatch):
  module = importlib.import_module('slipstream_jax.placement.cached')
  monkeypatch.setattr(module, '_SAMPLE', 12)
  assert_equals_oracle(eviction, long_run(eviction, 90, ahead))


def test_few_plans_look_at_all_slots_though_known_batches_use_all(monkeypatch):
  module = importlib.import_module('slipstream_jax.placement.cached')
  lowest, calls = module._lowest, []
  monkeypatch.setattr(
    module, '_lowest', lambda *args: calls.append(1) or lowest(*args)
  )
  rng, ahead = np.random.default_rng(0), 7
  batches = [rng.choice(900, (40, 1), replace=False) for _ in range(8)]
  run = 200, ahead, 900, None, [(rows, KEEP) for rows in batches * 20]
  plans = [plan for plan, _, _ in plans_of('look_ahead', run)]
  assert sum(len(plan.load) for plan in plans) > 10 * len(plans)
  assert len(calls) < len(plans) / 4


@pytest.mark.parametrize('eviction', ['lfu', 'look_ahead'])
def test_order_of_counts_survives_their_scaling(eviction):
  capacity, ahead, num_rows, hot, batches = long_run(eviction, 40, 2)
  placement = cached(capacity, eviction, ahead)
  oracle = Oracle(capacity, eviction, num_rows, hot.rows.tolist())
  found = [unique_rows(lookups, num_rows, hot) for lookups, _ in batches]
  oracle.step = 60_000 - 40
  state = placement.start(num_rows, hot, None)
  state = state._replace(step=oracle.step, known=oracle.step)
  for i in range(len(found)):
    upcoming = found[i : i + 1 + ahead]
    state, plan = placement.plan(state, upcoming)
    batch, *coming = (unique.rows.tolist() for unique in upcoming)
    slots, load, *_ = oracle.plan(batch, coming)
    assert (plan.slots.tolist(), plan.load.tolist()) == (slots, load)
  assert state.memory.max() < 1e3  # it was scaled


def test_no_slot_is_taken_twice_if_its_new_row_counts_as_much_as_the_old():
  placement, hot = cached(2, 'look_ahead', 1), hot_rows(np.arange(2), 4)
  state = placement.start(4, hot, None)
  # Row 0 counts 2 from the start, as a use does now.
  state = state._replace(step=1000, known=1000)
  found = [unique_rows(np.array([rows]), 4, hot) for rows in ([2, 3], [0, 1])]
  state, _ = placement.plan(state, found)
  _, plan = placement.plan(state, found[1:])
  assert plan.slots.tolist() == [0, 1]


def assert_cache_agrees(cache):
  full = np.flatnonzero(cache.row_at >= 0)
  np.testing.assert_array_equal(cache.place_of[cache.row_at[full]] - 1, full)
  assert np.count_nonzero(cache.place_of) == len(full)
  assert not cache.dirty[cache.row_at < 0].any()


class Memory:
  """A version of each row on the host and in the device's slots."""

  def __init__(self, num_rows, contents):
    self.host, self.newest = [0] * num_rows, [0] * num_rows
    self.device = {s: (r, 0) for s, r in enumerate(contents.tolist())}

  def carry_out(self, plan, frozen):
    batch = plan.rows.tolist()
    moves = zip(plan.evict.tolist(), plan.evict_slots.tolist(), strict=True)
    for row, slot in moves:
      assert row not in batch
      there, version = self.device[slot]
      assert there == row
      self.host[row] = version
    loaded, stored = set(plan.load.tolist()), set(plan.store.tolist())
    assert stored <= loaded
    for i, (row, slot) in enumerate(
      zip(batch, plan.slots.tolist(), strict=True)
    ):
      read = (row, self.host[row]) if i in loaded else self.device[slot]
      assert read == (row, self.newest[row]), 'a stale version'
      self.newest[row] += row not in frozen
      assert (slot < 0) == (i in stored)
      if slot >= 0:
        self.device[slot] = row, self.newest[row]
      else:
        self.host[row] = self.newest[row]

  def read_back(self):
    rows = list(self.host)
    for row, version in self.device.values():
      if row >= 0:
        rows[row] = version
    return rows


def replay(eviction, run):
  capacity, ahead, num_rows, hot, batches = run
  contents = cached(capacity, eviction, ahead).keeps(num_rows, hot)
  memory = Memory(num_rows, contents)
  # Half way the planner starts anew, from what the device holds by then.
  for part in (batches[: len(batches) // 2], batches[len(batches) // 2 :]):
    part_run = capacity, ahead, num_rows, hot, part
    for plan, frozen, cache in plans_of(eviction, part_run, contents):
      memory.carry_out(plan, frozen)
      held = plan.slots[plan.slots >= 0]
      assert len(np.unique(held)) == len(held)
      np.testing.assert_array_equal(
        cache.row_at[held], plan.rows[plan.slots >= 0]
      )
      assert_cache_agrees(cache)
    contents = np.array([memory.device[s][0] for s in range(len(contents))])
  assert memory.read_back() == memory.newest


@evictions
@given(data=st.data())
def test_no_stale_row_is_read_and_none_is_lost(eviction, data):
  replay(eviction, data.draw(runs(eviction)))


@evictions
@pytest.mark.parametrize('capacity', [5, 60])
def test_no_row_is_lost_in_a_long_run(eviction, capacity):
  replay(eviction, long_run(eviction, capacity, 3))


@settings(max_examples=200)
@given(st.data())
def test_the_whole_trace_ahead_loads_as_few_rows_as_any_cache(data):
  capacity = data.draw(st.integers(2, 4))
  batch = st.sets(st.integers(0, 5), min_size=1, max_size=capacity)
  trace = data.draw(st.lists(batch, min_size=1, max_size=7))
  batches = [(np.array([sorted(rows)]), KEEP) for rows in trace]
  run = (capacity, len(trace), 6, None, batches)
  plans = plans_of('look_ahead', run)
  loads = sum(len(plan.load) for plan, _, _ in plans)
  assert loads == fewest_loads(trace, capacity)


@pytest.mark.parametrize(
  ('arguments', 'sentence'),
  [
    ((0,), 'capacity must be a whole number, at least 1, got 0 (cached, capa'),
    (
      (4, 'lru', -1),
      'look_ahead must be a whole number, at least 0, got -1 (cached, l',
    ),
    (
      (4, 'mru'),
      "eviction must be one of static, lru, lfu, look_ahead, got 'm",
    ),
  ],
)
def test_bad_arguments(arguments, sentence):
  with pytest.raises(UserError) as caught:
    cached(*arguments)
  assert str(caught.value).startswith(sentence)
  assert str(caught.value).count('.') == 1


def test_what_needs_hot_rows_says_so():
  with pytest.raises(UserError, match='static ranks rows by their'):
    cached(3, 'static').start(9, None, None)
  placement = cached(3)
  with pytest.raises(UserError, match='only hot rows can be frozen, got no'):
    placement.freeze(placement.start(9, None, None), np.ones(2, bool))


def test_keeps_the_most_popular_rows_that_fit():
  hot = hot_rows(np.array([7, 2, 5]), 9)
  keep = {rows: cached(rows).keeps(9, hot).tolist() for rows in (2, 4, 99)}
  assert keep == {2: [7, 2], 4: [7, 2, 5, -1], 99: [7, 2, 5] + [-1] * 6}
  assert cached(2).keeps(9, None).tolist() == [-1, -1]


@given(st.data(), st.integers(1, 6))
def test_a_window_that_shrinks_takes_no_slot_nobody_found(data, capacity):
  batches = data.draw(st.lists(lookups_of(14), min_size=2, max_size=12))
  found = [unique_rows(lookups, 14) for lookups in batches]
  placement = cached(capacity, 'look_ahead', 5)
  state = placement.start(14, None, None)
  held = placement.keeps(14, None)
  for i in range(len(found)):
    known = data.draw(st.integers(1, 6))  # fewer than before, too
    state, plan = placement.plan(state, found[i : i + known])
    np.testing.assert_array_equal(held[plan.evict_slots], plan.evict)
    placed = plan.slots >= 0
    assert len(set(plan.slots[placed].tolist())) == placed.sum()
    assert (plan.slots < capacity).all()
    # What has no slot is brought for the step, and taken back after it.
    assert {*np.flatnonzero(~placed)} == {*plan.store} <= {*plan.load}
    there = np.setdiff1d(np.flatnonzero(placed), plan.load)
    np.testing.assert_array_equal(held[plan.slots[there]], plan.rows[there])
    held[plan.slots[placed]] = plan.rows[placed]
