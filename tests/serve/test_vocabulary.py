"""Raw ids have the rows that the trainer's vocabulary gives them."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import polars as pl
import pytest

from slip_serve import layout as form
from slip_serve import vocabulary
from slip_serve.errors import ServeError
from slipstream_jax.columns.ids import packed_ids
from slipstream_jax.vocabulary.counted import count, Vocabulary
from slipstream_jax.vocabulary.hashed import (
  HashVocabulary,
  RankedHashVocabulary,
)
from slipstream_jax.vocabulary.state import integers
from tests.serve.exported import saved_words

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 30))


@given(IDS, IDS, st.integers(1, 3), st.integers(1, 40))
def test_rows_are_those_of_training(tmp_path_factory, seen, asked, least, size):
  folder = tmp_path_factory.mktemp('words')
  columns = [np.array(ids, np.int64) for ids in (seen, seen[:3], [])]
  rng = np.random.default_rng(len(seen))
  ranks = tuple(rng.integers(0, 9, size).astype(np.uint8) for _ in columns)
  kinds = (
    count(columns, least),
    tuple(Vocabulary(integers(np.unique(ids))) for ids in columns),
    tuple(HashVocabulary(size, table) for table in range(3)),
    tuple(RankedHashVocabulary(one, table) for table, one in enumerate(ranks)),
  )
  ids = np.array([*asked, *seen, -1], np.int64)
  for words in kinds:
    opened = saved_words(words, folder)
    for table in range(3):
      expected = words[table].rows(ids)
      rows = vocabulary.rows_of(opened[table], ids)
      assert rows.dtype == np.int64
      np.testing.assert_array_equal(rows, expected)


VALUES = st.integers(-(2**63) + 2, 2**63 - 1) | st.text(max_size=4)


@given(st.lists(VALUES | st.sampled_from(['', '7', '-7', '007', '+7', ' 7'])))
def test_a_table_of_ones_own_numbers_its_ids_alike(values):
  texts = [str(value) for value in values if '\x00' not in str(value)]
  expected = packed_ids(pl.Series(texts, dtype=pl.String), 'here')
  assert [vocabulary.raw_id(text) for text in texts] == expected.tolist()
  numbers = [value for value in values if isinstance(value, int)]
  expected = packed_ids(pl.Series(numbers, dtype=pl.Int64), 'here')
  assert [vocabulary.raw_id(value) for value in numbers] == expected.tolist()
  assert vocabulary.raw_id(None) == vocabulary.MISSING


def test_without_a_vocabulary_ids_are_rows():
  words = vocabulary.TableVocabulary(2, 5, 'none', 0)
  ids = np.array([0, 4, 2])
  np.testing.assert_array_equal(vocabulary.rows_of(words, ids), ids)
  for bad in 5, -1:
    with pytest.raises(ServeError, match=r'table 2 must be in \[0, 5\)'):
      vocabulary.rows_of(words, np.array([0, bad]))


def test_a_file_of_another_length_is_told(tmp_path):
  (tmp_path / 'ids_0.bin').write_bytes(bytes(13))
  of = form.Vocabulary('counted', 2, 'ids_0.bin')
  with pytest.raises(ServeError, match='24 bytes'):
    vocabulary._open(tmp_path, 0, of, 3)
