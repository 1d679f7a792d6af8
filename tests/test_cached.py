"""The cache's plans against plain Python, and against Belady's optimum."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.placement import cached, EVICTIONS, evictions
from slipstream_jax.selection.classify import hot_rows
from slipstream_jax.store.host_table import distinct
from tests.cache_oracle import fewest_loads, Oracle

N = 14
HOT = [3, 11, 0, 7, 5]
HOT_ROWS = hot_rows(np.array(HOT), N)


def batches_of(rng, count, shape=(3, 2), rows=N):
  """Skewed ids with padding, so that rows leave and return."""
  ids = (rng.random((count, *shape)) ** 2 * (rows + 1)).astype(np.int64) - 1
  return [distinct(batch, rows, HOT_ROWS) for batch in ids]


@pytest.mark.parametrize('eviction', EVICTIONS)
@given(
  seed=st.integers(0, 1 << 20),
  capacity=st.integers(1, N + 2),
  look_ahead=st.integers(0, 5),
  length=st.sampled_from([None, 3]),
)
@settings(max_examples=80)
def test_plans_equal_plain_python(eviction, seed, capacity, look_ahead, length):
  rng = np.random.default_rng(seed)
  shape = (2, 2) if length is None else (2, 2, length)
  batches = batches_of(rng, 20, shape)
  placement = cached(capacity, eviction, look_ahead)
  state = placement.start(N, HOT_ROWS, None)
  oracle = Oracle(capacity, eviction, look_ahead, N, HOT)
  rows = [batch.rows.tolist() for batch in batches]
  for step in range(len(batches)):
    if rng.random() < 0.2:  # before the plan, as in training
      stale = rng.random(len(HOT)) < 0.5 if rng.random() < 0.7 else None
      state = placement.freeze(state, stale)
      frozen = [] if stale is None else np.array(HOT)[stale].tolist()
      oracle.frozen = set(frozen)
    hits = np.isin(
      batches[step].rows, [r for r in oracle.row_at if r is not None]
    )
    expected = oracle.plan(rows[step : step + 1 + look_ahead])
    state, plan = placement.plan(state, batches[step : step + 1 + look_ahead])
    assert plan.rows.tolist() == rows[step]
    assert plan.slots.tolist() == expected['slots']
    assert plan.rows[plan.load].tolist() == expected['load']
    assert plan.rows[plan.store].tolist() == expected['store']
    evicted = zip(plan.evict.tolist(), plan.evict_slots.tolist(), strict=True)
    assert list(evicted) == expected['evict']
    inverse = batches[step].inverse
    assert plan.lookups == (inverse >= 0).sum()
    assert plan.hits == hits[inverse[inverse >= 0]].sum()


@given(seed=st.integers(0, 1 << 20), capacity=st.integers(2, 4))
def test_seeing_the_whole_trace_is_beladys_optimum(seed, capacity):
  rng = np.random.default_rng(seed)
  small = hot_rows(np.array([1, 4]), 6)
  ids = rng.integers(0, 6, (7, 1, 2))
  batches = [distinct(each, 6, small) for each in ids]
  placement = cached(capacity, 'look_ahead', len(batches))
  state, loads = placement.start(6, small, None), 0
  for step in range(len(batches)):
    state, plan = placement.plan(state, batches[step:])
    loads += len(plan.load)
  rows = [batch.rows.tolist() for batch in batches]
  assert loads == fewest_loads(rows, capacity, [1, 4][:capacity])


def test_counts_survive_what_leaves():
  """A row that left keeps its uses: back again, it outranks a newer one."""
  placement = cached(2, 'lfu')
  state = placement.start(N, None, None)
  kept = None
  for ids in ([1], [1], [1], [2], [3], [4], [1], [5], [6]):
    found = distinct(np.array([ids]), N)
    state, _ = placement.plan(state, [found])
    kept = state.cache.row_at.tolist()
  assert 1 in kept


def test_counts_are_scaled_down_in_time(monkeypatch):
  """By a power of two, which changes no plan."""
  batches = batches_of(np.random.default_rng(0), 60)
  monkeypatch.setattr(evictions, 'HALF_LIFE', 16)

  def plans():
    state, found = cached(4, 'lfu').start(N, HOT_ROWS, None), []
    for batch in batches:
      state, plan = cached(4, 'lfu').plan(state, [batch])
      found.append((plan.slots.tolist(), plan.evict.tolist()))
    return found

  expected = plans()
  monkeypatch.setattr(evictions, '_REBASE', 16)
  assert plans() == expected


def test_contents_given_may_have_changed_on_the_device():
  placement = cached(2, 'lru')
  state = placement.start(N, HOT_ROWS, np.array([8, 9]))
  found = distinct(np.array([[1, 2]]), N, HOT_ROWS)
  _, plan = placement.plan(state, [found])
  assert sorted(plan.evict.tolist()) == [8, 9]


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ((0,), 'capacity must be at least 1, got 0'),
    ((5, 'look_ahead', -1), 'look_ahead must be at least 0, got -1'),
    ((5, 'mru'), "eviction must be one of .*, got 'mru'"),
  ],
)
def test_bad_arguments(arguments, message):
  with pytest.raises(UserError, match=message):
    cached(*arguments)


def test_static_and_frozen_rows_need_hot_rows():
  with pytest.raises(UserError, match='hot rows'):
    cached(5, 'static').start(N, None, None)
  placement = cached(5, 'lru')
  state = placement.start(N, None, None)
  with pytest.raises(UserError, match='hot rows'):
    placement.freeze(state, np.ones(5, bool))
