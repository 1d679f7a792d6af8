"""What people try first: it works, or ends in one sentence."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.inputs.batches import batches
from slipstream_jax.tables import Feature, Table, TableSet

USERS, ITEMS = [0, 1, 2, 3, 4], [9, 8, 7, 6, 5]
CLICKS = [0, 1, 0, 1, 1]
TABLES = TableSet({'user': Table(5), 'item': Table(10)})


def one(data=None, features=None, label=None, *, tables=TABLES, **arguments):
  """All five examples as one batch."""
  features = {'user': USERS, 'item': ITEMS} if features is None else features
  arguments = {'batch_size': 5, 'epochs': 1} | arguments
  (batch,) = batches(data, features, label, **arguments).bind(tables)
  return batch


def rows(*columns):
  return np.stack([np.asarray(c) for c in columns], axis=1)


DTYPES = 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint32', 'uint64', '>i4'
IDS = {
  **{t: lambda ids, t=t: np.array(ids, t) for t in DTYPES},
  'a list': list,
  'a tuple': tuple,
  'a range': lambda ids: range(5),
  'a line of a matrix': lambda ids: np.array([ids, ids])[1],
  'a column of a matrix': lambda ids: np.array([ids, ids]).T[:, 1],
  'backwards': lambda ids: np.array(ids)[::-1][::-1],
  'a matrix of one column': lambda ids: np.array(ids)[:, None],
  'lists of one': lambda ids: [[i] for i in ids],
  'objects': lambda ids: np.array(ids, object),
  'polars': pl.Series,
  'polars of few bits': lambda ids: pl.Series(ids, dtype=pl.UInt8),
  'arrow': lambda ids: pl.Series(ids).to_arrow(),
}


@pytest.mark.parametrize('kind', IDS)
def test_ids_of_any_container(kind):
  batch = one(features={'user': IDS[kind](USERS), 'item': ITEMS})
  np.testing.assert_array_equal(batch.lookups, rows(USERS, np.add(ITEMS, 5)))
  assert batch.lookups.dtype == np.int32


def test_arrays_of_jax():
  with jax.transfer_guard('allow'):
    ids = {'user': jnp.array(USERS), 'item': jnp.array(ITEMS)}
    batch = one(jnp.ones((5, 2)), ids, jnp.array(CLICKS))
  np.testing.assert_array_equal(batch.lookups, rows(USERS, np.add(ITEMS, 5)))
  np.testing.assert_array_equal(batch.dense, np.ones((5, 2)))


def test_one_feature_no_dense_features_no_labels():
  batch = one(None, {'user': USERS}, tables=TableSet({'user': Table(5)}))
  assert batch.dense.shape == (5, 0)
  assert batch.labels is None
  np.testing.assert_array_equal(batch.lookups, rows(USERS))
  np.testing.assert_array_equal(batch.weights, np.ones(5))
  source = batches(None, {'user': USERS}, batch_size=2)
  assert not source.form.has_labels
  assert source.form.dense_features == 0


def test_labels_of_several_heads():
  both = rows(CLICKS, [1, 1, 0, 0, 0])
  by_name = {'click': CLICKS, 'buy': [1, 1, 0, 0, 0]}
  for labels in (both, by_name, pl.DataFrame(by_name)):
    np.testing.assert_array_equal(one(label=labels).labels, both)
  assert one(label=CLICKS).labels.shape == (5,)
  frame = pl.DataFrame({'user': USERS, 'item': ITEMS} | by_name)
  batch = one(frame, ['user', 'item'], ['click', 'buy'])
  np.testing.assert_array_equal(batch.labels, both)


def test_weights_of_examples():
  batch = one(weights=[0, 1, 2, 0.5, 1], batch_size=8)
  np.testing.assert_array_equal(batch.weights, [0, 1, 2, 0.5, 1, 0, 0, 0])
  frame = {'user': USERS, 'item': ITEMS, 'w': [0, 1, 2, 0.5, 1]}
  batch = one(frame, ['user', 'item'], weights='w')
  np.testing.assert_array_equal(batch.weights, [0, 1, 2, 0.5, 1])


class Words:
  """A vocabulary, as far as it must be one."""

  def __init__(self, *words):
    self.places = {word: place for place, word in enumerate(words)}

  def rows(self, ids):
    local = [self.places.get(word, -1) for word in ids.ravel()]
    return np.array(local, np.int32).reshape(ids.shape)


def test_a_vocabulary_knows_raw_ids():
  words = {'user': Words('ann', 'bob', 2**40)}
  names = ['bob', 'ann', 'bob', 'ann', 'ann']
  ids = {'user': names, 'item': ITEMS}
  batch = one(features=ids, vocabularies=words)
  np.testing.assert_array_equal(batch.lookups[:, 0], [1, 0, 1, 0, 0])
  ids = {'user': np.array([2**40] * 5), 'item': ITEMS}
  assert (one(features=ids, vocabularies=words).lookups[:, 0] == 2).all()
  with pytest.raises(UserError, match=r"got -1 .*'user', example 1\)"):
    one(
      features={'user': ['ann', 'eve', 'bob', 'bob', 'bob'], 'item': ITEMS},
      vocabularies=words,
    )
  # In an array of words, a vocabulary may give padding.
  some = TableSet({'user': Table(5)}, {'user': Feature('user', 'none', 2)})
  pairs = {'user': np.array([['ann', 'bob'], ['bob', '']])}
  batch = one(
    None, pairs, tables=some, vocabularies={'user': Words('ann', 'bob')}
  )
  np.testing.assert_array_equal(batch.lookups[:2, 0], [[0, 1], [1, -1]])
  # By table, and of lists of either kind: padding is no word.
  tables = TableSet(
    {'user': Table(5, unknown='row')}, {'friends': Feature('user', 'none', 3)}
  )
  friends = [['bob', 'ann'], [], ['eve', 'bob', 'bob'], ['ann'], []]
  wanted = [[1, 0, -1], [-1] * 3, [5, 1, 1], [0, -1, -1], [-1] * 3]
  for column in (friends, pl.Series(friends)):
    batch = one(None, {'friends': column}, tables=tables, vocabularies=words)
    np.testing.assert_array_equal(batch.lookups[:, 0], wanted)
  column = np.array([[2**40, -1], [-1, -1], [3, 2**40], [-1, -1], [-1, -1]])
  batch = one(None, {'friends': column}, tables=tables, vocabularies=words)
  wanted = [[2, -1, -1], [-1] * 3, [5, 2, -1], [-1] * 3, [-1] * 3]
  np.testing.assert_array_equal(batch.lookups[:, 0], wanted)
  with pytest.raises(UserError, match=r"one of user.*did you mean 'user'"):
    one(vocabularies={'users': Words()})
  with pytest.raises(UserError, match='must have a method rows, got dict'):
    one(vocabularies={'user': {}})
  tables = TableSet({'user': Table(5)}, tables.features)
  with pytest.raises(UserError, match=r'got -1 .*example 2, position 0\)'):
    one(None, {'friends': column}, tables=tables, vocabularies=words)


SENTENCES = {
  'unequal lengths': (
    lambda: one([1.0, 2], {'user': [1, 2], 'item': [1, 2, 3]}),
    "got dense and labels 2, feature 'user' 2, feature 'item' 3",
  ),
  'unequal labels': (lambda: one([1.0, 2], label=[1]), 'dense 2, labels 1'),
  'no examples': (lambda: one(features={'user': [], 'item': []}), 'got none'),
  'no features': (lambda: one(features={}), 'there must be a feature'),
  'no batch size': (lambda: one(batch_size=None), 'got None (batches, batch_s'),
  'batches of none': (lambda: one(batch_size=0), 'at least one example'),
  'no epochs': (lambda: one(epochs=0), 'at least 1, got 0 (batches, epochs)'),
  'epochs of a stream': (
    lambda: batches(iter([]), epochs=2),
    'got epochs=2',
  ),
  'a seed of a stream': (
    lambda: batches(iter([]), seed=1),
    'got seed=1',
  ),
  'a seed below 0': (lambda: one(seed=-1), 'a seed must be'),
  'too few': (
    lambda: next(
      batches(None, {'user': [1]}, batch_size=2, seed=0).bind(
        TableSet({'user': Table(2)})
      )
    ),
    'a batch of 2 needs at least as many examples, got 1',
  ),
  'a matrix of ids': (
    lambda: batches(None, np.zeros((5, 2))),
    "arrays go as batches(dense or None, {'user': users}, clicks)",
  ),
  'only a matrix': (lambda: batches(np.zeros((5, 2))), "{'user': users"),
  'no place for dense features': (
    lambda: batches({'user': USERS}, CLICKS, batch_size=2),
    'arrays go as batches(dense or None,',
  ),
  'a name unknown': (
    lambda: one(features={'usr': USERS, 'item': ITEMS}),
    "feature 'user' (did you mean 'usr'?)",
  ),
  'one too many': (
    lambda: one(features={'user': USERS, 'item': ITEMS, 'items': ITEMS}),
    "one of user, item (did you mean 'item'?), got 'items'",
  ),
  'no such column': (
    lambda: one({'user': USERS, 'item': ITEMS}, ['user', 'itm']),
    "one of user, item (did you mean 'item'?), got 'itm'",
  ),
  'no such label': (
    lambda: one({'user': USERS, 'item': ITEMS}, ['user'], 'click'),
    "got 'click' (batches, label)",
  ),
  'a lazy frame': (
    lambda: one(pl.LazyFrame({'user': USERS}), ['user']),
    'a LazyFrame',
  ),
  'names with arrays': (lambda: one(label='click'), 'names of columns'),
  'dense twice': (lambda: one([1.0], dense=[1.0]), 'given once'),
  'NaN': (
    lambda: one([[1, 2], [3, np.nan], [0, 0], [0, 0], [0, 0]]),
    'got nan (batches, dense, example 1, column 1)',
  ),
  'NaN by name': (
    lambda: one({'age': [1, 2, 3, 4, np.inf]}),
    "got inf (batches, dense, 'age', example 4)",
  ),
  'null': (
    lambda: one({'age': pl.Series([1, None, 3, 4, 5])}),
    "got None (batches, dense, 'age', example 1)",
  ),
  'words that are dense': (lambda: one(['a'] * 5), 'must be real numbers'),
  'a label of infinity': (
    lambda: one(label=[0, 1, 1, np.inf, 0]),
    'must be finite numbers, got inf (batches, label, example 3)',
  ),
  'a weight below 0': (
    lambda: one(weights=[1, 1, -1, 1, 1]),
    'at least 0, got -1.0 (batches, weights, example 2)',
  ),
  'what to do with long lists': (
    lambda: one(too_long='cut'),
    "one of error, first, last, got 'cut'",
  ),
  'batches of nobody': (
    lambda: next(batches(None, {'user': USERS}, batch_size=2)),
    'bind(tables)',
  ),
  'a loop over nobody': (
    lambda: list(batches(None, {'user': USERS}, batch_size=2)),
    'bind(tables)',
  ),
}


@pytest.mark.parametrize('name', SENTENCES)
def test_what_cannot_be_ends_in_a_sentence(name):
  give, text = SENTENCES[name]
  with pytest.raises(UserError, match=re.escape(text)) as caught:
    give()
  assert '\n' not in str(caught.value)


def test_pandas_frames():
  pd = pytest.importorskip('pandas')
  frame = pd.DataFrame({'user': USERS, 'item': ITEMS, 'click': CLICKS})
  for given in (frame, frame.convert_dtypes(), frame.iloc[::-1].iloc[::-1]):
    batch = one(given, ['user', 'item'], 'click')
    np.testing.assert_array_equal(batch.lookups, rows(USERS, np.add(ITEMS, 5)))
    np.testing.assert_array_equal(batch.labels, CLICKS)
  frame.loc[2, 'item'] = None
  for given in (frame, frame.convert_dtypes()):
    with pytest.raises(UserError, match=r'example 2.*fill what is missing'):
      one(given, ['user', 'item'])
