"""Given initial rows, and rows that are set, are the same bits everywhere."""

import contextlib
import functools

import jax
import numpy as np
import optax
import pytest

import slipstream_jax as slip
from slipstream_jax.checkpoint.chain import read_chain
from slipstream_jax.checkpoint.manifest import steps_in
from slipstream_jax.checkpoint.places import open_place
from slipstream_jax.engine.drawing import draws_of
from slipstream_jax.store.base import Storage
from slipstream_jax.store.tiered import TieredStore
from slipstream_jax.tables import TableSet
from tests.api import shop
from tests.support import small

RNG = np.random.default_rng(5)
ARRAY = RNG.normal(size=(60, 4)).astype(np.float32)
ARRAY.flags.writeable = False  # so that all trainers share it
IDS = [17, 3, 0, 59, 30]
VECTORS = {key: RNG.normal(size=3) for key in (19, 0, 7)}
NORMAL = jax.nn.initializers.normal(0.1)
GIVEN = {
  'user': slip.Table(60, 4, initializer=ARRAY),
  'item': slip.Table(20, 3, initializer=VECTORS),
}
DRAWN = {
  'user': slip.Table(60, 4, initializer=NORMAL),
  'item': slip.Table(20, 3, initializer=jax.nn.initializers.glorot_uniform()),
}
TABLES = {'given': TableSet(GIVEN), 'drawn': TableSet(DRAWN)}
PLACED = shop.PLACINGS


def tiered(folder):
  def stores(groups):
    return tuple(TieredStore(one, folder, 10) for one in groups)

  return Storage('tiered', stores)


def everything(trainer):
  """All rows with their state, and the state on the device."""
  return small.everything(trainer.parts)


def new_rows(step):
  rng = np.random.default_rng(step)
  return rng.permutation(60)[:20], rng.normal(size=(20, 4))


def run(kind, skip='none', sets=(20, 33), steps=45, **arguments):
  """Trains, and sets rows before some steps; the trainer."""
  trainer, source = (
    shop.trainer(tables=TABLES[kind], **arguments),
    shop.source(),
  )
  losses, taken = [], 0
  for until in (*sets, steps):
    history = trainer.train(source, until - taken, skip=shop.SKIPS[skip])
    losses += history.losses.tolist()
    taken = until
    if until in sets:
      trainer.set_rows('user', *new_rows(until))
  return trainer, losses


@functools.cache
def wanted(kind, skip):
  trainer, losses = run(kind, skip)
  with trainer:
    return everything(trainer), losses


@pytest.mark.parametrize('kind', TABLES)
@pytest.mark.parametrize('placing', PLACED)
def test_no_placement_changes_a_number(kind, placing):
  for skip in ('none', 'rows') if kind == 'given' else ('none',):
    trainer, losses = run(kind, skip, placement=PLACED[placing])
    with trainer:
      small.assert_same_bits((everything(trainer), losses), wanted(kind, skip))


def test_no_placement_changes_a_number_of_rows_that_a_chain_freezes():
  chain = optax.chain(slip.rowwise_adagrad(0.1), slip.skip_stale(0.1, 12, 4))
  runs = {}
  for placing in PLACED:
    how = {'placement': PLACED[placing], 'row_optimizer': chain}
    trainer, losses = run('given', 'none', (18, 29), 42, **how)
    with trainer:
      entries = trainer.parts.state.entries
      assert any(np.asarray(one.own.stale).any() for one in entries)
      runs[placing] = everything(trainer), losses
  small.assert_same_bits([runs['streamed']] * len(runs), [*runs.values()])


@pytest.mark.parametrize('kind', TABLES)
@pytest.mark.parametrize('placing', ['streamed', 'pinned', 'by value'])
def test_no_store_changes_a_number(kind, placing, tmp_path):
  how = {'placement': PLACED[placing], 'store': tiered(tmp_path)}
  trainer, losses = run(kind, 'rows', **how)
  with trainer:
    small.assert_same_bits((everything(trainer), losses), wanted(kind, 'rows'))


def test_it_is_done_by_hand():
  """A trainer whose rows are replaced before its first step."""
  with shop.trainer(tables=TABLES['given']) as ours, shop.trainer() as other:
    for trainer in ours, other:
      trainer.predict(shop.held_out())
    blocks = jax.tree.map(np.array, list(other.parts.engine.read_back()))
    users, items = blocks
    users.rows[:] = ARRAY
    for key, vector in VECTORS.items():
      items.rows[key] = vector
    small.replace_rows(other.parts.engine, blocks)
    shop.assert_same(ours, other)
    for trainer in ours, other:
      trainer.train(shop.source(), 25)
    shop.assert_same(ours, other)


@pytest.mark.parametrize('placing', PLACED)
def test_other_rows_and_all_state_stay(placing):
  trainer, _ = run('given', sets=(), steps=20, placement=PLACED[placing])
  with trainer:
    before = jax.tree.map(np.array, list(trainer.parts.engine.read_back()))
    ids, values = new_rows(0)
    trainer.set_rows('user', ids, values)
    before[0].rows[ids] = values
    after = list(trainer.parts.engine.read_back())
    small.assert_same_bits(before, after)


@pytest.mark.parametrize('kind', TABLES)
@pytest.mark.parametrize('placing', ['streamed', 'resident', 'by value'])
@pytest.mark.parametrize('skip', ['none', 'rows'])
def test_a_resumed_run_has_the_same_bits(kind, placing, skip, tmp_path):
  first, _ = run(kind, skip, (20,), 25, placement=PLACED[placing])
  with first:
    first.save(tmp_path)
    first.train(shop.source(), 0)
  # Its increment has the rows that are set between two checkpoints.
  with shop.trainer(tables=TABLES[kind], placement=PLACED[placing]) as second:
    second.restore(tmp_path)
    source = shop.source()
    second.train(source, 8, skip=shop.SKIPS[skip])
    second.set_rows('user', *new_rows(33))
    second.save(tmp_path)
  with shop.trainer(tables=TABLES[kind], placement=PLACED[placing]) as third:
    third.restore(tmp_path)
    third.train(shop.source(), 12, skip=shop.SKIPS[skip])
    small.assert_same_bits(everything(third), wanted(kind, skip)[0])


def rows_in(folder):
  """The rows in each link of the newest checkpoint, by group."""
  place = open_place(str(folder))
  chain = read_chain(place, max(steps_in(place)))
  return [[file.rows for file in link.rows.values()] for link in chain]


def test_checkpoints_have_what_cannot_be_named_again(tmp_path):
  once = shop.source(batch_size=4, seed=None)
  users, items = len({*shop.USERS[:4]}), {*shop.ITEMS[:4].tolist()}
  more = [len({*shop.USERS[4:8]}), len({*shop.ITEMS[4:8]})]
  expected = {'given': [users, len(items | {*VECTORS})], 'drawn': [60, 20]}
  for kind, first in expected.items():
    with shop.trainer(tables=TABLES[kind]) as trainer:
      once = shop.source(batch_size=4, seed=None)
      trainer.train(once, 1)
      trainer.save(tmp_path / kind)
      trainer.train(once, 1)
      trainer.save(tmp_path / kind)
    assert rows_in(tmp_path / kind) == [first, more]


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_is_rounded_once_to_nearest(dtype):
  array = RNG.normal(size=(60, 4)).astype(np.float32)
  kind = jax.numpy.dtype(dtype)
  tables = GIVEN | {'user': slip.Table(60, 4, dtype, array)}
  with shop.trainer(tables=tables) as trainer:
    trainer.predict(shop.held_out())
    exact = np.asarray(trainer.rows('user'))
    np.testing.assert_array_equal(exact, array.astype(kind))
    trainer.set_rows('user', np.arange(60), 2 * array, shop.source())
    exact = np.asarray(trainer.rows('user'))
    np.testing.assert_array_equal(exact, (2 * array).astype(kind))


@pytest.mark.parametrize('seed', [0, 1, 2**40 + 1])
def test_a_drawn_row_depends_on_seed_table_and_row_alone(seed):
  tables = TableSet(
    {
      'a': slip.Table(900, 5, initializer=NORMAL),
      'b': slip.Table(600, 5, initializer=NORMAL),
      'c': slip.Table(600, 5, initializer=jax.nn.initializers.orthogonal()),
    }
  )
  a, b, c = draws_of(tables).values()
  whole = a(seed, np.arange(900))
  for rows in np.array([899]), RNG.permutation(900)[:333], np.arange(0):
    np.testing.assert_array_equal(a(seed, rows), whole[rows])
  assert not np.array_equal(b(seed, np.arange(600)), whole[:600])
  assert not np.array_equal(a(seed + 1, np.arange(900)), whole)
  assert not np.array_equal(a(seed ^ 2**33, np.arange(900)), whole)
  assert len(np.unique(whole)) > 4400
  near, far = a(seed, np.array([5, 5 + 2**32]))
  assert np.array_equal(near, whole[5])
  assert not np.array_equal(near, far)
  assert abs(whole.std() - 0.1) < 0.005
  square = c(seed, np.arange(600))
  np.testing.assert_allclose(square.T @ square, np.eye(5), atol=1e-5)


@pytest.mark.parametrize('placing', PLACED)
def test_a_checkpoint_has_no_row_that_is_set_while_it_is_written(
  placing, tmp_path
):
  trainer, _ = run('given', sets=(), steps=20, placement=PLACED[placing])
  closing = contextlib.closing(slip.Checkpoints(tmp_path))
  with trainer, closing as checkpoints:
    checkpoints.save(trainer.parts, {}, wait=False)
    before = jax.tree.map(np.array, list(trainer.parts.engine.read_back()))
    trainer.set_rows('user', np.arange(60), np.full((60, 4), 7))
    checkpoints.wait()
  with shop.trainer(tables=TABLES['given']) as other:
    other.restore(tmp_path, resume=False)
    small.assert_same_bits(before, list(other.parts.engine.read_back()))
