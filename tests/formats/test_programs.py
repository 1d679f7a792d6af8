"""Configs of public formats: prepared, trained and refused by the programs."""

import gc
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from configs import avazu, criteo, movielens, taobao, terabyte, tfds
from experiments.common import build, cli, datasets, errors, loading
from experiments.make_text import job as make_text
from experiments.prepare import job as program
from slipstream_jax.errors import UserError
from slipstream_jax.formats.base import MISSING
from slipstream_jax.packed import columns as packed
from slipstream_jax.training.evaluate import predict_batch
from tests.formats.text_formats import FORMATS, SHARED
from tests.support import programs
from tests.support.runs import (
  assert_one_sentence,
  changed,
  run_job,
  summary_of,
)

CRITEO = FORMATS['criteo']


def config_of(module, variant='', **changes):
  return changed(module.get_config(variant), changes)


def prepare(config, verify=False):
  """The program's exit code, in this process."""
  return cli.guarded(program.prepare_data, config, verify)


def test_made_text_is_like_the_stream_it_is_made_of(tmp_path):
  make_text.make(str(tmp_path / 'made.txt'), '3000', '4')
  data = (tmp_path / 'made.txt').read_bytes()
  rows = np.array([*CRITEO.slow_rows(data).values()])
  assert rows.shape == (3000, 40)
  assert 0.2 < rows[:, 0].mean() < 0.3
  missing = (rows == MISSING).mean(axis=0)
  assert missing[[0, 2, 14]].tolist() == [0, 0, 0]
  assert 0.4 < missing[1] < 0.5
  unique = [len(np.unique(column)) for column in rows[:, 14:].T]
  assert max(unique) > 500 > min(unique)
  with pytest.raises(UserError, match='at least one line, got 0'):
    make_text.make(str(tmp_path / 'none.txt'), '0')


def test_prepare_prepares_refuses_and_verifies(tmp_path, capsys):
  path = CRITEO.write(tmp_path / 'some.txt', [*CRITEO.lines(300), 'torn'])
  where = {'data.raw': str(path), 'data.path': str(tmp_path / 'data')}

  def run(verify=False, **changes):
    return prepare(config_of(criteo, **(where | changes)), verify)

  assert run() == 1
  assert_one_sentence(capsys.readouterr().err, 'line 301', 'torn')
  assert run(**{'data.bad_lines': 2}) == 0
  said = capsys.readouterr().out
  for part in ('examples/s', 'peak memory', 'C26', 'unknown'):
    assert part in said
  assert re.search(r'bad lines skipped[ │]+1 ', said)
  assert re.search(r'examples +│ +300 ', said)
  assert run() == 0
  said = capsys.readouterr().out
  assert said.count('\n') == 1
  assert f'{tmp_path / "data"} ' in said
  assert 'is finished' in said
  assert run(**{'data.min_count': 2}) == 1
  assert_one_sentence(capsys.readouterr().err, 'min_count 2 after 1')
  assert run(verify=True, **{'data.raw': None}) == 0
  assert 'as they were written' in capsys.readouterr().out
  column = tmp_path / 'data' / 'C3.uint8'
  contents = bytearray(column.read_bytes())
  contents[7] ^= 4
  column.write_bytes(contents)
  assert run(verify=True) == 1
  assert_one_sentence(capsys.readouterr().err, 'checksum', 'C3.uint8')


def test_prepare_names_what_is_not_set(tmp_path, capsys):
  some = {'data.raw': 'x', 'data.path': str(tmp_path / 'data')}
  for given, said in (
    ({}, 'config.data.raw'),
    ({'data.raw': 'x'}, 'config.data.path'),
    (some, 'No such file'),
    (some | {'data.format': 'parquet'}, 'criteo, terabyte'),
  ):
    assert prepare(config_of(criteo, **given)) == 1
    assert_one_sentence(capsys.readouterr().err, said)
  assert not (tmp_path / 'data').exists()


@pytest.mark.slow
def test_ctrl_c_leaves_what_the_same_command_continues(tmp_path):
  path, folder = tmp_path / 'some.txt', tmp_path / 'data'
  make_text.make(str(path), '400000')
  command = [
    *(sys.executable, '-m', 'experiments.prepare'),
    *('--config=configs/criteo.py', f'--config.data.raw={path}'),
    f'--config.data.path={folder}',
  ]
  outputs = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE}
  with programs.started(command, **outputs) as process:
    programs.wait_until((folder / 'dense.float32').exists, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=programs.LIMIT_S)
  assert process.returncode == 130
  # 'interrupted at once' where it is not ready within 5 s: the same is kept.
  assert_one_sentence(said, 'interrupted', '; the same command continues')
  assert not packed.is_finished(folder)
  where = {'data.raw': str(path), 'data.path': str(folder)}
  assert prepare(config_of(criteo, **where)) == 0
  assert packed.open_packed(folder).manifest['examples'] == 400_000


def test_ctrl_c_in_a_callback_is_not_lost(tmp_path, capsys):
  path, folder = tmp_path / 'some.txt', tmp_path / 'data'
  make_text.make(str(path), '60000')
  sent = []

  def send(phase, facts):  # what it raises is dropped by Python
    if not sent and (folder / 'dense.float32').exists():
      sent.append(phase)
      signal.raise_signal(signal.SIGINT)

  where = {'data.raw': str(path), 'data.path': str(folder)}
  threshold = gc.get_threshold()
  gc.callbacks.append(send)
  gc.set_threshold(20)
  try:
    assert prepare(config_of(criteo, **where)) == 130
  finally:
    gc.set_threshold(*threshold)
    gc.callbacks.remove(send)
  assert sent
  assert_one_sentence(capsys.readouterr().err, 'interrupted; the last')
  assert not packed.is_finished(folder)


@pytest.mark.parametrize('module', [avazu, criteo, movielens, taobao, terabyte])
def test_a_config_reads_its_format_and_has_all_keys(tmp_path, module):
  for day in 'day_0', 'day_1':
    (tmp_path / day).write_text('not read')
  data = module.get_config().data
  path = tmp_path if data.format == 'terabyte' else tmp_path / 'day_0'
  assert datasets.raw_data(data, str(path)).format == data.format
  with pytest.raises(ValueError, match='smok'):
    module.get_config('smok')


def test_the_terabyte_config_prepares_days(tmp_path):
  for number, day in enumerate(('day_9', 'day_10')):
    (tmp_path / 'days').mkdir(exist_ok=True)
    CRITEO.write(tmp_path / 'days' / day, CRITEO.lines(150, number))
  where = {
    'data.raw': str(tmp_path / 'days'),
    'data.path': str(tmp_path / 'data'),
  }
  assert prepare(config_of(terabyte, 'smoke', **where)) == 0
  manifest = packed.open_packed(tmp_path / 'data').manifest
  assert manifest['examples'] == 300
  assert (manifest['min_count'], manifest['hash_rows']) == (1, 10_000)
  assert terabyte.get_config().data.hash_rows == 40_000_000


def test_the_avazu_config_reads_the_real_sample():
  path = SHARED / 'avazu' / 'train.csv'
  if not path.is_file():
    pytest.skip('no sample')
  made = config_of(avazu, 'sample', **{'data.path': str(path)})
  errors.check(made)
  data = datasets.dataset(made)
  assert (data.train_examples, len(data.sizes)) == (7999, 21)
  assert build.total_steps(made, data) == 2 * (7999 // 128)
  ours, theirs = avazu.get_config(), criteo.get_config()
  assert set(theirs) == set(ours)
  assert set(theirs.data) - set(ours.data) == {'missing_flags'}


SMALL = {
  'model.bottom': (16,),
  'model.top': (16,),
  'train.steps': 20,
  'eval.curve_steps': 0,
}


@pytest.mark.slow
@pytest.mark.parametrize('variant', ['two_tower', 'sasrec', 'hstu'])
def test_other_models_train_on_movielens(variant, tmp_path):
  log = FORMATS['ml csv']
  path = log.write(tmp_path / 'ratings.csv', log.lines(1500))
  some = {'data.path': str(path), 'data.batch_size': 64, 'train.steps': 4}
  some |= {'eval.curve_steps': 0}
  steps = {} if variant == 'two_tower' else {'data.steps': 3}
  config = config_of(movielens, variant, **some, **steps)
  assert run_job(tmp_path / 'run', config) == 0
  assert 0 <= summary_of(tmp_path / 'run')['recall_at_10'] <= 1


def test_movielens_trains_alike_from_its_file_and_packed(tmp_path):
  path = tmp_path / 'ratings.csv'
  FORMATS['ml csv'].write(path, FORMATS['ml csv'].lines(1500))
  some = {'data.path': str(path), 'data.history': 3, 'data.batch_size': 64}
  config = config_of(movielens, 'sample', **some, **SMALL)
  assert run_job(tmp_path / 'raw', config) == 0
  raw = summary_of(tmp_path / 'raw')
  assert raw['data'].startswith('MovieLens, ratings.csv, examples 1-1,200 to')
  with config.unlocked():
    config.data.raw, config.data.path = str(path), str(tmp_path / 'packed')
  assert prepare(config) == 0
  assert run_job(tmp_path / 'run', config) == 0
  held = summary_of(tmp_path / 'run')
  assert held['examples_evaluated'] == raw['examples_evaluated'] == 300
  assert held['steps'] == raw['steps'] == 20
  # Labels may be stars, and the proxy needs no file.
  config = config_of(movielens, 'sample', **some, **{'data.threshold': 0.0})
  labels = next(datasets.dataset(config).train(64)).labels
  assert {round(10 * float(label), 3) for label in labels} <= {*range(1, 11)}
  assert 0 < labels.min() < labels.max() <= 1
  data = datasets.dataset(movielens.get_config('smoke'))
  assert [*data.sizes.values()] == [9000, 4000]


@pytest.mark.slow
def test_taobao_trains_skips_and_reports(tmp_path, capsys):
  of = FORMATS['taobao']
  path = of.write(tmp_path / 'log.csv', [*of.lines(4000), '9,9,9,pv,15'])
  some = {'data.path': str(path), 'data.per_user': 50, 'train.steps': 60}
  config = config_of(taobao, 'smoke', **some)
  assert run_job(tmp_path / 'run', config) == 0
  summary = summary_of(tmp_path / 'run')
  assert summary['data'].startswith('Taobao user behaviour, log.csv, examples')
  assert '1 bad lines skipped' in summary['data']
  assert summary['examples_seen'] == 60 * config.data.batch_size
  assert summary['examples_dropped'] > 0
  assert summary['skip_refill'] is False  # a pass has few batches
  assert summary['lookups'] > 3 * 2 * summary['examples_trained']
  assert 0 < summary['auc'] < 1
  for changes, said in (
    ({'data.format': 'tabao'}, "movielens, tfds, got 'tabao'"),
    ({'model.name': 'tsbm'}, "hstu, or my_module:function, got 'tsbm'"),
    ({'data.bad_lines': 0}, 'line 4001, column time'),
  ):
    config = config_of(taobao, 'smoke', **some, **changes)
    assert run_job(tmp_path / 'bad', config) == 1
    assert said in capsys.readouterr().err


def test_movielens_of_tfds_has_the_features_of_its_map(monkeypatch):
  registered = pytest.importorskip('tensorflow_datasets.core.registered')
  # Importing a builder registers it, and other tests read a set of its name.
  registry = dict(registered._DATASET_REGISTRY)
  monkeypatch.setattr(registered, '_DATASET_REGISTRY', registry)
  module = pytest.importorskip('tensorflow_datasets.structured.movielens')
  for name, features in tfds.MAPS.items():
    if name.startswith('movielens/'):
      builder = module.Movielens(config=name.removeprefix('movielens/'))
      used = {*features['tables'], *features.get('dense', ())}
      assert used | {features['label'][0]} <= set(builder.info.features)


@pytest.mark.slow
def test_a_pilot_says_which_ids_share_rows(tmp_path, capsys):
  """Held in memory or packed. The folder is trained on and scored like any."""
  lines = CRITEO.lines(700)
  earlier = CRITEO.write(tmp_path / 'earlier.txt', lines[:300])
  later = CRITEO.write(tmp_path / 'later.txt', lines[300:])
  few = {'model.dim': 4, 'model.bottom': (16, 4), 'model.top': (16,)}
  some = {'data.batch_size': 32, 'train.steps': 4, 'eval.curve_steps': 0}
  packed_earlier = {
    'data.raw': str(earlier),
    'data.path': str(tmp_path / 'earlier'),
  }
  assert prepare(config_of(criteo, **packed_earlier)) == 0
  folders = []
  for name, path in ('memory', earlier), ('packed', tmp_path / 'earlier'):
    where = {'data.path': str(path), 'data.shuffle': False}
    pilot = tmp_path / f'pilot_{name}'
    assert run_job(pilot, config_of(criteo, **where, **few, **some)) == 0
    folders.append(tmp_path / name)
    where = {'data.raw': str(later), 'data.path': str(folders[-1])}
    wanted = config_of(criteo, **where), False, str(pilot), 2.0
    assert cli.guarded(program.prepare_data, *wanted) == 0
    assert cli.guarded(program.prepare_data, *wanted) == 0
  one, other = (packed.open_packed(folder) for folder in folders)
  assert one.manifest['vocabularies'] == other.manifest['vocabularies']
  for name, column in one.columns.items():
    np.testing.assert_array_equal(column, other.columns[name])
  before = packed.open_packed(tmp_path / 'earlier').manifest['tables']
  after = one.manifest['tables']
  for many, fewer in zip(before, after, strict=True):
    wanted = max(16, -(-many['rows'] // 2))
    assert fewer['rows'] == min(many['rows'], wanted)
  assert any(own[1] for own in one.manifest['vocabularies'].values())
  run = tmp_path / 'run'
  where = {'data.path': str(folders[1])}
  small = {**few, **some, 'data.batch_size': 32}
  assert run_job(run, config_of(criteo, **where, **small)) == 0
  loaded = loading.load(run)
  raw = datasets.new_examples(loaded.config.data, str(later))
  scores = np.concatenate([p.logits for p in loading.scored(loaded, raw)])
  tested = [
    predict_batch(loaded.trainer, batch) for batch in loaded.data.test(64)
  ]
  logits = np.concatenate([part.logits for part in tested])
  assert len(scores) == 400
  np.testing.assert_allclose(scores[-len(logits) :], logits, rtol=1e-5)
  capsys.readouterr()
  for change, said in (
    ((str(tmp_path / 'no'), 2.0), str(tmp_path / 'no')),
    ((str(tmp_path / 'pilot_memory'), 0.5), '--fewer'),
    ((str(tmp_path / 'pilot_memory'), 4.0), 'vocabularies'),
    ((None, 2.0), 'vocabularies None after'),
  ):
    config = config_of(criteo, **{'data.raw': str(later), **where})
    assert cli.guarded(program.prepare_data, config, False, *change) == 1
    assert_one_sentence(capsys.readouterr().err, said)
