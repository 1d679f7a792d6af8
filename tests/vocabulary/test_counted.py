"""Ids to rows: by count against a counter, and by hash."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.columns.ids import MISSING
from slipstream_jax.errors import UserError
from slipstream_jax.vocabulary import counted
from slipstream_jax.vocabulary.hashed import HashVocabulary

columns_of_ids = st.lists(st.integers(MISSING, 12), max_size=60).map(np.int64)


@settings(max_examples=100, deadline=None)
@given(columns_of_ids, columns_of_ids, st.integers(1, 5))
def test_counted_rows_match_a_counter(train, test, min_count):
  counts = collections.Counter({MISSING: 0})
  counts.update(train.tolist())
  kept = [i for i in counts if counts[i] >= min_count or i == MISSING]
  kept.sort(key=lambda i: (-counts[i], i))
  row_of = {id_: row for row, id_ in enumerate(kept, start=1)}
  words = counted.count([train, train + 100], min_count)
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


def test_ids_that_are_never_missing_have_no_row_for_that():
  ids = np.array([7, 5, 5, 9, 9, 9])
  (words,) = counted.count([ids], 2, missing=False)
  assert words.known.tolist() == [9, 5]
  assert words.rows(np.array([5, 7, MISSING, 9])).tolist() == [2, 0, 0, 1]


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
