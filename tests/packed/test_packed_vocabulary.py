"""Ids are mapped later as they were when the data set was packed."""

import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.packed import columns as packed
from slipstream_jax.packed.dataset import packed_vocabulary
from slipstream_jax.packed.prepare import prepare
from tests.support import raw_example, small
from tests.support.packed_folders import write_folder


@pytest.mark.parametrize(
  'how', [{}, {'min_count': 4}, {'hash_rows': 37}, {'hash_rows': 5000}]
)
def test_maps_every_id_as_prepare_did(how, tmp_path):
  whole = raw_example.fields()
  for _ in prepare(raw_example.raw_of(whole), tmp_path / 'data', **how):
    pass
  vocabulary = packed_vocabulary(tmp_path / 'data')
  found = packed.open_packed(tmp_path / 'data')
  tables = found.manifest['tables']
  for own, table, ids in zip(vocabulary, tables, whole.ids.T, strict=True):
    rows = own.rows(ids)
    assert own.size == table['rows']
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, found.columns[table['name']])


def test_unseen_ids_are_unknown(tmp_path):
  for _ in prepare(raw_example.raw_of(raw_example.fields()), tmp_path / 'data'):
    pass
  vocabulary = packed_vocabulary(tmp_path / 'data')
  for own in vocabulary:
    assert not own.rows(np.full(2, 123_456_789, np.int64)).any()


def test_columns_that_are_not_there_are_named(tmp_path):
  folder = write_folder(tmp_path, small.columns(50), small.ROWS)
  with pytest.raises(UserError, match=r'column vocabulary_t0 .* got no column'):
    packed_vocabulary(folder)
