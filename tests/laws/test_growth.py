"""Vocabularies that grow while training, as if done by hand."""

import jax
import numpy as np
import pytest

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
