"""Packed data sets in use: trained on, and named."""

import itertools

import numpy as np
import pytest

from configs import terabyte
from experiments.common import build, datasets
from slipstream_jax.errors import UserError
from slipstream_jax.packed.columns import MANIFEST, UNFINISHED
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.selection.hot import access_counts, popular_rows
from slipstream_jax.tables import Feature
from tests.support import small
from tests.support.packed_folders import (
  made_older,
  write_columns,
  write_folder,
)
from tests.support.runs import lines_of, run_job, smoke, summary_of

EXAMPLES, SPLIT = 500, 400


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  base = tmp_path_factory.mktemp('packed')
  return write_folder(base / 'here', small.columns(EXAMPLES), small.ROWS, SPLIT)


def drain(source):
  parts = list(source)
  source.close()
  columns = zip(*(part[:4] for part in parts), strict=True)
  arrays = [np.concatenate(a) for a in columns]
  return [a[arrays[3] > 0] for a in arrays[:3]]


def test_what_a_folder_says_of_itself(folder):
  data = packed_dataset(str(folder))
  assert data.name == (
    'clicks packed in here, examples 1-400 to train, 401-500 to test'
  )
  assert list(data.sizes.items()) == list(small.SIZES.items())
  assert data.features == {name: Feature(name) for name in small.SIZES}
  assert (data.dense_features, data.train_examples) == (small.DENSE, SPLIT)
  columns = small.columns(EXAMPLES)
  assert data.base_rate == pytest.approx(columns.labels[:SPLIT].mean())
  seen = columns.lookups[:SPLIT].reshape(-1)
  np.testing.assert_array_equal(
    data.counts(), np.bincount(seen, minlength=sum(small.ROWS))
  )
  source = data.train(100)
  source.close()
  assert source.batches_per_epoch == 4
  for ours, theirs in zip(
    columns.take(slice(SPLIT, None))[:3], drain(data.test(64)), strict=True
  ):
    np.testing.assert_array_equal(ours, theirs)


def test_a_shard_and_another_split(tmp_path, folder):
  columns = small.columns(EXAMPLES)
  splits = {'train': [0, 300], 'validation': [300, 350], 'test': [350, 500]}
  where = write_folder(tmp_path, columns, small.ROWS, splits=splits)
  halves = [
    packed_dataset(where, test_split='validation', shard=(i, 2)) for i in (0, 1)
  ]
  labels = [drain(half.test(20))[2] for half in halves]
  assert [len(part) for part in labels] == [30, 20]
  expected = columns.labels[300:350]
  assert np.concatenate(labels).sum() == expected.sum()
  assert labels[0].tolist() == [*expected[:20], *expected[40:]]
  assert halves[0].train_examples == 150
  known = [drain(part(64))[2] for part in packed_dataset(where).known]
  np.testing.assert_array_equal(known[0], columns.labels[:300])
  np.testing.assert_array_equal(known[1], expected)
  with pytest.raises(UserError, match="a split 'validation', got train, test"):
    packed_dataset(folder, test_split='validation')


def test_counts_that_are_absent_or_of_another_table(tmp_path):
  folder = write_folder(tmp_path, small.columns(50), small.ROWS)

  def without_counts(facts):
    columns = facts['columns']
    facts['columns'] = [c for c in columns if c['name'] != 'frequency_t1']

  made_older(folder, without_counts)
  with pytest.warns(UserWarning, match='before blocks had checksums'):
    data = packed_dataset(folder)
  with pytest.raises(
    UserError, match=r'frequency_t1 must be uint32 of shape \(7,\)'
  ):
    data.counts()


def config_of(folder, **changes):
  plain = {
    'data.path': str(folder),
    'data.batch_size': 16,
    'train.steps': 0,
    'eval.curve_steps': 0,
    'model.bottom': (16,),
    'model.top': (16,),
    'skip.mode': 'off',
  }
  return smoke(**plain | changes)


def test_a_run_on_a_folder(folder, tmp_path):
  assert run_job(tmp_path / 'run', config_of(folder)) == 0
  summary = summary_of(tmp_path / 'run')
  assert summary['data'] == packed_dataset(folder).name
  assert summary['steps'] == SPLIT // 16
  assert summary['examples_evaluated'] == EXAMPLES - SPLIT
  assert lines_of(tmp_path / 'run')


def test_a_folder_of_another_model_or_unfinished_is_one_sentence(
  tmp_path, capsys
):
  columns, facts = small.columns(50), {'format': 'criteo', 'name': 'A log'}
  folder = write_folder(tmp_path / 'data', columns, small.ROWS, **facts)
  config = terabyte.get_config()
  with config.unlocked():
    config.data.path = str(folder)
  half = tmp_path / 'half'
  write_columns(half, {'labels': np.zeros(3, np.uint8)}, {})
  (half / MANIFEST).unlink()
  other = f"{folder} holds A log, so the config must be for 'criteo'"
  for given, parts in (
    (config, (other, "for 'terabyte'", 'use --config=configs/criteo.py')),
    (config_of(half), ('have a manifest.json', 'a folder that was prepared')),
    (config_of(half), ('have a manifest.json', 'prepare it again')),
  ):
    assert run_job(tmp_path / 'run', given) == 1
    said = capsys.readouterr().err
    assert said.count('\n') == 1
    for part in parts:
      assert part in said
    if given is not config:  # now it was begun
      (half / UNFINISHED).mkdir(exist_ok=True)
  assert not (tmp_path / 'run').exists()


def test_hot_rows_are_those_counted(folder):
  config = config_of(folder, **{'hot.bytes': 60 * 4 * 17})
  data = datasets.dataset(config)
  made = build.recipe(config, data, 10)

  def unread(size):
    raise AssertionError('counted rows need no pass over the data')

  hot = build.hot(config, data._replace(train=unread, profile=unread), made)
  lookups = small.columns(EXAMPLES).lookups[:SPLIT]
  counts = access_counts([lookups], made.tables.num_rows)
  expected = popular_rows(counts, 60, 1)
  np.testing.assert_array_equal(hot.rows, expected)


@pytest.mark.parametrize('shuffle', [True, False])
def test_the_config_says_whether_to_shuffle(folder, shuffle):
  data = datasets.dataset(config_of(folder, **{'data.shuffle': shuffle}))
  source = data.train(SPLIT)
  in_order = small.columns(EXAMPLES).dense[:SPLIT]
  for batch in itertools.islice(source, 2):
    assert np.array_equal(batch.dense, in_order) != shuffle
    assert sorted(batch.dense[:, 0]) == sorted(in_order[:, 0])
  source.close()
