"""A market whose customers and goods come and go: raw ids for all tests.

Text and 64-bit numbers, a table that two features share, lists of unlike
lengths, missing ids, and tables so small that rows are given away all the time.
"""

import itertools

from flax import linen as nn
import jax
import numpy as np
import optax

import slipstream_jax as slip
from slipstream_jax.placement import cached
from tests.vocabulary.dictionary import Dictionary

BATCH, EXAMPLES, STEPS = 8, 150, 40  # two epochs, and a batch of six in each
SIZES = {'user': 14, 'item': 23}
ADMIT = {'user': 1, 'item': 2}
PHASES = slip.Phases(4, 5, 3, 17)
SKIPS = {
  'none': None,
  'stale': slip.Skip(0.5, 'stale', phases=PHASES, refill=True),
  'random': slip.Skip(0.6, 'random', phases=PHASES, drop_of='hot'),
  'rows': slip.Skip(0.6, mode='rows', phases=PHASES),
  'model': slip.Skip(0.4, scorer='model', phases=slip.Phases(1, 0, 3, 9)),
}
PLACINGS = {
  'resident': 'resident',
  'streamed': 'streamed',
  'pinned': 'pinned',
  'cached': cached(6, 'lru'),
  'look_ahead': cached(5, look_ahead=2),
}
TABLES = {
  'user': slip.Table(SIZES['user'], embedding_dim=4),
  'item': slip.Table(SIZES['item'], embedding_dim=3),
  'ad': slip.Table(5, embedding_dim=3),
}
FEATURES = {
  'user': slip.Feature('user'),
  'item': slip.Feature('item'),
  'history': slip.Feature('item', combiner='mean', max_length=3),
  'ad': slip.Feature('ad'),
}


class Model(nn.Module):
  @nn.compact
  def __call__(self, dense, e):
    goods = nn.Dense(3)(e['user']) * (e['item'] + e['history'] + e['ad'])
    return goods.sum(-1) + nn.Dense(1)(dense)[:, 0]


MODEL, ROWS, ADAM = Model(), slip.rowwise_adagrad(0.1), optax.adam(1e-2)
CHAIN = optax.chain(ROWS, slip.skip_stale(0.05, every=12, window=4))
"""A row optimizer that skips by itself."""

_rng = np.random.default_rng(0)
_time = np.arange(EXAMPLES) // 20
USERS = [
  None if number == 7 else f'user {number}'
  for number in (_rng.zipf(1.4, EXAMPLES) % 12 + 2 * _time).tolist()
]
_goods = _rng.integers(2**63, 2**64, 99, np.uint64)
ITEMS = _goods[_rng.zipf(1.5, EXAMPLES) % 15 + 4 * _time]
_lengths = _rng.integers(0, 4, EXAMPLES)
_past = np.repeat(np.arange(EXAMPLES), _lengths)
HISTORY = (
  _goods[_rng.zipf(1.5, len(_past)) % 15 + 4 * _time[_past]],
  np.cumsum([0, *_lengths]),
)
ADS = _rng.integers(0, 5, EXAMPLES)
DENSE = _rng.normal(size=(EXAMPLES, 2)).astype(np.float32)
CLICKS = (_rng.random(EXAMPLES) < 0.4).astype(np.float32)
IDS = {'user': USERS, 'item': ITEMS, 'history': HISTORY, 'ad': ADS}


def vocabularies():
  return {
    name: slip.GrowingVocabulary(
      SIZES[name], admit_after=ADMIT[name], candidates=9, history=1
    )
    for name in SIZES
  }


def source(words=None, **arguments):
  words = vocabularies() if words is None else words
  arguments = {'batch_size': BATCH, 'seed': 1, 'epochs': 2} | arguments
  labels = arguments.pop('labels', CLICKS)
  return slip.batches(DENSE, IDS, labels, vocabularies=words, **arguments)


def trainer(model=MODEL, **arguments):
  defaults = {'row_optimizer': ROWS, 'dense_optimizer': ADAM, 'hot_bytes': 600}
  return slip.Trainer(model, TABLES, features=FEATURES, **defaults | arguments)


def state_of(trainer):
  """All that training changes, as numpy: rows, their state, the rest."""
  state, blocks = trainer.parts.whole_state, trainer.parts.engine.read_back()
  leaves = jax.tree.leaves(
    (state.params, state.dense_state, state.step, state.entries)
  )
  return [
    *map(np.array, jax.device_get(leaves)),
    *jax.tree.leaves(list(blocks)),
  ]


def words_of(trainer):
  """By table, the ids of the rows as trained."""
  tables = ((name, trainer.vocabulary(name)) for name in SIZES)
  return {name: v.ids(np.arange(SIZES[name])).tolist() for name, v in tables}


def assert_same(one, other):
  for a, b in zip(state_of(one), state_of(other), strict=True):
    np.testing.assert_array_equal(a, b)
  assert words_of(one) == words_of(other)


def history_of(example):
  values, splits = HISTORY
  return values[splits[example] : splits[example + 1]].tolist()


def cuts(seed=1, epochs=2):
  """The examples of each batch, as `batches` shuffles them."""
  for epoch in range(epochs):
    order = np.arange(EXAMPLES)
    np.random.default_rng((seed, epoch)).shuffle(order)
    yield from np.split(order, range(BATCH, EXAMPLES, BATCH))


def by_dictionary():
  """Of each batch, by the rule: examples, lookups by feature, fresh rows."""
  user, item = (Dictionary(SIZES[t], ADMIT[t], 9) for t in ('user', 'item'))
  for examples in cuts():
    bags = [history_of(i) for i in examples]
    goods = [int(ITEMS[i]) for i in examples] + [*itertools.chain(*bags)]
    users, of_user = user.take([USERS[i] for i in examples])
    rows, of_item = item.take(goods)
    split, histories = len(examples), []
    for bag in bags:
      histories.append(rows[split : split + len(bag)])
      split += len(bag)
    lookups = {
      'user': users,
      'item': rows[: len(examples)],
      'history': histories,
      'ad': ADS[examples].tolist(),
    }
    yield examples, lookups, {'user': of_user, 'item': of_item}
