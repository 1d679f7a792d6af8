"""Lines of every format, good and bad, are read as by a slow reader."""

import collections
import gzip
import os
import pathlib
import random
import resource

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats import criteo, lines, text
from slipstream_jax.formats.base import BadLines, check_chunk, END, MISSING
from tests.formats.text_formats import Bad, FORMATS, SHARED, TextFormat
from tests.support.texts.mutations import check_sentence, mutated, overwrite
from tests.support.watchdog import watchdog

every_format = pytest.mark.parametrize('name', FORMATS)
MUTATIONS = int(os.environ.get('MUTATIONS', '10000'))  # see CONTRIBUTING.md
MORE = [20, pytest.param(1, marks=pytest.mark.slow)]
MOST_GROWTH = 300_000  # kB


class Collected(BadLines):
  """Skips all bad lines and keeps their errors."""

  def __init__(self):
    super().__init__()
    self.errors: list[UserError] = []

  def add(self, path, error):
    self.errors.append(error)


BETWEEN = {b'\t': 'tabs', b',': 'commas', b'::': 'double colons'}


def rule_of(of: TextFormat, fault: Bad) -> str:
  """What the error of a bad line must say that a line or field is to be."""
  if not fault.place:
    return "a file's last line must be whole, with a line end after it"
  before, _, column = fault.place.rpartition(' column ')
  if before != ',':
    between = BETWEEN[of.schema.delimiter]
    return f'a line must have {len(of.fields)} fields between {between}'
  return of.schema.columns[of.columns.index(column)].rule


def check_file(
  of: TextFormat, path: pathlib.Path, block_bytes: int | None = None
) -> bool:
  """Compares a file with the slow reader; says whether all of it is good."""
  bad, schema = Collected(), of.schema
  if block_bytes is None:
    blocks = (fields for _, fields in lines.read(path, schema, bad))
  else:
    blocks = (
      lines.parse(block, schema, bad)
      for block in text.read_blocks(path, block_bytes)
    )
  try:
    expected = of.slow_rows(path.read_bytes(), torn=block_bytes is None)
  except Bad:
    with pytest.raises(UserError) as caught:
      collections.deque(blocks, 0)
    check_sentence(caught.value, str(path))
    return False
  numbers, found = [], []
  for fields in blocks:
    numbers += fields.lines.tolist()
    found += fields.values[of.compared].T.tolist()
  good = [n for n, row in expected.items() if not isinstance(row, Bad)]
  assert numbers == good
  assert found == [[expected[n][c] for c in of.compared] for n in good]
  wrong = {n: row for n, row in expected.items() if isinstance(row, Bad)}
  for (number, fault), error in zip(wrong.items(), bad.errors, strict=True):
    check_sentence(error)
    assert error.where == f'{path}, line {number}{fault.place}'
    assert error.got == fault.got
    assert error.rule == rule_of(of, fault)
  return not wrong


texts = st.text('0123456789abcdefABCDEFgxXpv-+._ \r\N{BOM}é",\t:', max_size=12)
faults = st.none() | st.tuples(st.integers(0, 39), texts)


@every_format
@settings(max_examples=60)
@given(
  st.lists(faults, max_size=5),
  st.integers(0, 99),
  st.sampled_from(['\n', '\r\n']),
  st.sampled_from(['', '\N{BOM}']),
  st.booleans(),
  st.none() | st.integers(1, 2000),
  st.booleans(),
)
def test_any_file_is_read_as_by_a_slow_reader(
  name, tmp_path_factory, wrong, seed, end, bom, ends, block_bytes, packed
):
  """Any text in a field, line ends, gzip, and blocks of any size."""
  of = FORMATS[name]
  rows = of.lines(len(wrong), seed)
  for at, fault in enumerate(wrong):
    if fault is not None:
      number, some = fault
      column = of.columns[number % len(of.columns)]
      rows[at] = of.with_field(column, some, rows[at])
  data = bom.encode() + of.text(rows, end)
  data = data if ends else data.removesuffix(end.encode())
  path = tmp_path_factory.getbasetemp() / 'any'
  path.write_bytes(gzip.compress(data, 1) if packed else data)
  check_file(of, path, block_bytes)


PUBLISHED = {
  'avazu': (
    'id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,'
    'app_domain,app_category,device_id,device_ip,device_model,device_type,'
    'device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n'
    '10000169349117863715,0,14102100,1005,0,1fbe01fe,f3845767,28905ebd,'
    'ecad2386,7801e8d9,07d7df22,a99f214a,96809ac8,711ee120,1,0,15704,320,50,'
    '1722,0,35,-1,79\n',
    [
      *(0, 14102100, 1005, 0, 0x1FBE01FE, 0xF3845767, 0x28905EBD, 0xECAD2386),
      *(0x7801E8D9, 0x07D7DF22, 0xA99F214A, 0x96809AC8, 0x711EE120, 1, 0),
      *(15704, 320, 50, 1722, 0, 35, -3, 79),
    ],
  ),
  'taobao': (
    '1,2268318,2520377,pv,1511544070\n',
    [1, 2268318, 2520377, int.from_bytes(b'pv'), 1511544070],
  ),
  'ml csv': (
    'userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n',
    [1, 31, int.from_bytes(b'2.5'), 1260759144],
  ),
  'ml dat': (
    '1::1193::5::978300760\n',
    [1, 1193, int.from_bytes(b'5'), 978300760],
  ),
  'ml data': (
    '196\t242\t3\t881250949\n',
    [196, 242, int.from_bytes(b'3'), 881250949],
  ),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_lines_as_they_were_published(name, tmp_path):
  """The slow reader takes headers and columns from the package."""
  data, values = PUBLISHED[name]
  of, path = FORMATS[name], tmp_path / 'file'
  path.write_text(data)
  ((_, fields),) = lines.read(path, of.schema, BadLines())
  assert fields.values[of.compared].T.tolist() == [values]


NASTY = [
  *('', '0', '1', '2', '-1', '01', '1.0', '1.5', '-', '--1', '-0', '-000'),
  *('+3', ' 3', '3 ', 'a', 'z', 'é', '"79"', 'nan', '1' * 18, '1' * 19),
  *('-' + '9' * 18, '0x5db91', '05db916g', '05db91640', '-5db916', ' 711ee1'),
  *('4294967295', '4294967296', '978300760', '97830076', '111248602'),
  *('2147483647', '2147483648', '999999999', '14132100', '14100000'),
  *('14103200', '14102124', '2014102100', 'look', 'PV', 'pvv', '4.25', '0.5'),
  *('5.5', '4.', 'g' * 10_000),
]


@every_format
def test_all_that_people_write_in_a_field(name, tmp_path):
  of = FORMATS[name]
  rows, (good,) = [], of.lines(1)
  for column in {
    f: c for c, f in zip(of.columns, of.fields, strict=True)
  }.values():
    rows += [of.with_field(column, some, good) for some in NASTY]
  # Of two bad fields, the first is named.
  rows += [of.with_field(of.columns[-1], 'x', row) for row in rows]
  delimiter = of.schema.delimiter.decode()
  last = good.rindex(delimiter)
  rows += [
    '',
    '   ',
    '0',
    good[:last],
    good + delimiter,
    good + delimiter + '7',
  ]
  rows += [good + good, good.replace(delimiter, ';'), f'{good}\r{good}']
  rows += [delimiter.join(of.columns), good]
  path = of.write(tmp_path / 'bad', rows)
  assert not check_file(of, path)
  for cut in range(1, len(good) + 1):  # torn anywhere
    path.write_bytes(of.text([good, good])[:-cut])
    assert not check_file(of, path) or cut == 1


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('', MISSING),
    ('0', 0),
    ('-0', 0),
    ('-1', -3),
    ('-' + '9' * 18, -(10**18) - 1),
  ],
)
def test_no_number_stands_for_what_is_none(field, value):
  row = FORMATS['criteo'].with_field('I1', field)
  block = text.Block(pathlib.Path('x'), 1, f'{row}\n'.encode())
  assert lines.parse(block, criteo.SCHEMA).values[1].tolist() == [value]
  assert field == '' or value not in (MISSING, END)


@pytest.mark.parametrize('name', [n for n in FORMATS if FORMATS[n].sample])
@pytest.mark.parametrize('block_bytes', [None, 100_000])
def test_every_field_of_every_real_line(name, block_bytes):
  path = SHARED / FORMATS[name].sample
  if not path.is_file():
    pytest.skip(f'no sample {path}')
  assert check_file(FORMATS[name], path, block_bytes) == (name != 'taobao')


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


def kilobytes():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize('share', MORE)
@pytest.mark.parametrize('packed', [False, True])
@every_format
def test_mutated_lines_are_refused_or_read_right(name, packed, share, tmp_path):
  of, path = FORMATS[name], tmp_path / 'file'
  content, rng = of.text(of.lines(20)), random.Random(packed)
  if packed:
    content = gzip.compress(content, 1)
  outcomes = collections.Counter()
  before = kilobytes()
  with watchdog(busy_s=300):
    for _ in range(MUTATIONS // share // (5 if packed else 1)):
      overwrite(path, mutated(content, rng))
      outcomes[check_file(of, path)] += 1
  assert kilobytes() - before < MOST_GROWTH
  assert outcomes[False]
  assert packed or outcomes[True]


@pytest.mark.parametrize('share', MORE)
@every_format
def test_mutated_files_are_data_sets_or_none(name, share, tmp_path):
  """All that is made of lines, which are fewer here: it takes longer."""
  of, path, rng = FORMATS[name], tmp_path / 'file', random.Random(9)
  content = of.text(of.lines(60))
  for _ in range(MUTATIONS // share // 10):
    overwrite(path, mutated(content, rng))
    try:
      raw = of.raw(path)
      lengths = []
      for part in raw.parts:
        count = 0
        for chunk, _ in part.chunks():
          check_chunk(raw, chunk, part.name)
          count += len(chunk.labels)
        lengths.append(count)
      for first, end in raw.split(sum(lengths), tuple(lengths)).values():
        assert 0 <= first <= end <= sum(lengths)
    except UserError as error:
      check_sentence(error)
