"""Raw data to packed data: every value, every fact, within bounded memory."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import Chunk, END, MISSING
from slipstream_jax.packed import columns as packed
from slipstream_jax.packed import ranking
from slipstream_jax.packed.dataset import packed_vocabulary
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.vocabulary import counted
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.hashed import HashVocabulary
from slipstream_jax.vocabulary.learned import learned_hash
from slipstream_jax.vocabulary.state import integers
from tests.support.packed_folders import checksums, prepared
from tests.support.raw_example import fields, raw_of


def slow_rows(ids, train, min_count):
  """Ids of rows 1 and up by counting in a dict; the oracle of `ranking`."""
  counts = collections.Counter(ids[slice(*train)].ravel().tolist())
  counts.pop(END, None)
  counts.setdefault(MISSING, 0)
  kept = [i for i in counts if counts[i] >= min_count or i == MISSING]
  kept.sort(key=lambda i: (-counts[i], i))
  return kept, counts


@pytest.mark.parametrize('sequence_length', [None, 3])
@pytest.mark.parametrize('min_count', [1, 3])
def test_every_value_comes_back(tmp_path, sequence_length, min_count):
  whole = fields(sequence_length=sequence_length)
  data = prepared(
    raw_of(whole, (0.3, 0.7)), tmp_path / 'data', min_count=min_count
  )
  columns, manifest = data.columns, data.manifest
  words = packed_vocabulary(data.folder)
  assert columns['labels'].dtype == np.uint8
  np.testing.assert_array_equal(columns['labels'], whole.labels)
  np.testing.assert_array_equal(columns['dense'], whole.dense)
  for table, name in enumerate('abc'):
    ids = whole.ids[:, table]
    kept, counts = slow_rows(ids, (0, 700), min_count)
    row_of = {id_: row for row, id_ in enumerate(kept, start=1)}
    row_of[END] = rows = len(kept) + 1
    assert manifest['tables'][table]['name'] == name
    assert manifest['tables'][table]['rows'] == rows
    expected = np.vectorize(lambda i, of=row_of: of.get(i, 0))(ids)
    np.testing.assert_array_equal(columns[name], expected)
    assert columns[name].dtype == packed.smallest_uint(rows)
    assert words[table].size == rows
    found = words[table].rows(ids[ids != END])
    np.testing.assert_array_equal(found, expected[ids != END])
    assert not words[table].rows(np.full(2, 123_456_789)).any()
    assert manifest['tables'][table]['unknown'] == (expected == 0).sum()
    frequency = columns[f'frequency_{name}']
    assert frequency.dtype == np.uint32
    assert frequency[1:].tolist() == [counts[i] for i in kept]
    uses = sum(counts.values())
    assert frequency.sum() == uses == (ids[:700] != END).sum()
    assert columns[f'vocabulary_{name}'].tolist() == kept


def test_the_manifest_says_what_the_contract_asks_for(tmp_path):
  whole = fields()
  raw = raw_of(whole, (0.25, 0.75), settings={'x': 1})
  raw = raw._replace(format='some')
  manifest = prepared(raw, tmp_path / 'data', min_count=2).manifest
  assert [
    *('version', 'format', 'name', 'sources', 'settings', 'min_count'),
    *('hash_rows', 'tables', 'features', 'dense_features', 'labels'),
    *('label_dtype', 'vocabularies', 'examples', 'splits', 'parts'),
    *('base_rate', 'bad_lines', 'columns', 'blocks'),
  ] == [*manifest]
  assert [[*table] for table in manifest['tables']] == [
    ['name', 'rows', 'unknown', 'lookups']
  ] * 3
  assert (manifest['format'], manifest['name']) == ('some', 'example')
  assert manifest['examples'] == 1000
  assert manifest['dense_features'] == 2
  feature = {'pooling': 'sum', 'max_length': 1, 'weighted': False}
  assert manifest['features'] == [
    {'name': name, 'table': name, **feature} for name in 'abc'
  ]
  assert (manifest['labels'], manifest['label_dtype']) == (0, 'uint8')
  assert manifest['parts'] == [
    {'name': 'part0', 'examples': 250},
    {'name': 'part1', 'examples': 750},
  ]
  assert manifest['splits'] == {
    'train': [0, 700],
    'validation': [700, 800],
    'test': [800, 1000],
  }
  assert manifest['base_rate'] == pytest.approx(whole.labels[:700].mean())
  assert (manifest['min_count'], manifest['hash_rows']) == (2, None)
  assert manifest['vocabularies'] is None
  assert manifest['bad_lines'] == 0
  source = {'path': 'part1', 'bytes': 750, 'changed': None}
  assert manifest['sources'][1] == source
  assert manifest['settings'] == {'x': 1}
  assert not (tmp_path / 'data' / packed.UNFINISHED).exists()


@settings(max_examples=25)
@given(st.data())
def test_rows_are_those_of_the_counted_vocabulary(tmp_path_factory, data):
  """For any ids, of any i64 value: the same as `counted.count` finds."""
  number = st.sampled_from([MISSING, 0, 1, -3, 1 << 40]) | st.integers(
    -(2**63), 2**63 - 1
  ).filter(lambda i: i != END)
  ids = data.draw(st.lists(number, min_size=20, max_size=90))
  ids = np.array(ids[: len(ids) // 2 * 2], np.int64).reshape(-1, 2)
  examples = len(ids)
  whole = Chunk(
    np.zeros(examples, np.float32), np.zeros((examples, 2), np.float32), ids
  )
  min_count = data.draw(st.integers(1, 3))
  folder = tmp_path_factory.mktemp('any') / 'data'
  found = prepared(raw_of(whole), folder, min_count=min_count)
  first, end = found.manifest['splits']['train']
  words = counted.count(ids[first:end].T, min_count)
  for name, column, own in zip('ab', ids.T, words, strict=True):
    np.testing.assert_array_equal(found.columns[name], own.rows(column))


@pytest.mark.parametrize('sequence_length', [None, 2])
def test_hashed_rows_are_the_buckets_by_frequency(tmp_path, sequence_length):
  whole, hash_rows = fields(sequence_length=sequence_length), 211
  data = prepared(raw_of(whole), tmp_path / 'data', hash_rows=hash_rows)
  flat = (
    whole.ids.transpose(1, 0, 2).reshape(3, -1)
    if sequence_length
    else whole.ids.T
  )
  buckets = np.stack(
    [
      HashVocabulary(hash_rows, table).rows(ids)
      for table, ids in enumerate(flat)
    ],
    axis=1,
  )
  for table, name in enumerate('abc'):
    ids = whole.ids[:, table]
    rank, column = data.columns[f'rank_{name}'], data.columns[name]
    rows = data.manifest['tables'][table]['rows']
    assert rank.shape == (hash_rows,)
    expected = np.where(
      ids == END, rows, rank[buckets[:, table].reshape(ids.shape)]
    )
    np.testing.assert_array_equal(column, expected)
    words = packed_vocabulary(data.folder)[table]
    found = words.rows(ids[ids != END])
    np.testing.assert_array_equal(found, expected[ids != END])
    here = buckets[:, table].reshape(ids.shape)[:700][ids[:700] != END]
    counts = np.bincount(here, minlength=hash_rows)
    order = sorted(np.flatnonzero(counts), key=lambda b: (-counts[b], b))
    assert [rank[b] for b in order] == list(range(1, rows))
    assert (rank > 0).sum() == rows - 1, 'unused buckets are unknown'
    frequency = data.columns[f'frequency_{name}']
    assert frequency.tolist() == [0, *counts[order]]


@pytest.mark.parametrize('sequence_length', [None, 3])
def test_rows_are_those_of_given_vocabularies(tmp_path, sequence_length):
  """Ids that share rows, own rows, and ids that no vocabulary knows."""
  whole = fields(sequence_length=sequence_length)
  given = []
  for table in range(3):
    ids = whole.ids[:500, table]
    words = counted.count([ids[ids != END]], 2)[0]
    rng = np.random.default_rng(table)
    counts = rng.integers(1, 9, words.size)
    vectors = rng.normal(size=(words.size, 3)).astype(np.float32)
    given.append(learned_hash(words, counts, vectors, 1 + words.size // 2))
  given[2] = counted.count([whole.ids[:500, 2].ravel()], 3)[0]
  raw = raw_of(whole, (0.3, 0.7))
  data = prepared(raw, tmp_path / 'data', vocabularies=given, threads=2)
  found = packed_vocabulary(data.folder)
  for table, name in enumerate('abc'):
    ids, words = whole.ids[:, table], given[table]
    rows = np.where(ids == END, words.size, words.rows(ids))
    np.testing.assert_array_equal(data.columns[name], rows)
    facts = data.manifest['tables'][table]
    assert facts['rows'] == words.size == found[table].size
    assert facts['unknown'] == (rows == 0).sum()
    trained = rows[:700][ids[:700] != END]
    frequency = np.bincount(trained, minlength=words.size)
    np.testing.assert_array_equal(data.columns[f'frequency_{name}'], frequency)
    one, other = words.get_state(), found[table].get_state()
    assert one.keys() == other.keys()
    for key, value in one.items():
      np.testing.assert_array_equal(other[key], value)


def test_a_folder_keeps_its_vocabularies(tmp_path):
  """Other ids, and other shared rows, are other settings."""
  raw, ids = raw_of(fields(tables=1)), np.arange(20)
  one = Vocabulary(integers(ids), 3)
  prepared(raw, tmp_path / 'data', vocabularies=[one])
  prepared(raw, tmp_path / 'data', vocabularies=[one])
  shared = np.array([1, 2], np.int32)
  for other in (
    None,
    [Vocabulary(integers(ids[::-1].copy()), 3)],
    [Vocabulary(integers(ids), 3, 24, shared)],
    [Vocabulary(integers(ids), 4)],
  ):
    with pytest.raises(UserError, match='vocabularies'):
      prepared(raw, tmp_path / 'data', vocabularies=other)


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    ({'vocabularies': []}, 'each of the 1 tables, got 0'),
    ({'min_count': 2}, 'so they are not counted'),
    ({'hash_rows': 9}, 'so they are not counted'),
    ({'vocabularies': [Vocabulary.fit(['x', 'y'])]}, 'object of table a'),
    (
      {'vocabularies': [Vocabulary.fit(np.array([1, 2], np.uint64))]},
      'uint64 of table a',
    ),
  ],
)
def test_vocabularies_that_do_not_fit_are_refused(tmp_path, change, said):
  given = {'vocabularies': [Vocabulary(integers(np.arange(9)))]} | change
  with pytest.raises(UserError, match=said):
    prepared(raw_of(fields(tables=1)), tmp_path / 'data', **given)
  assert not (tmp_path / 'data').exists()


def test_threads_change_nothing(tmp_path):
  raw = raw_of(fields(tables=4), (0.5, 0.5))
  for threads in 1, 4:
    prepared(raw, tmp_path / f'{threads}', threads=threads)
  assert checksums(tmp_path / '1') == checksums(tmp_path / '4')


def test_splits_are_those_that_the_reader_knew(tmp_path):
  """As of a format whose days are only known once they are read."""
  raw, known = raw_of(fields(), (0.5, 0.5)), []
  last = raw.parts[-1]

  def chunks():
    yield from last.chunks()
    known.append({'train': (0, 900), 'test': (900, 1000)})

  learning = raw._replace(
    parts=(raw.parts[0], last._replace(chunks=chunks)),
    split=lambda examples, parts: known[0],
  )
  work = prepare(learning, tmp_path)
  while next(work).phase == 'reading':
    pass
  work.close()
  known.clear()
  data = prepared(learning, tmp_path)
  assert data.manifest['splits'] == {'train': [0, 900], 'test': [900, 1000]}


def test_frequencies_too_large_for_their_type_stay_at_its_end():
  counts = np.array([5, 2**40, 2**32 - 1, 2**16, 7, 2**16, 0])
  assert counted.by_count(counts).tolist() == [1, 2, 3, 5, 4, 0, 6]
  assert ranking._saturated(counts)[1] == 2**32 - 1
