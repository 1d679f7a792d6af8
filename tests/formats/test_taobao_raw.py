"""Taobao's log packed: the same sequences as in memory, id by id."""

import gzip
import itertools

import numpy as np
import pytest

from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import END
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.taobao import TABLES, taobao_raw
from slipstream_jax.packed import columns as packed
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.tables import offsets

STEPS, USERS, EVENTS = 5, 40, 1500


@pytest.fixture(scope='module')
def log(tmp_path_factory):
  rng = np.random.default_rng(0)
  path = tmp_path_factory.mktemp('log') / 'log.csv.gz'
  lines = [
    f'{rng.integers(USERS)},{item},{item % 7},pv,{1_511_600_000 + 3 * second}'
    for second, item in enumerate(rng.integers(0, 60, EVENTS) ** 2)
  ]
  path.write_bytes(gzip.compress('\n'.join([*lines, '1,2,3,pv,15']).encode()))
  return path


def raw_of(log, **changes):
  return taobao_raw(
    log, **{'steps': STEPS, 'min_history': 2, 'bad_lines': 1} | changes
  )


def packed_ids(folder):
  """Raw ids of all examples [n, 3, L], END where padded; labels, splits."""
  found = packed.open_packed(folder)
  columns = found.columns
  ids = []
  for name, table in zip(TABLES, found.manifest['tables'], strict=True):
    known = np.append(columns[f'vocabulary_{name}'], END)
    rows = np.asarray(columns[name]).astype(np.int64)
    assert (rows > 0).all()  # every id is frequent enough for a row
    assert rows.max() == table['rows']  # padding
    ids.append(known[rows - 1])
  return np.stack(ids, 1), columns['labels'], found.manifest


def text_ids(source, data):
  starts = offsets([*data.sizes.values()])[:-1]
  for batch in source:
    local = np.where(
      batch.lookups < 0, -1, batch.lookups - starts[None, :, None]
    )
    real = batch.weights > 0
    yield local[real], batch.labels[real]


def test_packed_sequence_are_those_in_memory(log, tmp_path):
  raw = raw_of(log)
  # Test ids that training has not would be unknown: so test on the same part.
  first = raw.parts[0]._replace(name='again')
  same = raw._replace(parts=(raw.parts[0], first))
  for _ in prepare(same, tmp_path / 'packed'):
    pass
  ids, labels, manifest = packed_ids(tmp_path / 'packed')
  assert manifest['bad_lines'] == 1
  lengths = {f['max_length'] for f in manifest['features']}
  assert lengths == {STEPS + 1}
  examples = manifest['splits']['train'][1]
  data = in_memory(raw_of(log))
  assert data.train_examples == examples
  source = itertools.islice(data.train(10), examples // 10)
  local, told = zip(*text_ids(source, data), strict=True)
  local, told = np.concatenate(local), np.concatenate(told)
  ids, labels = ids[: len(told)], labels[: len(told)]
  np.testing.assert_array_equal(labels, told)
  np.testing.assert_array_equal(ids == END, local == -1)
  # Rows are numbered in another order; but one row is one id.
  for feature in range(3):
    pairs = {*zip(ids[:, feature].flat, local[:, feature].flat, strict=True)}
    assert len(pairs) == len({a for a, _ in pairs})
    unknown = {a for a, b in pairs if b == 0}  # drawn, but only seen later
    assert len({b for _, b in pairs if b}) == len(pairs) - len(unknown)


def test_a_packed_log_is_read_as_sequence(log, tmp_path):
  for _ in prepare(raw_of(log), tmp_path / 'packed'):
    pass
  data = packed_dataset(tmp_path / 'packed', shuffle_seed=0)
  features = data.features.values()
  assert [feature.combiner for feature in features] == ['none'] * 3
  assert {feature.max_length for feature in features} == {STEPS + 1}
  source = data.train(256)
  batch = next(source)
  source.close()
  assert batch.lookups.shape == (256, 3, STEPS + 1)
  assert batch.dense.shape == (256, STEPS + 1)
  assert (batch.lookups[:, :, -1] >= 0).all()  # the candidate
  assert (batch.lookups[:, :, 0] < 0).any()  # short histories


def test_ids_of_32_bits_are_ids(tmp_path):
  high = 2**32 - 60
  lines = [
    f'{3_000_000_000 + i % 5},{high + i % 50},{2**31 + i % 3},pv,'
    f'{1_511_600_000 + i}'
    for i in range(400)
  ]
  path = tmp_path / 'log.csv'
  path.write_text('\n'.join(lines) + '\n')
  for _ in prepare(raw_of(path), tmp_path / 'packed'):
    pass
  ids, _, manifest = packed_ids(tmp_path / 'packed')
  assert {*np.unique(ids[:, 0])} <= {END, *range(3_000_000_000, 3_000_000_005)}
  assert {*np.unique(ids[:, 1])} <= {END, *range(high, high + 50)}
  for table in manifest['tables']:
    assert table['unknown'] == 0
    assert table['lookups'] == (ids[:, 0] != END).sum()


def test_bad_lines_are_counted_once_and_budgeted(log):
  raw = raw_of(log)
  assert raw.bad.count == 0
  for _ in range(2):
    for part in raw.parts:
      for _ in part.chunks():
        pass
    assert raw.bad.count == 1
  with pytest.raises(UserError, match='line 1501'):
    next(raw_of(log, bad_lines=0).parts[0].chunks())
