"""Rows that a chain lets stand still: neither loaded nor stored meanwhile."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.engine.planner import SETTLE, Slices
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.training.loop import take_step, train
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from tests.support import small
from tests.support.small import assert_same_bits, everything
from tests.training.skip_chain import (
  BATCH,
  batches_for,
  COLUMNS,
  HOT,
  NUMBERS,
  recipe,
  skip_numbers,
  source,
  start,
  WHERE,
  with_numbers,
)

STEPS, EVERY = 42, NUMBERS['every']
STANDS = EVERY - NUMBERS['window']  # the phases of a period in which rows may


def trained(trainer, depth=2):
  """Per step the item, its counts, and which hot rows stand still."""
  steps_taken = []
  with batches_for(trainer, depth) as batches:
    for _ in range(STEPS):
      before, item = trainer.engine.counters, batches.peek()
      take_step(trainer, item, batches.advance)
      after = trainer.engine.counters
      counts = type(after)(*np.subtract(after, before).tolist())
      stale = np.array(jax.device_get(trainer.state.entries[0].own.stale))
      steps_taken.append((item, counts, stale))
  return steps_taken


@pytest.mark.parametrize('name', WHERE)
def test_what_stands_still_is_in_no_plan(name):
  trainer, stood, spared, copied = start(recipe(), name), 0, 0, set()
  for step, (item, counts, stale) in enumerate(trained(trainer)):
    phase, (plan,) = step % EVERY, item.plans
    known = step >= EVERY and SETTLE <= phase < STANDS
    np.testing.assert_array_equal(
      stale, stale & (step >= EVERY and phase < STANDS)
    )
    places = HOT.places(plan.rows)
    still = stale[np.minimum(places, len(stale) - 1)]
    still &= places < len(stale)
    if not known:
      copied.clear()
      assert item.judgement.frozen in ({}, {0: None})
      continue
    stood = stood + still.sum()
    spared += still[plan.store].sum()
    if name == 'streamed':
      moving = len(plan.rows) - still.sum()
      new = {*plan.rows[still].tolist()} - copied
      copied |= new
      assert counts.rows_stored == len(plan.store) == moving
      assert counts.rows_loaded == len(plan.load) == moving + len(new)
    else:
      spared += still[plan.load].sum()
    # What left a cache may have changed before it stood still; and hot rows
    # that are swapped are streamed as all others, until a schedule swaps them.
    moves = 'lru', 'look_ahead', 'swapped'
    assert not still[plan.store].any() or name in moves
  assert stood > 100
  if name in ('resident', 'streamed', 'pinned'):
    assert spared == 0


@functools.cache
def unskipped(name):
  """Counts of what a chain without `skip_stale` moves."""
  of = recipe()._replace(row_optimizer=slip.rowwise_adagrad(0.05))
  trainer = make_parts(of, WHERE[name], small.DENSE, 3, HOT)
  with batches_for(trainer) as batches:
    return list(train(trainer, batches, STEPS))[-1].counters


def assert_moves_no_more(trainer, batches, plain):
  with batches:
    skipped = list(train(trainer, batches, STEPS))[-1].counters
  for kind in ('rows_loaded', 'rows_stored', 'bytes_loaded', 'bytes_stored'):
    assert getattr(skipped, kind) <= getattr(plain, kind)
  return skipped


@pytest.mark.parametrize('name', WHERE)
@settings(max_examples=4)
@given(numbers=skip_numbers())
def test_a_chain_that_skips_never_moves_more(name, numbers):
  trainer = start(recipe(), name, **numbers)
  assert_moves_no_more(trainer, batches_for(trainer), unskipped(name))


@pytest.mark.parametrize('name', WHERE)
@settings(max_examples=4)
@given(
  target=st.sampled_from([0.1, 0.5, 0.9]),
  lengths=st.tuples(*map(st.integers, (0, 1, 4, 12), (3, 4, 6, 20))),
)
def test_freezing_rows_never_moves_more(name, target, lengths):
  of = recipe()._replace(row_optimizer=slip.rowwise_adagrad(0.05))
  trainer = make_parts(of, WHERE[name], small.DENSE, 3, HOT)
  skip = slip.Skip(target, 'stale', 'rows', Phases(*lengths), drop_of='hot')
  batches = slipstream(trainer, source(), skip)
  skipped = assert_moves_no_more(trainer, batches, unskipped(name))
  if name == 'streamed' and target > 0.1:  # else all rows may move in windows
    assert skipped.rows_stored < unskipped(name).rows_stored


@pytest.mark.parametrize('placement', ['streamed', 'pinned'])
def test_a_chain_that_skips_has_as_many_hot_rows(placement):
  rng = np.random.default_rng(0)
  ids = np.minimum(rng.zipf(1.2, 3200), 2000) - 1
  tables, counts = {'item': slip.Table(2000, embedding_dim=8)}, []
  for links in ((), (slip.skip_stale(0.0, 25, 5),)):
    source = slip.batches(None, {'item': ids}, ids % 2, batch_size=64, seed=0)
    rows = optax.chain(slip.rowwise_adagrad(0.1), *links)
    with slip.Trainer(
      recipe().model,
      tables,
      row_optimizer=rows,
      placement=placement,
      hot_bytes=4000,
    ) as trainer:
      counts.append(trainer.train(source, steps=60).counters)
  assert counts[0] == counts[1]


def test_prefetch_depth_changes_no_count():
  first, *others = (
    trained(start(recipe(), 'look_ahead', every=9, window=2), depth)
    for depth in (0, 1, 9)
  )
  for other in others:
    assert [c for _, c, _ in other] == [c for _, c, _ in first]


def test_on_stale_gets_the_hot_rows_in_order():
  masks = []
  chain = optax.chain(
    slip.rowwise_adagrad(0.05), slip.skip_stale(0.1, 12, 4, 1, masks.append)
  )
  of = recipe()._replace(row_optimizer=chain)
  trainer = make_parts(of, 'streamed', small.DENSE, 3, HOT)
  steps = trained(trainer)
  jax.effects_barrier()
  assert len(masks) == 5  # the last period's rows are not let go
  for mask, step in zip(masks, (12, 20, 24, 32, 36), strict=True):
    np.testing.assert_array_equal(mask, steps[step][2], strict=True)
    assert mask.any() == (step % 12 == 0)


@pytest.mark.parametrize('least', [0, 1])
def test_a_row_that_gets_another_id_is_not_stale(least):
  rng = np.random.default_rng(4)
  # In windows, as they open and close, and while rows stand still.
  fresh = {
    step: HOT.rows[rng.permutation(len(HOT.rows))[: rng.integers(1, 30)]]
    for step in (2, 8, 11, 12, 13, 15, 16, 17, 19, 20, 24, 27, 28, 36, 40)
  }
  expected = None
  for name in WHERE:
    trainer = start(recipe(), name, min_touches=least)
    with planned(trainer, small.WithFresh(source(), fresh), 2) as batches:
      for step in range(STEPS):
        take_step(trainer, batches.peek(), batches.advance)
        stale = np.array(jax.device_get(trainer.state.entries[0].own.stale))
        if step in fresh:
          assert not stale[HOT.places(fresh[step])].any()
        frozen = trainer.engine.groups[0].frozen
        if frozen is not None:
          np.testing.assert_array_equal(frozen, stale)
    found = everything(trainer)
    if expected is None:
      expected = found
    assert_same_bits(expected, found)


@pytest.mark.parametrize('over', [None, Slices(2, 8)], ids=['one', 'two'])
@pytest.mark.parametrize('how', ['chain', 'rows'])
def test_a_row_that_is_set_in_a_window_is_not_stale(how, over):
  """By hand, and not used again; all others that were touched are."""
  of, skip = recipe(), slip.Skip(mode='rows', threshold=1e9, policy='stale')
  if how == 'rows':
    of = of._replace(row_optimizer=slip.rowwise_adagrad(0.05))
  trainer = make_parts(of, 'streamed', small.DENSE, 3, HOT, over=over)
  if how == 'chain':
    trainer.state = with_numbers(of, trainer.state, {'threshold': 1e9})
    batches = batches_for(trainer)
  else:
    skip = skip._replace(phases=Phases(8, 4, 1, 40))
    batches = slipstream(trainer, source(), skip)
  name, size = next(iter(small.SIZES.items()))
  some = HOT.rows[HOT.rows < size][::2]
  with batches:
    list(train(trainer, batches, 11))
    trainer.set_rows(name, some, np.ones((len(some), 8), np.float32))
    used = np.concatenate([p.rows for p in batches.peek().plans])
    list(train(trainer, batches, 4))
  state = trainer.whole_state
  (one,) = state.entries or (w.skip for w in state.watch)
  stale = np.asarray(one.own.stale if how == 'chain' else one.stale)
  assert not stale[HOT.places(some)].any()
  assert stale.sum() > 20
  assert not np.isin(some, used).all()


@pytest.mark.parametrize('at', [9, 12, 15])
def test_a_watch_survives_a_step_that_fails(at, monkeypatch):
  """In a window, after it, and while rows stand still."""
  of = recipe()._replace(row_optimizer=slip.rowwise_adagrad(0.05))
  skip = slip.Skip(0.9, 'stale', 'rows', Phases(8, 4, 1, 40), drop_of='hot')
  runs = []
  for fails in (False, True):
    trainer = make_parts(of, 'streamed', small.DENSE, 3, HOT)
    with slipstream(trainer, source(), skip) as batches:
      list(train(trainer, batches, at))
      if fails:
        with monkeypatch.context() as patch:
          patch.setattr(trainer.programs, 'step', lambda *_: 1 / 0)
          with pytest.raises(ZeroDivisionError):
            list(train(trainer, batches, 1))
      list(train(trainer, batches, 25 - at))
    assert trainer.engine.groups[0].frozen.sum() > 20
    runs.append((everything(trainer), trainer.engine.counters))
  assert_same_bits(runs[0][0], runs[1][0])
  assert runs[0][1] == runs[1][1]


def test_a_group_without_hot_rows_is_not_watched():
  tables = slip.TableSet(
    {
      name: slip.Table(
        size, 8, optimizer=slip.sgd(0.05) if size == 50 else None
      )
      for name, size in small.SIZES.items()
    },
    {},
  )
  of = recipe()._replace(tables=tables, row_optimizer=slip.rowwise_adagrad(0.1))
  hot = hot_rows(HOT.rows[HOT.rows >= 50], sum(small.ROWS))
  skip = slip.Skip(0.9, 'stale', 'rows', Phases(8, 4, 1, 40), drop_of='hot')
  runs = []
  for name in ('resident', 'streamed'):
    trainer = make_parts(of, WHERE[name], small.DENSE, 3, hot)
    with slipstream(trainer, source(), skip) as batches:
      list(train(trainer, batches, 20))
    runs.append(everything(trainer))
  assert_same_bits(*runs)


@pytest.mark.parametrize('some', [False, True], ids=['hot', 'some_hot'])
def test_groups_have_windows_of_their_own(some):
  chains = [
    optax.chain(slip.rowwise_adagrad(0.05), slip.skip_stale(0.1, *numbers))
    for numbers in ((7, 2), (11, 4))
  ]
  sizes = dict(zip(small.SIZES, [*chains, None, None], strict=True))
  tables = slip.TableSet(
    {
      name: slip.Table(size, 8, optimizer=sizes[name])
      for name, size in small.SIZES.items()
    },
    {},
  )
  of = recipe()._replace(tables=tables, row_optimizer=slip.rowwise_adagrad(0.1))
  # A group may have no hot row at all.
  hot = hot_rows(HOT.rows[HOT.rows >= 50], sum(small.ROWS)) if some else HOT
  runs = []
  for names in (['resident'] * 3, ['streamed'] * 3, ['streamed', 'lru', 'lru']):
    places = [WHERE[name] for name in names]
    trainer = make_parts(of, places, small.DENSE, 3, hot)
    assert trainer.windows == ((7, 2), (11, 4), None)
    with batches_for(trainer) as batches:
      list(train(trainer, batches, 38))
    runs.append(everything(trainer))
    frozen = [group.frozen for group in trainer.engine.groups]
    # Step 37 is two after the first's window, and four after the second's.
    assert frozen[0] is None
    assert frozen[1] is not None
    assert frozen[2] is None
  assert len(COLUMNS.labels) == 20 * BATCH
  for other in runs[1:]:
    assert_same_bits(runs[0], other)
