"""Tables and features as data: what they are refused for, and their groups."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import optax
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.initializers import Constant, Uniform
from slipstream_jax.tables import Feature, Table, tables_of, TableSet

OWN = optax.sgd(0.1)
BAD_TABLES = {
  'half a row': ({'vocabulary_size': 2.5}, "Table 'a', vocabulary_size"),
  'no row': ({'vocabulary_size': 0}, 'at least 1, got 0'),
  'rows as text': (
    {'vocabulary_size': '7'},
    "whole number, at least 1, got '7'",
  ),
  'no dim': ({'embedding_dim': 0}, "Table 'a', embedding_dim"),
  'dtype': ({'dtype': 'int8'}, 'one of float32, bfloat16, float16'),
  'unknown': ({'unknown': 'drop'}, "one of error, row, got 'drop'"),
  'by name': ({'initializer': 'normal'}, "numbers, got 'normal'"),
  'an infinite scale': (
    {'initializer': Uniform(np.inf)},
    'with finite numbers',
  ),
  'NaN': ({'initializer': Constant(np.nan)}, "Table 'a', initializer"),
}
BAD_FEATURES = {
  'combiner': ({'combiner': 'max'}, "one of sum, mean, sqrtn, none, got 'max'"),
  'no combiner': ({'combiner': None}, "Feature 'a', combiner"),
  'half a step': ({'max_length': 1.5}, "Feature 'a', max_length"),
  'of no table': ({'table': 'b'}, "one of a, got 'b'"),
}


@pytest.mark.parametrize('name', BAD_TABLES)
def test_what_is_no_table(name):
  changes, said = BAD_TABLES[name]
  with pytest.raises(UserError, match=said):
    TableSet({'a': Table(3, 4)._replace(**changes)})


@pytest.mark.parametrize('name', BAD_FEATURES)
def test_what_is_no_feature(name):
  changes, said = BAD_FEATURES[name]
  with pytest.raises(UserError, match=said):
    TableSet({'a': Table(3, 4)}, {'a': Feature('a')._replace(**changes)})


def test_what_is_no_set():
  with pytest.raises(UserError, match='at least one table'):
    TableSet({})
  with pytest.raises(UserError, match='feature that looks its rows up, got'):
    TableSet({'a': Table(3), 'b': Table(3)}, {'a': Feature('a')})
  for tables in ({'a': 3}, {'a': (3, 4)}):
    # By its type, where that is checked.
    with pytest.raises(Exception, match=r"must be a Table|parameter 'tables'"):
      TableSet(tables)


def test_equal_sets_are_one_and_order_counts():
  one, other = ({'a': Table(3), 'b': Table(2)} for _ in range(2))
  assert TableSet(one) == TableSet(other)
  assert hash(TableSet(one)) == hash(TableSet(other))
  assert TableSet(one) != TableSet({'b': Table(2), 'a': Table(3)})
  assert TableSet(one) == tables_of({'a': 3, 'b': 2})


@st.composite
def parts(draw):
  """Arguments of a set of tables of some kinds, looked up by some features."""
  names = [f't{i}' for i in range(draw(st.integers(1, 5)))]
  tables = {
    name: Table(
      draw(st.integers(1, 9)),
      draw(st.sampled_from([1, 4])),
      draw(st.sampled_from(['float32', 'float16'])),
      optimizer=draw(st.sampled_from([None, OWN])),
      unknown=draw(st.sampled_from(['error', 'row'])),
    )
    for name in names
  }
  more = draw(st.lists(st.sampled_from(names), max_size=3))
  owners = draw(st.permutations(names + more))
  lengths = st.sampled_from([1, 2, 5])
  features = {
    f'f{i}': Feature(owner, max_length=draw(lengths))
    for i, owner in enumerate(owners)
  }
  return tables, features


@given(parts())
def test_every_row_and_column_is_in_one_group(given_):
  made = TableSet(*given_)
  rows = sum(table.rows for table in made.tables.values())
  assert made.num_rows == rows == sum(g.num_rows for g in made.groups)
  columns = [column for group in made.groups for column in group.columns]
  assert sorted(columns) == list(range(made.num_columns))
  kinds = [(g.dim, g.dtype, g.optimizer) for g in made.groups]
  assert len(set(kinds)) == len(kinds)
  assert np.prod(made.example_shape) == made.num_columns
  first, end = made.column_rows
  table_of = np.repeat(
    [*made.tables], [table.rows for table in made.tables.values()]
  )
  places = made.in_groups(np.arange(rows))
  owner = np.full(rows, -1)
  for number, (group, (at, own)) in enumerate(
    zip(made.groups, places, strict=True)
  ):
    owner[at] = number
    assert sorted(own.tolist()) == list(range(group.num_rows))
    assert {*table_of[at].tolist()} == {*group.tables}
    row_of = dict(zip(at.tolist(), own.tolist(), strict=True))
    for column, shift in zip(group.columns, group.shifts, strict=True):
      for row in range(first[column], end[column]):
        assert row_of[row] == row - shift
    assert list(group.columns) == sorted(group.columns)
    for name, (a, b) in zip(group.features, group.spans, strict=True):
      span = made.columns[name]
      assert list(group.columns[a:b]) == list(range(span.start, span.stop))
  assert (owner >= 0).all()
