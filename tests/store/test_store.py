"""Host tables and their kernels against plain numpy and dictionaries."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.initializers import Constant
from slipstream_jax.store import host_table
from slipstream_jax.tables import Feature, Table, tables_of, TableSet

ids = st.integers(-1, 2**40)
shapes = hnp.array_shapes(min_dims=2, max_dims=3, max_side=12)


@given(
  hnp.arrays(np.int64, shapes, elements=ids)
  | hnp.arrays(np.int32, shapes, elements=st.integers(-1, 5))
)
def test_unique_equals_a_dictionary(lookups):
  found = host_table.unique_rows(lookups, 2**62)
  expected = {}
  for row in lookups.ravel().tolist():
    if row >= 0:
      expected.setdefault(row, len(expected))
  assert found.rows.tolist() == list(expected)
  inverse = [expected.get(row, -1) for row in lookups.ravel().tolist()]
  assert found.inverse.ravel().tolist() == inverse
  assert found.inverse.shape == lookups.shape
  assert found.inverse.dtype == np.int32


def test_unique_of_ids_that_collide():
  # Multiples of a large power of two share the low bits of a weak hash.
  lookups = (np.arange(5000, dtype=np.int64) << 32).reshape(-1, 10)
  assert len(host_table.unique_rows(lookups, 2**62).rows) == 5000


@pytest.mark.parametrize(
  ('ids', 'said'),
  [
    ([[0, 3]], r'ids of feature 1 must be in \[0, 3\) or -1, got 3'),
    ([[-2, 0]], r'ids of feature 0 must be in \[0, 2\) or -1, got -2'),
    ([[0]], r'ids must be \[B, 2\]'),
    ([[0.0, 1.0]], 'integer type, got float64'),
    ([[np.nan, 1.0]], 'integer type, got float64'),
    ([[True, False]], 'integer type, got bool'),
    (
      [[2**64 - 1, 2**63]],
      r'feature 0 must be in .*, got 18446744073709551615',
    ),
    ([[2**70, 0]], 'integer type, got object'),
    ([[0, 1], [0]], 'lists that make one'),
  ],
)
def test_bad_ids(ids, said):
  tables = tables_of({'a': 2, 'b': 3}, dim=2)
  with pytest.raises(UserError, match=said):
    tables.lookups(ids)


@given(st.integers(-(2**40), -2), st.integers(0, 8))
def test_unique_takes_nothing_but_minus_one_for_padding(row, at):
  lookups = np.full((3, 3), -1, np.int64)
  lookups[divmod(at, 3)] = row
  with pytest.raises(UserError, match=f'got {row} '):
    host_table.unique_rows(lookups, 10)


def test_initialisers_and_state():
  half = Table(3, 4, initializer=Constant(0.5))
  tables = TableSet({'a': half, 'b': Table(2, 4)})
  initial = (np.float32(0.1) * np.ones(4, np.float32), np.asarray(np.int32(7)))
  block = host_table.UntrainedRows(tables, [initial], 0).block(0)
  assert (block.rows[:3] == 0.5).all()
  assert (block.rows[3:] != 0.5).all()
  assert block.state[0].shape == (5, 4)
  assert (block.state[0] == np.float32(0.1)).all()
  assert (block.state[1] == 7).all()
  assert host_table.row_bytes(block) == 16 + 16 + 4


@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([3, 5000]))
def test_unique_of_a_group_goes_table_by_table(seed, examples, rows):
  tables = TableSet(
    {'a': Table(rows, 2), 'other': Table(9, 4), 'b': Table(7, 2)},
    {
      'x': Feature('b', max_length=3),
      'y': Feature('a'),
      'z': Feature('other'),
      'w': Feature('b', max_length=2),
    },
  )
  first, end = tables.column_rows
  rng = np.random.default_rng(seed)
  lookups = rng.integers(first, end, (examples, len(first)))
  lookups[rng.random(lookups.shape) < 0.2] = -1
  for group in tables.groups:
    found = host_table.unique_rows_of(lookups, group)
    some = lookups[:, list(group.columns)]
    own = np.where(some < 0, -1, some - np.array(group.shifts))
    expected = {}
    for start, stop in sorted({*group.ranges}):
      for row in own.ravel().tolist():
        if start <= row < stop:
          expected.setdefault(row, len(expected))
    assert found.rows.tolist() == list(expected)
    inverse = [expected.get(row, -1) for row in own.ravel().tolist()]
    assert found.inverse.ravel().tolist() == inverse
    uses = [inverse.count(u) for u in range(len(expected))]
    assert found.counts.tolist() == uses


def test_a_row_of_another_table_is_refused():
  tables = tables_of({'a': 2, 'b': 3}, dim=2)
  (group,) = tables.groups
  said = r'in \[2, 5\) or -1, got 1'
  with pytest.raises(UserError, match=said):
    host_table.unique_rows_of(np.array([[0, 2], [1, 1]]), group)
