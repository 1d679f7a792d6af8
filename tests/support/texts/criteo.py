"""Lines of Criteo's logs for tests, and a slow parser as the oracle."""

import collections
import gzip
import random

import numpy as np

from slipstream_jax.formats.base import MISSING
from slipstream_jax.formats.criteo import COLUMNS, TABLES
from slipstream_jax.packed import columns as packed
from slipstream_jax.packed.prepare import prepare

GOOD = '\t'.join(['1'] + ['7'] * 13 + ['05db9164'] * 26)


def slow_parse(data):
  """Fields of every line, None where empty; the oracle of the fast parser."""
  data = gzip.decompress(data) if data[:2] == b'\x1f\x8b' else data
  rows = data.decode('ascii').replace('\r\n', '\n').split('\n')
  parsed = []
  for row in rows[:-1] if rows[-1] == '' else rows:
    fields = row.split('\t')
    assert len(fields) == 40
    bases = [10] * 14 + [16] * 26
    pairs = zip(fields, bases, strict=True)
    parsed.append([int(f, base) if f else None for f, base in pairs])
  return parsed


def line(rng):
  """A line with skewed ids and missing fields."""
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
  """So many lines."""
  rng = random.Random(seed)
  return [line(rng) for _ in range(count)]


def write(path, some, packed_=False):
  """Writes lines as text, plain or gzip; returns the path."""
  data = ('\n'.join(some) + '\n').encode()
  path.write_bytes(gzip.compress(data, 1) if packed_ else data)
  return path


def with_field(column, value):
  """A good line but for one field."""
  fields = GOOD.split('\t')
  fields[COLUMNS.index(column)] = value
  return '\t'.join(fields)


def packed_of(raw, folder, **arguments):
  """Raw data as a packed data set."""
  collections.deque(prepare(raw, folder, **arguments), maxlen=0)
  return packed.open_packed(folder)


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
  for at, name in enumerate(TABLES, start=14):
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


def three_days(folder):
  """Three days, the second one gzip; returns all of their lines."""
  folder.mkdir()
  all_lines = lines(900)
  write(folder / 'day_9', all_lines[:200])
  write(folder / 'day_10.gz', all_lines[200:500], packed_=True)
  write(folder / 'day_11', all_lines[500:])
  return all_lines
