"""Criteo's logs, Kaggle and Terabyte, from raw files to a packed data set."""

import functools
import pathlib
import random
import re

import pytest

from experiments.make_text import job as make_text
from slipstream_jax.errors import UserError
from slipstream_jax.formats import criteo, text
from slipstream_jax.formats.criteo import criteo_raw
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.packed import columns as packed
from tests.support.texts.criteo import (
  check_every_field,
  GOOD,
  lines,
  packed_of,
  slow_parse,
  with_field,
  write,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / 'shared' / 'data' / 'criteo'
needs_samples = pytest.mark.skipif(
  not SHARED.is_dir(), reason=f'shared samples absent: {SHARED}'
)


@needs_samples
@pytest.mark.parametrize('name', ['train.txt', 'dac_80k.tsv.gz'])
def test_every_field_of_every_real_line(tmp_path, name, monkeypatch):
  small = functools.partial(text.read_blocks, block_bytes=1 << 20)
  monkeypatch.setattr(text, 'read_blocks', small)
  monkeypatch.setattr('slipstream_jax.packed.prepare.SAVED_EXAMPLES', 20_000)
  rows = slow_parse((SHARED / name).read_bytes())
  flags = name == 'train.txt'
  raw = criteo_raw(SHARED / name, missing_flags=flags)
  data = packed_of(raw, tmp_path)
  examples = len(rows)
  start = examples - examples // 7
  middle = start + examples // 7 // 2
  assert data.manifest['splits'] == {
    'train': [0, start],
    'validation': [start, middle],
    'test': [middle, examples],
  }
  check_every_field(rows, data, start, flags)


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
    data = packed_of(criteo_raw(path), tmp_path / f'{name}-data')
    check_every_field(slow_parse(path.read_bytes()), data, 52)


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
    packed_of(criteo_raw(path), tmp_path / 'data')
  assert f'{path}, line {at + 1}' in str(caught.value)
  assert not packed.is_finished(tmp_path / 'data')
  # Allowed now, it continues where it was.
  data = packed_of(criteo_raw(path, bad_lines=1), tmp_path / 'data')
  assert data.manifest['bad_lines'] == 1
  write(tmp_path / 'good.txt', good)
  other = packed_of(criteo_raw(tmp_path / 'good.txt'), tmp_path / 'other')
  assert data.manifest['columns'] == other.manifest['columns']


def test_any_bad_lines_in_blocks_of_any_size(tmp_path, monkeypatch):
  rng = random.Random(5)
  good, bad = lines(200), [b for b, _ in BAD_LINES.values()]
  mixed = [rng.choice(bad) for _ in range(50)] + good
  order = sorted(
    range(250), key=lambda i: i if i >= 50 else rng.uniform(50, 250)
  )
  path = write(tmp_path / 'mixed.txt', [mixed[i] for i in order])
  expected = packed_of(
    criteo_raw(write(tmp_path / 'good.txt', good)), tmp_path / 'good'
  )
  read_blocks = text.read_blocks
  for size in 300, 5000, 1 << 20:
    small = functools.partial(read_blocks, block_bytes=size)
    monkeypatch.setattr(text, 'read_blocks', small)
    data = packed_of(criteo_raw(path, bad_lines=50), tmp_path / f'{size}')
    assert data.manifest['bad_lines'] == 50
    assert data.manifest['columns'] == expected.manifest['columns']
    with pytest.raises(UserError, match='after 49 bad lines') as caught:
      packed_of(criteo_raw(path, bad_lines=49), tmp_path / f'{size}-not')
    assert 'raise bad_lines' in str(caught.value)


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
    packed_of(criteo_raw(path), tmp_path / 'data')
  assert "file's last line must be whole" in str(caught.value)
  assert f'{path}, line 31' in str(caught.value)
  data = packed_of(criteo_raw(path, bad_lines=1), tmp_path / 'data')
  assert (data.manifest['examples'], data.manifest['bad_lines']) == (30, 1)


def test_no_file_and_a_negative_budget(tmp_path):
  with pytest.raises(UserError, match='No such file'):
    criteo_raw(tmp_path / 'none.txt')
  with pytest.raises(UserError, match='Is a directory'):
    criteo_raw(tmp_path)
  with pytest.raises(UserError, match='at least 0, got -1'):
    criteo_raw(tmp_path / 'none.txt', bad_lines=-1)


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


def test_a_share_means_the_same_on_both_routes(tmp_path):
  path = write(tmp_path / 'some.txt', lines(200))
  raw = criteo_raw(path, test_share=0.3)
  data = packed_of(raw, tmp_path / 'data')
  assert data.manifest['splits'] == {'train': [0, 140], 'test': [140, 200]}
  assert data.manifest['settings']['test_share'] == 0.3
  assert in_memory(raw).train_examples == 140
  # As published: six of seven days to train, half of the last one to test.
  assert in_memory(criteo_raw(path)).train_examples == 172
  with pytest.raises(UserError, match=r'got 1.5 \(criteo_raw, test_share\)'):
    criteo_raw(tmp_path / 'none.txt', test_share=1.5)
