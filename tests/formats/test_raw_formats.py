"""Files of every format as data sets: examples, bad lines and splits."""

import gzip
import pathlib
import re

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from slipstream_jax.errors import UserError
from slipstream_jax.formats import avazu, text
from slipstream_jax.formats.base import MISSING
from slipstream_jax.formats.criteo import criteo_raw, terabyte_raw
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.table import frame_raw
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.vocabulary.hashed import HashVocabulary
from tests.formats.own_tables import LAYOUT, own_table
from tests.formats.text_formats import FORMATS, SHARED
from tests.support import raw_example
from tests.support.packed_folders import checksums, prepared
from tests.support.same import assert_same, assert_same_batches

every_format = pytest.mark.parametrize('name', FORMATS)


def read(raw):
  """Labels, dense features and ids of all examples."""
  chunks = [chunk for part in raw.parts for chunk, _ in part.chunks()]
  fields = zip(*(chunk[:3] for chunk in chunks), strict=True)
  return [np.concatenate(field) for field in fields]


def criteo_fields(rows, flags=False):
  """What criteo's examples are made of, by plain numpy."""
  integers = rows[:, 1:14]
  dense = np.log(1 + np.maximum(integers, 0.0))
  if flags:
    dense = np.concatenate([dense, integers == MISSING], axis=1)
  return rows[:, 0], dense, rows[:, 14:]


def avazu_fields(rows):
  return rows[:, 1], rows[:, 2:3] % 100 / 24, rows[:, 3:]


FIELDS = [
  ('criteo', {}, criteo_fields),
  (
    'criteo',
    {'missing_flags': True},
    lambda rows: criteo_fields(rows, flags=True),
  ),
  ('avazu', {}, avazu_fields),
]


@pytest.mark.parametrize(('name', 'how', 'fields'), FIELDS)
@pytest.mark.parametrize('real', [False, True])
def test_examples_are_made_of_the_fields_of_lines(
  tmp_path, name, how, fields, real
):
  of, path = FORMATS[name], tmp_path / 'packed'
  if real and not (SHARED / of.sample).is_file():
    pytest.skip('no sample')
  data = (SHARED / of.sample).read_bytes() if real else of.text(of.lines(500))
  path.write_bytes(gzip.compress(data, 1))
  raw = of.raw(path, **how)
  labels, dense, ids = read(raw)
  assert (labels.dtype, dense.dtype, ids.dtype) == ('f4', 'f4', 'i8')
  rows = np.array([*of.slow_rows(data).values()])
  assert raw.dense_features == dense.shape[1]
  assert [f'{n}' for n in raw.tables] == of.columns[-ids.shape[1] :]
  for ours, theirs in zip((labels, dense, ids), fields(rows), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
  progress = [read for _, read in raw.parts[0].chunks()]
  assert progress[-1] == raw.parts[0].size == path.stat().st_size


def raw_of(kind, folder):
  """Raw data of some kind, and arguments that all ids are counted with."""
  folder.mkdir(exist_ok=True)
  if kind == 'frame':
    return frame_raw(own_table(), **LAYOUT)
  if kind == 'example':
    return raw_example.raw_of(raw_example.fields(), (0.3, 0.7))
  if kind == 'lists':
    whole = raw_example.fields(sequence_length=3)
    return raw_example.raw_of(whole, (0.3, 0.7))
  if kind == 'terabyte':
    days = ('day_9', 'day_10', 'day_11')
    for seed, day in enumerate(days):
      rows = FORMATS['criteo'].lines(100 + 50 * seed, seed)
      FORMATS['criteo'].write(folder / day, rows)
    return terabyte_raw(folder)
  of = FORMATS[kind]
  how = {'history': 3, 'threshold': None} if kind.startswith('ml') else {}
  return of.raw(of.write(folder / 'file', of.lines(400)), **how)


KINDS = [
  'example',
  'lists',
  'frame',
  'terabyte',
  *(name for name in FORMATS if name != 'taobao'),
]


@pytest.mark.parametrize('kind', KINDS)
def test_packed_data_are_those_in_memory(tmp_path, kind):
  """Rows, order, counts and labels; Taobao's log numbers rows otherwise."""
  raw = raw_of(kind, tmp_path / 'raw')
  prepared(raw, tmp_path / 'data', min_count=2)
  packed, held = packed_dataset(tmp_path / 'data'), in_memory(raw, min_count=2)
  assert (packed.sizes, packed.features) == (held.sizes, held.features)
  assert packed.train_examples == held.train_examples
  assert packed.base_rate == pytest.approx(held.base_rate)
  source = packed.train(40)
  assert_same_batches(source, held.train(40), 8)
  source.close()
  assert_same_batches(packed.test(7), held.test(7))
  lookups = next(held.train(held.train_examples)).lookups
  rows = sum(packed.sizes.values())
  counts = np.bincount(lookups[lookups >= 0], minlength=rows)
  np.testing.assert_array_equal(packed.counts(), counts)
  prepared(raw, tmp_path / 'again', min_count=2)
  assert checksums(tmp_path / 'again') == checksums(tmp_path / 'data')


def test_ids_in_memory_may_be_hashed_and_examples_shuffled():
  whole = raw_example.fields(2000)
  raw = raw_example.raw_of(whole, (0.3, 0.7))
  data = in_memory(raw, hash_rows=5, shuffle_seed=1)
  assert [*data.sizes.values()] == [5, 5, 5]
  assert data.base_rate == pytest.approx(whole.labels[:1400].mean())
  assert data.name == (
    'example, examples 1-1,400 to train, examples 1,401-1,600 to validation,'
    ' examples 1,601-2,000 to test'
  )
  shuffled = next(data.train(1400))
  held = in_memory(raw, hash_rows=5)
  in_order = next(held.train(1400))
  places = {row.tobytes(): n for n, row in enumerate(in_order.dense)}
  order = [places[row.tobytes()] for row in shuffled.dense]
  assert order != sorted(order) == list(range(1400))
  assert_same(tuple(shuffled[:3]), tuple(a[order] for a in in_order[:3]))
  for table in range(3):
    rows = HashVocabulary(5, table).rows(whole.ids[:1400, table])
    assert (in_order.lookups[:, table] == rows + 5 * table).all()


@every_format
@pytest.mark.parametrize('at', [1, 70])
def test_a_bad_line_ends_it_or_is_skipped_and_counted_once(tmp_path, name, at):
  of = FORMATS[name]
  rows = of.lines(200)
  good = of.raw(of.write(tmp_path / 'good', rows))
  path = of.write(tmp_path / 'bad', [*rows[:at], 'bad', *rows[at:], '', 'bad'])
  said = f'{path}, line {at + 1 + bool(of.schema.header)}, after'
  with pytest.raises(UserError, match=re.escape(said)):
    read(of.raw(path))
  raw = of.raw(path, bad_lines=3)
  assert raw.bad.count == 0
  for _ in range(2):
    assert_same(read(raw), read(good))
    assert raw.bad.count == 3
  assert ', 3 bad lines skipped' in in_memory(raw).name
  with pytest.raises(
    UserError, match=r'after 2 bad lines.*, or raise bad_line'
  ):
    read(of.raw(path, bad_lines=2))
  with pytest.raises(UserError, match=r'bad_lines .* at least 0, got -1'):
    of.raw(path, bad_lines=-1)
  with pytest.raises(UserError, match='must exist and be readable'):
    read(of.raw(tmp_path / 'absent'))


def test_another_first_line_is_no_header(tmp_path):
  path = tmp_path / 'file'
  for name, said in ('avazu', 'the only one with clicks'), ('ml csv', 'u.data'):
    path.write_text('movieId,title,genres\n1,Toy Story,Animation\n')
    with pytest.raises(UserError, match=f'must be the header .*{said}'):
      read(FORMATS[name].raw(path, bad_lines=9))


SHARES = ['criteo', 'terabyte', 'avazu', 'taobao', 'ml csv']
BAD_ARGUMENTS = [
  *((name, {'test_share': 0.0}, 'between 0 and 1') for name in SHARES),
  *((name, {'test_share': float('nan')}, 'got nan') for name in SHARES),
  *((name, {'test_share': 1.0}, 'got 1.0') for name in SHARES),
  ('criteo', {'test_share': 1e-9}, 'got 400 to train, 0 to test'),
  ('criteo', {'test_share': 0.9999}, 'got 0 to train, 400 to test'),
  *(
    ('terabyte', {name: share}, f'{name} must be above 0')
    for name in ('sample', 'sample_negatives')
    for share in (0.0, 1.1, float('nan'))
  ),
  ('terabyte', {'seed': -1}, r'seed must be .* in \[0, 2\*\*63\), got -1'),
  ('taobao', {'seed': -1}, r'seed must be .* in \[0, 2\*\*63\), got -1'),
  ('taobao', {'test_share': 0.999}, 'points to train on .* got 0 and'),
  ('taobao', {'min_history': 500}, 'got 0 and 0'),
  *(
    ('taobao', {name: 0}, f'{name} must be .*, at least 1, got 0')
    for name in ('min_history', 'steps', 'per_user')
  ),
  ('ml csv', {'threshold': 0.0}, 'stars, from 0.5 to 5, or None, got 0.0'),
  ('ml csv', {'threshold': float('nan')}, 'got nan'),
  ('ml csv', {'history': -1}, 'at least 0, got -1'),
]


@pytest.mark.parametrize(('name', 'arguments', 'said'), BAD_ARGUMENTS)
def test_bad_arguments_are_named(tmp_path, name, arguments, said):
  raw_of(name, tmp_path)
  make, path = terabyte_raw, tmp_path
  if name != 'terabyte':
    make, path = FORMATS[name].raw, tmp_path / 'file'
  with pytest.raises(UserError, match=said):
    in_memory(make(path, **arguments))


# Criteo and the Terabyte logs.


def test_criteo_holds_out_the_last_seventh_or_a_share(tmp_path):
  raw = raw_of('criteo', tmp_path)
  expected = {'train': (0, 343), 'validation': (343, 371), 'test': (371, 400)}
  assert raw.split(400, (400,)) == expected
  shared = criteo_raw(tmp_path / 'file', test_share=0.3)
  assert shared.split(400, (400,)) == {'train': (0, 280), 'test': (280, 400)}
  assert shared.settings['test_share'] == 0.3
  # What the folder and the set in memory say of it.
  manifest = prepared(shared, tmp_path / 'data').manifest
  assert manifest['splits'] == {'train': [0, 280], 'test': [280, 400]}
  assert in_memory(shared).name == (
    'Criteo Kaggle, file, examples 1-280 to train, examples 281-400 to test'
  )


def test_days_follow_each_other_and_the_last_is_held_out(tmp_path):
  raw = raw_of('terabyte', tmp_path / 'days')
  assert [p.name.rpartition('/')[2] for p in raw.parts] == [
    *('day_9', 'day_10', 'day_11')
  ]
  assert raw.split(450, (100, 150, 200)) == {
    'train': (0, 250),
    'validation': (250, 350),
    'test': (350, 450),
  }
  whole = b''.join(pathlib.Path(p.name).read_bytes() for p in raw.parts)
  (tmp_path / 'all').write_bytes(whole)
  assert_same(read(raw), read(criteo_raw(tmp_path / 'all')))
  share = terabyte_raw(tmp_path / 'days', test_share=0.1)
  assert share.split(450, (1, 2, 3)) == {'train': (0, 405), 'test': (405, 450)}
  for name in 'day_10.md5', 'README', 'day_x':  # do not matter
    (tmp_path / 'days' / name).write_text('')
  assert len(terabyte_raw(tmp_path / 'days').parts) == 3


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    (lambda d: (d / 'day_10').unlink(), 'got day_9, day_11'),
    (lambda d: (d / 'day_10.gz').write_text('1'), 'day_10, day_10.gz'),
    (lambda d: [p.unlink() for p in d.iterdir()], 'got none'),
  ],
)
def test_days_that_are_missing_or_there_twice(tmp_path, change, said):
  raw_of('terabyte', tmp_path)
  change(tmp_path)
  with pytest.raises(UserError, match=said):
    terabyte_raw(tmp_path)


@pytest.mark.parametrize('cut', [40, 400, -9, -1])
def test_a_day_cut_in_the_middle_of_its_gzip(tmp_path, cut):
  raw_of('terabyte', tmp_path)
  path = tmp_path / 'day_10'
  path.write_bytes(gzip.compress(path.read_bytes())[:cut])
  # No number of bad lines stands for what is not there.
  with pytest.raises(UserError, match='readable to its end') as caught:
    read(terabyte_raw(tmp_path, bad_lines=99))
  assert f'{path}, at or after line' in str(caught.value)


def test_a_sample_depends_on_places_and_labels_only(tmp_path, monkeypatch):
  raw_of('terabyte', tmp_path)
  whole, _, all_ids = read(terabyte_raw(tmp_path))
  half, _, ids = read(terabyte_raw(tmp_path, sample=0.5))
  assert 180 < len(half) < 270
  # What is kept is a subsequence of the lines, whole.
  lines = iter(all_ids.tolist())
  assert all(line in lines for line in ids.tolist())
  other_ids = read(terabyte_raw(tmp_path, sample=0.5, seed=1))[2]
  assert other_ids.tolist() != ids.tolist()
  thin, *_ = read(terabyte_raw(tmp_path, sample_negatives=0.25))
  assert thin.sum() == whole.sum(), 'all clicks are kept'
  negatives = (whole == 0).sum()
  assert 0.15 * negatives < (thin == 0).sum() < 0.35 * negatives
  small_blocks(monkeypatch, 5000)  # in these it is the same
  assert_same(read(terabyte_raw(tmp_path, sample=0.5))[2], ids)


# Avazu's days.


def days(path, *examples):
  """A file with so many examples in each of some consecutive days."""
  of = FORMATS['avazu']
  hours = [
    f'1410{day:02}{hour % 24:02}'
    for day, count in enumerate(examples, start=29)
    for hour in range(count)
  ]
  return of.write(path, [of.with_field('hour', hour) for hour in hours])


def test_the_last_day_is_held_out(tmp_path):
  path = days(tmp_path / 'days.csv', 30, 12, 7)
  raw = avazu.avazu_raw(path)
  expected = {'train': (0, 42), 'test': (42, 49)}
  assert raw.split(49, (49,)) == expected, 'before it was read'
  read(raw)
  assert raw.split(49, (49,)) == expected
  one = avazu.avazu_raw(days(tmp_path / 'one.csv', 50))
  assert one.split(50, (50,)) == {'train': (0, 40), 'test': (40, 50)}
  share = avazu.avazu_raw(path, test_share=0.5)
  assert share.split(49, (49,)) == {'train': (0, 25), 'test': (25, 49)}
  # Days of lines that are skipped do not count.
  of = FORMATS['avazu']
  bad = of.with_field('C1', 'x', of.with_field('hour', '14113100'))
  path.write_text(path.read_text() + f'{bad}\n{bad[:40]}')
  raw = avazu.avazu_raw(path, bad_lines=2)
  assert len(read(raw)[0]) == 49
  assert raw.split(49, (49,)) == expected


def small_blocks(monkeypatch, size):
  """Reads files of text in many blocks, as only large ones are."""
  blocks = text.read_blocks
  monkeypatch.setattr(text, 'read_blocks', lambda path: blocks(path, size))


@pytest.mark.parametrize('size', [50, text.BLOCK_BYTES])
def test_days_out_of_order_are_named(tmp_path, monkeypatch, size):
  small_blocks(monkeypatch, size)
  of = FORMATS['avazu']
  first, late, early = (
    of.with_field('hour', h) for h in ('14102105', '14102205', '14102104')
  )
  path = of.write(tmp_path / 'days.csv', [first, late, early])
  with pytest.raises(UserError, match=r'hour 14102104 after a later') as caught:
    read(avazu.avazu_raw(path, bad_lines=9))
  assert f'{path}, line 4, column hour' in str(caught.value)
  # Hours of one day may come in any order.
  path = of.write(tmp_path / 'hours.csv', [first, early])
  assert len(read(avazu.avazu_raw(path))[0]) == 2


# Criteo's samples.


SAMPLE = SHARED / 'criteo' / 'dac_80k.tsv.gz'
needs_sample = pytest.mark.skipif(not SAMPLE.is_file(), reason='no sample')


@needs_sample
def test_counts_of_the_80k_lines():
  labels, _, ids = read(criteo_raw(SAMPLE))
  assert len(labels) == 80_000
  assert labels.mean() == pytest.approx(0.2245, abs=5e-5)
  # The manifest counts "missing" as one more id of each table that has any.
  counts = [np.unique(column, return_counts=True)[1] for column in ids.T]
  assert sum(map(len, counts)) == 200_103
  seen_once = (np.concatenate(counts) == 1).mean()
  assert seen_once == pytest.approx(0.71, abs=0.005)


@pytest.mark.slow
@needs_sample
def test_logistic_regression_on_the_80k_lines_meets_the_yardstick():
  data = in_memory(criteo_raw(SAMPLE, test_share=0.2), min_count=4)
  num_rows = sum(data.sizes.values())
  assert num_rows == 24_420

  def features(batch):
    shape = len(batch.lookups), num_rows
    starts = np.arange(0, batch.lookups.size + 1, 26)
    cells = (
      np.ones(batch.lookups.size, np.float32),
      batch.lookups.ravel(),
      starts,
    )
    one_hot = sparse.csr_matrix(cells, shape=shape)
    return sparse.hstack([one_hot, batch.dense / 5], format='csr')

  train = next(data.train(data.train_examples))
  (test,) = data.test(16_000)
  model = LogisticRegression(C=0.1, max_iter=300)
  model.fit(features(train), train.labels)
  clicks = model.predict_proba(features(test))[:, 1]
  assert roc_auc_score(test.labels, clicks) == pytest.approx(0.769, abs=0.001)
  assert log_loss(test.labels, clicks) == pytest.approx(0.443, abs=0.001)
