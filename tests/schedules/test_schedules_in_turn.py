"""One trainer, several schedules after one another."""

import jax
import numpy as np
import pytest

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.errors import UserError
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.tables import tables_of
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from tests.support import small
from tests.support.watchdog import watchdog

COLUMNS = small.columns(64 * 40)
HOT = small.hot(COLUMNS, 1500)
SETTINGS = Skip(0.6, POLICIES['stale'], 'rows', Phases(4, 8, 6, 40))


def start(placement):
  return make_parts(
    small.recipe('sgd'),
    PLACEMENTS[placement],
    small.DENSE,
    seed=3,
    hot=HOT,
  )


def rows(trainer):
  return np.array(trainer.engine.read_back()[0].rows)


def source(seed):
  return ColumnBatches(COLUMNS, 64, shuffle_seed=seed)


@pytest.mark.parametrize('placement', ['streamed', 'pinned'])
def test_plain_training_thaws_what_stood_still(placement):
  trainer = start(placement)
  with slipstream(trainer, source(1), SETTINGS, 30) as batches:
    list(train(trainer, batches, 30))
  stale = np.asarray(jax.device_get(trainer.state.watch[0].skip.stale))
  stale = HOT.rows[stale]
  assert len(stale) > 50
  before = rows(trainer)
  with planned(trainer, source(2)) as batches:
    list(train(trainer, batches, 30))
  moved = (rows(trainer) != before).any(axis=1)
  assert moved[stale].mean() > 0.5


def test_a_second_schedule_learns_nothing_of_the_first():
  def run(depth):
    trainer = start('pinned')
    for seed in (1, 2):
      settings = SETTINGS._replace(phases=Phases(4, 8, 2, 0))
      made = slipstream(trainer, source(seed), settings, 30, depth)
      with made as batches:
        events = [r.event for r in train(trainer, batches, 30) if r.event]
    return rows(trainer), events[0]['threshold']

  (first, threshold), *others = (run(depth) for depth in (0, 1, 8))
  for other, same in others:
    assert same == threshold
    np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize('depth', [0, 2])
def test_batches_that_nobody_trains_end_in_a_sentence(depth):
  """A decision needs the window's steps; to wait for them is to hang."""
  trainer = start('pinned')
  with slipstream(trainer, source(1), SETTINGS, 30, depth) as batches:
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
