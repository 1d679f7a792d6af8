"""Training that skips: what is skipped, and what that leaves untouched."""

import functools
import itertools

import jax
import numpy as np
import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.errors import UserError
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.tables import tables_of
from slipstream_jax.training.loop import take_step, train
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from tests.schedules.test_settings import oracle_phase, PHASES
from tests.support import small
from tests.support.small import assert_same_bits, everything
from tests.support.watchdog import watchdog

COLUMNS = small.columns(64 * 25, seed=4)
HOT = small.hot(COLUMNS, 600)
# Room for fewer rows than are hot, and for fewer than a batch has.
ALL = PLACEMENTS | {
  'lru': cached(250, 'lru'),
  'look_ahead': cached(250, 'look_ahead', look_ahead=1),
  'small': cached(40, 'lfu'),
}
every_policy = pytest.mark.parametrize('policy', POLICIES)


def settings(**changes):
  base = Skip(0.5, POLICIES['stale'], 'examples', PHASES, seed=3, refill=True)
  return base._replace(**{'drop_of': 'hot'} | changes)


def start(
  placement='pinned',
  optimizer='adagrad',
  depth=2,
  batches=60,
  source=None,
  **how,
):
  trainer = make_parts(
    small.recipe(optimizer),
    ALL[placement],
    small.DENSE,
    seed=3,
    hot=HOT,
  )
  source = source or ColumnBatches(COLUMNS, 64, shuffle_seed=1)
  return trainer, slipstream(trainer, source, settings(**how), batches, depth)


def run(**how):
  trainer, batches = start(**how)
  with batches:
    records = list(train(trainer, batches, 10_000))
  return trainer, records


def items_of(**how):
  """Every item that a run trains; a window waits for its steps."""
  trainer, batches = start(**how)
  with batches:
    for item in batches:
      take_step(trainer, item)
      yield item


@pytest.mark.parametrize(
  'how',
  [
    {'mode': 'examples', 'min_touches': 0},
    {'mode': 'rows', 'min_touches': 0, 'optimizer': 'lazy_adam'},
    {'policy': 'surprise_offset', 'batches': 40},
    {'policy': 'random_weighted', 'batches': 40, 'refit': 3, 'refill': False},
  ],
  ids=['examples', 'rows', 'offset', 'sizes'],
)
def test_placement_changes_no_number_while_skipping(how):
  (first, records), *others = [run(placement=name, **how) for name in ALL]
  events = [r.event for r in records if r.event is not None]
  if 'mode' in how:
    assert len(events) == 3
    assert all(event['rows_stale'] > 20 for event in events[1:])
  else:
    assert first.engine.counters.examples_dropped > 100
  for other, its_records in others:
    assert [r.loss for r in records] == [r.loss for r in its_records]
    assert_same_bits(everything(first), everything(other))


@functools.cache
def plainly():
  trainer = make_parts(
    small.recipe('adagrad'), PLACEMENTS['pinned'], small.DENSE, seed=3, hot=HOT
  )
  with planned(trainer, ColumnBatches(COLUMNS, 64, shuffle_seed=1)) as batches:
    list(train(trainer, batches, 60))
  return everything(trainer)[0], trainer.state.params


@pytest.mark.parametrize(
  ('mode', 'policy', 'refill'),
  [
    ('rows', 'stale', True),
    *(('examples', name, i % 2 == 0) for i, name in enumerate(POLICIES)),
  ],
)
def test_drop_target_0_is_plain_training(mode, policy, refill):
  trainer, _ = run(policy=policy, drop=0, mode=mode, refill=refill)
  assert_same_bits(plainly(), (everything(trainer)[0], trainer.state.params))
  assert trainer.engine.counters.examples_dropped == 0


def skips(policy, batch):
  """Whether examples are left out of the source's batch of this number."""
  if POLICIES[policy].stale_target(0.5):
    return oracle_phase(PHASES, batch) == 'skip'
  # Nothing to compare: no windows, and each decision replaces another.
  return batch >= PHASES.warm_up + PHASES.settle


@pytest.mark.parametrize('policy', ['random', 'stale'])
def test_drop_target_1_trains_no_hot_example(policy):
  number = np.arange(64 * 25, dtype=np.float32)
  dense = np.repeat(number[:, None], small.DENSE, axis=1) / 1e4
  how = {'policy': POLICIES[policy], 'drop': 1, 'min_touches': 0}
  hot = small.hot_examples(HOT, COLUMNS.lookups)
  source = ColumnBatches(COLUMNS._replace(dense=dense), 64)
  trained = []
  for item in items_of(source=source, batches=25, **how):
    real = item.batch.weights > 0
    trained.append(np.rint(item.batch.dense[real, 0] * 1e4).astype(int))
  skipped = [hot[i] and skips(policy, i // 64) for i in range(64 * 25)]
  np.testing.assert_array_equal(
    np.concatenate(trained), np.flatnonzero(~np.array(skipped))
  )
  assert sum(skipped) > 300


@every_policy
def test_every_example_is_counted(policy):
  trainer, records = run(policy=POLICIES[policy], drop=0.6)
  counters = records[-1].counters
  assert counters == trainer.engine.counters
  assert counters.examples_seen == 60 * 64
  assert counters.examples_trained + counters.examples_dropped == 60 * 64
  skipping = sum(skips(policy, i) for i in range(60))
  hot = small.hot_examples(HOT, COLUMNS.lookups).mean()
  expected = 0.6 * hot * skipping * 64
  # The tables of 1 and 7 rows tie most examples, so staleness is coarse.
  least = 0.3 if POLICIES[policy].stale_target(0.6) else 0.85
  assert least * expected < counters.examples_dropped < 1.15 * expected
  # Full batches again: as many steps fewer as examples.
  assert len(records) == -(-counters.examples_trained // 64)


def test_kept_examples_keep_their_order_and_weight_up():
  how = {'policy': POLICIES['stale_revisit'], 'drop': 0.4}
  kept = [item.batch for item in items_of(**how)]
  dense = np.concatenate([b.dense[b.weights > 0] for b in kept])
  weights = np.concatenate([b.weights[b.weights > 0] for b in kept])
  source = ColumnBatches(COLUMNS, 64, shuffle_seed=1)
  whole = np.concatenate([b.dense for b in itertools.islice(source, 60)])
  at = 0
  for row in dense:  # a subsequence of the source
    while not np.array_equal(whole[at], row):
      at += 1
    at += 1
  assert len(dense) < len(whole)
  assert set(np.unique(weights).tolist()) > {1.0}
  assert weights.sum() == pytest.approx(len(whole), rel=0.1)


def rows_run(placement):
  """Snapshots of the table around each step of a run in mode `rows`."""
  trainer, batches = start(placement, mode='rows', min_touches=1, batches=50)
  rows, masks = [], []
  with batches:
    for _ in train(trainer, batches, 10_000):
      rows.append(np.array(trainer.engine.read_back()[0].rows))
      masks.append(np.array(trainer.state.watch[0].skip.stale))
  return np.array(rows), np.array(masks), trainer


@pytest.mark.parametrize('placement', ['streamed', 'pinned', 'small'])
def test_stale_rows_stand_still_and_thaw(placement):
  rows, masks, _ = rows_run(placement)
  hot_rows = rows[:, HOT.rows]
  moved = (hot_rows[1:] != hot_rows[:-1]).any(axis=2)
  assert not (moved & masks[1:] & masks[:-1]).any()
  assert masks.any()
  ever_stale = masks.any(axis=0)
  # A window thaws them: rows once stale move again.
  stale_first = masks.argmax(axis=0)
  later = [moved[stale_first[h] :, h].any() for h in np.flatnonzero(ever_stale)]
  assert np.mean(later) > 0.5


def test_stale_rows_are_not_moved():
  """Streamed: not stored, and loaded once at most, until the next window."""
  frozen, there, seen = set(), set(), 0
  for item in items_of(placement='streamed', mode='rows'):
    edge, plan = item.scheduled.edge, item.plans[0]
    if edge.opens:
      frozen, there = set(), set()
    if edge.stale is not None:
      frozen, there = set(HOT.rows[edge.stale].tolist()), set()
    rows = set(plan.rows.tolist())
    assert set(plan.rows[plan.load].tolist()) == rows - there
    assert set(plan.rows[plan.store].tolist()) == rows - frozen
    there |= rows & frozen
    seen += len(plan.rows) - len(plan.load)
  assert seen > 100


def test_padded_remainders_end_and_look_ahead_changes_no_number():
  """65 examples in batches of 16: of 5 batches one brings a single example."""
  columns = small.columns(65)
  phases = Phases(warm_up=2, window=3, settle=17, period=40)

  def trained(placement):
    source = ColumnBatches(columns, 16, shuffle_seed=1, pad_remainder=True)
    trainer = make_parts(small.recipe(), placement, small.DENSE, hot=HOT)
    chosen = settings(phases=phases, policy='stale_revisit', min_touches=0)
    with slipstream(trainer, source, chosen, 60) as batches:
      records = list(train(trainer, batches, 10_000))
    assert sum(r.event is not None for r in records) == 1
    return everything(trainer)

  with watchdog():
    first = trained(PLACEMENTS['pinned'])
    for ahead in (0, 16):
      made = cached(250, look_ahead=ahead)
      assert_same_bits(first, trained(made))


@pytest.mark.parametrize('alpha', [30, (1, 1, 1), (1, 1, 1, 2)])
def test_an_alpha_beyond_the_lookups_surfaces_at_once(alpha):
  _, batches = start(alpha=alpha)
  named = pytest.raises(UserError, match=r'alpha must be in \[1, [14]\]')
  with batches, named:
    next(batches)


def test_a_position_without_its_checkpoint_is_refused():
  trainer, batches = start(batches=20)
  with batches:
    list(train(trainer, batches, 11))  # the window has closed
    state = batches.get_state()
  _, batches = start(batches=20)
  said = 'its window 10 has been compared, got no window'
  with batches, pytest.raises(UserError, match=said):
    batches.set_state(state)


def test_looking_further_ahead_than_a_decision_waits():
  trainer = make_parts(
    small.recipe(), cached(250, look_ahead=2), small.DENSE, hot=HOT
  )
  source = ColumnBatches(COLUMNS, 64)
  with pytest.raises(UserError, match='settle must be more than the 2 batch'):
    slipstream(trainer, source, settings())


def test_skipping_without_hot_rows():
  trainer = make_parts(small.recipe(), PLACEMENTS['streamed'], small.DENSE)
  source = ColumnBatches(COLUMNS, 64)
  with pytest.raises(UserError, match='hot rows'):
    slipstream(trainer, source, settings())
  with pytest.raises(UserError, match='pinned keeps hot rows'):
    make_parts(small.recipe(), PLACEMENTS['pinned'], small.DENSE)


def rows_of(trainer):
  return np.array(trainer.engine.read_back()[0].rows)


@pytest.mark.parametrize('placement', ['streamed', 'pinned'])
def test_plain_training_thaws_what_stood_still(placement):
  trainer, _ = run(placement=placement, mode='rows', batches=22)
  stale = HOT.rows[jax.device_get(trainer.state.watch[0].skip.stale)]
  assert len(stale) > 20
  before = rows_of(trainer)
  with planned(trainer, ColumnBatches(COLUMNS, 64, shuffle_seed=2)) as batches:
    list(train(trainer, batches, 30))
  moved = (rows_of(trainer) != before).any(axis=1)
  assert moved[stale].mean() > 0.5


def test_a_second_schedule_learns_nothing_of_the_first():
  settled = settings(mode='rows', phases=PHASES._replace(period=0))

  def in_turn(depth):
    trainer, _ = start()
    for seed in (1, 2):
      source = ColumnBatches(COLUMNS, 64, shuffle_seed=seed)
      with slipstream(trainer, source, settled, 30, depth) as batches:
        events = [r.event for r in train(trainer, batches, 30) if r.event]
    return rows_of(trainer), events[0]['threshold']

  (first, threshold), *others = (in_turn(depth) for depth in (0, 1, 8))
  for other, same in others:
    assert same == threshold
    np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize('depth', [0, 2])
def test_batches_that_nobody_trains_end_in_a_sentence(depth):
  """A decision needs the window's steps; to wait for them is to hang."""
  trainer, batches = start(mode='rows', depth=depth)
  with batches:
    first = batches.get_state()
    with watchdog(), pytest.raises(UserError, match='train each batch'):
      list(batches)
    batches.set_state(first)
    assert len(list(train(trainer, batches, 30))) > 0


def test_more_rows_than_a_device_can_number_are_refused():
  """Before there is a table of them."""
  tables = tables_of({'users': 2**31}, dim=8)
  recipe = small.recipe('sgd')._replace(tables=tables)
  with pytest.raises(UserError, match=r'keeps at most .*, got 2147483648 '):
    make_parts(recipe, 'resident', small.DENSE)
