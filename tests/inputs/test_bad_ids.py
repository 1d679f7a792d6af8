"""What is wrong with ids is said in one sentence: where, what, which bound."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from slipstream_jax.columns.read import Ragged
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.batches import batches
from slipstream_jax.tables import Feature, Table, TableSet
from tests.inputs.examples import padded, ragged

SIZE, LENGTH = 100, 5
TABLES = TableSet(
  {'item': Table(3), 'user': Table(SIZE)},
  {'item': Feature('item'), 'seen': Feature('user', max_length=LENGTH)},
)


def bind(column, tables=TABLES, **arguments):
  """Asks for batches of a column of ids of the feature 'seen'."""
  count = len(column[1]) - 1 if isinstance(column, tuple) else len(column)
  ids = {'item': np.zeros(count, np.int8), 'seen': column}
  source = batches(None, ids, batch_size=1, **arguments)
  return source.bind(tables)


def stream(column):
  """The same ids as the second batch of an iterator."""
  good = {'item': [0], 'seen': [[1]]}
  count = len(column[1]) - 1 if isinstance(column, tuple) else len(column)
  bad = {'item': np.zeros(count, np.int8), 'seen': column}
  bound = batches(iter([good, bad]), batch_size=count).bind(TABLES)
  next(bound)
  return next(bound)


def said(give, column):
  with pytest.raises(UserError) as caught:
    give(column)
  text = str(caught.value)
  assert '\n' not in text
  return caught.value


FORMS = {
  'padded': lambda bags, dtype: padded(bags, -1, LENGTH, dtype),
  'ragged': ragged,
  'Ragged': lambda bags, dtype: Ragged(*ragged(bags, dtype)),
  'lists': lambda bags, dtype: [np.array(bag, dtype) for bag in bags],
  'polars': lambda bags, dtype: pl.Series(bags, dtype=pl.List(pl.Int64)),
  'arrow': lambda bags, dtype: pa.array(bags, pa.list_(pa.int64())),
}


@pytest.mark.parametrize('form', FORMS)
@settings(max_examples=10)
@given(st.data())
def test_the_first_bad_id_is_named_wherever_it_is(form, data):
  bags = data.draw(
    st.lists(
      st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=LENGTH),
      min_size=1,
      max_size=8,
    )
  )
  example = data.draw(st.integers(0, len(bags) - 1))
  position = data.draw(st.integers(0, len(bags[example]) - 1))
  bad = data.draw(
    st.sampled_from([SIZE, SIZE + 1, 2**31, 2**40 + 7, 2**63 - 1, -2, -(2**40)])
  )
  bags[example][position] = bad
  # Another one behind it is not what is said.
  bags[-1].extend([-7] * (len(bags[-1]) < LENGTH))
  for give, batch in (bind, ''), (stream, 'batch 1, '):
    error = said(give, FORMS[form](bags, np.int64))
    assert error.got == bad
    assert f'[0, {SIZE})' in error.rule
    assert "'seen'" in error.rule
    assert error.where == (
      f"batches, {batch}feature 'seen', example {example}, position {position}"
    )


@pytest.mark.parametrize('dtype', [np.uint32, np.uint64])
def test_no_unsigned_id_passes_as_padding(dtype):
  largest = np.iinfo(dtype).max
  ids = np.array([[1, largest], [2, 3]], dtype)
  assert said(bind, ids).got == largest
  assert said(bind, np.array([1, largest], dtype)).got == largest
  assert said(bind, (ids.ravel(), [0, 2, 4])).got == largest


def test_padding_is_of_lists_alone():
  assert said(bind, np.array([3, -1])).where.endswith('example 1')
  assert said(bind, ([3, -1], [0, 1, 2])).got == -1
  (batch,) = [next(bind(np.array([[3, -1, 4]]), epochs=1))]
  # What is in the midst of a line stays where it is.
  np.testing.assert_array_equal(batch.lookups, [[0, 6, -1, 7, -1, -1]])


OF_TYPES = {
  'a fraction': ([1.0, 2.5, 3.5], 2.5, 1, 'whole numbers'),
  'NaN': ([1.0, np.nan], np.nan, 1, 'fill what is missing'),
  'infinity': (np.array([1, np.inf], np.float32), np.inf, 1, 'whole numbers'),
  'whole floats': ([1.0, 2.0], 1.0, 0, 'convert them to int64'),
  'truth values': ([True, False], True, 0, 'int64'),
  'words': (['a', 'b'], 'a', 0, 'Vocabulary'),
  'objects': (np.array([1, 'b'], object), 'b', 1, 'Vocabulary'),
  'bytes': ([b'a'], b'a', 0, 'Vocabulary'),
  'null in a list': (pl.Series([[1], [2, None]]), None, 1, 'fill'),
  'large': ([3, 2**70], 2**70, 1, ''),
  'dates': (np.array(['2020-01-01'], 'datetime64[D]'), None, 0, 'int64'),
  'complex': (np.array([1, 2j]), None, 0, 'int64'),
}


@pytest.mark.parametrize('name', OF_TYPES)
def test_ids_of_another_type(name):
  column, value, example, hint = OF_TYPES[name]
  for give in bind, stream:
    error = said(give, column)
    assert f'[0, {SIZE})' in error.rule
    assert f'example {example}' in error.where
    assert "'seen'" in error.where
    assert hint in error.hint
    if value is not None:
      assert str(error.got).startswith(repr(value)), error


MISSING = [[3, None], pl.Series([3, None]), pa.array([3, None, 4])]


@pytest.mark.parametrize('column', MISSING)
def test_a_missing_id_is_an_error_and_a_missing_list_is_empty(column):
  one = TableSet({'user': Table(SIZE)})
  source = batches(None, {'user': column}, batch_size=1, epochs=1)
  with pytest.raises(UserError, match=r'example 1.*fill what is missing'):
    source.bind(one)
  lists = TableSet(one.tables, {'user': Feature('user', max_length=2)})
  lookups = [batch.lookups.tolist() for batch in source.bind(lists)]
  assert lookups[:2] == [[[[3, -1]]], [[[-1, -1]]]]


@pytest.mark.parametrize('form', FORMS)
def test_lists_that_are_too_long(form):
  bags = [[1, 2], [], [3] * LENGTH, [4] * (LENGTH + 2), [5]]
  column = padded(bags)
  if form != 'padded':
    column = FORMS[form](bags, np.int64)
  error = said(bind, column)
  assert f'at most {LENGTH}' in error.rule
  assert (error.got, error.where.split(', ')[-1]) == (LENGTH + 2, 'example 3')


UNKNOWN = TableSet(
  {'item': Table(3), 'user': Table(SIZE, unknown='row')},
  dict(TABLES.features),
)


@settings(max_examples=40)
@given(
  st.lists(
    st.integers(-(2**63), 2**63 - 1) | st.integers(-2, SIZE + 1), min_size=1
  )
)
def test_unknown_ids_share_the_last_row(ids):
  wanted = [3 + (i if 0 <= i < SIZE else SIZE) for i in ids]
  whole = ragged([ids])
  source = batches(
    None,
    {'item': [0] * len(ids), 'seen': np.array(ids)},
    batch_size=len(ids),
    epochs=1,
  )
  (batch,) = source.bind(UNKNOWN)
  np.testing.assert_array_equal(batch.lookups[:, 1], wanted)
  tables = TableSet(
    UNKNOWN.tables,
    {'seen': Feature('user', max_length=len(ids)), 'item': Feature('item')},
  )
  source = batches(None, {'item': [0], 'seen': whole}, batch_size=1, epochs=1)
  (batch,) = source.bind(tables)
  np.testing.assert_array_equal(batch.lookups[0, :-1], wanted)


RAGGED = {
  'one split too few': (([1, 2], [0, 1]), r'rise from 0 to 2.*got 1'),
  'not from 0': (([1, 2], [1, 2]), r'got 1 .*row_splits\[0\]'),
  'falling': (([1, 2], [0, 2, 1, 2]), r'got 1 .*row_splits\[2\]'),
  'past the end': (([1, 2], [0, 3]), r'got 3 '),
  'fractions': (([1, 2], [0.0, 2.0]), r'row_splits must be integers'),
  'none': (([], []), r'row_splits must be integers|must be \(values'),
  'weights too few': (([1, 2], [0, 2], [1.0]), 'one weight per lookup'),
  'four': (([1, 2], [0, 2], [1.0], 3), r'\(values, row_splits\)'),
  'lists of lists': (([[1, 2]], [0, 2]), 'one-dimensional'),
}


@pytest.mark.parametrize('name', RAGGED)
def test_ragged_lists_that_cannot_be(name):
  column, text = RAGGED[name]
  with pytest.raises(UserError, match=text):
    batches(None, {'seen': column}, batch_size=1)


def test_weights_of_lookups_that_cannot_be():
  features = dict(TABLES.features)
  features['seen'] = features['seen']._replace(weighted=True)
  weighted = TableSet(TABLES.tables, features)
  ids = ragged([[1], [2, 3]])
  with pytest.raises(UserError, match='must carry weights'):
    bind(ids, weighted)
  with pytest.raises(UserError, match='must carry no weights'):
    bind((*ids, [1.0, 2.0, 3.0]))
  with pytest.raises(
    UserError, match=r'numbers, got nan .*example 1, posi.* 1'
  ):
    bind((*ids, [1.0, 2.0, np.nan]), weighted)
  with pytest.raises(UserError, match='must be given once'):
    bind((*ids, [1.0] * 3), weighted, lookup_weights={'seen': [1.0] * 3})
  with pytest.raises(UserError, match='shaped as the ids'):
    bind(ids, weighted, lookup_weights={'seen': [[1.0, 2.0], [3.0]]})
  with pytest.raises(UserError, match=re.escape("(did you mean 'seen'?)")):
    bind(ids, weighted, lookup_weights={'sen': [1.0] * 3})
  (batch,) = [next(bind(ids, weighted, lookup_weights={'seen': [1, 2, 3]}))]
  np.testing.assert_array_equal(batch.lookup_weights, [[1, 1, 0, 0, 0, 0]])
