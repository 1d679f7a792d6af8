"""MovieLens' ratings: its three formats, histories, splits and bad lines."""

import collections
import gzip

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import END
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.movielens import movielens_raw
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.tables import Feature
from tests.formats.ratings.text import (
  as_csv,
  as_dat,
  as_data,
  HEADER,
  ratings,
  slow_examples,
)
from tests.support.packed_folders import checksums, prepared

FORMATS = {
  'ratings.csv': (as_csv, True),
  'ratings.dat': (as_dat, True),
  'u.data': (as_data, False),
}
every_format = pytest.mark.parametrize('name', FORMATS)


def write(tmp_path, name, columns):
  path = tmp_path / name
  path.write_text(FORMATS[name][0](columns))
  return path


def chunks_of(raw):
  (part,) = raw.parts
  return [chunk for chunk, _ in part.chunks()]


def assert_as_slow(raw, columns, history, threshold=4.0):
  chunks = chunks_of(raw)
  labels, dense, ids = (
    np.concatenate([chunk[field] for chunk in chunks]) for field in range(3)
  )
  expected = slow_examples(columns, history, threshold)
  assert labels.tolist() == [example[0] for example in expected]
  np.testing.assert_array_equal(dense, [example[1] for example in expected])
  padded = [
    [user, item, *past, *[END] * (history - len(past))]
    for _, _, user, item, past in expected
  ]
  assert ids.tolist() == padded


@every_format
@pytest.mark.parametrize('history', [0, 3])
def test_every_format_gives_what_a_slow_reader_does(tmp_path, name, history):
  columns = ratings(halves=FORMATS[name][1])
  path = write(tmp_path, name, columns)
  assert_as_slow(movielens_raw(path, history=history), columns, history)
  (tmp_path / 'packed.gz').write_bytes(gzip.compress(path.read_bytes()))
  raw = movielens_raw(tmp_path / 'packed.gz', history=history)
  assert_as_slow(raw, columns, history)


@settings(max_examples=30)
@given(st.data())
def test_any_log_has_the_histories_of_a_slow_reader(tmp_path_factory, data):
  count = data.draw(st.integers(1, 60))
  columns = ratings(
    count,
    users=data.draw(st.integers(1, 6)),
    items=data.draw(st.integers(1, 9)),
    seed=data.draw(st.integers(0, 99)),
  )
  history = data.draw(st.integers(0, 9))
  threshold = data.draw(st.sampled_from([0.5, 3.5, 4.0, 5.0, None]))
  path = write(tmp_path_factory.mktemp('log'), 'ratings.csv', columns)
  raw = movielens_raw(path, history=history, threshold=threshold)
  assert_as_slow(raw, columns, history, threshold)


def test_crlf_and_a_byte_order_mark_are_fine(tmp_path):
  columns = ratings(50)
  path = tmp_path / 'ratings.csv'
  text = as_csv(columns).replace('\n', '\r\n')
  path.write_bytes(b'\xef\xbb\xbf' + text.encode())
  assert_as_slow(movielens_raw(path), columns, 0)


def test_the_latest_ratings_are_held_out_and_rows_ranked_by_all_features(
  tmp_path,
):
  columns = ratings()
  raw = movielens_raw(
    write(tmp_path, 'ratings.csv', columns), history=4, test_share=0.25
  )
  data = in_memory(raw, min_count=2)
  assert list(data.sizes) == ['user', 'item']
  assert data.features['history'] == Feature('item', 'mean', 4)
  assert (data.train_examples, data.dense_features) == (300, 2)
  expected = slow_examples(columns, 4)
  seen = collections.Counter()
  for _, _, _, item, past in expected[:300]:
    seen.update([item, *past])
  assert data.sizes['item'] == 2 + sum(count >= 2 for count in seen.values())
  batch = next(data.train(300))
  assert batch.lookups.shape == (300, 6)
  popular, _ = max(seen.items(), key=lambda pair: (pair[1], -pair[0]))
  row = data.sizes['user'] + 1  # after that of unknown ids
  is_popular = [example[3] == popular for example in expected[:300]]
  assert (batch.lookups[:, 1] == row).tolist() == is_popular
  (test,) = data.test(100)
  assert test.labels.tolist() == [example[0] for example in expected[300:]]


@every_format
def test_packed_it_is_what_it_is_in_memory(tmp_path, name):
  path = write(tmp_path, name, ratings(halves=FORMATS[name][1]))
  raw = movielens_raw(path, history=3, threshold=None)
  prepared(raw, tmp_path / 'data', min_count=2)
  packed, held = packed_dataset(tmp_path / 'data'), in_memory(raw, min_count=2)
  assert (packed.sizes, packed.features) == (held.sizes, held.features)
  for ours, theirs in (
    (packed.train(40), held.train(40)),
    (packed.test(7), held.test(7)),
  ):
    for _ in range(8):
      for mine, other in zip(next(ours)[:4], next(theirs)[:4], strict=True):
        np.testing.assert_array_equal(mine, other)
    ours.close()
  prepared(raw, tmp_path / 'again', min_count=2)
  assert checksums(tmp_path / 'again') == checksums(tmp_path / 'data')


BAD = {
  'ratings.csv': {
    '1,2,4.0': "4 fields between commas, got 3, the last being '4.0'",
    '1,2,4.25,978300760': "stars from 0.5 to 5 in halves, got '4.25'",
    '1,2,0,978300760': "in halves, got '0'",
    '1,2,5.5,978300760': "in halves, got '5.5'",
    '1,,4.0,978300760': "below 2\\*\\*32, got '' .*column item",
    '4294967296,2,4.0,978300760': "got '4294967296' .*column user",
    '1,2,4.0,97830076': "from 1995 on, got '97830076'",
    '1,2,4.0,111248602': "from 1995 on, got '111248602'",
    HEADER: "got 'userId'",
    '': 'must have 4 fields',
  },
  'ratings.dat': {
    '1::2::4': '4 fields between double colons, got 3',
    '1::2:3::4::978300760': "got '2:3' .*column item",
    '1:::2::4::978300760': "got ':2' .*column item",
    '1:2:4:978300760': '4 fields between double colons, got 1',
    '1::2::4::978300760::': 'got 5',
  },
  'u.data': {
    '1\t2\t4\t978300760\t': 'between tabs, got 5',
    '1\t2\t6\t978300760': "got '6' .*column rating",
  },
}


@pytest.mark.parametrize(
  ('name', 'line'), [(name, line) for name in BAD for line in BAD[name]]
)
def test_a_bad_line_ends_it_or_is_skipped(tmp_path, name, line):
  columns = ratings(20, halves=FORMATS[name][1])
  path = write(tmp_path, name, columns)
  lines = path.read_text().splitlines()
  path.write_text('\n'.join([*lines[:7], line, *lines[7:]]) + '\n')
  with pytest.raises(UserError, match=BAD[name][line]) as caught:
    chunks_of(movielens_raw(path))
  assert f'{path}, line 8' in str(caught.value)
  raw = movielens_raw(path, bad_lines=1)
  assert_as_slow(raw, columns, 0)
  assert raw.bad.count == 1


@every_format
def test_a_torn_last_line_never_passes(tmp_path, name):
  """Wherever it is cut, but before its line end alone."""
  columns = ratings(5, halves=FORMATS[name][1])
  path = write(tmp_path, name, columns)
  whole = path.read_bytes()
  begin = whole[:-1].rindex(b'\n') + 1
  for end in range(begin + 1, len(whole) - 1):
    path.write_bytes(whole[:end])
    with pytest.raises(UserError, match='line'):
      chunks_of(movielens_raw(path))
  path.write_bytes(whole[:-1])
  assert_as_slow(movielens_raw(path), columns, 0)


@pytest.mark.parametrize(
  ('arguments', 'named'),
  [
    ({'threshold': 0.0}, 'stars, from 0.5 to 5, or None, got 0.0'),
    ({'threshold': float('nan')}, 'got nan'),
    ({'history': -1}, 'at least 0, got -1'),
    ({'test_share': 1.0}, 'between 0 and 1'),
    ({'bad_lines': -1}, 'at least 0'),
  ],
)
def test_bad_arguments(tmp_path, arguments, named):
  path = write(tmp_path, 'ratings.csv', ratings(5))
  with pytest.raises(UserError, match=named):
    movielens_raw(path, **arguments)


@pytest.mark.parametrize(
  ('text', 'named'),
  [
    ('movieId,title,genres\n1,Toy Story,Animation\n', 'must be the header'),
    ('', 'at least one line'),
  ],
)
def test_another_file_is_refused(tmp_path, text, named):
  (tmp_path / 'movies.csv').write_text(text)
  with pytest.raises(UserError, match=named):
    chunks_of(movielens_raw(tmp_path / 'movies.csv'))


def test_a_file_that_is_not_there(tmp_path):
  with pytest.raises(UserError, match='must exist and be readable'):
    movielens_raw(tmp_path / 'ratings.csv')
