"""Packed data sets in use: trained on, told by name, single inputs."""

import json

import jax
import numpy as np
import pytest

from configs import criteo
from experiments.common import build, datasets
from slipstream_jax.data.base import ColumnBatches
from slipstream_jax.errors import UserError
from slipstream_jax.packed.batches import PackedBatches
from slipstream_jax.packed.columns import MANIFEST, open_packed, UNFINISHED
from slipstream_jax.packed.dataset import packed_dataset, PackedInputs
from slipstream_jax.placement import PLACEMENTS
from slipstream_jax.selection.hot import access_counts, popular_rows
from slipstream_jax.tables import Table
from slipstream_jax.train.loop import train
from slipstream_jax.train.trainer import create_trainer, planned
from tests.experiments.test_run import lines_of, run_job, summary_of
from tests.laws.test_placements import assert_same_bits
from tests.support import examples
from tests.support.packed_folders import write_columns, write_folder

INPUTS, SPLIT = 500, 400


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  base = tmp_path_factory.mktemp('packed')
  return write_folder(
    base / 'here', examples.columns(INPUTS), examples.ROWS, SPLIT
  )


def drain(source):
  parts = list(source)
  source.close()
  arrays = [np.concatenate(a) for a in zip(*parts, strict=True)]
  return [a[arrays[3] > 0] for a in arrays[:3]]


def test_what_a_folder_says_of_itself(folder):
  data = packed_dataset(str(folder))
  assert data.name == (
    'clicks packed in here, inputs 1-400 to train, 401-500 to test'
  )
  assert data.tables == tuple(
    Table(f't{i}', rows) for i, rows in enumerate(examples.ROWS)
  )
  assert (data.dense_features, data.train_inputs) == (examples.DENSE, SPLIT)
  columns = examples.columns(INPUTS)
  assert data.base_rate == pytest.approx(columns.labels[:SPLIT].mean())
  seen = columns.lookups[:SPLIT].reshape(-1)
  np.testing.assert_array_equal(
    data.counts(), np.bincount(seen, minlength=sum(examples.ROWS))
  )
  source = data.train(100)
  source.close()
  assert source.batches_per_epoch == 4
  for ours, theirs in zip(
    columns.take(slice(SPLIT, None)), drain(data.test(64)), strict=True
  ):
    np.testing.assert_array_equal(ours, theirs)


def test_a_shard_and_another_split(tmp_path, folder):
  columns = examples.columns(INPUTS)
  splits = {'train': [0, 300], 'validation': [300, 350], 'test': [350, 500]}
  where = write_folder(tmp_path, columns, examples.ROWS, splits=splits)
  halves = [
    packed_dataset(where, test_split='validation', shard=(i, 2)) for i in (0, 1)
  ]
  labels = [drain(half.test(20))[2] for half in halves]
  assert [len(part) for part in labels] == [30, 20]
  expected = columns.labels[300:350]
  assert np.concatenate(labels).sum() == expected.sum()
  assert labels[0].tolist() == [*expected[:20], *expected[40:]]
  assert halves[0].train_inputs == 150
  with pytest.raises(UserError, match="a split 'validation', got train, test"):
    packed_dataset(folder, test_split='validation')


def test_counts_that_are_absent_or_of_another_table(tmp_path):
  folder = write_folder(tmp_path, examples.columns(50), examples.ROWS)
  manifest = folder / MANIFEST
  facts = json.loads(manifest.read_text())
  facts['columns'] = [
    c for c in facts['columns'] if c['name'] != 'frequency_t1'
  ]
  manifest.write_text(json.dumps(facts))
  data = packed_dataset(folder)
  with pytest.raises(UserError, match=r'frequency_t1 must be of shape \[7\]'):
    data.counts()


@pytest.mark.parametrize('length', [None, 3])
def test_inputs_one_at_a_time_make_the_same_batches(tmp_path, length):
  """grain's protocol of a random-access source, without grain."""
  columns = examples.columns(40, length=length)
  packed = open_packed(write_folder(tmp_path, columns, examples.ROWS))
  inputs = PackedInputs(packed, 10, 30)
  assert len(inputs) == len(list(inputs)) == 20
  source = PackedBatches(packed, 20, first=10, end=30)
  batch = next(source)
  source.close()
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *inputs)
  assert_same_bits(stacked, batch)
  for index in (-1, np.int64(19)):
    np.testing.assert_array_equal(inputs[index].dense, columns.dense[29])
  with pytest.raises(IndexError):
    inputs[20]
  assert repr(inputs) == repr(PackedInputs(packed, 10, 30))
  assert repr(inputs) != repr(PackedInputs(packed, 10))


def test_training_has_the_bits_of_training_in_memory(tmp_path):
  columns = examples.columns(64 * 9 + 5)
  folder = write_folder(tmp_path, columns, examples.ROWS, len(columns.labels))
  ended = []
  for source in (
    ColumnBatches(columns, 64),
    packed_dataset(folder).train(64),
  ):
    trainer = create_trainer(
      examples.recipe(), PLACEMENTS['streamed'], examples.DENSE, 0
    )
    batches = planned(trainer, source)
    losses = [at.loss for at in train(trainer, batches, 20)]
    batches.close()
    state = jax.device_get((trainer.engine.read_back(), trainer.state))
    ended.append((losses, jax.tree.map(np.array, state)))
  assert_same_bits(*ended)


def config_of(folder, **changes):
  config = criteo.get_config('smoke')
  with config.unlocked():
    config.update_from_flattened_dict(
      {
        'data.path': str(folder),
        'data.batch_size': 16,
        'train.steps': 0,
        'eval.curve_steps': 0,
        'model.bottom': (16,),
        'model.top': (16,),
        'skip.mode': 'off',
      }
      | changes
    )
  return config


def test_a_run_on_a_folder(folder, tmp_path):
  assert run_job(tmp_path / 'run', config_of(folder)) == 0
  summary = summary_of(tmp_path / 'run')
  assert summary['data'] == packed_dataset(folder).name
  assert summary['steps'] == SPLIT // 16
  assert summary['inputs_evaluated'] == INPUTS - SPLIT
  assert lines_of(tmp_path / 'run')


def test_hot_rows_are_those_counted(folder):
  config = config_of(folder, **{'skip.hot_bytes': 60 * 4 * 17})
  data = datasets.dataset(config)
  made = build.recipe(config, data, 10)

  def unread(size):
    raise AssertionError('counted rows need no pass over the data')

  hot = build.hot(config, data._replace(train=unread, profile=unread), made)
  lookups = examples.columns(INPUTS).lookups[:SPLIT]
  counts = access_counts([lookups], made.tables.num_rows)
  expected = popular_rows(counts, 60, 1)
  np.testing.assert_array_equal(hot.rows, expected.rows)


@pytest.mark.parametrize('shuffle', [True, False])
def test_the_config_says_whether_to_shuffle(folder, shuffle):
  data = datasets.dataset(config_of(folder, **{'data.shuffle': shuffle}))
  source = data.train(SPLIT)
  found, then = next(source), next(source)
  source.close()
  in_order = examples.columns(INPUTS).dense[:SPLIT]
  assert np.array_equal(found.dense, in_order) != shuffle
  assert np.array_equal(found.dense, then.dense) != shuffle
  for batch in found, then:
    assert sorted(batch.dense[:, 0]) == sorted(in_order[:, 0])


@pytest.mark.parametrize(
  ('begun', 'mend'),
  [
    (True, 'run experiments.prepare again'),
    (False, 'give a folder that experiments.prepare wrote'),
  ],
)
def test_an_unfinished_folder_is_told_in_a_sentence(
  begun, mend, tmp_path, capsys
):
  write_columns(tmp_path / 'half', {'labels': np.zeros(3, np.uint8)}, {})
  (tmp_path / 'half' / MANIFEST).unlink()
  if begun:
    (tmp_path / 'half' / UNFINISHED).mkdir()
  assert run_job(tmp_path / 'run', config_of(tmp_path / 'half')) == 1
  said = capsys.readouterr().err
  assert 'must have a manifest.json' in said
  assert mend in said
  assert not (tmp_path / 'run').exists()
