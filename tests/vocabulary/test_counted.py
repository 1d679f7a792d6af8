"""Ids to rows: by count against a counter, by hash, and fitted by users."""

import collections
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import polars as pl
import pytest

from slipstream_jax.columns.ids import MISSING
from slipstream_jax.errors import UserError
from slipstream_jax.vocabulary import counted
from slipstream_jax.vocabulary.counted import Vocabulary
from slipstream_jax.vocabulary.hashed import HashVocabulary

columns_of_ids = st.lists(st.integers(MISSING, 12), max_size=60).map(np.int64)


@settings(max_examples=60)
@given(columns_of_ids, columns_of_ids, st.integers(1, 5), st.booleans())
def test_counted_rows_match_a_counter(train, test, min_count, missing):
  counts = collections.Counter(train.tolist())
  kept = [i for i in counts if counts[i] >= min_count and i != MISSING]
  kept += [MISSING] * (missing or MISSING in counts)
  kept.sort(key=lambda i: (-counts[i], i))
  row_of = {id_: row for row, id_ in enumerate(kept, start=1)}
  words = counted.count([train, train + 100], min_count, missing=missing)
  assert words[0].size == len(kept) + 1
  for ids in train, test:
    rows = words[0].rows(ids)
    assert rows.dtype == np.int32
    assert rows.tolist() == [row_of.get(i, 0) for i in ids.tolist()]
    assert words[0].ids(rows).tolist() == [
      i if i in row_of else None for i in ids.tolist()
    ]


def test_hashed_rows_stay_in_range_spread_and_differ_between_tables():
  ids = np.append(np.arange(20_000), MISSING)
  words = [HashVocabulary(101, table) for table in range(3)]
  rows = np.stack([one.rows(ids) for one in words], axis=1)
  assert rows.min() == 0
  assert rows.max() == 100
  for table in range(3):
    # 198 ids a row are expected; five standard deviations are 70.
    assert np.ptp(np.bincount(rows[:, table])) < 140
    same = (rows[:, table] == rows[:, table - 1]).mean()
    assert same == pytest.approx(1 / 101, abs=0.005)
  many = np.arange(MISSING, 300_000)
  large = HashVocabulary(2**62, 0).rows(many)
  assert large.dtype == np.int64
  assert len(np.unique(large)) == len(many), 'no two ids share a hash'
  np.testing.assert_array_equal(words[2].rows(ids[:5]), rows[:5, 2])


@given(
  st.dictionaries(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 1, 2, 3, 70_000, 2**17, 2**31]),
  ),
  st.integers(1, 3),
)
def test_ranks_are_by_count_then_by_id(seen, min_count):
  ids = np.array([*seen], np.int64)
  counts = np.array([*seen.values()], np.int64)
  kept = [i for i in seen if seen[i] >= min_count or i == MISSING]
  kept.sort(key=lambda i: (-seen[i], i))
  ranked, their_counts = counted.ranked(ids, counts, min_count)
  assert ranked.tolist() == kept
  assert their_counts.tolist() == [seen[i] for i in kept]


@pytest.mark.parametrize(
  ('arguments', 'named'),
  [
    ({'min_count': 0}, r'at least 1, got 0 \(vocabulary, min_count\)'),
    (
      {'hash_rows': -4},
      r'at least 1 .* got -4 \(vocabulary, hash_rows\)',
    ),
    ({'hash_rows': 1 << 31}, r'below 2\*\*31'),
    ({'hash_rows': 4, 'min_count': 2}, 'got min_count 2 and hash_rows 4'),
  ],
)
def test_bad_arguments_are_named(arguments, named):
  with pytest.raises(UserError, match=named):
    counted.fit_by(3, **arguments)


# Vocabularies that users fit.


words = st.sampled_from(['', 'a', 'ab', 'b', 'ä', '日本', 'a' * 9, '\0', 'a\0'])
numbers = st.sampled_from([0, 1, -1, 2, -(2**63), 2**63 - 1, 7])
large = st.sampled_from([0, 1, 2**64 - 1, 2**63, 2**63 - 1, 7])


@st.composite
def ids_of(draw):
  """Chunks of ids, and others, of one type, as polars has them.

  Numpy's text would lose a NUL at its end.
  """
  values, dtype = draw(
    st.sampled_from(
      [(words, pl.String), (numbers, pl.Int64), (large, pl.UInt64)]
    )
  )
  chunks = draw(st.lists(st.lists(values, max_size=9), max_size=6))
  others = draw(st.lists(values))
  return [pl.Series(ids, dtype=dtype) for ids in [*chunks, others]]


@given(
  ids_of(),
  st.integers(1, 3),
  st.integers(0, 3),
  st.integers(0, 4),
  st.sampled_from([1, 4, counted._AT_ONCE]),
)
def test_rows_are_ranks(case, min_count, hash_rows, more, at_once):
  *chunks, others = case
  counts = collections.Counter(i for chunk in chunks for i in chunk)
  # Of text, by its bytes: the order of Python's code points.
  kept = [i for i in counts if counts[i] >= min_count]
  kept = sorted(kept, key=lambda i: (-counts[i], i))[:more]
  with mock.patch.object(counted, '_AT_ONCE', at_once):
    vocabulary = Vocabulary.fit(
      iter(chunks),
      min_count=min_count,
      hash_rows=hash_rows,
      max_size=1 + hash_rows + more,
    )
  first = 1 + hash_rows
  assert vocabulary.size == first + len(kept)
  assert vocabulary.known.tolist() == kept
  for copy in vocabulary, Vocabulary.from_state(vocabulary.get_state()):
    ids = pl.concat([*chunks, others])
    rows = copy.rows(ids.extend_constant(None, 1)).tolist()
    assert rows.pop() == 0
    for wanted, row in zip(ids, rows, strict=True):
      if wanted in kept:
        assert row == first + kept.index(wanted)
      else:
        assert row in (range(1, first) if hash_rows else [0])
  assert copy.ids(range(copy.size)).tolist() == [None] * first + kept


CHUNKS = {
  'matrix': lambda ids: ids.reshape(50, 100),
  'arrays': lambda ids: np.split(ids, [0, 7, 4000]),
  'lists': lambda ids: ids.reshape(50, 100).tolist(),
  'series': lambda ids: [*pl.DataFrame({'id': ids}).iter_columns()],
  'iterator': lambda ids: iter(np.split(ids, [0, 7, 4000])),
}


@pytest.mark.parametrize('kind', CHUNKS)
def test_any_chunks_count_alike(kind):
  ids = np.random.default_rng(0).zipf(1.3, 5000) % 700
  whole = Vocabulary.fit(ids).known
  np.testing.assert_array_equal(Vocabulary.fit(CHUNKS[kind](ids)).known, whole)


@given(st.lists(numbers, min_size=1), st.integers(1, 3))
def test_it_is_the_rule_of_every_data_set(ids, min_count):
  column = np.array(ids, np.int64)
  rule = counted.count([column], min_count, missing=False)[0].known
  # There, -1 is a missing id, which keeps its row.
  kept = rule[(rule != -1) | (ids.count(-1) >= min_count)]
  vocabulary = Vocabulary.fit(column, min_count=min_count)
  assert vocabulary.known.tolist() == kept.tolist()


def test_unknown_ids_are_spread_over_their_rows():
  vocabulary = Vocabulary.fit(np.arange(10), hash_rows=100)
  rows = vocabulary.rows(np.arange(10, 20_010))
  assert rows.min() == 1
  assert rows.max() == 100
  assert np.ptp(np.bincount(rows)[1:]) < 140  # 5 standard deviations are 70
  texts = Vocabulary.fit(['x'], hash_rows=100)
  rows = texts.rows([str(i) for i in range(20_000)])
  assert np.ptp(np.bincount(rows)[1:]) < 140


def test_texts_of_one_hash_are_told_apart(monkeypatch):
  monkeypatch.setattr(
    'slipstream_jax.columns.ids.hash_texts',
    lambda data, ends, hashes: hashes.fill(5),
  )
  ids = ['a', 'b', 'bb', 'c', 'cb', '']
  vocabulary = Vocabulary.fit(ids)
  assert vocabulary.ids(vocabulary.rows(ids)).tolist() == ids
  assert vocabulary.rows(['ab', 'd', 'cc']).tolist() == [0, 0, 0]


def test_files(tmp_path):
  for ids in (['b', 'a', 'b'], [2**64 - 1, 3], [-5, -5, 2], []):
    vocabulary = Vocabulary.fit(ids, hash_rows=2)
    vocabulary.save(tmp_path / 'ids')
    loaded = Vocabulary.load(tmp_path / 'ids')
    assert loaded.known.tolist() == vocabulary.known.tolist()
    assert loaded.rows(ids).tolist() == vocabulary.rows(ids).tolist()
    assert loaded.known.dtype == vocabulary.known.dtype
  assert [path.name for path in tmp_path.iterdir()] == ['ids']


@pytest.mark.parametrize(
  ('arguments', 'sentence'),
  [
    ({'min_count': 0}, r'min_count must be a whole number, at least 1, got 0'),
    ({'hash_rows': -1}, r'hash_rows must be a whole number, at least 0'),
    ({'hash_rows': 2, 'max_size': 2}, r'max_size .* at least 3, got 2 .*room'),
  ],
)
def test_bad_arguments_of_fit_are_named(arguments, sentence):
  with pytest.raises(UserError, match=sentence):
    Vocabulary.fit([1, 2], **arguments)


@pytest.mark.parametrize(
  ('ids', 'rows', 'sentence'),
  [
    ([1], ['a'], r'ids must be int64, as the first were, got text \(Vocab'),
    (['a'], [1], r'ids must be text, as the first were, got int64'),
    ([-1], [2**63], r'ids must be int64.* got 9223372036854775808'),
    ([2**63], [-1], r'ids must be uint64.* got -1 '),
  ],
)
def test_ids_of_another_type_are_refused(ids, rows, sentence):
  with pytest.raises(UserError, match=sentence):
    Vocabulary.fit(ids).rows(rows)
  with pytest.raises(UserError, match=sentence):
    Vocabulary.fit([ids, rows])


def test_rows_that_are_none_are_refused():
  vocabulary = Vocabulary.fit([5, 6])
  for rows, sentence in (
    ([3], r'rows must be in \[0, 3\), got 3'),
    ([-1], r'rows must be in \[0, 3\), got -1'),
    ([0.5], 'rows must be of an integer type, got float64'),
  ):
    with pytest.raises(UserError, match=sentence):
      vocabulary.ids(rows)


def test_files_that_are_none_are_refused(tmp_path):
  (tmp_path / 'text').write_text('no vocabulary')
  np.savez(tmp_path / 'other.npz', a=np.zeros(3))
  for name in 'absent', 'text', 'other.npz', '':
    with pytest.raises(UserError):
      Vocabulary.load(tmp_path / name)
  with pytest.raises(UserError, match='must be written whole'):
    Vocabulary.fit([1]).save(tmp_path / 'absent' / 'ids')
  Vocabulary.fit(range(100)).save(tmp_path / 'cut')
  whole = (tmp_path / 'cut').read_bytes()
  for cut in 10, len(whole) // 2, len(whole) - 5:
    (tmp_path / 'cut').write_bytes(whole[:cut])
    with pytest.raises(UserError, match='read from the file it was saved to'):
      Vocabulary.load(tmp_path / 'cut')
