"""Rows before their first step: any of them, at any time, to the bit."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import optax
import pytest

from slipstream_jax.initializers import Constant, GivenRows, Uniform
from slipstream_jax.store.host_table import UntrainedRows
from slipstream_jax.tables import Table, tables_of, TableSet

INITIALIZERS = [None, Uniform(0.3), Constant(0.1)]


@st.composite
def one_table(draw):
  table = Table(
    draw(st.integers(1, 40)),
    draw(st.sampled_from([1, 2, 5])),
    draw(st.sampled_from(['float32', 'bfloat16', 'float16'])),
    draw(st.sampled_from(INITIALIZERS)),
    unknown=draw(st.sampled_from(['error', 'row'])),
  )
  if draw(st.booleans()):
    rows = draw(st.sampled_from([table.vocabulary_size, table.rows]))
    array = np.random.default_rng(rows).normal(size=(rows, table.embedding_dim))
    return table._replace(initializer=array)
  return table


@st.composite
def tables_by_name(draw):
  number = draw(st.integers(1, 5))
  return {f't{i}': draw(one_table()) for i in range(number)}


@given(tables=tables_by_name(), seed=st.integers(0, 2**40), data=st.data())
def test_some_rows_are_those_of_the_whole_table(tables, seed, data):
  tables = TableSet(tables)
  state = (np.arange(3, dtype=np.float32), np.asarray(np.int32(7)))
  untrained = UntrainedRows(tables, [state] * len(tables.groups), seed)
  for number in range(len(tables.groups)):
    whole = untrained.block(number)
    size = tables.groups[number].num_rows
    assert len(whole.rows) == size
    rows = data.draw(st.lists(st.integers(0, size - 1)))
    some = untrained.rows(number, np.array(rows, np.int64))
    np.testing.assert_array_equal(
      some.rows.view(np.uint8), whole.rows[rows].view(np.uint8)
    )
    for leaf, part in zip(whole.state, some.state, strict=True):
      np.testing.assert_array_equal(part, leaf[rows], strict=True)
    start = 0
    for name in tables.groups[number].tables:
      table = tables.tables[name]
      if isinstance(table.initializer, GivenRows):
        given = table.initializer.array
        got = whole.rows[start : start + len(given)]
        np.testing.assert_array_equal(got, given.astype(got.dtype))
      start += table.rows


def test_an_optimizer_of_its_own_gives_a_table_no_other_values():
  tables = {'a': Table(9, 4), 'b': Table(7, 4)}
  one, two = (
    TableSet(made)
    for made in (
      tables,
      tables | {'a': tables['a']._replace(optimizer=optax.sgd(0.1))},
    )
  )
  whole = UntrainedRows(one, [()], 3).block(0)
  parts = [UntrainedRows(two, [(), ()], 3).block(g).rows for g in (0, 1)]
  np.testing.assert_array_equal(whole.rows, np.concatenate(parts))


@pytest.mark.parametrize('dims', [(1, 32), (32, 1)])
def test_tables_of_unlike_dims_share_no_value(dims):
  tables = TableSet({f't{dim}': Table(500, dim) for dim in dims})
  untrained = UntrainedRows(tables, [(), ()], 0)
  parts = [untrained.block(group).rows.ravel() for group in (0, 1)]
  values = np.concatenate(parts)
  # Of 16,500 draws out of 2^24, some agree by chance.
  assert len(np.unique(values)) > len(values) - 40


def test_initial_rows_depend_on_seed_and_row_only():
  def create(sizes, seed=0):
    return UntrainedRows(tables_of(sizes, dim=4), [()], seed).block(0).rows

  few = {'a': 10, 'b': 5}
  one = create(few)
  np.testing.assert_array_equal(one, create(few | {'c': 7})[:15])
  assert not np.array_equal(one, create(few, 1))
  assert np.abs(one[:10]).max() < 10**-0.5
  big = create({'a': 200_000})
  scaled = big * 200_000**0.5
  assert abs(scaled.mean()) < 0.005
  assert abs(scaled.std() - 3**-0.5) < 0.005
  assert len(np.unique(big[:, 0])) > 190_000
