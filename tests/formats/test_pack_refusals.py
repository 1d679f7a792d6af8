"""What `pack` does not take ends in one sentence, and nothing half-done."""

import gc
import tracemalloc

import numpy as np
import polars as pl
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats import frames
from slipstream_jax.formats.table import frame_raw
from slipstream_jax.packed import columns as packed_columns
from slipstream_jax.packed import ranking
from slipstream_jax.packed.columns import is_finished, MANIFEST, UNFINISHED
from slipstream_jax.packed.pack import pack
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.tables import Feature
from tests.formats.own_tables import LAYOUT, own_table
from tests.support.packed_folders import checksums

PLAIN = {'features': ['user'], 'dense': ['age'], 'label': 'click'}
LISTS = {'features': {'bag': Feature('t', 'sum', 2)}, 'label': 'click'}


def table(**columns):
  given = {'user': [1, 2, 3, 4], 'age': [1.0, 2.0, 3.0, 4.0]}
  return pl.DataFrame(given | {'click': [0, 1, 0, 1]} | columns)


BAD_VALUES = [
  (
    table(user=[0.5, 1.0, 2.0, 3.0]),
    'integers or text, got 0.5, of type float64.*to text first',
  ),
  (table(user=[[1], [2, 3], [3], [4]]), 'row 1, column user.*max_length'),
  (
    table(click=[0.0, 1e39, 0.0, 1.0]),
    r'finite .*\(frame, row 1, column click',
  ),
  (table(click=[0, 1, None, 1]), 'got (None|nan) .*row 2, column click'),
  (
    table(click=['0', '1', 'yes', '1']),
    "must be real numbers, got 'yes' .*row 2",
  ),
  (table(age=[1e39, 2.0, 3.0, 4.0]), r'got 1e\+39 \(frame, row 0, column age'),
  (table(age=[[1], [2], [3], [4]]), 'must be real numbers, got .*column age'),
  (table().drop('age'), "must have the column 'age', got user, click"),
  (table().rename({'user': 'users'}), "did you mean 'users'"),
  (table().clear(), 'got 0 to train, 0 to test'),
]


@pytest.mark.parametrize(('frame', 'named'), BAD_VALUES)
def test_bad_values_are_named(tmp_path, frame, named):
  with pytest.raises(UserError, match=named) as caught:
    pack(frame, tmp_path / 'data', **PLAIN)
  assert '\n' not in str(caught.value)
  assert not is_finished(tmp_path / 'data')


def test_a_bad_value_of_a_file_is_named_by_its_line(tmp_path):
  path = tmp_path / 'clicks.csv'
  path.write_text('user,age,click\n"a\nb",1,0\nc,x,1\n')
  with pytest.raises(
    UserError, match=r"got 'x' \(.*clicks.csv, line 4, column"
  ):
    pack(path, tmp_path / 'data', **PLAIN)
  path.write_text('user,age,click\na,1,0\nb,2\n')
  with pytest.raises(UserError, match=r'3 fields.*got 2 \(.*line 3\)'):
    pack(path, tmp_path / 'other', **PLAIN)


@pytest.mark.parametrize(
  ('column', 'arguments', 'named'),
  [
    (
      [[1], [1, 2, 3], [], [2]],
      {},
      'at most 2 lookups.*got 3 .*row 1.*too_long',
    ),
    ([[1.0], [0.5], [], [2.0]], {}, r'integers or text, got 1.0'),
    ([[[1]], [[2]], [[3]], [[4]]], {}, 'single values, or lists of values'),
  ],
)
def test_bad_lists_are_named(tmp_path, column, arguments, named):
  frame = table(bag=column)
  with pytest.raises(UserError, match=named):
    pack(frame, tmp_path / 'data', **LISTS, **arguments)


def test_weights_must_be_as_many_and_finite(tmp_path):
  layout = {
    'features': {'bag': Feature('t', 'sum', 2, weighted=True)},
    'lookup_weights': {'bag': 'weight'},
    'label': 'click',
  }
  bags = [[1], [1, 2], [], [2]]
  for weights, named in (
    (
      [[1.0], [1.0], [], [1.0]],
      'shaped as the ids are, got 1 for 2 ids .*row 1',
    ),
    (
      [[1.0], [1.0, float('inf')], [], [1.0]],
      'finite numbers, got inf .*row 1',
    ),
    ([[1.0], [1.0, None], [], [1.0]], 'finite numbers, got None .*row 1'),
  ):
    frame = table(bag=bags, weight=weights)
    with pytest.raises(UserError, match=named):
      pack(frame, tmp_path / 'data', **layout)


BAD_ARGUMENTS = [
  ({'features': []}, 'features must be columns of ids'),
  ({'features': 'user'}, 'features must be columns of ids'),
  ({'features': {'user': Feature('t', 'sum', 0)}}, 'at least 1, got 0'),
  ({'features': {'user': Feature('t', 'max')}}, 'must be one of sum, mean'),
  ({'features': {'user': Feature('t', weighted=True)}}, 'column of weights'),
  ({'lookup_weights': {'user': 'age'}}, 'each weighted feature, and no other'),
  ({'fill': float('nan')}, 'fill must be a finite number'),
  ({'fill': {'agee': 0.0}}, "got 0.0 for 'agee'"),
  ({'label': []}, 'column of labels'),
  ({'split': 'part', 'test_share': 0.1}, 'only one of split and test_share'),
  ({'test_share': 1.5}, 'between 0 and 1'),
  ({'separator': ''}, 'separator must be'),
  ({'too_long': 'middle'}, 'too_long must be one of error, first, last'),
  ({'min_count': 0}, 'min_count must be a whole number, at least 1'),
  ({'features': {'labels': Feature('t')}}, 'names that no other column has'),
]


@pytest.mark.parametrize(('arguments', 'named'), BAD_ARGUMENTS)
def test_bad_arguments_leave_no_folder(tmp_path, arguments, named):
  frame = table(labels=[1, 2, 3, 4])
  with pytest.raises(UserError, match=named):
    pack(frame, tmp_path / 'data', **PLAIN | arguments)
  assert not (tmp_path / 'data').exists()


def test_sources_that_are_none(tmp_path):
  (tmp_path / 'clicks.xlsx').write_bytes(b'PK')
  (tmp_path / 'no.parquet').write_bytes(b'PAR1 not really')
  for source, named in (
    (tmp_path / 'clicks.xlsx', r"of a known kind, .*got '.xlsx'"),
    (tmp_path / 'absent.csv', 'must exist and be readable'),
    (str(tmp_path / 'day-*.csv'), 'at least one file, got none'),
    (tmp_path / 'no.parquet', 'must be readable to its end'),
    ([1, 2], 'must give frames, or dicts of arrays'),
    ([{'user': [1, 2], 'age': [1.0], 'click': [0, 1]}], 'arrays of one length'),
    ([{'user': (np.arange(3), [0, 2]), 'age': [1.0], 'click': [0]}], 'row_spl'),
    ([table(), table(user=list('abcd'))], 'same columns of the same types'),
  ):
    folder = tmp_path / 'data'
    with pytest.raises(UserError, match=named):
      pack(source, folder, **PLAIN)
    assert not is_finished(folder)


def test_a_split_that_is_none_is_named(tmp_path):
  frame = table(part=['train', 'train', 'tests', 'test'])
  with pytest.raises(
    UserError, match=r"got 'tests' \(frame, row 2, column part"
  ):
    pack(frame, tmp_path / 'data', **PLAIN, split='part')
  with pytest.raises(UserError, match='is read three times'):
    pack(iter([frame]), tmp_path / 'data', **PLAIN, split='part')


def test_repeating_it_changes_nothing_and_other_settings_are_refused(tmp_path):
  frame, folder = own_table(), tmp_path / 'data'
  pack(frame, folder, **LAYOUT)
  before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
  assert pack(frame, folder, **LAYOUT).sizes
  assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before
  for other, arguments, named in (
    (frame.with_columns(age=pl.col('age') + 1), LAYOUT, 'contents'),
    (frame.head(199), LAYOUT, 'contents'),
    (frame.reverse(), LAYOUT, 'contents'),
    (frame, LAYOUT | {'fill': 0.0}, r"\{'dense': \{'age': 0.0"),
    (frame, LAYOUT | {'too_long': 'first'}, "{'too_long': 'first'} after"),
    (frame, LAYOUT | {'min_count': 2}, 'min_count 2 after 1'),
    (frame.lazy(), LAYOUT, 'name'),
  ):
    with pytest.raises(UserError, match=named) as caught:
      pack(other, folder, **arguments)
    assert str(folder / MANIFEST) in str(caught.value)


def test_an_iterator_cannot_be_continued(tmp_path, monkeypatch):
  monkeypatch.setattr(frames, '_ROWS', 10)
  monkeypatch.setattr('slipstream_jax.packed.prepare.SAVED_EXAMPLES', 20)
  frame, folder = own_table(), tmp_path / 'data'
  work = prepare(frame_raw(frame.iter_slices(7), **LAYOUT), folder)
  for _ in range(9):
    next(work)
  work.close()
  assert (folder / UNFINISHED).exists()
  with pytest.raises(UserError, match='source that can be read again'):
    pack(frame.iter_slices(7), folder, **LAYOUT)


def test_memory_does_not_grow_with_the_rows(tmp_path, monkeypatch):
  monkeypatch.setattr(frames, '_ROWS', 1 << 11)
  monkeypatch.setattr(ranking, 'PIECE', 1 << 11)
  monkeypatch.setattr(packed_columns, 'BLOCK_BYTES', 1 << 12)
  frame = own_table(1 << 11)

  def peak(times, name):
    def frames():
      for _ in range(times):
        gc.collect()  # garbage in cycles is not what reading holds
        yield frame

    tracemalloc.start()
    try:
      pack(frames, tmp_path / name, **LAYOUT, threads=1)
      return tracemalloc.get_traced_memory()[1]
    finally:
      tracemalloc.stop()

  gc.freeze()  # so that a collection looks at this test's objects alone
  try:
    peak(2, 'compiles what is needed')
    # A chunk more or less may wait for its reader: some 200 of 1,000 KB. What
    # grows with the rows does so every time.
    bound = 1.5 * peak(12, 'short')
    assert any(peak(40, f'long{i}') < bound for i in range(3))
  finally:
    gc.unfreeze()


def test_names_need_not_be_names_of_files(tmp_path):
  frame = table().rename({'user': 'a/b c'})
  data = pack(frame, tmp_path / 'data', features=['a/b c'], label='click')
  assert data.sizes == {'a/b c': 5}
  assert (tmp_path / 'data' / 'a%2Fb%20c.uint8').exists()
  assert checksums(tmp_path / 'data')
  (batch,) = data.test(1)
  assert batch.dense.shape == (1, 0)
