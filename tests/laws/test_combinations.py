"""Features meet each other: a trainer's life changes no number.

A life trains in pieces. Between them it evaluates, predicts, closes, or saves
and goes on in another trainer: with another placement, another store, and
names in another order. It ends with the bits of the life that trained the same
examples in one piece, streamed from memory.

FUZZ_EXAMPLES=5000 pytest tests/laws/test_combinations.py
"""

import functools
import itertools
import os
from typing import NamedTuple

from flax import linen as nn
from hypothesis import given, HealthCheck, Phase, settings
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.store.tiered import STORES
from tests.support import market
from tests.support.watchdog import watchdog

DENSE = {'age': market.DENSE[:, 0], 'price': market.DENSE}  # [n] and [n, 2]
BOUGHT = np.roll(market.CLICKS, 3)
LABELS = {'click': market.CLICKS, 'buy': BOUGHT}
ITEMS = slip.Vocabulary.fit(market.ITEMS)
COUNTS = np.bincount(ITEMS.rows(market.ITEMS), minlength=ITEMS.size)
VECTORS = np.random.default_rng(0).normal(size=(ITEMS.size, 2))
# The most frequent ids have rows. Other users share row 0, other items more.
FITTED = {
  'user': slip.Vocabulary.fit(market.USERS, max_size=14),
  'item': slip.learned_hash(ITEMS, COUNTS, VECTORS, 23),
}
assert ITEMS.size > FITTED['item'].size == 23
EXAMPLES = int(os.environ.get('FUZZ_EXAMPLES', '10'))


class Model(nn.Module):
  """Logits of one head [B], or of two [B, 2], from dense features by name."""

  heads: int = 1

  @nn.compact
  def __call__(self, dense, e):
    if not isinstance(dense, dict):
      dense = {'age': dense[:, 0], 'price': dense[:, 1:]}
    columns = [dense['age'].reshape(-1, 1), dense['price'] * 0.5]
    goods = nn.Dense(3)(e['user']) * (e['item'] + e['history'] + e['ad'])
    x = jnp.concatenate([goods, *columns], axis=1)
    x = nn.Dense(self.heads)(x)
    return x[:, 0] if self.heads == 1 else x


MODELS = {heads: Model(heads) for heads in (1, 2)}


class World(NamedTuple):
  """What all pieces of a life share."""

  heads: int
  grows: bool
  skip: str
  by_name: bool
  streams: bool
  """From a function that makes iterators, not from arrays in memory."""


class Place(NamedTuple):
  """Where the rows of one trainer are, and how its source is written."""

  placement: str
  store: str
  order: int
  """Which permutation of the names of features, dense columns and heads."""


PLAIN = Place('streamed', 'memory', 0)
PLACES = st.builds(
  Place,
  st.sampled_from([*market.PLACINGS]),
  st.sampled_from([*STORES]),
  st.integers(0, 5),
)
WORLDS = st.builds(
  World,
  st.sampled_from([1, 2]),
  st.booleans(),
  st.sampled_from([*market.SKIPS]),
  st.booleans(),
  st.booleans(),
).filter(lambda world: world.heads == 1 or world.skip != 'model')
DEEDS = st.sampled_from(
  ['evaluate', 'predict', 'rows', 'close', 'move', 'move', 'move to a used one']
)


def shuffled(columns, order):
  names = [*columns]
  np.random.default_rng(order).shuffle(names)
  return {name: columns[name] for name in names} if order else columns


def vocabularies(world):
  return market.vocabularies() if world.grows else FITTED


def source(world, place, words, *, trains=True):
  """What a piece trains on; or one pass to score, of arrays."""
  dense, labels = shuffled(DENSE, place.order), shuffled(LABELS, place.order)
  if world.heads == 1:
    labels = market.CLICKS
  if world.streams and trains:
    return streamed(world, place, words, [*dense], [*labels])
  if not world.by_name:
    dense = np.column_stack([*DENSE.values()])
    if world.heads > 1:
      labels = np.column_stack([*LABELS.values()])
  return slip.batches(
    dense,
    shuffled(market.IDS, place.order),
    labels,
    vocabularies=words,
    batch_size=market.BATCH,
    seed=1 if trains else place.order or None,
    epochs=2 if trains else 1,
  )


def streamed(world, place, words, dense, labels):
  """The same examples in the same order, batch by batch.

  Each batch has its names in another order.
  """

  def batches():
    for number, examples in enumerate(market.cuts()):
      bags = [market.history_of(i) for i in examples]
      columns = {
        'user': [market.USERS[i] for i in examples],
        'item': market.ITEMS[examples],
        'history': (
          np.array([*itertools.chain(*bags)], np.uint64),
          np.cumsum([0, *map(len, bags)]),
        ),
        'ad': market.ADS[examples],
      }
      for name, column in (DENSE | LABELS).items():
        columns[name] = column[examples]
      columns['dense'] = np.column_stack([*DENSE.values()])[examples]
      columns['labels'] = np.column_stack([*LABELS.values()])[examples]
      yield shuffled(columns, place.order and place.order + number)

  if world.heads == 1:
    labels = 'click'
  elif not world.by_name:
    labels = 'labels'
  return slip.batches(
    batches,
    [*shuffled(market.IDS, place.order)],
    labels,
    dense=dense if world.by_name else 'dense',
    vocabularies=words,
    batch_size=market.BATCH,
  )


def trainer(world, place, folder):
  return slip.Trainer(
    MODELS[world.heads],
    market.TABLES,
    features=market.FEATURES,
    row_optimizer=market.ROWS,
    dense_optimizer=market.ADAM,
    placement=market.PLACINGS[place.placement],
    store=STORES[place.store](4000, str(folder)),
    hot_bytes=600,
  )


def outcome(world, trained):
  """All that training changes, and what the model then says."""
  held_out = source(world, PLAIN, vocabularies(world), trains=False)
  words = market.words_of(trained) if world.grows else None
  logits = trained.predict(held_out)
  return [*market.state_of(trained), logits], words


@functools.cache
def in_one_piece(world):
  if world.skip == 'none':  # else hot rows are those of one pass, or of all
    world = world._replace(streams=False)
  with trainer(world, PLAIN, '/unused') as one:
    words = vocabularies(world)
    history = one.train(
      source(world, PLAIN, words), skip=market.SKIPS[world.skip]
    )
    return history.losses, *outcome(world, one)


class Life:
  """A trainer, its source, and the folder where it is saved."""

  def __init__(self, world, place, folder):
    self.world, self.folder, self.moves = world, folder, 0
    self.losses = []
    self.begin(place._replace(order=0))  # which the trainer learns

  def begin(self, place):
    self.place = place
    self.trainer = trainer(self.world, place, self.folder)
    self.words = vocabularies(self.world)
    self.source = source(self.world, place, self.words)

  def train(self, steps):
    skip = market.SKIPS[self.world.skip]
    self.losses += [*self.trainer.train(self.source, steps, skip=skip).losses]

  def do(self, deed, place):
    words = vocabularies(self.world)
    held_out = source(self.world, place, words, trains=False)
    if deed == 'evaluate':
      self.trainer.evaluate(held_out, max_batches=2)
    elif deed == 'predict':
      self.trainer.predict(held_out, max_batches=2)
    elif deed == 'rows':
      self.trainer.rows('item')[:] = 0  # a copy
    elif deed == 'close':
      self.trainer.close()
    else:
      self.move(place, used=deed == 'move to a used one')

  def move(self, place, used):
    """Continues in another trainer, which may have trained something else."""
    self.moves += 1
    folder = self.folder / str(self.moves)
    steps = self.trainer.save(folder)
    self.trainer.close()
    self.begin(place._replace(order=0) if used else place)
    if used:
      self.trainer.train(self.source, 3, skip=market.SKIPS[self.world.skip])
    assert self.trainer.restore(folder) == steps


PIECES = st.tuples(st.integers(1, 9), DEEDS, PLACES)


@pytest.mark.slow
@settings(
  max_examples=EXAMPLES,
  phases=[Phase.generate],
  suppress_health_check=list(HealthCheck),
)
@given(WORLDS, PLACES, st.lists(PIECES, min_size=1, max_size=5))
def test_a_life_in_pieces_is_the_life_in_one(
  tmp_path_factory, world, place, pieces
):
  with watchdog(busy_s=120):
    losses, leaves, words = in_one_piece(world)
    life = Life(world, place, tmp_path_factory.mktemp('life'))
    left = len(losses)
    for steps, deed, other in pieces:
      steps = min(steps, left - 1)
      if steps:
        life.train(steps)
        left -= steps
        life.do(deed, other)
    life.train(None)
    with life.trainer as trained:
      ours, known = outcome(world, trained)
  np.testing.assert_array_equal(life.losses, losses)
  for mine, theirs in zip(ours, leaves, strict=True):
    np.testing.assert_array_equal(mine, theirs)
  assert known == words
  for name, table in (known or {}).items():  # what was read ahead is forgotten
    assert life.words[name].ids(np.arange(len(table))).tolist() == table


@pytest.mark.parametrize('heads', MODELS)
def test_the_lives_differ(heads):
  """Else the law would hold of anything."""
  skips = [skip for skip in market.SKIPS if heads == 1 or skip != 'model']
  worlds = [World(heads, True, skip, True, False) for skip in skips]
  losses = [tuple(in_one_piece(world)[0]) for world in worlds]
  assert len({*losses}) >= 3
