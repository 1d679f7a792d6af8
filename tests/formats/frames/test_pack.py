"""`pack`: one table, whatever it comes in, is one packed folder to the bit."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import polars as pl
import pytest

from slipstream_jax.formats import frames
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.table import frame_raw
from slipstream_jax.packed.columns import is_finished
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.packed.pack import pack
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.tables import Feature
from tests.formats.frames import own_tables
from tests.formats.frames.own_tables import LAYOUT, own_table
from tests.support.packed_folders import checksums


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
  monkeypatch.setattr(frames, '_ROWS', 40)
  monkeypatch.setattr(frames, '_SLICE', 90)


def assert_same_batches(ours, theirs, count=None):
  ours, theirs = (itertools.islice(of, count) for of in (ours, theirs))
  for mine, other in zip(ours, theirs, strict=True):
    for name, one in mine._asdict().items():
      two = getattr(other, name)
      assert (one is None) == (two is None), name
      if one is not None:
        assert one.dtype == two.dtype, name
        np.testing.assert_array_equal(one, two, err_msg=name)


def test_the_checksum_of_a_dict_is_that_of_a_stream_as_folders_have_it():
  table = {'u': (np.arange(20), np.arange(0, 21, 2)), 'y': np.zeros(10)}
  (part,) = frames.open_source([table], ['u', 'y']).parts
  source = frames.open_source(table, ['u', 'y'])
  assert source.contents == frames._checksum(part.pieces)


@pytest.mark.parametrize('arguments', [{'min_count': 2}, {'hash_rows': 13}])
def test_all_sources_of_a_table_pack_to_the_same_bits(tmp_path, arguments):
  frame, expected = own_table(), None
  for name, source in own_tables.sources(frame, tmp_path).items():
    folder = tmp_path / f'packed-{name}'
    pack(source, folder, **LAYOUT, **arguments)
    expected = expected or checksums(folder)
    assert checksums(folder) == expected, name


def test_packed_is_in_memory(tmp_path):
  frame = own_table()
  packed = pack(frame, tmp_path / 'data', **LAYOUT, min_count=2)
  held = in_memory(frame_raw(frame, **LAYOUT), min_count=2)
  assert packed.sizes == held.sizes
  assert packed.features == held.features == own_tables.FEATURES
  assert packed.base_rate == pytest.approx(held.base_rate)
  assert_same_batches(packed.test(7), held.test(7))
  source = packed.train(20)
  assert_same_batches(source, held.train(20), 8)
  source.close()
  np.testing.assert_array_equal(
    packed.counts(), counts_of(held.train(held.train_examples), packed)
  )


def counts_of(source, data):
  lookups = next(source).lookups
  rows = sum(data.sizes.values())
  return np.bincount(lookups[lookups >= 0], minlength=rows)


def slow_rows(data, frame, train):
  """Rows by a dictionary, of all features together; id by name."""
  ids = {'user': [], 'item': [], 'tag': []}
  of = []
  for row in frame.iter_rows(named=True):
    lists = {
      'user': [row['user']],
      'item': [row['item'] or None],
      'history': row['history'][-4:],
      'tags': row['tags'][-3:],
    }
    of.append(lists)
  for table, names in (
    ('user', ['user']),
    ('item', ['item', 'history']),
    ('tag', ['tags']),
  ):
    for name in names:
      for lists in of[:train]:
        ids[table] += lists[name]
  counts = {
    table: {value: values.count(value) for value in {*values, None}}
    for table, values in ids.items()
  }
  return of, counts


def test_ids_that_are_equal_have_equal_rows_and_frequent_ones_come_first(
  tmp_path,
):
  frame = own_table()
  data = pack(frame, tmp_path, **LAYOUT, test_share=0.25, min_count=2)
  train = 150
  lists, counts = slow_rows(data, frame, train)
  source = data.train(150)
  lookups = next(source).lookups
  source.close()
  first, at = {}, 0
  for table, size in data.sizes.items():
    kept = [v for v, n in counts[table].items() if n >= 2 or v is None]
    assert size == 1 + len(kept), table
    first[table], at = at, at + size
  columns = {'user': 0, 'item': 1, 'history': 2, 'tags': 6}
  row_of = {}
  for i, row in enumerate(lists[:train]):
    for name, feature in own_tables.FEATURES.items():
      values, start = row[name], columns[name]
      mine = lookups[i, start : start + feature.max_length].tolist()
      assert mine[len(values) :] == [-1] * (feature.max_length - len(values))
      for value, got in zip(values, mine, strict=False):
        local = got - first[feature.table]
        known = counts[feature.table][value] >= 2 or value is None
        assert (local > 0) == known
        if known:
          key = feature.table, value
          assert row_of.setdefault(key, local) == local
  for table, seen in counts.items():
    ranked = sorted(
      (row, -seen[value]) for (of, value), row in row_of.items() if of == table
    )
    uses = [count for _, count in ranked]
    assert uses == sorted(uses)


numbers_or_texts = st.one_of(
  st.integers(-(2**63), 2**64 - 1),
  st.sampled_from(['', 'a', '7', '007', '+7', '-0', 'true', 'NaN', 'a|b']),
  st.text(st.characters(blacklist_categories=('Cs', 'Cc')), max_size=5),
)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_column_of_texts_is_what_its_csv_is(tmp_path_factory, data):
  """Numbers beyond 64 bits, quotes, delimiters, blanks: an id is its text."""
  folder = tmp_path_factory.mktemp('any')
  rows = data.draw(st.integers(2, 20))
  ids = data.draw(
    st.lists(st.none() | numbers_or_texts, min_size=rows, max_size=rows)
  )
  texts = [None if value is None else str(value) for value in ids]
  bags = data.draw(
    st.lists(
      st.lists(st.sampled_from(['a', 'b', '3', '-1']), max_size=3),
      min_size=rows,
      max_size=rows,
    )
  )
  frame = pl.DataFrame(
    {
      'id': pl.Series(texts, dtype=pl.String),
      'bag': pl.Series(bags, dtype=pl.List(pl.String)),
      'label': [i % 2 for i in range(rows)],
    }
  )
  kinds = own_tables.sources(frame, folder, rows=3)
  layout = {
    'features': {'id': Feature('t'), 'bag': Feature('t', 'mean', 3)},
    'test_share': 0.5,
  }
  found = {}
  for name in ('frame', 'csv', 'tsv', 'parquet', 'dicts'):
    pack(kinds[name], folder / name, **layout)
    found[name] = checksums(folder / name)
  assert all(other == found['frame'] for other in found.values())


@pytest.mark.parametrize('name', ['csv', 'parquet', 'dicts', 'lazy', 'pattern'])
def test_stopped_anywhere_and_continued_gives_the_same_bits(
  tmp_path, monkeypatch, name
):
  monkeypatch.setattr('slipstream_jax.packed.prepare.SAVED_EXAMPLES', 30)
  frame = own_table(300)
  kinds = own_tables.sources(frame, tmp_path / 'sources')
  if name not in kinds:
    pytest.skip('this polars reads no lazy frames in pieces')
  pack(frame, tmp_path / 'whole', **LAYOUT)
  rng = np.random.default_rng(2)
  for trial in range(2):
    folder, stops = tmp_path / f'{trial}', 0
    while not is_finished(folder):
      stops += 1
      work = prepare(frame_raw(kinds[name], **LAYOUT), folder, threads=1)
      for _ in range(int(rng.integers(1, 60))):
        next(work, None)
      work.close()
      assert stops < 60
    assert checksums(folder) == checksums(tmp_path / 'whole')


def test_a_column_of_splits(tmp_path):
  frame = own_table(120)
  wanted = np.random.default_rng(0).choice(
    ['train', 'test', 'validation'], 120, p=[0.6, 0.2, 0.2]
  )
  frame = frame.with_columns(part=pl.Series(wanted))
  data = pack(frame, tmp_path / 'a', **LAYOUT, split='part')
  kinds = own_tables.sources(frame, tmp_path / 'sources')
  for name in ('csv', 'pattern', 'dicts'):
    pack(kinds[name], tmp_path / name, **LAYOUT, split='part')
    assert checksums(tmp_path / name) == checksums(tmp_path / 'a')
  order = ['train', 'validation', 'test']
  in_order = pl.concat([frame.filter(pl.col('part') == name) for name in order])
  counts = [int((wanted == name).sum()) for name in order]
  assert data.train_examples == counts[0]
  assert sum(1 for _ in data.test(1)) == counts[2]
  validation = packed_dataset(tmp_path / 'a', test_split='validation')
  labels = np.concatenate([b.labels for b in validation.test(1)])
  expected = in_order['share'].to_numpy()[counts[0] : counts[0] + counts[1]]
  np.testing.assert_array_equal(labels[:, 1], expected.astype(np.float32))
