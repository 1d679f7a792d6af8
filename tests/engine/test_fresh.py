"""Rows that get another id: untrained again, at a cost that is counted."""

import jax
import numpy as np
import pytest

from slipstream_jax.checkpoint.checkpoint import Checkpoints
from slipstream_jax.data.admission import admit
from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.errors import UserError
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from tests.support import small

COLUMNS = small.columns(64 * 8)
HOT = small.hot(COLUMNS)
ALL = PLACEMENTS | {'cached': cached(150), 'tiny': cached(3, 'lru')}
placements = pytest.mark.parametrize('name', ALL)


def with_fresh(fresh):
  return small.WithFresh(ColumnBatches(COLUMNS, 64), fresh)


def start(name, seed=3):
  recipe = small.recipe('adagrad')
  return make_parts(recipe, ALL[name], small.DENSE, seed, HOT)


def trained(trainer, fresh, steps=8):
  with planned(trainer, with_fresh(fresh)) as batches:
    list(train(trainer, batches, steps))
  (table,) = trainer.engine.read_back()
  return jax.tree.map(np.array, table)


def used_in(number):
  return np.unique(COLUMNS.lookups[64 * number : 64 * (number + 1)])


@placements
def test_a_row_that_no_later_batch_uses_is_as_at_the_start(name):
  trainer = start(name)
  (first,) = trainer.engine.read_back()
  first = jax.tree.map(np.array, first)
  moved = trained(start(name), {})
  used = np.unique(COLUMNS.lookups)
  fresh = np.setdiff1d(used, used_in(7))
  assert len(fresh) > 200
  assert (moved.rows[fresh] != first.rows[fresh]).any(axis=1).mean() > 0.9
  table = trained(trainer, {7: fresh})
  for leaf, before in zip(
    (table.rows, *table.state), (first.rows, *first.state), strict=True
  ):
    np.testing.assert_array_equal(leaf[fresh], before[fresh])


@placements
def test_a_row_of_the_batch_is_trained_from_the_start(name):
  """One step after the reset is one step of a trainer whose rows are new."""
  fresh = used_in(7)[:40]
  table = trained(start(name), {7: np.append(fresh, fresh[:5])})
  whole = start('resident')
  before = trained(whole, {}, 7)
  (new,) = start('resident').engine.read_back()
  before.rows[fresh] = new.rows[fresh]
  before.state[0][fresh] = new.state[0][fresh]
  small.replace_rows(whole.engine, [before])
  with planned(whole, with_fresh({})) as batches:
    batches.set_state({**batches.get_state(), 'delivered': 7})
    list(train(whole, batches, 1))
  expected = whole.engine.read_back()[0]
  np.testing.assert_array_equal(table.rows, expected.rows)
  np.testing.assert_array_equal(table.state[0], expected.state[0])


@placements
def test_what_crosses_the_link_is_counted(name):
  """Of rows on the device their new values; the others are loaded anyway."""
  fresh = {2: np.arange(0, 3000, 3)}
  counters = []
  for given in ({}, fresh):
    trainer = start(name)
    trained(trainer, given, 3)
    counters.append(trainer.engine.counters)
  before = start(name)
  trained(before, {}, 2)
  (group,) = before.engine.groups
  there = group.kept.rows
  on_device = fresh[2] if there is None else np.intersect1d(fresh[2], there)
  plain, more = counters
  assert more.rows_loaded - plain.rows_loaded == len(on_device)
  extra = more.bytes_loaded - plain.bytes_loaded
  assert extra == len(on_device) * group.row_bytes
  assert more.rows_stored == plain.rows_stored


def test_a_resumed_run_begins_rows_as_it_did_before(tmp_path):
  fresh = {6: np.arange(500)}
  whole = trained(start('streamed', seed=3), fresh)
  halfway, other = start('streamed', seed=3), start('streamed', seed=4)
  checkpoints = Checkpoints(tmp_path)
  with planned(halfway, with_fresh(fresh)) as batches:
    list(train(halfway, batches, 5))
    checkpoints.save(halfway, batches.get_state())
  with planned(other, with_fresh(fresh)) as batches:
    position = checkpoints.restore(other)
    batches.set_state(position.schedule_state)
    list(train(other, batches, 3))
  checkpoints.close()
  (table,) = other.engine.read_back()
  np.testing.assert_array_equal(table.rows, whole.rows)


@pytest.mark.parametrize(
  ('fresh', 'said'),
  [
    ([3058], r'in \[0, 3058\), as \[n\], got 3058 \(Batch.fresh\)'),
    ([-1], 'got -1'),
    ([[1, 2]], r'got \[1, 2\]'),
    ([0.5], 'integer type, got float64'),
  ],
)
def test_what_are_no_fresh_rows(fresh, said):
  batch = next(with_fresh({}))._replace(fresh=np.array(fresh))
  with pytest.raises(UserError, match=said):
    admit(batch, start('streamed').shape)


def test_no_fresh_rows_are_none_and_others_are_copied():
  shape, batch = start('streamed').shape, next(with_fresh({}))
  empty = batch._replace(fresh=np.empty(0, np.int64))
  assert admit(empty, shape).fresh is None
  given = np.array([3, 1], np.uint16)
  own = admit(batch._replace(fresh=given), shape).fresh
  given[:] = 9
  assert own.tolist() == [3, 1]
  assert own.dtype == np.int64
