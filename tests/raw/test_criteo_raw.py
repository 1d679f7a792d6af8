"""Criteo's logs, Kaggle and Terabyte, from raw files to a packed data set."""

import collections
import functools
import gzip
import pathlib
import random
import re
import signal
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest

from configs import criteo as criteo_config
from configs import terabyte as terabyte_config
from experiments import make_text
from experiments import prepare as program
from experiments.common import cli
from slipstream_jax.data import vocabulary
from slipstream_jax.errors import UserError
from slipstream_jax.packed import columns as packed
from slipstream_jax.packed import spill
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.raw import criteo, text
from slipstream_jax.raw.base import MISSING
from slipstream_jax.raw.criteo import criteo_raw
from slipstream_jax.raw.terabyte import terabyte_raw
from tests.support import programs

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / 'shared' / 'data' / 'criteo'
needs_samples = pytest.mark.skipif(
  not SHARED.is_dir(), reason=f'shared samples absent: {SHARED}'
)
GOOD = '\t'.join(['1'] + ['7'] * 13 + ['05db9164'] * 26)


def run(raw, folder, **arguments):
  collections.deque(prepare(raw, folder, **arguments), maxlen=0)
  return packed.open_packed(folder)


def slow_parse(path):
  """Fields of every line, None where empty; the oracle of the fast parser."""
  data = path.read_bytes()
  data = gzip.decompress(data) if data[:2] == b'\x1f\x8b' else data
  lines = data.decode('ascii').replace('\r\n', '\n').split('\n')
  rows = []
  for line in lines[:-1] if lines[-1] == '' else lines:
    fields = line.split('\t')
    assert len(fields) == 40
    bases = [10] * 14 + [16] * 26
    pairs = zip(fields, bases, strict=True)
    rows.append([int(f, base) if f else None for f, base in pairs])
  return rows


def check_every_field(rows, data, train_end, flags=False):
  """Compares all columns with the slow parser's rows, ids mapped back."""
  columns = data.columns
  assert columns['labels'].tolist() == [row[0] for row in rows]
  integers = np.array([[max(v or 0, 0) for v in row[1:14]] for row in rows])
  dense = np.log(1 + integers)
  if flags:
    missing = [[v is None for v in row[1:14]] for row in rows]
    dense = np.concatenate([dense, missing], axis=1)
  np.testing.assert_allclose(columns['dense'], dense, rtol=1e-6)
  for at, name in enumerate(criteo.TABLES, start=14):
    ids = np.array([MISSING if row[at] is None else row[at] for row in rows])
    counts = collections.Counter(ids[:train_end].tolist())
    counts.setdefault(MISSING, 0)
    known = columns[f'vocabulary_{name}']
    assert known.tolist() == sorted(counts, key=lambda i: (-counts[i], i))
    assert columns[f'frequency_{name}'].tolist() == [
      0,
      *(counts[i] for i in known.tolist()),
    ]
    lookups = columns[name].astype(np.int64)
    found = lookups > 0
    np.testing.assert_array_equal(known[lookups[found] - 1], ids[found])
    assert not set(ids[~found].tolist()) & set(counts)


@needs_samples
@pytest.mark.parametrize('name', ['train.txt', 'dac_80k.tsv.gz'])
def test_every_field_of_every_real_line(tmp_path, name, monkeypatch):
  small = functools.partial(text.read_blocks, block_bytes=1 << 20)
  monkeypatch.setattr(text, 'read_blocks', small)
  monkeypatch.setattr(spill, 'SAVED_INPUTS', 20_000)
  rows = slow_parse(SHARED / name)
  flags = name == 'train.txt'
  raw = criteo_raw(SHARED / name, missing_flags=flags)
  data = run(raw, tmp_path)
  inputs = len(rows)
  start = inputs - inputs // 7
  middle = start + inputs // 7 // 2
  assert data.manifest['splits'] == {
    'train': [0, start],
    'validation': [start, middle],
    'test': [middle, inputs],
  }
  check_every_field(rows, data, start, flags)


def line(rng):
  integers = [
    '' if rng.random() < 0.2 else str(rng.randrange(-2, 1000))
    for _ in range(13)
  ]
  ids = [
    '' if rng.random() < 0.1 else f'{int(rng.paretovariate(0.7)) % 500:08x}'
    for _ in range(26)
  ]
  return '\t'.join([str(rng.randrange(2)), *integers, *ids])


def lines(count, seed=0):
  rng = random.Random(seed)
  return [line(rng) for _ in range(count)]


def write(path, some, packed_=False):
  data = ('\n'.join(some) + '\n').encode()
  path.write_bytes(gzip.compress(data, 1) if packed_ else data)
  return path


def test_case_line_ends_and_signs_make_no_difference(tmp_path):
  some = lines(60)
  write(tmp_path / 'unix', some)
  windows = '\r\n'.join(some).upper() + '\r\n'
  (tmp_path / 'windows').write_bytes(windows.encode())
  # A last line without its end is whole if its last id has all its digits.
  whole = [*some[:-1], some[-1][: some[-1].rindex('\t')] + '\t000000AB']
  (tmp_path / 'open').write_text('\n'.join(whole))
  for name in 'unix', 'windows', 'open':
    path = tmp_path / name
    data = run(criteo_raw(path), tmp_path / f'{name}-data')
    check_every_field(slow_parse(path), data, 52)


def with_field(column, value):
  fields = GOOD.split('\t')
  fields[criteo.COLUMNS.index(column)] = value
  return '\t'.join(fields)


HEADER = '\t'.join(criteo.COLUMNS)
BAD_LINES = {
  'ragged': (GOOD[: GOOD.rindex('\t')], '40 fields'),
  'missing trailing fields': ('\t'.join(GOOD.split('\t')[:30]), 'C16'),
  'empty': ('', '40 fields'),
  'byte order mark': ('\N{BOM}' + GOOD, 'label must be 0 or 1'),
  'header': (HEADER, "got 'label'"),
  'not hex': (with_field('C7', '05db916z'), 'column C7'),
  'not whole': (with_field('I2', '1.5'), 'column I2'),
  'signs': (with_field('I2', '--1'), 'column I2'),
  'long id': (with_field('C26', '123456789'), 'column C26'),
  'lone carriage return': (GOOD + '\r' + GOOD, '40 fields'),
}


@pytest.mark.parametrize('at', [0, 39])
@pytest.mark.parametrize('case', BAD_LINES)
def test_a_bad_line_is_named_or_counted(tmp_path, case, at):
  bad, said = BAD_LINES[case]
  good = lines(40)
  path = write(tmp_path / 'bad.txt', [*good[:at], bad, *good[at:]])
  with pytest.raises(UserError, match=re.escape(said)) as caught:
    run(criteo_raw(path), tmp_path / 'data')
  assert f'{path}, line {at + 1}' in str(caught.value)
  assert not packed.is_finished(tmp_path / 'data')
  # Allowed now, it continues where it was.
  data = run(criteo_raw(path, bad_lines=1), tmp_path / 'data')
  assert data.manifest['bad_lines'] == 1
  write(tmp_path / 'good.txt', good)
  other = run(criteo_raw(tmp_path / 'good.txt'), tmp_path / 'other')
  assert data.manifest['columns'] == other.manifest['columns']


def test_any_bad_lines_in_blocks_of_any_size(tmp_path, monkeypatch):
  rng = random.Random(5)
  good, bad = lines(200), [b for b, _ in BAD_LINES.values()]
  mixed = [rng.choice(bad) for _ in range(50)] + good
  order = sorted(
    range(250), key=lambda i: i if i >= 50 else rng.uniform(50, 250)
  )
  path = write(tmp_path / 'mixed.txt', [mixed[i] for i in order])
  expected = run(
    criteo_raw(write(tmp_path / 'good.txt', good)), tmp_path / 'good'
  )
  read_blocks = text.read_blocks
  for size in 300, 5000, 1 << 20:
    small = functools.partial(read_blocks, block_bytes=size)
    monkeypatch.setattr(text, 'read_blocks', small)
    data = run(criteo_raw(path, bad_lines=50), tmp_path / f'{size}')
    assert data.manifest['bad_lines'] == 50
    assert data.manifest['columns'] == expected.manifest['columns']
    with pytest.raises(UserError, match='after 49 bad lines') as caught:
      run(criteo_raw(path, bad_lines=49), tmp_path / f'{size}-not')
    assert 'config.data.bad_lines' in str(caught.value)


@pytest.mark.parametrize(
  ('tail', 'said'),
  [
    ('1\t5\t\t68', "4 fields, the last being '68'"),
    (GOOD[:-3], "40 fields, the last being '05db9'"),
    (GOOD[:-8], "40 fields, the last being ''"),
    ('1', "1 fields, the last being '1'"),
  ],
)
def test_a_file_cut_in_the_middle_of_a_line(tmp_path, tail, said):
  path = tmp_path / 'cut.txt'
  path.write_text('\n'.join([*lines(30), tail]))
  with pytest.raises(UserError, match=re.escape(said)) as caught:
    run(criteo_raw(path), tmp_path / 'data')
  assert "file's last line must be whole" in str(caught.value)
  assert f'{path}, line 31' in str(caught.value)
  data = run(criteo_raw(path, bad_lines=1), tmp_path / 'data')
  assert (data.manifest['inputs'], data.manifest['bad_lines']) == (30, 1)


@pytest.mark.parametrize('cut', [40, 400, -9, -1])
def test_a_day_cut_in_the_middle_of_its_gzip(tmp_path, cut):
  write(tmp_path / 'day_0', lines(30))
  whole = gzip.compress(('\n'.join(lines(300)) + '\n').encode())
  (tmp_path / 'day_1.gz').write_bytes(whole[:cut])
  # No number of bad lines stands for what is not there.
  with pytest.raises(UserError, match='readable to its end') as caught:
    run(terabyte_raw(tmp_path, bad_lines=99), tmp_path / 'data')
  assert f'{tmp_path / "day_1.gz"}, at or after line' in str(caught.value)
  assert not packed.is_finished(tmp_path / 'data')


def test_no_file_and_a_negative_budget(tmp_path):
  with pytest.raises(UserError, match='No such file'):
    criteo_raw(tmp_path / 'none.txt')
  with pytest.raises(UserError, match='Is a directory'):
    criteo_raw(tmp_path)
  with pytest.raises(UserError, match='bad_lines must be at least 0, got -1'):
    criteo_raw(tmp_path / 'none.txt', bad_lines=-1)


@pytest.fixture
def days(tmp_path):
  """Three days, the second one gzip; and all of their lines in one file."""
  folder = tmp_path / 'days'
  folder.mkdir()
  all_lines = lines(900)
  write(folder / 'day_9', all_lines[:200])
  write(folder / 'day_10.gz', all_lines[200:500], packed_=True)
  write(folder / 'day_11', all_lines[500:])
  write(tmp_path / 'all.txt', all_lines)
  return folder


def test_days_follow_each_other_and_the_last_is_held_out(days, tmp_path):
  data = run(terabyte_raw(days), tmp_path / 'data')
  assert data.manifest['parts'] == [
    {'name': 'day_9', 'inputs': 200},
    {'name': 'day_10.gz', 'inputs': 300},
    {'name': 'day_11', 'inputs': 400},
  ]
  assert data.manifest['splits'] == {
    'train': [0, 500],
    'validation': [500, 700],
    'test': [700, 900],
  }
  check_every_field(slow_parse(tmp_path / 'all.txt'), data, 500)


def test_hashed_days(days, tmp_path):
  data = run(terabyte_raw(days), tmp_path / 'data', hash_rows=97)
  rows = slow_parse(tmp_path / 'all.txt')
  ids = [[MISSING if v is None else v for v in row[14:]] for row in rows]
  buckets = vocabulary.Hashed(26, 97).map(np.array(ids).T)
  for table, name in enumerate(criteo.TABLES):
    rank = data.columns[f'rank_{name}'].astype(int)
    np.testing.assert_array_equal(data.columns[name], rank[buckets[:, table]])
    assert data.manifest['tables'][table]['rows'] == rank.max() + 1


def test_a_sample_depends_on_places_and_labels_only(
  days, tmp_path, monkeypatch
):
  def kept(name, **arguments):
    return run(terabyte_raw(days, **arguments), tmp_path / name)

  rows = slow_parse(tmp_path / 'all.txt')
  clicks = sum(row[0] for row in rows)
  half = kept('half', sample=0.5)
  assert 380 < half.manifest['inputs'] < 520
  assert half.manifest['settings']['sample'] == 0.5
  small = functools.partial(text.read_blocks, block_bytes=5000)
  monkeypatch.setattr(text, 'read_blocks', small)
  again = kept('again', sample=0.5)
  assert again.manifest['columns'] == half.manifest['columns']
  other = kept('other', sample=0.5, seed=1)
  assert other.manifest['columns'] != half.manifest['columns']
  thin = kept('thin', sample_negatives=0.25)
  assert thin.columns['labels'].sum() == clicks, 'all clicks are kept'
  negatives = len(rows) - clicks
  left = thin.manifest['inputs'] - clicks
  assert 0.15 * negatives < left < 0.35 * negatives
  # What is kept is a subsequence of the lines, whole.
  dense = np.log1p([[max(v or 0, 0) for v in row[1:14]] for row in rows])
  places = iter(dense.astype(np.float32).tolist())
  assert all(line in places for line in half.columns['dense'].tolist())


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    (lambda d: (d / 'day_10.gz').unlink(), 'got day_9, day_11'),
    (lambda d: write(d / 'day_10', lines(3)), 'day_10, day_10.gz'),
    (lambda d: [p.unlink() for p in d.iterdir()], 'got none'),
  ],
)
def test_days_that_are_missing_or_there_twice(days, change, said):
  change(days)
  with pytest.raises(UserError, match=said):
    terabyte_raw(days)


def test_other_files_beside_the_days_do_not_matter(days):
  for name in 'day_10.md5', 'README', 'day_x':
    (days / name).write_text('')
  assert len(terabyte_raw(days).parts) == 3


@pytest.mark.parametrize('name', ['sample', 'sample_negatives'])
@pytest.mark.parametrize('share', [0.0, -0.1, 1.1, float('nan')])
def test_shares_out_of_range(days, name, share):
  with pytest.raises(UserError, match=f'{name} must be above 0'):
    terabyte_raw(days, **{name: share})


def test_chunks_are_bounded(tmp_path):
  make_text.write_text(tmp_path / 'long.txt', 150_000)
  (part,) = criteo_raw(tmp_path / 'long.txt').parts
  sizes, read = zip(
    *((len(chunk.labels), read) for chunk, read in part.chunks()), strict=True
  )
  assert len(sizes) == 3
  assert sum(sizes) == 150_000
  least = min(map(len, (tmp_path / 'long.txt').read_bytes().splitlines()))
  assert max(sizes) <= text.BLOCK_BYTES / least + 1
  assert list(read) == sorted(read)
  assert read[-1] == part.size


def test_made_text_is_like_the_stream_it_is_made_of(tmp_path):
  make_text.write_text(tmp_path / 'made.txt', 3000, seed=4)
  rows = slow_parse(tmp_path / 'made.txt')
  assert len(rows) == 3000
  assert 0.2 < np.mean([row[0] for row in rows]) < 0.3
  missing = np.mean([[v is None for v in row] for row in rows], axis=0)
  assert missing[[0, 2, 14]].tolist() == [0, 0, 0]
  assert 0.4 < missing[1] < 0.5
  distinct = [len({row[t] for row in rows}) for t in range(14, 40)]
  assert max(distinct) > 500 > min(distinct)
  with pytest.raises(UserError, match='at least one line, got 0'):
    make_text.write_text(tmp_path / 'none.txt', 0)


def job(config, **changes):
  """The program's exit code, in this process."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(['tests'])
  verify = changes.pop('verify', False)
  with config.unlocked():
    config.update_from_flattened_dict(changes)
  with flagsaver.flagsaver(verify=verify):
    return cli.guarded(program.main, config)


def assert_one_sentence(said, *parts):
  assert said.startswith('error: ')
  assert said.count('\n') == 1
  for part in parts:
    assert part in said, said


def test_the_program_prepares_refuses_and_verifies(tmp_path, capsys):
  path = write(tmp_path / 'some.txt', [*lines(300), 'torn'])
  where = {'data.raw': str(path), 'data.path': str(tmp_path / 'data')}

  def run_job(**changes):
    return job(criteo_config.get_config(), **(where | changes))

  assert run_job() == 1
  assert_one_sentence(capsys.readouterr().err, 'line 301', 'torn')
  assert run_job(**{'data.bad_lines': 2}) == 0
  said = capsys.readouterr().out
  for part in 'bad lines skipped', 'inputs/s', 'peak memory', 'C26', 'unknown':
    assert part in said
  assert re.search(r'bad lines skipped[ │]+1 ', said)
  assert re.search(r'inputs +│ +300 ', said)
  assert run_job() == 0
  said = capsys.readouterr().out
  assert said.count('\n') == 1
  for part in str(tmp_path / 'data'), 'is finished', '300 inputs', '26 tables':
    assert part in said
  assert run_job(**{'data.min_count': 2}) == 1
  assert_one_sentence(capsys.readouterr().err, 'min_count 2 after 1')
  assert run_job(verify=True, **{'data.raw': None}) == 0
  assert 'as they were written' in capsys.readouterr().out
  column = tmp_path / 'data' / 'C3.uint8'
  contents = bytearray(column.read_bytes())
  contents[7] ^= 4
  column.write_bytes(contents)
  assert run_job(verify=True) == 1
  assert_one_sentence(capsys.readouterr().err, 'checksum', 'C3.uint8')


def test_the_program_names_what_is_not_set(tmp_path, capsys):
  config = criteo_config.get_config
  assert job(config()) == 1
  assert_one_sentence(capsys.readouterr().err, 'config.data.raw')
  assert job(config(), **{'data.raw': 'x'}) == 1
  assert_one_sentence(capsys.readouterr().err, 'config.data.path')
  some = {'data.raw': 'x', 'data.path': str(tmp_path / 'data')}
  assert job(config(), **some) == 1
  assert_one_sentence(capsys.readouterr().err, 'No such file', 'x')
  assert job(config(), **some, **{'data.format': 'parquet'}) == 1
  assert_one_sentence(capsys.readouterr().err, 'criteo, terabyte', 'parquet')
  assert not (tmp_path / 'data').exists()


def test_the_terabyte_config_prepares_days(days, tmp_path, capsys):
  config = terabyte_config.get_config('smoke')
  where = {'data.raw': str(days), 'data.path': str(tmp_path / 'data')}
  assert job(config, **where) == 0
  manifest = packed.open_packed(tmp_path / 'data').manifest
  assert manifest['inputs'] == 900
  assert (manifest['min_count'], manifest['hash_rows']) == (1, 10_000)
  assert terabyte_config.get_config().data.hash_rows == 40_000_000
  with pytest.raises(ValueError, match='huge'):
    terabyte_config.get_config('huge')


def test_ctrl_c_leaves_what_the_same_command_continues(tmp_path):
  path, folder = tmp_path / 'some.txt', tmp_path / 'data'
  make_text.write_text(path, 400_000)
  command = [
    *(sys.executable, '-m', 'experiments.prepare'),
    *('--config=configs/criteo.py', f'--config.data.raw={path}'),
    f'--config.data.path={folder}',
  ]
  outputs = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE}
  with programs.started(command, **outputs) as process:
    programs.wait_until((folder / 'dense.float32').exists, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=programs.LIMIT_S)
  assert process.returncode == 130
  assert_one_sentence(errors, 'interrupted; the same command continues')
  assert not packed.is_finished(folder)
  assert run(criteo_raw(path), folder).manifest['inputs'] == 400_000
