"""Every way a raw text file can be bad ends in one sentence that names it."""

import collections
import gzip
import os
import pathlib
import re

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats import criteo, lines, text
from slipstream_jax.formats.base import BadLines, END, MISSING
from slipstream_jax.formats.lines import parse
from tests.support.texts.criteo import GOOD, with_field

LETTERS = '0123456789abcdefABCDEFgxX-+._ \r\N{BOM}é"'


def error_of(path: pathlib.Path, block_bytes: int = text.BLOCK_BYTES) -> str:
  """The one sentence that reading and parsing `path` ends with."""
  blocks = text.read_blocks(path, block_bytes)
  with pytest.raises(UserError) as caught:
    collections.deque(parse(block, criteo.SCHEMA) for block in blocks)
  message = str(caught.value)
  assert re.fullmatch(r'[^\n]+, got [^\n]+ \([^\n]+\); [^\n]+\.', message)
  rest = message.replace(str(path), '').replace(str(caught.value.got), '')
  assert '. ' not in rest
  assert str(path) in message
  return message


BAD_FIELDS = [
  ('label', '', 'a label must be 0 or 1'),
  ('label', '2', 'a label must be 0 or 1'),
  ('label', '-1', 'a label must be 0 or 1'),
  ('label', '01', 'a label must be 0 or 1'),
  ('label', '1.0', 'a label must be 0 or 1'),
  ('label', 'label', 'a label must be 0 or 1'),
  ('I1', '1.5', '18 decimal digits'),
  ('I2', '-', '18 decimal digits'),
  ('I3', '--2', '18 decimal digits'),
  ('I7', '+3', '18 decimal digits'),
  ('I9', ' 3', '18 decimal digits'),
  ('I10', 'a', '18 decimal digits'),
  ('I13', '1' * 19, '18 decimal digits'),
  ('C1', '05db916g', '8 hex digits'),
  ('C2', '-5db9164', '8 hex digits'),
  ('C5', '0x5db91', '8 hex digits'),
  ('C25', '05db91640', '8 hex digits'),
  ('C26', '05db91640', '8 hex digits'),
  ('C26', 'z', '8 hex digits'),
]


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('end', ['\n', '\r\n', ''])
@pytest.mark.parametrize(('column', 'value', 'rule'), BAD_FIELDS)
def test_bad_field(tmp_path, column, value, rule, end, packed):
  path = tmp_path / 'bad.txt'
  data = f'{GOOD}\n{GOOD}\r\n{with_field(column, value)}{end}'.encode()
  path.write_bytes(gzip.compress(data) if packed else data)
  for block_bytes in 50, 500, 5000:
    message = error_of(path, block_bytes)
    assert rule in message
    assert f'got {value!r} ({path}, line 3, column {column})' in message


@pytest.mark.parametrize(
  ('line', 'got', 'after'),
  [
    ('', "1, the last being ''", 'label'),
    ('0', "1, the last being '0'", 'label'),
    ('0\t5', "2, the last being '5'", 'I1'),
    (GOOD[: GOOD.rindex('\t')], "39, the last being '05db9164'", 'C25'),
    (GOOD + '\t', "41, the last being ''", 'C26'),
    (GOOD + '\tff', "41, the last being 'ff'", 'C26'),
    (GOOD + GOOD, "79, the last being '05db9164'", 'C26'),
    (GOOD.replace('\t', ','), "1, the last being '1,7,", 'label'),
  ],
)
def test_wrong_count_of_fields(tmp_path, line, got, after):
  path = tmp_path / 'bad.txt'
  path.write_text(f'{GOOD}\n{line}\n{GOOD}\n')
  message = error_of(path)
  assert message.startswith('a line must have 40 fields')
  assert f'got {got}' in message
  assert f'{path}, line 2, after column {after}' in message


def test_the_first_bad_line_and_its_first_bad_column_are_named(tmp_path):
  path = tmp_path / 'bad.txt'
  worse = with_field('I4', 'x').replace('05db9164', 'y')
  path.write_text('\n'.join([GOOD] * 40 + [worse, '', worse]))
  assert "got 'x'" in error_of(path)
  assert 'line 41, column I4' in error_of(path, 700)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(criteo.COLUMNS), st.text(LETTERS, max_size=10))
def test_fast_parser_and_message_agree_on_what_is_bad(
  tmp_path_factory, column, value
):
  path = tmp_path_factory.getbasetemp() / 'maybe.txt'
  path.write_bytes(f'{GOOD}\n{with_field(column, value)}\n'.encode())
  field = value
  if column == 'C26' and field.endswith('\r'):
    field = field[:-1]  # with the line's end it is a CRLF
  pattern = {'l': '[01]', 'I': '(-?[0-9]{1,18})?', 'C': '[0-9a-fA-F]{0,8}'}
  if re.fullmatch(pattern[column[0]], field):
    (block,) = text.read_blocks(path)
    assert len(parse(block, criteo.SCHEMA).lines) == 2
  else:
    assert f'line 2, column {column}' in error_of(path)


def test_a_long_value_is_cut_short(tmp_path):
  path = tmp_path / 'bad.txt'
  path.write_text(with_field('C3', 'g' * 10_000))
  message = error_of(path)
  assert f"'{'g' * 40}' and more" in message
  assert len(message) < 300 + len(str(path))


def test_missing_file_and_directory(tmp_path):
  assert 'No such file' in error_of(tmp_path / 'absent.txt')
  assert 'directory' in error_of(tmp_path)


@pytest.mark.parametrize('data', [b'', gzip.compress(b'', mtime=0)])
def test_empty_file(tmp_path, data):
  path = tmp_path / 'empty.gz'
  path.write_bytes(data)
  assert 'got an empty file' in error_of(path)


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 20_000))
def test_gzip_cut_anywhere(tmp_path_factory, share, block_bytes):
  path = tmp_path_factory.getbasetemp() / 'cut.gz'
  whole = gzip.compress(f'{GOOD}\n'.encode() * 50)
  cut = max(2, int(share * len(whole)))
  path.write_bytes(whole[:cut])
  message = error_of(path, block_bytes)
  assert 'got a file that is cut off' in message
  assert re.search(r'at or after line \d+\)', message)


def test_cut_gzip_delivers_its_lines_first(tmp_path):
  path = tmp_path / 'cut.gz'
  lines = [os.urandom(60).hex() for _ in range(2000)]
  whole = gzip.compress('\n'.join(lines).encode())
  path.write_bytes(whole[: len(whole) // 2])
  read: list[str] = []
  blocks = (b.text.decode() for b in text.read_blocks(path, 1000))
  with pytest.raises(UserError, match='cut off') as caught:
    read.extend(line for b in blocks for line in b.splitlines())
  assert 500 < len(read) < 1500
  assert read == lines[: len(read)]
  assert f'after line {len(read) + 1})' in str(caught.value)


@pytest.mark.parametrize(
  ('place', 'bits', 'cause'),
  [
    (2, 0xFF, 'Unknown compression method'),
    (10, 0b100, 'invalid block type'),  # from 01, fixed codes, to 11
    (-8, 0xFF, 'CRC check failed'),
    (-3, 0xFF, 'Incorrect length'),
  ],
)
def test_corrupt_gzip(tmp_path, place, bits, cause):
  path = tmp_path / 'corrupt.gz'
  data = bytearray(gzip.compress(b'a line\n'))
  data[place] ^= bits
  path.write_bytes(data)
  message = error_of(path)
  assert 'must be readable to its end' in message
  assert cause in message


def test_garbage_after_a_gzip_stream(tmp_path):
  path = tmp_path / 'corrupt.gz'
  path.write_bytes(gzip.compress(f'{GOOD}\n'.encode()) + b'no gzip')
  assert 'Not a gzipped file' in error_of(path)


@pytest.mark.parametrize(
  'data', [b'PK\x03\x04rest', b'0\t\x001\t', 'label'.encode('utf-16')]
)
def test_binary_under_any_name(tmp_path, data):
  path = tmp_path / 'train.txt.gz'
  path.write_bytes(data)
  assert 'must be plain or gzip text' in error_of(path)


def test_endless_line_is_not_read_whole(tmp_path, monkeypatch):
  monkeypatch.setattr(text, 'MAX_LINE_BYTES', 1000)
  path = tmp_path / 'long.txt'
  path.write_text(f'{GOOD}\n' + '7' * 5000)
  message = error_of(path, 400)
  assert 'a line must have at most 1,000 bytes' in message
  assert f'{path}, line 2' in message


def test_a_budget_counts_a_file_that_is_read_again_once():
  bad, error = BadLines(4), UserError('a', got=1, where='b', hint='c')
  bad.restore(1)  # in a file that is not read again
  for _ in range(3):
    bad.start('day_1')
    bad.add('day_1', error)
    bad.add('day_1', error)
    assert bad.count == 3
  bad.start('day_2')
  bad.add('day_2', error)
  with pytest.raises(UserError, match=r'after 4 bad lines\); c, or raise bad'):
    bad.add('day_2', error)
  bad.restore(2)
  assert bad.count == 2


COLUMN = lines.Column('a', 'rule', 'hint', 10, (0, 18), sign=True)
SCHEMA = lines.Schema((COLUMN, COLUMN._replace(name='b')), b',')


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('', MISSING),
    ('0', 0),
    ('-0', 0),
    ('-000', 0),
    ('-1', -3),
    ('7', 7),
    ('-' + '9' * 18, -(10**18) - 1),
  ],
)
def test_no_number_stands_for_what_is_none(field, value):
  block = text.Block(pathlib.Path('x'), 1, f'{field},1\n'.encode())
  assert lines.parse(block, SCHEMA).values[:, 0].tolist() == [value, 1]
  assert field == '' or value not in (MISSING, END)
