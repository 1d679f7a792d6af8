"""Vocabularies that grow while training, as if done by hand."""

import jax
import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.data.numbered import NumberedBatches
from slipstream_jax.tables import TableSet
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import planned
from slipstream_jax.types import Batch
from tests.support import market, small

SET = TableSet(market.TABLES, market.FEATURES)


def in_global_rows(examples, lookups, fresh):
  """The batch that these stand for, padded, and its fresh rows."""
  rows = np.full((market.BATCH, SET.num_columns), -1, np.int64)
  for name, feature in SET.features.items():
    first, start = SET.first_rows[feature.table], SET.columns[name].start
    for i, row in enumerate(lookups[name]):
      bag = row if isinstance(row, list) else [row]
      rows[i, start : start + len(bag)] = np.array(bag, int) + first

  def pad(column):
    short = market.BATCH - len(examples)
    return np.pad(column, [(0, short)] + [(0, 0)] * (column.ndim - 1))

  batch = Batch(
    pad(market.DENSE[examples]),
    rows.reshape(-1, *SET.example_shape),
    pad(market.CLICKS[examples]),
    pad(np.ones(len(examples), np.float32)),
  )
  parts = [SET.first_rows[t] + np.array(r, int) for t, r in fresh.items()]
  return batch, np.concatenate(parts)


BY_HAND = [in_global_rows(*taken) for taken in market.by_dictionary()]


@pytest.fixture(scope='module')
def wanted():
  """Trained by a dictionary; rows with another id are reset between steps."""
  trainer = market.trainer(placement='resident')
  trainer.predict(market.source(labels=None))
  parts = trainer.parts
  first = parts.engine.untrained
  untrained = [first.block(group) for group in range(len(SET.groups))]
  losses = []
  for batch, fresh in BY_HAND:
    blocks = jax.tree.map(np.array, list(parts.engine.read_back()))
    for (_, rows), block, new in zip(
      SET.in_groups(fresh), blocks, untrained, strict=True
    ):
      for leaf, first in zip(
        (block.rows, *block.state), (new.rows, *new.state), strict=True
      ):
        leaf[rows] = first[rows]
    small.replace_rows(parts.engine, blocks)
    one = NumberedBatches(lambda _, batch=batch: batch, 1, 'one', reads='one')
    with planned(parts, one, 0) as batches:
      losses += [record.loss for record in train(parts, batches, 1)]
  assert len(BY_HAND) == 38
  assert sum(len(fresh) for _, fresh in BY_HAND) > 90
  return losses, market.state_of(trainer)


@pytest.mark.parametrize('placing', market.PLACINGS)
def test_it_is_done_by_hand_under_every_placement(placing, wanted):
  with market.trainer(placement=market.PLACINGS[placing]) as trainer:
    history = trainer.train(market.source())
    assert history.losses.tolist() == wanted[0]
    for ours, theirs in zip(market.state_of(trainer), wanted[1], strict=True):
      np.testing.assert_array_equal(ours, theirs)


def test_batches_are_those_of_dictionaries():
  for batch, (other, fresh) in zip(
    market.source().bind(SET), BY_HAND, strict=True
  ):
    for ours, theirs in zip(batch[:4], other[:4], strict=True):
      np.testing.assert_array_equal(ours, theirs)
    assert batch.fresh.tolist() == fresh.tolist()


VECTORS = {
  'user': {
    f'user {number}': np.random.default_rng(number).normal(size=4)
    for number in range(0, 40, 2)
  },
  'item': {
    key: np.random.default_rng(key % 999).normal(size=3)
    for key in market.ITEMS[::2].tolist()
  },
}


def with_vectors():
  """The tables of the market, whose ids have vectors."""
  tables = dict(market.TABLES)
  for name, given in VECTORS.items():
    tables[name] = tables[name]._replace(initializer=given)
  return TableSet(tables, market.FEATURES)


GIVEN = with_vectors()


def trainer_of_vectors(**arguments):
  defaults = {'row_optimizer': market.ROWS, 'dense_optimizer': market.ADAM}
  return slip.Trainer(market.MODEL, GIVEN, **defaults | arguments)


def trained_on_vectors(skip='none', **arguments):
  with trainer_of_vectors(hot_bytes=600, **arguments) as trainer:
    history = trainer.train(market.source(), skip=market.SKIPS[skip])
    return history.losses, market.state_of(trainer)


@pytest.fixture(scope='module')
def wanted_of_vectors():
  """By a dictionary: each id gets its own vector with its row."""
  trainer = market.trainer(placement='resident')
  trainer.predict(market.source(labels=None))
  parts, losses, given = trainer.parts, [], 0
  first = parts.engine.untrained
  untrained = [first.block(group) for group in range(len(SET.groups))]
  words = market.vocabularies()
  for (batch, fresh), _ in zip(
    BY_HAND, market.source(words).bind(SET), strict=True
  ):
    blocks = jax.tree.map(np.array, list(parts.engine.read_back()))
    table_of = np.searchsorted(SET.offsets, fresh, side='right') - 1
    for (at, rows), block, new in zip(
      SET.in_groups(fresh), blocks, untrained, strict=True
    ):
      for leaf, value in zip(
        (block.rows, *block.state), (new.rows, *new.state), strict=True
      ):
        leaf[rows] = value[rows]
      for row, table, whole in zip(rows, table_of[at], fresh[at], strict=True):
        name = [*SET.tables][table]
        (key,) = words[name].ids([whole - SET.offsets[table]])
        if key in VECTORS[name]:
          block.rows[row] = VECTORS[name][key]
          given += 1
    small.replace_rows(parts.engine, blocks)
    one = NumberedBatches(lambda _, batch=batch: batch, 1, 'one', reads='one')
    with planned(parts, one, 0) as batches:
      losses += [record.loss for record in train(parts, batches, 1)]
  assert 30 < given < sum(len(fresh) for _, fresh in BY_HAND) - 30
  return losses, market.state_of(trainer)


@pytest.mark.parametrize('placing', [*market.PLACINGS, 'on a disk'])
def test_new_ids_start_from_their_vectors(placing, wanted_of_vectors, tmp_path):
  how = {'placement': market.PLACINGS.get(placing, 'streamed')}
  if placing == 'on a disk':
    how['store'] = slip.tiered(200, str(tmp_path))
  found = trained_on_vectors(**how)
  small.assert_same_bits([*map(float, found[0])], wanted_of_vectors[0])
  small.assert_same_bits(found[1], wanted_of_vectors[1])


@pytest.mark.parametrize('skip', market.SKIPS)
def test_skipping_brings_each_vector_with_its_row(skip, tmp_path):
  wanted = trained_on_vectors(skip)
  for placing in ('resident', 'look_ahead'):
    placement = market.PLACINGS[placing]
    found = trained_on_vectors(skip, placement=placement)
    small.assert_same_bits(found, wanted)
  steps = len(wanted[0]) // 2
  with trainer_of_vectors(hot_bytes=600) as trainer:
    trainer.train(market.source(), steps, skip=market.SKIPS[skip])
    trainer.save(tmp_path)
  with trainer_of_vectors(hot_bytes=600) as trainer:
    trainer.restore(tmp_path)
    trainer.train(market.source(), skip=market.SKIPS[skip])
    small.assert_same_bits(market.state_of(trainer), wanted[1])


def test_a_row_of_an_array_starts_anew_from_its_row():
  array = np.random.default_rng(0).normal(size=(14, 4)).astype(np.float32)
  tables = market.TABLES | {'user': slip.Table(14, 4, initializer=array)}
  still = slip.sgd(0.0)  # so that rows stay as they start
  source = market.source()
  with slip.Trainer(
    market.MODEL, tables, features=market.FEATURES, row_optimizer=still
  ) as trainer:
    trainer.train(source, 10)
    known = trainer.vocabulary('user').known.tolist()
    trainer.set_rows('user', known, np.full((len(known), 4), 9))
    trainer.train(source)
    rows = trainer.rows('user')
  fresh = np.concatenate([fresh for _, fresh in BY_HAND[10:]])
  again = np.isin(np.arange(14), fresh) | (np.arange(14) == 0)
  assert 5 < again.sum() < 14
  np.testing.assert_array_equal(rows[again], array[again])
  assert (rows[~again] == 9).all()
