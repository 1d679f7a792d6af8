"""Which examples tell what is popular: they lie all over a pass."""

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

import slipstream_jax as slip
from slipstream_jax.api import making
from slipstream_jax.data.numbered import ColumnBatches, Columns
from slipstream_jax.data.profile import BLOCKS, row_uses, spread
from slipstream_jax.data.source import Forwarded
from slipstream_jax.errors import UserError
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.selection.hot import access_counts, popular_rows
from slipstream_jax.tables import Table, TableSet
from tests.support import small
from tests.support.packed_folders import write_folder


def in_order(examples, size, **how):
  """Batches whose examples are numbered."""
  number = np.arange(examples, dtype=np.int64)[:, None]
  columns = Columns(
    number.astype(np.float32), number, np.zeros(examples, np.float32)
  )
  return ColumnBatches(columns, size, **how)


@given(
  st.integers(1, 400), st.integers(1, 7), st.integers(1, 900), st.integers(0, 9)
)
def test_it_reads_so_many_examples_each_once(batches, size, wanted, begun):
  source = in_order(batches * size, size)
  for _ in range(begun):
    next(source)
  parts = list(spread(source, wanted))
  read = np.concatenate([part.lookups[:, 0] for part in parts])
  assert len(parts) == min(batches, -(-wanted // size))
  assert len(np.unique(read)) == len(read)


def test_it_reads_blocks_all_over_a_pass():
  source = in_order(100_000, 10)
  read = [part.lookups[0, 0] for part in spread(source, 6400)]
  assert len(read) == 640
  starts = np.array(read).reshape(BLOCKS, -1)
  assert (np.diff(starts, axis=1) == 10).all()
  assert (abs(np.diff(starts[:, 0]) - 100_000 / BLOCKS) <= 10).all()


@pytest.mark.parametrize('length', [None, 50])
def test_what_is_no_numbered_source_is_read_in_its_order(length):
  source = Forwarded(in_order(1000, 10))
  read = [part.lookups[0, 0] for part in spread(source, 300, length)]
  assert read == list(range(0, 300, 10))
  over = in_order(10, 10, epochs=1)
  assert len(list(over)) == 1
  assert not list(spread(over, 10))


def test_hot_rows_of_a_log_by_time_are_those_of_all_of_it():
  """Its last half looks other rows up than its first."""
  examples = 300_000
  ids = np.arange(examples) * 2 // examples * 500
  ids += np.random.default_rng(0).integers(0, 20, examples)
  tables = TableSet({'item': Table(1000, embedding_dim=4)})
  source = slip.batches(None, {'item': ids}, ids % 2, batch_size=1000)
  with mock.patch.object(making, '_PROFILED', 1 << 14):
    hot = making.popular(source, tables, 1 << 20, [16], {}, making.Look())
  assert sorted(hot.rows.tolist()) == [*range(20), *range(500, 520)]


def test_packed_examples_know_their_counts(tmp_path):
  columns = small.columns(200)
  folder = write_folder(tmp_path / 'packed', columns, small.ROWS)
  tables, sizes = small.tables(), [4] * len(small.ROWS)
  source = slip.batches(folder, batch_size=8)
  with mock.patch.object(making, 'spread', None):  # nothing is read
    hot = making.popular(source, tables, 4 * 60, sizes, {}, making.Look())
  counts = packed_dataset(folder).counts()
  assert hot.rows.tolist() == popular_rows(counts, 60, 1).tolist()
  held_out = slip.batches(folder, batch_size=8, split='test')
  assert held_out.row_counts() is None
  some = making.popular(held_out, tables, 4 * 60, sizes, {}, making.Look())
  assert len(some.rows) == 60


@given(
  st.lists(
    hnp.arrays(
      st.sampled_from([np.int32, np.int64]),
      hnp.array_shapes(min_dims=1, max_dims=3),
      elements=st.integers(-1, 30),
    ),
    max_size=5,
  )
)
def test_uses_are_counted_alike_by_the_kernel(profile):
  np.testing.assert_array_equal(
    row_uses(iter(profile), 31), access_counts(profile, 31), strict=True
  )


def test_a_lookup_that_no_table_has_is_not_counted():
  with pytest.raises(UserError, match='31'):
    row_uses([np.array([[3, 31]])], 31)
