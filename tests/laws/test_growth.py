"""Vocabularies that grow while training: as if done by hand, from anywhere."""

from hypothesis import given, Phase, settings
from hypothesis import strategies as st
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
STEPS = 38  # all of them


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


@pytest.fixture(scope='module')
def wholes():
  """Of each way to skip, a run in one piece."""
  trained = {}
  for name, skip in market.SKIPS.items():
    with market.trainer() as trainer:
      history = trainer.train(market.source(), skip=skip)
    assert name == 'none' or history.events
    trained[name] = trainer
  return trained


def resumes(wholes, folder, skip, at, placing, into):
  """Saves at a step, goes on elsewhere, and ends as if unbroken."""
  settings = market.SKIPS[skip]
  whole = wholes[skip]
  steps = int(jax.device_get(whole.parts.state.step))
  at = min(at, steps - 1)
  arguments = {'placement': market.PLACINGS[placing]}
  words = market.vocabularies()
  with market.trainer(**arguments) as first:
    first.train(market.source(words), at, skip=settings)
    assert first.save(folder) == at
    known = market.words_of(first)
    scores = first.predict(market.source(words, labels=None))
    if into == 'same':
      trainer = first
      trainer.train(market.source(words), 1, skip=settings)
    else:
      trainer, words = market.trainer(**arguments), market.vocabularies()
    if into == 'used':
      trainer.train(market.source(words, seed=5), 5)
    assert trainer.restore(folder) == at
    assert market.words_of(trainer) == known
    again = trainer.predict(market.source(words, labels=None))
    np.testing.assert_array_equal(again, scores)
    trainer.save(folder / 'again')
    with trainer:
      trainer.train(market.source(words), skip=settings)
    market.assert_same(trainer, whole)
    for name, vocabulary in words.items():  # what was read ahead is forgotten
      ids = vocabulary.ids(np.arange(vocabulary.size)).tolist()
      assert ids == market.words_of(whole)[name]


@settings(max_examples=5, phases=[Phase.generate])
@given(
  st.sampled_from([*market.SKIPS]),
  st.integers(1, STEPS - 1),
  st.sampled_from([*market.PLACINGS]),
  st.sampled_from(['new', 'used', 'same']),
)
def test_a_run_resumes_at_any_step(
  wholes, tmp_path_factory, skip, at, placing, into
):
  resumes(wholes, tmp_path_factory.mktemp('run'), skip, at, placing, into)


@pytest.mark.slow
@pytest.mark.parametrize('at', range(1, STEPS))
@pytest.mark.parametrize('skip', market.SKIPS)
def test_a_run_resumes_at_every_step(wholes, tmp_path, skip, at):
  placing = [*market.PLACINGS][at % len(market.PLACINGS)]
  resumes(wholes, tmp_path, skip, at, placing, ['new', 'same'][at % 2])


CUTS = (1, 5, 8, 11, 12, 20)


@pytest.mark.parametrize('skip', market.SKIPS)
def test_pieces_are_the_whole(skip, wholes):
  """Scored, looked at and closed in between."""
  whole, source = wholes[skip], market.source()
  held_out = market.source(market.vocabularies(), seed=None, epochs=1)
  with market.trainer(placement='pinned') as trainer:
    for steps in np.diff([0, *CUTS]).tolist():
      trainer.train(source, steps, skip=market.SKIPS[skip])
      trainer.evaluate(held_out, max_batches=2)
      market.words_of(trainer)
      if steps % 2:
        trainer.close()
    trainer.train(source, skip=market.SKIPS[skip])
    market.assert_same(trainer, whole)
