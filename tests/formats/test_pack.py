"""`pack`: one table, whatever it comes in, is one packed folder to the bit."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import polars as pl
import pytest

from slipstream_jax.formats import frames
from slipstream_jax.formats.table import frame_raw
from slipstream_jax.packed.columns import is_finished
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.packed.pack import pack
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.tables import Feature
from tests.formats import own_tables
from tests.formats.own_tables import LAYOUT, own_table
from tests.support.packed_folders import checksums


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
  monkeypatch.setattr(frames, '_ROWS', 40)
  monkeypatch.setattr(frames, '_SLICE', 90)


@pytest.mark.parametrize('arguments', [{'min_count': 2}, {'hash_rows': 13}])
def test_all_sources_of_a_table_pack_to_the_same_bits(tmp_path, arguments):
  frame, expected = own_table(), None
  for name, source in own_tables.sources(frame, tmp_path).items():
    folder = tmp_path / f'packed-{name}'
    pack(source, folder, **LAYOUT, **arguments)
    expected = expected or checksums(folder)
    assert checksums(folder) == expected, name


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


def test_the_checksum_of_a_table_stays_as_folders_have_it():
  table = {'u': (np.arange(20), np.arange(0, 21, 2)), 'y': np.zeros(10)}
  assert frames.open_source(table, ['u', 'y']).contents == 3865205099


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
  rng, folder, stops = np.random.default_rng(2), tmp_path / 'stopped', 0
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
