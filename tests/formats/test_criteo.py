"""Criteo's raw text: fields, data sets in memory, and the real samples."""

import collections
import gzip
import pathlib

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from slipstream_jax.columns.ids import MISSING
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.formats import criteo, text
from slipstream_jax.formats.in_memory import in_memory
from slipstream_jax.formats.lines import parse
from tests.support.texts.criteo import lines, slow_parse, write

SHARED = pathlib.Path(__file__).resolve().parents[3] / 'shared' / 'data'
needs_samples = pytest.mark.skipif(
  not SHARED.is_dir(), reason=f'shared samples absent: {SHARED}'
)


def fast_parse(path: pathlib.Path, block_bytes: int) -> list[list[int | None]]:
  rows: list[list[int | None]] = []
  for block in text.read_blocks(path, block_bytes):
    fields = parse(block, criteo.SCHEMA)
    numbers = np.arange(len(fields.lines)) + block.first_line
    assert fields.lines.tolist() == numbers.tolist()
    for row in fields.values.T.tolist():
      # A negative v stands as v - 2.
      values = [None if v == MISSING else v + 2 * (v < 0) for v in row]
      rows.append(values)
  return rows


integer_fields = st.just('') | st.integers(-(10**18) + 1, 10**18 - 1).map(str)
id_fields = st.text('0123456789abcdefABCDEF', max_size=8)
any_lines = st.tuples(
  st.sampled_from('01'), *[integer_fields] * 13, *[id_fields] * 26
).map('\t'.join)


@st.composite
def files(draw: st.DrawFn) -> bytes:
  ends = st.sampled_from(['\n', '\r\n'])
  whole = draw(st.lists(st.tuples(any_lines, ends).map(''.join), max_size=4))
  last = draw(any_lines) + draw(st.just('') | ends)
  return (''.join(whole) + last).encode()


@settings(max_examples=150, deadline=None)
@given(files(), st.integers(1, 3000), st.booleans())
def test_every_field_of_any_file_in_blocks_of_any_size(
  tmp_path_factory, data, block_bytes, packed
):
  path = tmp_path_factory.getbasetemp() / 'any.txt'
  path.write_bytes(gzip.compress(data, 1) if packed else data)
  assert fast_parse(path, block_bytes) == slow_parse(data)


def random_file(path: pathlib.Path, count: int) -> list[list[int | None]]:
  """A file with skewed ids and missing fields, and what it holds."""
  return slow_parse(write(path, lines(count)).read_bytes())


def drain(dataset: Dataset, batch_size: int) -> list[np.ndarray]:
  """Dense features, lookups, labels of the test examples, padding left out."""
  batches = list(dataset.test(batch_size))
  columns = zip(*(batch[:4] for batch in batches), strict=True)
  arrays = [np.concatenate(a) for a in columns]
  return [a[arrays[3] > 0] for a in arrays[:3]]


def test_blocks_are_bounded_and_name_their_lines(tmp_path):
  path = tmp_path / 'some.txt'
  random_file(path, 300)
  blocks = list(text.read_blocks(path, 2000))
  assert b''.join(b.text for b in blocks) == path.read_bytes()
  assert max(len(b.text) for b in blocks) < 3000
  ends = [b.first_line + b.num_lines for b in blocks]
  assert [b.first_line for b in blocks] == [1] + ends[:-1]
  assert ends[-1] == 301
  assert blocks[1].where(2) == f'{path}, line {blocks[1].first_line + 2}'


def test_content_not_name_says_what_is_packed(tmp_path):
  random_file(tmp_path / 'plain.gz', 20)
  data = (tmp_path / 'plain.gz').read_bytes()
  (tmp_path / 'packed.txt').write_bytes(gzip.compress(data))
  for name in 'plain.gz', 'packed.txt':
    assert [b.text for b in text.read_blocks(tmp_path / name)] == [data]


def test_dense_features_are_logs_and_flags(tmp_path):
  path = tmp_path / 'some.txt'
  rows = random_file(path, 200)
  (block,) = text.read_blocks(path)
  integers = parse(block, criteo.SCHEMA).values[1:14]
  dense = criteo.dense_features(integers, missing_flags=True)
  raw = np.array([[max(v or 0, 0) for v in row[1:14]] for row in rows])
  flags = [[v is None for v in row[1:14]] for row in rows]
  assert dense.dtype == np.float32
  np.testing.assert_allclose(dense[:, :13], np.log(1 + raw), rtol=1e-6)
  np.testing.assert_array_equal(dense[:, 13:], flags)
  plain = criteo.dense_features(integers)
  np.testing.assert_array_equal(plain, dense[:, :13])


def data_of(path: pathlib.Path, **arguments) -> Dataset:
  """A file in memory; the last fifth of its lines to test on."""
  of_format = {'test_share': 0.2}
  for name in 'test_share', 'missing_flags', 'bad_lines':
    if name in arguments:
      of_format[name] = arguments.pop(name)
  return in_memory(criteo.criteo_raw(path, **of_format), **arguments)


def test_data_set_splits_by_file_order_and_fits_on_training_lines(tmp_path):
  path = tmp_path / 'some.txt'
  rows = random_file(path, 500)
  dataset = data_of(path, test_share=0.3, min_count=3)
  labels = [row[0] for row in rows]
  said = 'examples 1-350 to train, examples 351-500 to test'
  assert dataset.name == f'Criteo Kaggle, some.txt, {said}'
  assert list(dataset.sizes) == [f'C{i}' for i in range(1, 27)]
  assert (dataset.dense_features, dataset.train_examples) == (13, 350)
  assert dataset.base_rate == pytest.approx(sum(labels[:350]) / 350)
  train = next(dataset.train(350))
  assert train.labels.tolist() == labels[:350]
  assert drain(dataset, 64)[2].tolist() == labels[350:]
  first = 0
  for column, size in enumerate(dataset.sizes.values(), start=14):
    seen = collections.Counter(row[column] for row in rows[:350])
    kept = {i for i in seen if seen[i] >= 3} | {None}
    assert size == 1 + len(kept)
    local = train.lookups[:, column - 14] - first
    assert np.bincount(local)[1] == seen.most_common(1)[0][1]
    unknown = [row[column] not in kept for row in rows[:350]]
    assert (local == 0).tolist() == unknown
    first += size


def test_data_set_arguments(tmp_path):
  path = tmp_path / 'some.txt'
  rows = random_file(path, 100)
  dataset = data_of(str(path), hash_rows=7, missing_flags=True, shuffle_seed=3)
  assert {*dataset.sizes.values()} == {7}
  assert dataset.dense_features == 26
  dense, lookups, labels = drain(dataset, 4)
  assert dense.shape == (20, 26)
  assert labels.tolist() == [row[0] for row in rows[80:]]
  assert ((lookups // 7) == np.arange(26)).all()
  shuffled = next(dataset.train(80))
  in_order = next(data_of(path, hash_rows=7).train(80))
  assert not np.array_equal(shuffled.lookups, in_order.lookups)
  for ours, theirs in zip(shuffled.lookups.T, in_order.lookups.T, strict=True):
    assert sorted(ours) == sorted(theirs)


@pytest.mark.parametrize(
  ('arguments', 'named'),
  [
    ({'test_share': 0.0}, 'test_share must be between 0 and 1'),
    ({'test_share': float('nan')}, 'got nan'),
    ({'test_share': 1e-9}, 'got 10 to train, 0 to test'),
    ({'test_share': 0.999}, 'got 0 to train, 10 to test'),
    ({'min_count': 0}, 'min_count must be a whole number, at least 1, got 0'),
    ({'hash_rows': -4}, 'hash_rows must be a whole number, .* got -4'),
    ({'hash_rows': 4, 'min_count': 2}, 'got min_count 2 and hash_rows 4'),
  ],
)
def test_bad_arguments_are_named(tmp_path, arguments, named):
  path = tmp_path / 'some.txt'
  random_file(path, 10)
  with pytest.raises(UserError, match=named):
    data_of(path, **arguments)


def test_bad_lines_of_a_file_held_in_memory(tmp_path):
  line = '\t'.join(['1', *map(str, range(13)), *['0000c97d'] * 26])
  path = tmp_path / 'torn.txt'
  path.write_text('\n'.join([line] * 9 + ['bad', line[:-3]]))
  with pytest.raises(UserError, match='line 10'):
    data_of(path)
  with pytest.raises(UserError, match='line 11, after 1 bad lines'):
    data_of(path, bad_lines=1)
  dataset = data_of(path, bad_lines=2)
  said = 'examples 1-7 to train, examples 8-9 to test, 2 bad lines skipped'
  assert said in dataset.name
  assert dataset.sizes['C26'] == 3  # unknown, missing, and the one whole id


@needs_samples
def test_every_field_of_the_real_lines():
  path = SHARED / 'criteo' / 'train.txt'
  expected = slow_parse(path.read_bytes())
  assert len(expected) == 10_000
  assert sum(row[0] for row in expected) == 2182
  assert fast_parse(path, 100_000) == expected
  assert fast_parse(path, text.BLOCK_BYTES) == expected


@needs_samples
def test_counts_of_the_80k_lines():
  path = SHARED / 'criteo' / 'dac_80k.tsv.gz'
  blocks = text.read_blocks(path, 1 << 20)
  parts = [parse(block, criteo.SCHEMA).values for block in blocks]
  labels, *rest = np.concatenate(parts, axis=1)
  assert len(labels) == 80_000
  assert labels.mean() == pytest.approx(0.2245, abs=5e-5)
  # A negative v stands as v - 2.
  assert (np.min(rest[:13]) + 2, np.max(rest[:13])) == (-2, 1_618_112)
  # The manifest counts "missing" as one more id of each table that has any.
  counts = [np.unique(ids, return_counts=True)[1] for ids in rest[13:]]
  assert sum(map(len, counts)) == 200_103
  seen_once = (np.concatenate(counts) == 1).mean()
  assert seen_once == pytest.approx(0.71, abs=0.005)


@needs_samples
def test_logistic_regression_on_the_80k_lines_meets_the_yardstick():
  path = SHARED / 'criteo' / 'dac_80k.tsv.gz'
  dataset = data_of(path, min_count=4)
  num_rows = sum(dataset.sizes.values())
  assert num_rows == 24_420

  def features(dense: np.ndarray, lookups: np.ndarray) -> sparse.csr_matrix:
    starts = np.arange(0, lookups.size + 1, 26)
    cells = np.ones(lookups.size, np.float32), lookups.ravel(), starts
    one_hot = sparse.csr_matrix(cells, shape=(len(lookups), num_rows))
    return sparse.hstack([one_hot, dense / 5], format='csr')

  train = next(dataset.train(dataset.train_examples))
  model = LogisticRegression(C=0.1, max_iter=300)
  model.fit(features(train.dense, train.lookups), train.labels)
  dense, lookups, labels = drain(dataset, 1000)
  clicks = model.predict_proba(features(dense, lookups))[:, 1]
  assert roc_auc_score(labels, clicks) == pytest.approx(0.769, abs=0.001)
  assert log_loss(labels, clicks) == pytest.approx(0.443, abs=0.001)
