"""Iterators of batches: where they stand, and what they may not be."""

import collections
import itertools
import json

import numpy as np
import pytest

from slipstream_jax.data.source import BatchSource
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.arrays import UnboundExamples
from slipstream_jax.inputs.batches import batches
from slipstream_jax.tables import Table, TableSet

TABLES = TableSet({'user': Table(100)})
BATCHES = 9


def batch(number, size=4):
  ids = (np.arange(size) + 10 * number) % 100
  return {
    'user': ids,
    'dense': ids[:, None] / 2,
    'label': ids % 2,
    'when': ['noon'] * size,
  }


def generator(size=4):
  for number in range(BATCHES):
    yield batch(number, size)


class Pipeline:
  """An iterator with grain's methods; counts what was read."""

  def __init__(self, as_bytes):
    self.read, self.as_bytes = 0, as_bytes

  def __iter__(self):
    return self

  def __next__(self):
    if self.read == BATCHES:
      raise StopIteration
    self.read += 1
    return batch(self.read - 1)

  def get_state(self):
    state = {'next_index': self.read}
    return json.dumps(state).encode() if self.as_bytes else state

  def set_state(self, state):
    assert isinstance(state, bytes) == self.as_bytes
    state = json.loads(state) if self.as_bytes else state
    self.read = state['next_index']


def users(items):
  return [item.lookups[:, 0].tolist() for item in items]


WANTED = users(batches(generator()).bind(TABLES))


def test_the_batches_are_those_of_the_iterator():
  source = batches(generator())
  assert isinstance(source, UnboundExamples)
  assert not source.endless
  bound = source.bind(TABLES)
  assert isinstance(bound, BatchSource)
  first = next(bound)
  np.testing.assert_array_equal(first.dense, batch(0)['dense'])
  np.testing.assert_array_equal(first.labels, batch(0)['label'])
  assert users(bound) == WANTED[1:]
  assert [len(w) for w in WANTED] == [4] * BATCHES


SOURCES = {
  'a function': lambda: generator,
  'a list': lambda: [*generator()],
  'a pipeline': lambda: Pipeline(False),
  'a pipeline of bytes': lambda: Pipeline(True),
}


@pytest.mark.parametrize('kind', SOURCES)
@pytest.mark.parametrize('peeks', [False, True])
@pytest.mark.parametrize('at', [0, 1, 4, BATCHES])
def test_what_can_be_read_again_goes_on_from_anywhere(at, peeks, kind):
  def opened():
    source = batches(SOURCES[kind](), ['user'])
    if peeks:
      assert source.form.has_labels
      assert source.form.dense_features == 1
    return source.bind(TABLES)

  bound, resumed = opened(), opened()
  assert users(itertools.islice(bound, at)) == WANTED[:at]
  state = json.loads(json.dumps(bound.get_state()))
  assert state['delivered'] == at
  resumed.set_state(state)
  assert resumed.get_state() == state
  assert users(resumed) == WANTED[at:]
  assert users(bound) == WANTED[at:]
  bound.set_state(state)  # back again
  assert users(bound) == WANTED[at:]


def test_what_cannot_be_set_back_says_so():
  bound = batches(generator()).bind(TABLES)
  bound.set_state(bound.get_state())
  next(bound)
  state = bound.get_state()
  bound.set_state(state)
  assert len(list(bound)) == BATCHES - 1
  with pytest.raises(UserError, match=r'can be set to a position .*get_state'):
    bound.set_state(state)
  with pytest.raises(UserError, match=r'got generator'):
    batches(generator()).bind(TABLES).set_state(state)


def test_no_batch_is_forgotten_while_another_thread_reads_it():
  bound = batches(generator()).bind(TABLES)
  bound.keep_from(bound.get_state())
  next(bound)
  trained = bound.get_state()

  class Switching(collections.deque):
    def append(self, item):
      super().append(item)
      bound.keep_from(trained)  # as another thread does at any time

  bound._kept = Switching(bound._kept)
  assert users(itertools.islice(bound, 3)) == WANTED[1:4]
  bound.set_state(trained)
  assert users(bound) == WANTED[1:]


def test_what_follows_batches_put_back_is_kept_as_well():
  given = batches(generator())
  first = given.bind(TABLES)
  start = first.get_state()
  first.keep_from(start)
  next(first)
  first.set_state(start)
  bound = given.bind(TABLES)
  bound.put_back(first.unused(), start)
  assert users(itertools.islice(bound, 1)) == WANTED[:1]
  state = bound.get_state()
  for _ in range(2):
    bound.set_state(state)
    assert users(itertools.islice(bound, 2)) == WANTED[1:3]


def test_what_is_read_again_must_be_the_same():
  given = iter([list(generator()), [batch(0), batch(5)], [batch(0)]])
  bound = batches(lambda: next(given)).bind(TABLES)
  states = [bound.get_state()]
  for _ in range(4):
    next(bound)
    states.append(bound.get_state())
  with pytest.raises(
    UserError, match=r'same batches again, got another batch 1'
  ):
    bound.set_state(states[2])
  with pytest.raises(UserError, match='an end after 1 of 4 batches'):
    bound.set_state(states[4] | {'last': 0})
  assert bound.get_state() == states[4]
  assert users(bound) == WANTED[4:]  # it is where it was


def test_who_can_begin_anew_does():
  for items in (generator, list(generator())):
    source = batches(items)
    assert source.form.dense_features == 1
    for _ in range(3):
      bound = source.bind(TABLES)
      assert users(bound) == WANTED
      bound.close()
      bound.close()
      assert list(bound) == []
  source = batches(generator())
  for part in range(3):  # an iterator goes on
    some = itertools.islice(source.bind(TABLES), 3)
    assert users(some) == WANTED[3 * part : 3 * part + 3]
  with pytest.raises(UserError, match='an iterator that has ended'):
    _ = batches(iter(())).form
  assert list(batches(iter(())).bind(TABLES)) == []


def test_in_order_an_iterator_has_one_reader():
  source = batches(generator())
  assert (
    users(itertools.islice(source.in_order().bind(TABLES), 2)) == WANTED[:2]
  )
  assert source.in_order().form.dense_features == 1  # reads a batch ahead
  assert users(source.bind(TABLES)) == WANTED[2:]


def test_only_an_iterator_of_ours_is_closed():
  theirs = generator()
  bound = batches(theirs).bind(TABLES)
  next(bound)
  bound.close()
  assert users(batches(theirs).bind(TABLES)) == WANTED[1:]
  closed = []

  def watched():
    try:
      yield from generator()
    finally:
      closed.append(True)

  bound = batches(watched).bind(TABLES)
  next(bound)
  assert not closed
  bound.close()
  assert closed


def test_a_bad_batch_is_not_left_out():
  bad = batch(1) | {'user': [1, 2, 100, 3]}
  bound = batches(iter([batch(0), bad, batch(2)])).bind(TABLES)
  next(bound)
  state = bound.get_state()
  for _ in range(3):
    with pytest.raises(UserError, match=r'got 100 .*batch 1, .* example 2\)'):
      next(bound)
    assert bound.get_state() == state


def test_an_error_of_the_iterator_is_its_own():
  def broken():
    yield batch(0)
    raise OSError('a disk that is busy')

  bound = batches(broken).bind(TABLES)
  next(bound)
  with pytest.raises(OSError, match='busy'):
    next(bound)


def test_short_batches_are_padded_and_long_ones_refused():
  sizes = iter([4, 3, 4, 1, 5])
  items = (batch(number, size) for number, size in enumerate(sizes))
  bound = batches(items).bind(TABLES)
  for real in (4, 3, 4, 1):
    given = next(bound)
    np.testing.assert_array_equal(given.weights, np.arange(4) < real)
    np.testing.assert_array_equal(given.lookups[:, 0] >= 0, np.arange(4) < real)
  with pytest.raises(UserError, match=r'1 to 4 examples, got 5 .*batch 4\)'):
    next(bound)
  bound = batches(generator(3), batch_size=5).bind(TABLES)
  assert all(len(given.labels) == 5 for given in bound)
  with pytest.raises(UserError, match='1 to 2 examples, got 4'):
    next(batches(generator(), batch_size=2).bind(TABLES))
  with pytest.raises(UserError, match='must have examples, got 0'):
    next(batches([{'user': []}]).bind(TABLES))


ITEMS = {
  'tuples': (([1], [2]), r'a dict of columns .* got tuple \(.*batch 0\)'),
  'examples': ({'user': 1}, r'one value or one list .*batch 0, feature'),
  'no users': ({'item': [1]}, "ids of feature 'user', got 'item'"),
  'uneven': ({'user': [1, 2], 'label': [1]}, 'same number of examples'),
  'a label': ({'user': [1], 'label': [np.inf]}, r'got inf .*batch 0, label'),
  'NaN': ({'user': [1], 'dense': [np.nan]}, r'batch 0, dense, example 0'),
}


@pytest.mark.parametrize('name', ITEMS)
def test_items_that_are_no_batches(name):
  item, text = ITEMS[name]
  with pytest.raises(UserError, match=text):
    next(batches([item]).bind(TABLES))


def test_no_labels_are_invented():
  item = batch(0)
  del item['label']
  source = batches([item])
  assert not source.form.has_labels
  assert next(source.bind(TABLES)).labels is None
