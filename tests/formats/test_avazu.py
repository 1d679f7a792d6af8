"""Avazu's CSV: fields, bad lines, days, the real sample, and a run on it."""

import collections
import csv
import gzip
import io
import pathlib
import re

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs import avazu as config
from configs import criteo
from experiments.common import build, datasets, errors
from slipstream_jax.errors import UserError
from slipstream_jax.formats import avazu, text
from slipstream_jax.formats.base import END, MISSING
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.lines import parse

SAMPLE = (
  pathlib.Path(__file__).resolve().parents[3]
  / 'shared'
  / 'data'
  / 'avazu'
  / 'train.csv'
)
needs_sample = pytest.mark.skipif(
  not SAMPLE.is_file(), reason=f'shared samples absent: {SAMPLE}'
)
HEADER = (
  'id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,'
  'app_domain,app_category,device_id,device_ip,device_model,device_type,'
  'device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21'
)
NAMES = HEADER.split(',')
HEX = {n for n in NAMES if n.startswith(('site_', 'app_'))} | {
  'device_id',
  'device_ip',
  'device_model',
}
GOOD = (
  '10000169349117863715,0,14102100,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,'
  '7801e8d9,07d7df22,a99f214a,96809ac8,711ee120,1,0,15704,320,50,1722,0,35,'
  '-1,79'
)


def with_field(name: str, value: str, line: str = GOOD) -> str:
  fields = line.split(',')
  fields[NAMES.index(name)] = value
  return ','.join(fields)


def write(path: pathlib.Path, *lines: str) -> pathlib.Path:
  path.write_text(''.join(f'{line}\n' for line in (HEADER, *lines)))
  return path


def slow_parse(data: bytes) -> list[list[int]]:
  """Click, hour and ids of every line; the oracle of the fast parser."""

  def id_of(name: str, value: str) -> int:
    if not value:
      return MISSING
    number = int(value, 16 if name in HEX else 10)
    return number if number >= 0 else number - 2

  reader = csv.DictReader(io.StringIO(data.decode('utf-8-sig'), newline=''))
  return [
    [int(row['click']), int(row['hour'])]
    + [id_of(name, row[name]) for name in NAMES[3:]]
    for row in reader
  ]


def fast_parse(path: pathlib.Path, block_bytes: int) -> list[list[int]]:
  rows: list[list[int]] = []
  for block in text.read_blocks(path, block_bytes):
    fields = parse(block, avazu.SCHEMA)
    assert fields.lines.tolist() == [
      *range(len(rows) + 2, len(rows) + 2 + len(fields.lines))
    ]
    rows += fields.values[1:].T.tolist()
  return rows


def read(raw) -> list[list[float]]:
  """Click, hour of day and ids of every example."""
  rows: list[list[float]] = []
  for part in raw.parts:
    for chunk, _ in part.chunks():
      dense = np.rint(chunk.dense * 24)
      both = (chunk.labels[:, None], dense, chunk.ids)
      rows += np.concatenate(both, axis=1, dtype=np.float64).tolist()
  return rows


def error_of(path: pathlib.Path, **arguments) -> str:
  with pytest.raises(UserError) as caught:
    read(avazu.avazu_raw(path, **arguments))
  message = str(caught.value)
  assert re.fullmatch(r'[^\n]+, got [^\n]+ \([^\n]+\); [^\n]+\.', message)
  assert str(path) in message
  return message


numbers = st.just('') | st.integers(-(10**18) + 1, 10**18 - 1).map(str)
hexes = st.text('0123456789abcdefABCDEF', max_size=8)
lines = st.tuples(
  st.integers(0, 1 << 70).map(str),
  st.sampled_from('01'),
  st.integers(0, 23).map(lambda hour: f'141021{hour:02}'),
  *[hexes if name in HEX else numbers for name in NAMES[3:]],
).map(','.join)


@settings(max_examples=50, deadline=None)
@given(
  st.lists(lines, max_size=5),
  st.sampled_from(['\n', '\r\n']),
  st.sampled_from(['', '\N{BOM}']),
  st.integers(100, 2000),
  st.booleans(),
)
def test_every_field_of_any_file_in_blocks_of_any_size(
  tmp_path_factory, rows, end, bom, block_bytes, packed
):
  path = tmp_path_factory.getbasetemp() / 'any.csv'
  data = (bom + ''.join(row + end for row in [HEADER, *rows])).encode()
  path.write_bytes(gzip.compress(data, 1) if packed else data)
  assert fast_parse(path, block_bytes) == slow_parse(data)


@needs_sample
@pytest.mark.parametrize('block_bytes', [100_000, text.BLOCK_BYTES])
def test_every_field_of_every_real_line(block_bytes):
  expected = slow_parse(SAMPLE.read_bytes())
  assert len(expected) == 9999
  assert sum(row[0] for row in expected) == 1706
  # C20's -1 is an id like any other, and no field is missing.
  c20 = 2 + avazu.TABLES.index('C20')
  assert sum(row[c20] == -3 for row in expected) > 1000
  assert not {MISSING, END} & {id_ for row in expected for id_ in row}
  assert fast_parse(SAMPLE, block_bytes) == expected


@needs_sample
def test_the_real_sample_as_raw_data(tmp_path):
  packed = tmp_path / 'train.gz'
  packed.write_bytes(gzip.compress(SAMPLE.read_bytes(), 1))
  raw = avazu.avazu_raw(packed)
  rows = read(raw)
  expected = slow_parse(SAMPLE.read_bytes())
  assert rows == [[r[0], r[1] % 100, *r[2:]] for r in expected]
  assert raw.split(9999, (9999,)) == {'train': (0, 7999), 'test': (7999, 9999)}
  assert raw.tables == tuple(NAMES[3:])
  assert len(raw.tables) == 21
  chunk, progress = next(raw.parts[0].chunks())
  assert (raw.dense_features, chunk.dense.shape) == (1, (9999, 1))
  assert (chunk.labels.dtype, chunk.dense.dtype) == (np.float32, np.float32)
  assert chunk.ids.dtype == np.int64
  assert raw.parts[0].size == packed.stat().st_size == progress


BAD_FIELDS = [
  ('id', '', 'an id must not be empty'),
  ('click', '', 'a click must be 0 or 1'),
  ('click', '2', 'a click must be 0 or 1'),
  ('click', '-1', 'a click must be 0 or 1'),
  ('click', '01', 'a click must be 0 or 1'),
  ('hour', '', 'YYMMDDHH'),
  ('hour', '2014102100', 'YYMMDDHH'),
  ('hour', '14132100', 'YYMMDDHH'),
  ('hour', '14100000', 'YYMMDDHH'),
  ('hour', '14103200', 'YYMMDDHH'),
  ('hour', '14102124', 'YYMMDDHH'),
  ('C1', '1005.0', '18 decimal digits'),
  ('C1', '-', '18 decimal digits'),
  ('banner_pos', 'a', '18 decimal digits'),
  ('site_id', '1fbe01fg', '8 hex digits'),
  ('app_id', '1fbe01fe0', '8 hex digits'),
  ('device_ip', '-96809ac', '8 hex digits'),
  ('device_model', ' 711ee12', '8 hex digits'),
  ('device_type', '1' * 19, '18 decimal digits'),
  ('C20', '--1', '18 decimal digits'),
  ('C21', '79 ', '18 decimal digits'),
  ('C21', '"79"', '18 decimal digits'),
  ('C21', 'é', '18 decimal digits'),
]


@pytest.mark.parametrize(('name', 'value', 'rule'), BAD_FIELDS)
def test_a_bad_field_is_named(tmp_path, name, value, rule):
  bad = with_field(name, value)
  path = write(tmp_path / 'bad.csv', GOOD, bad, GOOD)
  message = error_of(path)
  assert rule in message
  assert f'line 3, column {name})' in message
  shown = text.quoted(value.encode())
  assert f'got {shown} (' in message
  raw = avazu.avazu_raw(path, bad_lines=1)
  assert len(read(raw)) == 2
  assert raw.bad.count == 1


BAD_LINES = {
  '': "got 1, the last being ''",
  '   ': "got 1, the last being '   '",
  GOOD + ',7': "got 25, the last being '7'",
  GOOD[: -len('79') - 1]: "got 23, the last being '-1'",
  GOOD.replace(',', '\t'): 'got 1, the last being',
  GOOD.replace(',', ';'): 'got 1, the last being',
  HEADER: "a click must be 0 or 1, got 'click'",
}


@pytest.mark.parametrize('line', BAD_LINES)
def test_a_bad_line_is_named_or_counted(tmp_path, line):
  path = write(tmp_path / 'bad.csv', GOOD, line, with_field('C1', '7'))
  message = error_of(path)
  assert BAD_LINES[line] in message
  assert 'line 3' in message
  raw = avazu.avazu_raw(path, bad_lines=1)
  assert [row[2] for row in read(raw)] == [1005, 7]
  assert read(raw) == read(raw), 'the same at each reading'
  assert raw.bad.count == 1, 'of one reading'


def test_one_bad_line_too_many_ends_the_reading(tmp_path):
  bad = with_field('click', 'x')
  path = write(tmp_path / 'bad.csv', GOOD, bad, '', GOOD, bad)
  assert len(read(avazu.avazu_raw(path, bad_lines=3))) == 2
  message = error_of(path, bad_lines=2)
  assert 'line 6, column click, after 2 bad lines' in message
  with pytest.raises(UserError, match='at least 0, got -1'):
    avazu.avazu_raw(path, bad_lines=-1)


@pytest.mark.parametrize('cut', [1, 2, 30, len(GOOD)])
def test_a_last_line_without_its_end_is_torn(tmp_path, cut):
  path = write(tmp_path / 'torn.csv', GOOD, GOOD)
  path.write_bytes(path.read_bytes()[:-cut])
  message = error_of(path)
  assert "a file's last line must be whole" in message
  assert 'line 3' in message
  raw = avazu.avazu_raw(path, bad_lines=1)
  assert (len(read(raw)), raw.bad.count) == (1, 1)


def test_a_first_line_must_be_the_header(tmp_path):
  path = tmp_path / 'no.csv'
  path.write_text(f'{GOOD}\n')
  assert 'the first line must be the header' in error_of(path, bad_lines=9)
  path.write_text(HEADER.replace('click,', '') + '\n')
  message = error_of(path)
  assert "got 'id,hour," in message
  assert 'the only one with clicks' in message
  path.write_text(HEADER)
  assert read(avazu.avazu_raw(path)) == []
  with pytest.raises(UserError, match='examples to test on, got 0 to train'):
    in_memory(avazu.avazu_raw(path))
  with pytest.raises(UserError, match='must exist and be readable'):
    avazu.avazu_raw(tmp_path / 'absent.csv')


def days(path: pathlib.Path, *examples: int) -> pathlib.Path:
  """A file with so many examples in each of some consecutive days."""
  rows = [
    with_field('hour', f'1410{day:02}{hour % 24:02}')
    for day, count in enumerate(examples, start=29)
    for hour in range(count)
  ]
  return write(path, *rows)


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
  for bad in 0.0, 1.0, float('nan'):
    with pytest.raises(UserError, match=f'got {bad}'):
      avazu.avazu_raw(path, test_share=bad)


def test_days_of_skipped_lines_do_not_count(tmp_path):
  path = days(tmp_path / 'days.csv', 10, 5)
  bad = with_field('C1', 'x', with_field('hour', '14103100'))
  path.write_text(path.read_text() + f'{bad}\n{GOOD[:40]}')
  raw = avazu.avazu_raw(path, bad_lines=2)
  assert len(read(raw)) == 15
  assert raw.split(15, (15,)) == {'train': (0, 10), 'test': (10, 15)}


def test_days_out_of_order_are_named(tmp_path):
  late, early = (with_field('hour', h) for h in ('14102205', '14102104'))
  path = write(tmp_path / 'days.csv', GOOD, late, early)
  message = error_of(path, bad_lines=9)
  assert 'days must be in order' in message
  assert 'got hour 14102104 after a later day' in message
  assert 'line 4, column hour' in message
  # Hours of one day may come in any order.
  path = write(tmp_path / 'hours.csv', early, GOOD)
  assert len(read(avazu.avazu_raw(path))) == 2


def test_in_memory_fits_ids_on_the_training_part(tmp_path):
  rows = [with_field('C20', str(number)) for number in (-1, 5, 5, 6, -1, 5, 7)]
  rows[6] = with_field('hour', '14102200', rows[6])
  data = in_memory(avazu.avazu_raw(write(tmp_path / 'some.csv', *rows)))
  assert (data.train_examples, data.dense_features) == (6, 1)
  assert data.name == (
    'Avazu some.csv, last day to test (last 20% of a single day),'
    ' examples 1-6 to train, examples 7-7 to test'
  )
  c20 = avazu.TABLES.index('C20')
  sizes = [*data.sizes.values()]
  first = sum(sizes[:c20])
  # Rows: unknown, 5, -1, 6, missing.
  assert sizes[c20] == 5
  local = next(data.train(6)).lookups[:, c20] - first
  assert local.tolist() == [2, 1, 1, 3, 2, 1]
  (test,) = data.test(4)
  assert (test.lookups[:, c20] - first)[:1].tolist() == [0]
  assert test.weights.tolist() == [1, 0, 0, 0]


@needs_sample
def test_the_config_reads_the_real_sample():
  made = config.get_config('sample')
  made.data.path = str(SAMPLE)
  errors.check(made)
  data = datasets.dataset(made)
  assert (data.train_examples, len(data.sizes)) == (7999, 21)
  assert build.total_steps(made, data) == 2 * (7999 // 128)
  expected = slow_parse(SAMPLE.read_bytes())[:7999]
  for column, size in enumerate(data.sizes.values(), start=2):
    seen = collections.Counter(row[column] for row in expected)
    assert size == 2 + sum(count >= 4 for count in seen.values())


def test_the_configs_have_all_keys():
  for variant in '', 'sample', 'smoke':
    ours, theirs = config.get_config(variant), criteo.get_config(variant)
    assert set(theirs) == set(ours)
    assert set(theirs.data) - set(ours.data) == {'missing_flags'}
  assert len(config.get_config('smoke').data.rows) == 21
  with pytest.raises(ValueError, match='smok'):
    config.get_config('smok')
