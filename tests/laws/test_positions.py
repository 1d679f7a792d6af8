"""Which batches a trainer trains: those of one schedule, and from where."""

import jaxtyping
import pytest

from slipstream_jax.data.base import ColumnBatches
from slipstream_jax.errors import UserError
from slipstream_jax.saving.checkpoint import Checkpoints
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.training import loop
from slipstream_jax.training.loop import train
from slipstream_jax.training.parts import make_parts, planned, slipstream
from tests.laws.test_placements import assert_same_bits
from tests.support import small
from tests.support.short_runs import (
  BATCH,
  COLUMNS,
  everything,
  HOT,
  skip,
  source,
  start,
  unbroken,
  WHERE,
)


def test_iterators_in_turn_plan_for_the_rows_as_they_are():
  """Each was planned ahead before the other's steps."""

  def run(placement):
    trainer = make_parts(
      small.recipe('adagrad'), WHERE[placement], small.DENSE, 3, HOT
    )
    one, other = (
      planned(trainer, ColumnBatches(COLUMNS, BATCH, shuffle_seed=seed), 2)
      for seed in (1, 2)
    )
    with one, other:
      for steps in (3, 1, 4, 2):
        for batches in (one, other):
          assert len(list(train(trainer, batches, steps))) == steps
    return everything(trainer)

  for placement in ('streamed', 'pinned', 'lru', 'look_ahead'):
    assert_same_bits(run(placement), run('resident'))


def test_a_plan_for_another_turn_is_refused():
  trainer, batches = start('lru', 'plain', 2)
  with batches:
    next(batches)
    item = next(batches)
    with pytest.raises(UserError, match=r'holds for turn 1 .*got turn 0'):
      loop.take_step(trainer, item)
  trainer.check_whole()


def test_a_trainer_follows_the_schedule_made_last():
  trainer, batches = start('pinned', 'rows', 2)
  with batches:
    list(train(trainer, batches, 6))
    with planned(trainer, ColumnBatches(COLUMNS, BATCH), 2) as plain:
      with pytest.raises(UserError, match='follows one schedule'):
        list(train(trainer, batches, 1))
      assert len(list(train(trainer, plain, 3))) == 3


def test_a_restore_asks_for_the_position_of_the_batches(tmp_path):
  trainer, batches = start('lru', 'plain', 2)
  checkpoints = Checkpoints(tmp_path)
  with batches:
    list(train(trainer, batches, 4))
    checkpoints.save(trainer, batches.get_state())
    list(train(trainer, batches, 4))
    position = checkpoints.restore(trainer)
    with pytest.raises(UserError, match=r'call batches\.set_state'):
      list(train(trainer, batches, 1))
    batches.set_state(position.schedule_state)
    list(train(trainer, batches, 10_000))
  checkpoints.close()
  assert_same_bits(everything(trainer), unbroken('lru', 'plain')[0])


@pytest.mark.parametrize('left_out', range(1, 12))
def test_batches_that_a_schedule_counts_on_cannot_be_left_out(left_out):
  """A window without a snapshot would be judged by nothing."""
  trainer, batches = start('pinned', 'rows', 0)
  with batches:
    list(train(trainer, batches, left_out))
    before = batches.get_state()
    if next(batches).scheduled.edge.must_train:
      with pytest.raises(UserError, match='see each of its batches trained'):
        list(train(trainer, batches, 1))
      batches.set_state(before)
    assert len(list(train(trainer, batches, 1))) == 1


def test_a_position_that_is_refused_leaves_the_old_one():
  trainer, batches = start('streamed', 'plain', 2)
  with batches:
    list(train(trainer, batches, 3))
    before = batches.get_state()
    with pytest.raises(UserError):
      batches.set_state({'delivered': 1, 'order': 7})
    assert batches.get_state() == before
    list(train(trainer, batches, 10_000))
  assert_same_bits(everything(trainer), unbroken('streamed', 'plain')[0])


@pytest.fixture
def _types_unchecked():
  """As for users: only our own tests check them."""
  jaxtyping.config.update('jaxtyping_disable', True)
  yield
  jaxtyping.config.update('jaxtyping_disable', False)


@pytest.mark.usefixtures('_types_unchecked')
def test_train_takes_planned_batches_and_whole_numbers():
  trainer, batches = start('streamed', 'plain', 0)
  with batches:
    with pytest.raises(UserError, match='planned batches, got ColumnBatches'):
      list(train(trainer, source(), 1))
    with pytest.raises(UserError, match=r'whole number, .*got -1'):
      list(train(trainer, batches, -1))


def test_a_position_of_other_settings_is_refused():
  trainer, batches = start('pinned', 'rows', 0)
  with batches:
    list(train(trainer, batches, 3))
    state = batches.get_state()
  others = skip('rows')._replace(drop=0.25)
  batches = slipstream(trainer, source(), others, None, 0)
  same = pytest.raises(UserError, match=r'same settings, drop 0\.5')
  with batches, same:
    batches.set_state(state)


@pytest.mark.parametrize('saved', ['at the end', 'before it is known'])
def test_what_is_read_after_the_last_step_is_counted_once(saved, tmp_path):
  """All of it is dropped, so that no batch reports it."""
  hot = small.hot(COLUMNS, sum(small.ROWS))
  drops_all = Skip(1, 'random', 'examples', Phases(1, 2, 2, 0))

  def begin():
    trainer = make_parts(small.recipe(), 'pinned', small.DENSE, hot=hot)
    given = ColumnBatches(COLUMNS, BATCH, epochs=1)
    return trainer, slipstream(trainer, given, drops_all)

  trainer, batches = begin()
  checkpoints = Checkpoints(tmp_path)
  with batches:
    if saved == 'before it is known':
      list(train(trainer, batches, 3))
      checkpoints.save(trainer, batches.get_state())
    assert len(list(train(trainer, batches, 100))) < 4
    step = checkpoints.save(trainer, batches.get_state())
  assert step == 3
  again, batches = begin()
  with batches:
    position = checkpoints.restore(again)
    batches.set_state(position.schedule_state)
    assert not list(train(again, batches, 100))
    assert not list(train(again, batches, 100))  # nor twice here
  checkpoints.close()
  assert again.engine.counters == trainer.engine.counters
  assert trainer.engine.counters.examples_seen == len(COLUMNS.labels)
