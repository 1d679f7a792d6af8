"""Text files, plain or gzip, in blocks of whole lines, and damaged ones."""

import collections
import gzip
import os

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats import text
from tests.support.texts.mutations import check_sentence

LINES = [os.urandom(60).hex() for _ in range(2000)]
TEXT = ('\n'.join(LINES) + '\n').encode()
PACKED = gzip.compress(TEXT, 1)


def error_of(path, block_bytes=text.BLOCK_BYTES):
  """The one sentence that reading `path` ends with."""
  with pytest.raises(UserError) as caught:
    collections.deque(text.read_blocks(path, block_bytes), 0)
  check_sentence(caught.value, str(path))
  return str(caught.value)


def test_blocks_are_bounded_and_name_their_lines(tmp_path):
  path = tmp_path / 'some.txt'
  path.write_bytes(TEXT)
  blocks = list(text.read_blocks(path, 2000))
  assert b''.join(b.text for b in blocks) == TEXT
  assert max(len(b.text) for b in blocks) < 3000
  ends = [b.first_line + b.num_lines for b in blocks]
  assert [b.first_line for b in blocks] == [1] + ends[:-1]
  assert ends[-1] == 2001
  assert blocks[1].where(2) == f'{path}, line {blocks[1].first_line + 2}'


def test_content_not_name_says_what_is_packed(tmp_path):
  for name, data in ('plain.gz', TEXT), ('packed.txt', PACKED):
    (tmp_path / name).write_bytes(data)
    blocks = text.read_blocks(tmp_path / name)
    assert [b.text for b in blocks] == [TEXT]


@settings(max_examples=40)
@given(st.integers(2, len(PACKED) - 1), st.integers(1000, 1 << 24))
def test_gzip_cut_anywhere_delivers_its_lines_first(
  tmp_path_factory, cut, block_bytes
):
  path = tmp_path_factory.getbasetemp() / 'cut.gz'
  path.write_bytes(PACKED[:cut])
  read: list[str] = []
  blocks = (
    block.text.decode().splitlines()
    for block in text.read_blocks(path, block_bytes)
  )
  with pytest.raises(UserError, match='got a file that is cut off') as caught:
    collections.deque(map(read.extend, blocks), 0)
  assert read == LINES[: len(read)]
  if block_bytes < 2000:  # a deflate block or two may be missing
    assert len(read) > 2000 * cut / len(PACKED) - 1000
  assert caught.value.where == f'{path}, at or after line {len(read) + 1}'


def flipped(place, bits):
  data = bytearray(gzip.compress(b'a line\n', mtime=0))
  data[place] ^= bits
  return bytes(data)


DAMAGED = [
  (flipped(2, 0xFF), 'Unknown compression method'),
  (flipped(10, 0b100), 'invalid block type'),  # from 01, fixed codes, to 11
  (flipped(-8, 0xFF), 'CRC check failed'),
  (flipped(-3, 0xFF), 'Incorrect length'),
  (gzip.compress(b'a line\n', mtime=0) + b'no gzip', 'Not a gzipped file'),
  (b'', 'got an empty file'),
  (gzip.compress(b'', mtime=0), 'got an empty file'),
  (b'PK\x03\x04rest', 'must be plain or gzip text'),
  (b'0\t\x001\t', 'must be plain or gzip text'),
  ('label'.encode('utf-16'), 'must be plain or gzip text'),
]


@pytest.mark.parametrize(('data', 'cause'), DAMAGED)
def test_what_is_no_text_is_told(tmp_path, data, cause):
  path = tmp_path / 'train.txt.gz'  # whatever its name
  path.write_bytes(data)
  assert cause in error_of(path)
  assert 'No such file' in error_of(tmp_path / 'absent.txt')
  assert 'directory' in error_of(tmp_path)


def test_endless_line_is_not_read_whole(tmp_path):
  path = tmp_path / 'long.txt'
  path.write_bytes(b'good\n' + b'7' * (3 << 20))
  message = error_of(path, 1 << 19)
  assert 'a line must have at most 1,048,576 bytes' in message
  assert f"from '{'7' * 40}' and more on ({path}, line 2)" in message
