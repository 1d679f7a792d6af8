"""Damaged raw files: a sentence that names them, or what they say."""

import collections
import gzip
import os
import random
import resource

import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats.avazu import avazu_raw
from slipstream_jax.formats.base import BadLines, check_chunk
from slipstream_jax.formats.criteo import criteo_raw
from slipstream_jax.formats.lines import read
from slipstream_jax.formats.taobao import taobao_raw
from tests.formats import test_avazu
from tests.formats.mutated.oracles import Bad, SCHEMAS
from tests.support.texts import criteo, taobao
from tests.support.texts.mutations import check_sentence, mutated, overwrite
from tests.support.watchdog import watchdog

MUTATIONS = int(os.environ.get('MUTATIONS', '10000'))  # see CONTRIBUTING.md
MOST_GROWTH = 300_000  # kB


def avazu_text(count):
  rng = random.Random(0)
  rows = []
  for n in range(count):
    line = test_avazu.with_field('hour', str(14102100 + n // 3))
    line = test_avazu.with_field('C20', str(rng.randrange(-1, 9)), line)
    rows.append(test_avazu.with_field('click', str(rng.randrange(2)), line))
  return '\n'.join([test_avazu.HEADER, *rows]) + '\n'


TEXTS = {
  'criteo': ('\n'.join(criteo.lines(20)) + '\n').encode(),
  'avazu': avazu_text(20).encode(),
  'taobao': taobao.log(60, users=2).encode(),
}


def kilobytes():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def rows_of(path, schema, columns):
  """What the reader makes of a file."""
  rows = []
  for _, fields in read(path, schema, BadLines()):
    rows += fields.values[columns].T.tolist()
  return rows


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('name', SCHEMAS)
def test_mutated_lines_are_refused_or_read_right(name, packed, tmp_path):
  schema, oracle, columns = SCHEMAS[name]
  content, path = TEXTS[name], tmp_path / 'file'
  path.write_bytes(content)
  assert rows_of(path, schema, columns) == oracle_rows(oracle, content)
  rng = random.Random(packed)
  if packed:
    content = gzip.compress(content, 1)
  outcomes = collections.Counter()
  before = kilobytes()
  with watchdog(busy_s=300):
    for _ in range(MUTATIONS // (5 if packed else 1)):
      data = mutated(content, rng)
      overwrite(path, data)
      try:
        rows = rows_of(path, schema, columns)
        assert rows == oracle_rows(oracle, data)
        outcomes['read'] += 1
      except UserError as error:
        check_sentence(error, str(path))
        outcomes['refused'] += 1
  assert kilobytes() - before < MOST_GROWTH
  assert min(outcomes['read'], outcomes['refused']) > 0, outcomes


def oracle_rows(oracle, data):
  """What a file says; one that the reader takes must say something."""
  try:
    return oracle(data)
  except Bad as error:
    pytest.fail(f'read, though it is none: {error!r}')


RAWS = {
  'criteo': criteo_raw,
  'avazu': avazu_raw,
  'taobao': lambda path: taobao_raw(path, steps=3, min_history=2),
}


@pytest.mark.parametrize('name', RAWS)
def test_mutated_files_are_data_sets_or_none(name, tmp_path):
  """All that is made of lines, which are fewer here: it takes longer."""
  content, path, rng = TEXTS[name], tmp_path / 'file', random.Random(9)
  for _ in range(MUTATIONS // 20):
    overwrite(path, mutated(content, rng))
    try:
      raw = RAWS[name](path)
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
