"""Laws of every system: a schedule with a placement."""

import pytest

from slipstream_jax.data.base import ColumnBatches
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.saving.checkpoint import Checkpoints
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.schedules.systems import SCHEDULES, SYSTEMS
from slipstream_jax.training.loop import train
from slipstream_jax.training.parts import make_parts, scheduled
from tests.laws.test_placements import assert_same_bits
from tests.support import small
from tests.support.short_runs import everything

COLUMNS = small.columns(64 * 20, seed=4)
HOT = small.hot(COLUMNS, 600)
# What each schedule is made with so that it leaves nothing out.
WHOLE = {
  'plain': (),
  'slipstream': (Skip(0, 'stale', 'examples', Phases(3, 5, 2, 15)),),
}
every_system = pytest.mark.parametrize('system', SYSTEMS.values(), ids=SYSTEMS)


def start(system):
  trainer = make_parts(
    small.recipe('adagrad'), system.placement, small.DENSE, 3, HOT
  )
  source = ColumnBatches(COLUMNS, 64, shuffle_seed=1, epochs=2)
  spec = SCHEDULES[system.schedule](*WHOLE[system.schedule])
  return trainer, scheduled(trainer, source, spec, 2)


def run(system):
  trainer, batches = start(system)
  with batches:
    assert len(list(train(trainer, batches, 100))) == 40
  return everything(trainer)


def test_systems_are_named_once_and_made_of_what_there_is():
  assert [system.name for system in SYSTEMS.values()] == list(SYSTEMS)
  assert {system.schedule for system in SYSTEMS.values()} == set(SCHEDULES)
  assert {system.placement for system in SYSTEMS.values()} <= set(PLACEMENTS)


@every_system
def test_where_nothing_is_left_out_all_systems_train_the_same_tables(system):
  (rows, state), (same, other) = run(system), run(SYSTEMS['resident'])
  assert_same_bits(rows, same)
  assert_same_bits(state.params, other.params)


@every_system
def test_a_resumed_system_has_the_bits_of_an_uninterrupted_one(
  system, tmp_path
):
  halfway, batches = start(system)
  checkpoints = Checkpoints(tmp_path)
  with batches:
    list(train(halfway, batches, 9))
    checkpoints.save(halfway, batches.get_state())
  resumed, batches = start(system)
  with batches:
    batches.set_state(checkpoints.restore(resumed).schedule_state)
    list(train(resumed, batches, 100))
  checkpoints.close()
  assert_same_bits(everything(resumed), run(system))
