"""Lines of Taobao's log: every field against a slow parser, and bad ones."""

import gzip
import pathlib

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats import taobao, text
from slipstream_jax.formats.base import BadLines
from slipstream_jax.formats.lines import parse, read
from tests.support.texts.taobao import log, slow_parse, WORDS

SHARED = pathlib.Path(__file__).resolve().parents[3] / 'shared' / 'data'
SAMPLE = SHARED / 'taobao' / 'UserBehavior.csv.gz'
needs_sample = pytest.mark.skipif(
  not SAMPLE.exists(), reason=f'shared samples absent: {SAMPLE}'
)


def fast_parse(path: pathlib.Path, block_bytes: int) -> list[tuple | None]:
  found: list[tuple | None] = []
  for block in text.read_blocks(path, block_bytes):
    fields = parse(block, taobao.SCHEMA, BadLines(block.num_lines))
    rows: list[tuple | None] = [None] * block.num_lines
    columns = fields.values.T.tolist()
    for line, (*ids, word, time) in zip(fields.lines, columns, strict=True):
      name = word.to_bytes(4).lstrip(b'\0').decode()
      rows[line - block.first_line] = (*ids, name, time)
    found += rows
  return found


numbers = st.integers(0, 2**32 + 3).map(str)
times = st.integers(10**9 - 2, 2**31 + 1).map(str)
junk = st.text('0123456789,pv-\t x', max_size=14)
good_lines = st.tuples(
  numbers, numbers, numbers, st.sampled_from([*WORDS, 'pvv', 'PV', '']), times
).map(','.join)
any_lines = good_lines | st.tuples(good_lines, junk).map(''.join) | junk


@settings(max_examples=150, deadline=None)
@given(
  st.lists(any_lines, min_size=1, max_size=6),
  st.sampled_from(['\n', '\r\n']),
  st.sampled_from(['', '\n']),
  st.integers(1, 200),
)
def test_every_field_of_any_lines_in_blocks_of_any_size(
  tmp_path_factory, lines, end, last, block_bytes
):
  data = (end.join(lines) + last).encode()
  path = tmp_path_factory.getbasetemp() / 'any.csv'
  path.write_bytes(data)
  if data:
    assert fast_parse(path, block_bytes) == slow_parse(data)


@pytest.mark.parametrize(
  ('line', 'says'),
  [
    ('1,2,3,pv', "5 fields .* got 4, the last being 'pv' .*line 3"),
    ('1,2,3,pv,1511658000,', 'got 6'),
    ('1,2,3,look,1511658000', "one of pv, cart, fav, buy, got 'look'"),
    ('1,,3,pv,1511658000', "below 2.*, got '' .*line 3, column item"),
    ('-1,2,3,pv,1511658000', "got '-1' .*column user"),
    ('1,2,4294967296,pv,1511658000', "got '4294967296' .*column category"),
    ('1,2,3,pv,151165', "10 digits .* got '151165' .*column time"),
    ('1,2,3,pv,2147483648', "got '2147483648'"),
    ('', "got 1, the last being ''"),
  ],
)
def test_bad_lines_are_named_and_counted(tmp_path, line, says):
  good = log(40).splitlines()
  path = tmp_path / 'log.csv'
  path.write_text('\n'.join([*good[:2], line, *good[2:], line]))
  for budget, number in ((0, 3), (1, 42)):
    named = says.replace('line 3', f'line {number}')
    if line or budget == 0:
      with pytest.raises(UserError, match=named) as error:
        [*read(path, taobao.SCHEMA, BadLines(budget))]
      assert f'{path}, line {number}' in str(error.value)
      assert 'raise bad_lines' in str(error.value)
  bad = BadLines(2)
  parts = [fields.values for _, fields in read(path, taobao.SCHEMA, bad)]
  assert bad.count == (2 if line else 1)  # an empty last line is none
  items = [int(x.split(',')[1]) for x in good]
  assert np.concatenate(parts, axis=1)[1].tolist() == items


@needs_sample
def test_every_field_of_the_real_lines():
  expected = slow_parse(gzip.decompress(SAMPLE.read_bytes()))
  assert len(expected) == 96_169
  assert [i for i, x in enumerate(expected) if x is None] == [96_168]
  assert fast_parse(SAMPLE, 100_000) == expected
  assert fast_parse(SAMPLE, text.BLOCK_BYTES) == expected
