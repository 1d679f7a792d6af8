"""No step waits for the rows of the one before; and none reads old ones."""

import itertools
import threading

import numpy as np
import pytest

from slipstream_jax.data.numbered import ColumnBatches, NumberedBatches
from slipstream_jax.engine import group_rows
from slipstream_jax.engine.buffers import to_device, to_host
from slipstream_jax.engine.group_rows import WriteBackQueue
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.placement.base import plan_with
from slipstream_jax.store.host_table import unique_rows
from slipstream_jax.training.loop import take_step, train
from slipstream_jax.training.trainer_parts import make_parts, planned
from slipstream_jax.types import Batch, RowBlock
from tests.support import small
from tests.support.small import assert_same_bits, BATCH, everything

COLUMNS = small.columns(BATCH * 8)
HOT = small.hot(COLUMNS, 150)
ALL = {
  name: PLACEMENTS[name] for name in ('resident', 'streamed', 'pinned')
} | {'cached': cached(150), 'tiny': cached(3, 'lru')}
placements = pytest.mark.parametrize('name', ALL)
STEPS = 12


def start(name):
  recipe = small.recipe('adagrad')
  return make_parts(recipe, ALL[name], small.DENSE, 3, HOT)


def batches_of(trainer, seed=1):
  source = ColumnBatches(COLUMNS, BATCH, shuffle_seed=seed)
  return planned(trainer, source, 2)


def after_steps(name='resident', steps=STEPS):
  trainer = start(name)
  with batches_of(trainer) as batches:
    list(train(trainer, batches, steps))
  return everything(trainer)


def recorded(trainer, act=lambda: None):
  """The rows written to the host from now on. Calls `act` before each."""
  host, written = trainer.engine.groups[0].host, []
  original = host.scatter

  def scatter(rows, *others):
    act()
    original(rows, *others)
    written.extend(rows.tolist())

  host.scatter = scatter
  return written


@placements
def test_no_step_waits_for_the_rows_of_the_one_before(name):
  """It writes what was stored two steps ago, and evicted one step ago."""
  trainer = start(name)
  written, stored, due = recorded(trainer), [], []
  with batches_of(trainer) as batches:
    for item in itertools.islice(batches, STEPS):
      written.clear()
      take_step(trainer, item)
      assert written == due
      (plan,) = item.plans
      due = stored + plan.evict.tolist()
      stored = plan.rows[plan.store].tolist()
  assert_same_bits(everything(trainer), after_steps())


def steps_of_two(name):
  """Of two iterators in turn, both planned from the first step on."""
  trainer = start(name)
  with batches_of(trainer) as one, batches_of(trainer, seed=2) as other:
    for number, items in enumerate(
      itertools.islice(zip(one, other, strict=True), STEPS)
    ):
      take_step(trainer, items[number % 2])
  return everything(trainer)


@pytest.mark.parametrize('name', ['streamed', 'pinned'])
def test_a_link_to_a_step_that_was_not_taken_is_not_believed(name):
  assert_same_bits(steps_of_two(name), steps_of_two('resident'))


@placements
@pytest.mark.parametrize('at', [1, 2, 5])
def test_rows_that_could_not_be_written_are_written_later(name, at):
  """The step that comes for them is not taken, and is tried again."""
  trainer, calls = start(name), itertools.count(1)

  def fail():
    if next(calls) == at:
      raise OSError('no memory')

  recorded(trainer, fail)
  steps = 0
  with batches_of(trainer) as batches:
    while steps < STEPS:
      try:
        for _ in train(trainer, batches, STEPS - steps):
          pass
      except OSError:
        assert trainer.inconsistent is None
      steps = int(to_host(trainer.state.step))
  if next(calls) <= at:
    trainer.engine.read_back()  # it may be the one to fail
  assert_same_bits(everything(trainer), after_steps())


def popular_batches(which):
  """Batches that look up hot rows alone where `which` says so."""
  batches = []
  for number, popular in enumerate(which):
    columns = small.columns(BATCH, seed=20 + number)
    lookups = columns.lookups
    if popular:  # the most popular row of each table
      first, end = small.tables().column_rows
      tops = [
        next(row for row in HOT.rows if low <= row < high)
        for low, high in zip(first, end, strict=True)
      ]
      lookups = np.broadcast_to(np.array(tops), lookups.shape).copy()
    batches.append(
      Batch(columns.dense, lookups, columns.labels, np.ones(BATCH, np.float32))
    )
  return batches


def after_batches(batches, name, act=lambda trainer, number: None):
  """All that there is after these. Everything is planned before a step."""
  trainer = start(name)
  given = NumberedBatches(batches.__getitem__, len(batches), 'these', reads='')
  with planned(trainer, given, len(batches)) as stream:
    for number, item in enumerate([*stream]):
      act(trainer, number)
      take_step(trainer, item)
  return everything(trainer)


@pytest.mark.parametrize('fails', [False, True])
def test_rows_are_gathered_behind_batches_that_move_none(monkeypatch, fails):
  popular = [False, True, True, False, True, False, False, True, True, False]
  batches, gathered = popular_batches(popular), []
  expected = after_batches(batches, 'streamed')
  monkeypatch.setattr(group_rows, 'EARLY_BYTES', 1)

  def act(trainer, number):
    """Notes which thread gathers the rows of which step."""
    host = trainer.engine.groups[0].host
    if not number:
      gather = host.gather

      def noted(rows, *others):
        early = 'slipstream-gather' in threading.current_thread().name
        gathered.append(early)
        if early and fails:
          raise OSError('a broken disk')
        return gather(rows, *others)

      host.gather = noted

  assert_same_bits(after_batches(batches, 'pinned', act), expected)
  early = [at for at, one in enumerate(gathered) if one]
  # Once for each run of popular batches, and again where that has failed.
  assert len(early) == 3
  if not fails:
    assert len(gathered) == popular.count(False)


@pytest.mark.parametrize('at', range(1, 10))
@pytest.mark.parametrize('what', ['set', 'read', 'predict'])
def test_rows_gathered_early_are_not_believed_after_a_change(
  monkeypatch, what, at
):
  popular = [False, True, True, False, True, False, False, True, True, False]
  batches = popular_batches(popular)
  monkeypatch.setattr(group_rows, 'EARLY_BYTES', 1)

  def act(trainer, number):
    engine = trainer.engine
    if number != at:
      return
    if what == 'set':
      engine.set_rows('t2', np.arange(3000), np.ones((3000, 8), np.float32))
    elif what == 'read':
      engine.read_back()
    else:
      engine.look_up(batches[3].lookups)

  one, other = (
    after_batches(batches, name, act) for name in ('pinned', 'streamed')
  )
  assert_same_bits(one, other)


def after_two_iterators(name):
  """Of two in turn, all planned before: the other's step comes in between."""
  trainer, items = start(name), []
  for popular in ([False, True, False] * 3, [False] * 9):
    batches = popular_batches(popular)
    given = NumberedBatches(batches.__getitem__, 9, 'these', reads='')
    with planned(trainer, given, 9) as stream:
      items.append([*stream])
  for number, pair in enumerate(zip(*items, strict=True)):
    take_step(trainer, pair[number % 2])
  return everything(trainer)


def test_rows_gathered_early_are_not_believed_after_the_step_of_another(
  monkeypatch,
):
  monkeypatch.setattr(group_rows, 'EARLY_BYTES', 1)
  one, other = map(after_two_iterators, ('pinned', 'resident'))
  assert_same_bits(one, other)


def test_copies_of_rows_that_stand_still_are_of_the_last_step():
  """Made when the host table has older ones."""
  trainer = start('streamed')
  engine = trainer.engine
  with batches_of(trainer) as batches:
    for item in itertools.islice(batches, 3):
      take_step(trainer, item)
  used = np.isin(HOT.rows, item.plans[0].rows)
  assert used.sum() > 20
  written = recorded(trainer)
  engine.freeze(used)
  assert not written  # nothing waits for the last step
  (group,), placement = engine.groups, ALL['streamed']
  state = placement.freeze(placement.start(group.num_rows, HOT, None), used)
  lookups = item.plans[0].rows[:, None]
  for loads in (True, False):
    batch = unique_rows(lookups, group.num_rows, HOT)
    state, plan = placement.plan(state, [batch])
    frozen = plan.slots >= 0
    assert frozen.sum() == used.sum()
    assert np.isin(np.flatnonzero(frozen), plan.load).all() == loads
    assert not frozen[plan.store].any()
    engine.store((plan,), engine.load((plan,)))  # a step that changes nothing
  kept = to_host(group.kept.block)
  (table,) = everything(trainer)[0]
  np.testing.assert_array_equal(kept.rows[used], table.rows[HOT.rows[used]])
  (expected,) = after_steps(steps=3)[0]
  np.testing.assert_array_equal(table.rows, expected.rows)


def test_a_queue_settles_what_was_queued_but_for_the_last_step():
  """And writes again what could not be written."""
  table = RowBlock(np.zeros((9, 2), np.float32), ())
  store = small.store_of(table)
  queue, plans = WriteBackQueue(store), []
  no_slots = np.full(3, -1)
  for value, rows in enumerate(([1, 2, 3], [3, 4, 5]), 1):
    found = unique_rows(np.array([rows]), 9)
    plans.append(plan_with(found, no_slots))
    block = RowBlock(np.full((3, 2), value, np.float32), ())
    queue.stored(plans[-1], to_device(block))
  written = []

  def settled(**how):
    queue.settle(**how)
    written.append(table.rows[:, 0].tolist())

  scatter, store.scatter = store.scatter, lambda *_: 1 / 0
  with pytest.raises(ZeroDivisionError):
    queue.settle(last=False)
  store.scatter = scatter
  settled(last=False)
  assert queue.forwarded(plans[1], np.empty(0, np.int64)) is not None
  settled(last=True)
  assert written == [[0, 1, 1, 1, 0, 0, 0, 0, 0], [0, 1, 1, 2, 2, 2, 0, 0, 0]]
  assert queue.forwarded(plans[1], np.empty(0, np.int64)) is None
