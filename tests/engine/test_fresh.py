"""Rows that get another id: what they cost, and which are refused.

That they are untrained again is checked by the machine of the engine, and of
their training by tests/laws/test_growth.py.
"""

import numpy as np
import pytest

from slipstream_jax.data.admission import admit
from slipstream_jax.data.numbered import ColumnBatches, NumberedBatches
from slipstream_jax.errors import UserError
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.tables import TableSet
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import make_parts, planned
from slipstream_jax.transforms.rowwise import sgd
from tests.support import small
from tests.support.small import BATCH

COLUMNS = small.columns(BATCH * 8)
HOT = small.hot(COLUMNS)
ALL = PLACEMENTS | {'cached': cached(150), 'tiny': cached(3, 'lru')}
placements = pytest.mark.parametrize('name', ALL)


def with_fresh(fresh):
  return small.WithFresh(ColumnBatches(COLUMNS, BATCH), fresh)


def start(name, seed=3):
  recipe = small.recipe('adagrad')
  return make_parts(recipe, ALL[name], small.DENSE, seed, HOT)


def trained(trainer, fresh, steps):
  with planned(trainer, with_fresh(fresh)) as batches:
    list(train(trainer, batches, steps))


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


def test_of_equal_fresh_rows_the_last_vector_counts():
  vectors = {number: np.full(8, number) for number in range(3)}
  tables = small.tables()
  tables = {
    name: table._replace(initializer=vectors if name == 't1' else None)
    for name, table in tables.tables.items()
  }
  tables = TableSet(tables, small.tables().features)
  recipe = small.recipe()._replace(tables=tables, row_optimizer=sgd(0.0))
  for name in ALL:
    parts = make_parts(recipe, ALL[name], small.DENSE, 3, HOT, given={})
    first = parts.engine.rows_of('t1')
    batch = next(with_fresh({}))._replace(
      fresh=np.array([52, 50, 52, 53, 50, 3]),
      fresh_vectors=np.array([0, 2, 1, -1, -1, -1]),
    )
    one = NumberedBatches(lambda _, batch=batch: batch, 1, 'one', reads='one')
    with planned(parts, one, 0) as batches:
      list(train(parts, batches, 1))
    first[2] = 1
    np.testing.assert_array_equal(parts.engine.rows_of('t1'), first)


def test_wrong_vectors_of_fresh_rows_are_one_sentence():
  batch, shape = next(with_fresh({})), start('streamed').shape
  for fresh, vectors, said in (
    (None, [1], 'one number per fresh row, got'),
    ([3], [1, 2], r'\[2\] for \(1,\)'),
    ([3], [0.5], 'integer type, got float64'),
    ([3], [0], 'vectors of the initializer of their table, got 0'),
    ([3], [-2], 'their table, got -2'),
  ):
    fresh = fresh and np.array(fresh)
    wrong = batch._replace(fresh=fresh, fresh_vectors=np.array(vectors))
    with pytest.raises(UserError, match=said):
      admit(wrong, shape)


def test_no_fresh_rows_are_none_and_others_are_copied():
  shape, batch = start('streamed').shape, next(with_fresh({}))
  empty = batch._replace(fresh=np.empty(0, np.int64))
  assert admit(empty, shape).fresh is None
  given = np.array([3, 1], np.uint16)
  own = admit(batch._replace(fresh=given), shape).fresh
  given[:] = 9
  assert own.tolist() == [3, 1]
  assert own.dtype == np.int64
