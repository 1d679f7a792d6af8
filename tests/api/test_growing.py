"""Vocabularies that grow, whatever happens between batches, and refusals."""

import functools
import itertools

from hypothesis import example, given, Phase, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.errors import UserError
from slipstream_jax.tables import TableSet
from tests.support import market

SET = TableSet(market.TABLES, market.FEATURES)


def dicts(batches=None, size=market.BATCH):
  """The examples in the order of `batches`, as a pipeline gives them."""
  for examples in itertools.islice(market.cuts(), batches):
    bags = [market.history_of(i) for i in examples]
    yield {
      'user': [market.USERS[i] for i in examples],
      'item': market.ITEMS[examples],
      'history': (
        np.array([*itertools.chain(*bags)], np.uint64),
        np.cumsum([0, *map(len, bags)]),
      ),
      'ad': market.ADS[examples],
      'dense': market.DENSE[examples],
      'label': market.CLICKS[examples],
    }


class Pipeline:
  """The same, with grain's methods."""

  def __init__(self):
    self.items, self.at = list(dicts()), 0

  def __iter__(self):
    return self

  def __next__(self):
    if self.at == len(self.items):
      raise StopIteration
    self.at += 1
    return self.items[self.at - 1]

  def get_state(self):
    return {'at': self.at}

  def set_state(self, state):
    self.at = state['at']


@functools.cache
def untrained():
  """Per table, rows as they are before their first step."""
  with market.trainer() as other:
    other.predict(market.source(labels=None), max_batches=1)
    return {name: other.rows(name) for name in market.SIZES}


def assert_unknown_rows_are_untrained(trainer):
  new = untrained()
  for name, ids in market.words_of(trainer).items():
    free = [row for row, known in enumerate(ids) if known is None and row]
    rows = trainer.rows(name)
    np.testing.assert_array_equal(rows[free], new[name][free])


@pytest.fixture(scope='module')
def whole():
  with market.trainer() as trainer:
    trainer.train(market.source())
  return trainer


ONES = {
  'array': (market.source, {}),
  'other': (market.source, {'seed': 4}),
  'dicts': (lambda w: slip.batches(dicts, vocabularies=w), {}),
  'pipeline': (lambda w: slip.batches(Pipeline(), vocabularies=w), {}),
}
operations = st.one_of(
  st.tuples(
    st.sampled_from(['array', 'other']),
    st.integers(1, 7),
    st.sampled_from(['none', 'none', 'stale', 'rows']),
  ),
  st.tuples(st.just('dicts'), st.integers(1, 7), st.just('none')),
  st.tuples(st.just('pipeline'), st.integers(1, 3), st.just('none')),
  st.tuples(st.sampled_from(['close', 'score', 'resume', 'rewind'])),
)


def run(program, folder, **arguments):
  """Trains as the program says; its trainer, and what it said on the way."""
  words = market.vocabularies()
  sources = {name: make(words, **more) for name, (make, more) in ONES.items()}
  held_out = market.source(words, seed=None, epochs=1, labels=None)
  said = []
  with market.trainer(**arguments) as trainer:
    trainer.train(sources['array'], 2)
    for number, (what, *more) in enumerate(program):
      if what in ONES:
        steps, skip = more
        try:
          trainer.train(sources[what], steps, skip=market.SKIPS[skip])
        except slip.UserError as error:  # by the others' steps in between
          if 'without another source in between' not in str(error):
            raise
          said.append(str(error))
      elif what == 'close':
        trainer.close()
      elif what == 'score':
        said.append(trainer.predict(held_out, max_batches=3))
      else:
        at = folder / f'{number}'
        trainer.save(at)
        if what == 'rewind':
          trainer.train(market.source(words, seed=9), 2)
        trainer.restore(at, resume=False)
    assert_unknown_rows_are_untrained(trainer)
  known = {n: v.ids(np.arange(v.size)).tolist() for n, v in words.items()}
  still = ('close', 'score')  # neither brings a vocabulary to where training is
  last = [what for what, *_ in program if what not in still][-1:]
  if last not in (['resume'], ['rewind']):  # a restored one has no source yet
    assert known == market.words_of(trainer)
  return trainer, said


@pytest.mark.slow
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@example(
  [('other', 2, 'rows'), ('array', 2, 'none'), ('other', 4, 'rows')],
  'cached',
  1,
)
@given(
  st.lists(operations, min_size=3, max_size=6),
  st.sampled_from([*market.PLACINGS]),
  st.integers(1, 4),
)
def test_how_far_is_read_ahead_changes_nothing(
  tmp_path_factory, program, placing, prefetch
):
  folder = tmp_path_factory.mktemp('run')
  if placing == 'look_ahead' and any('none' not in p[2:] for p in program):
    placing = 'cached'
  plain, said = run(program, folder / 'plain', prefetch=0)
  other, again = run(
    program,
    folder / 'other',
    prefetch=prefetch,
    placement=market.PLACINGS[placing],
  )
  market.assert_same(plain, other)
  for one, two in zip(said, again, strict=True):
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize('name', ['dicts', 'pipeline'])
@pytest.mark.parametrize('saved_at', [None, 1, 37])
def test_a_stream_grows_as_arrays_do_and_resumes(
  saved_at, name, whole, tmp_path
):
  make, how = ONES[name][0], {'prefetch': 3, 'placement': 'pinned'}
  with market.trainer(**how) as trainer, market.trainer(**how) as other:
    if saved_at is not None:
      other.train(make(market.vocabularies()), saved_at)
      other.save(tmp_path)
      trainer.restore(tmp_path)
    trainer.train(make(market.vocabularies()))
  market.assert_same(trainer, whole)


@settings(max_examples=4, phases=[Phase.generate])
@given(
  st.lists(st.integers(0, 37), min_size=1, max_size=4, unique=True),
  st.sampled_from([0, 2]),
  st.sampled_from([KeyboardInterrupt, ValueError]),
)
def test_what_breaks_in_between_breaks_nothing(whole, at, prefetch, error):
  """One table has taken the batch, and the other has not yet."""
  words, due = market.vocabularies(), set(at)
  take = words['item'].assign_features

  def broken(ids, after):
    if after.batches in due:
      due.remove(after.batches)
      raise error
    return take(ids, after)

  words['item'].assign_features = broken
  source, caught = market.source(words), 0
  with market.trainer(prefetch=prefetch) as trainer:
    while True:
      try:
        trainer.train(source)
        break
      except error:
        caught += 1
    assert caught == len(at)
    assert not due
  market.assert_same(trainer, whole)


def test_one_source_at_a_time(whole):
  words = market.vocabularies()
  with market.trainer() as first, market.trainer() as second:
    source = market.source(words)
    first.train(source, 5)
    with pytest.raises(UserError, match='grows by one source at a time'):
      second.train(market.source(words), 3)
    first.evaluate(source)  # nor does scoring take it away
    second.predict(source, max_batches=2)
    first.train(source, 5)
    first.close()
    # The other begins with what the first has trained, not with what it read.
    second.train(market.source(words, seed=3), 2)
    with pytest.raises(UserError, match='grows by one source at a time'):
      first.train(source, 3)
    second.close()
    first.train(source)
  market.assert_same(first, whole)


def test_who_grows_it_meanwhile_is_told(whole):
  words, source = market.vocabularies(), None
  source = market.source(words)
  with market.trainer(prefetch=0) as trainer:
    trainer.train(source, 6)
    words['user'].assign(['somebody'])
    with pytest.raises(UserError, match=r'else may grow it, got 7 batches'):
      trainer.train(source, 1)
    trainer.train(source)
  market.assert_same(trainer, whole)


def test_a_table_keeps_its_vocabulary():
  words = market.vocabularies()
  with market.trainer() as trainer:
    trainer.predict(market.source(labels=None), max_batches=1)
    with pytest.raises(UserError, match='only a table whose vocabulary grew'):
      trainer.vocabulary('user')
    trainer.train(market.source(words), 6)
    known = market.words_of(trainer)
    # A new one takes over what is known.
    trainer.train(market.source(market.vocabularies(), seed=2), 1)
    rows = market.words_of(trainer)['user']
    kept = [a == b for a, b in zip(rows, known['user'], strict=True)]
    assert np.mean(kept) > 0.5
    strange = market.vocabularies()
    strange['user'].assign(['somebody'])
    with pytest.raises(UserError, match='must keep the vocabulary'):
      trainer.train(market.source(strange), 1)
    wider = market.vocabularies() | {'user': slip.GrowingVocabulary(5)}
    with pytest.raises(UserError, match='must be of what GrowingVocabulary'):
      trainer.train(market.source(wider), 1)


def test_a_vocabulary_that_knows_ids_before_the_first_step(tmp_path):
  """As grown by a pass over last year's data, say."""

  def start(words):
    for vocabulary, ids in zip(
      words.values(), (market.USERS[:9], market.ITEMS[:9]), strict=True
    ):
      vocabulary.assign(ids)
    return market.source(words)

  with market.trainer() as trainer, market.trainer() as other:
    source = start(market.vocabularies())
    trainer.train(source, 0)
    trainer.save(tmp_path)
    trainer.train(source, 9)
    other.restore(tmp_path)
    other.train(market.source(market.vocabularies()), 9)
    market.assert_same(trainer, other)


def test_scores_are_of_the_rows_as_trained():
  """Ids that were read ahead, and no step has seen, are unknown."""
  words = market.vocabularies()
  with market.trainer(prefetch=4) as trainer:
    trainer.train(market.source(words), 3)
    scores = trainer.predict(market.source(words, seed=None, epochs=1))
    known = {name: trainer.vocabulary(name) for name in market.SIZES}
    fixed = market.source(known, seed=None, epochs=1)
    np.testing.assert_array_equal(trainer.predict(fixed), scores)
    trained = np.concatenate([*itertools.islice(market.cuts(), 3)])
    seen = {market.USERS[i] for i in trained} - {None}
    assert set(known['user'].known) == seen
    assert trainer.evaluate(fixed) == trainer.evaluate(
      market.source(words, seed=None, epochs=1)
    )


def grown(size=14):
  return slip.GrowingVocabulary(size)


ITEM = grown()
REFUSED = {
  'two of a table': (
    {'user': grown(), 'item': ITEM, 'history': grown()},
    r"share its one growing vocabulary, got another one, or none, .*'history'",
  ),
  'one of two features': (
    {'user': grown(), 'history': ITEM, 'item': slip.Vocabulary.fit([1])},
    "'history'|'item'",
  ),
  'one for two tables': (
    {'user': ITEM, 'item': ITEM},
    "growing vocabulary must be of one table, got another one, and 'item'",
  ),
  'too large': (
    {'user': grown(15), 'item': grown()},
    r"table 'user' must have a row for each of its vocabulary, got 14 for 15",
  ),
  'floats': ({'user': grown(), 'item': grown(), 'ad': grown(5)}, 'float64'),
}


@pytest.mark.parametrize('what', REFUSED)
def test_what_cannot_grow(what):
  words, said = REFUSED[what]
  ids = market.IDS | ({'ad': market.ADS / 2} if what == 'floats' else {})
  source = slip.batches(
    market.DENSE, ids, market.CLICKS, batch_size=8, vocabularies=words
  )
  with market.trainer() as trainer, pytest.raises(UserError, match=said):
    trainer.train(source, 1)


def test_positions_of_other_vocabularies_are_refused(tmp_path):
  source = market.source().bind(SET)
  next(source)
  state = source.get_state()
  with pytest.raises(UserError, match='user, item, got none'):
    source.set_state({k: v for k, v in state.items() if k != 'vocabularies'})
  assert source.get_state() == state
  source.set_state(state)
  with pytest.raises(UserError, match='vocabularies of its tables: user, item'):
    source.set_state(state | {'vocabularies': {'ad': None}})
  other = slip.batches(dicts, vocabularies=market.vocabularies()).bind(SET)
  position = {'delivered': 0, 'source': None, 'vocabularies': {}}
  with pytest.raises(UserError, match='user, item, got none'):
    other.set_state(position)
  assert jax.tree.leaves(position)


def test_ids_of_another_type_leave_all_as_it_was():
  items = list(dicts(4))
  bad = items[2] | {'item': [f'item {i}' for i in range(market.BATCH)]}
  words = market.vocabularies()
  given = iter([items[0], items[1], bad, items[3]])
  source = slip.batches(given, vocabularies=words).bind(SET)
  next(source), next(source)
  before = {name: v.get_state() for name, v in words.items()}
  for _ in range(2):
    with pytest.raises(UserError, match='ids must be uint64, as the first'):
      next(source)
    for name, state in before.items():
      for key, value in words[name].get_state().items():
        np.testing.assert_array_equal(value, state[key])
