"""One's own model, data and config in the programs, from outside of them."""

import json
import os
import sys
import textwrap

import pytest

from experiments.common import cli, datasets
from experiments.common.models import model_of
from slipstream_jax.errors import UserError
from tests.support.programs import finished
from tests.support.runs import (
  assert_one_sentence,
  lines_of,
  run_job,
  smoke,
  summary_of,
)

MODULE = """
  from flax import linen as nn
  import numpy as np
  from slipstream_jax.data.numbered import ColumnBatches, Columns
  from slipstream_jax.data.source import Dataset
  from slipstream_jax.tables import tables_of


  class Product(nn.Module):
    width: int

    @nn.compact
    def __call__(self, dense, embeddings):
      deep = nn.Dense(1)(nn.relu(nn.Dense(self.width)(dense)))
      pair = embeddings['user'] * embeddings['item']
      return pair.sum(-1) + deep[:, 0]


  def my_model(model):
    return Product(model.width)


  def my_data(config):
    tables = tables_of({'user': 300, 'item': 40}, dim=4)
    rng = np.random.default_rng(config.seed)
    ids = rng.integers(0, (300, 40), (6000, 2))
    labels = ((ids[:, 0] + ids[:, 1]) % 2).astype(np.float32)
    columns = Columns(
      rng.standard_normal((6000, 3), np.float32),
      tables.lookups(ids),
      labels,
    )
    train, test = columns.take(slice(0, 5000)), columns.take(slice(5000, None))
    return Dataset(
      config.data.title,
      {'user': 300, 'item': 40},
      tables.features,
      3,
      lambda size: ColumnBatches(train, size, shuffle_seed=config.seed),
      lambda size: ColumnBatches(test, size, epochs=1, pad_remainder=True),
      train_examples=5000,
    )


  def nothing(config):
    return None


  def two(config, more):
    return None


  CONSTANT = 3
"""
CONFIG = """
  from configs import common


  def get_config():
    config = common.start('', ('',))
    common.files(config, None, batch_size=100, source='own_clicks:my_data')
    config.data.title = 'my clicks'  # said in every summary
    common.model(config, 'own_clicks:my_model', dim=4, width=8)
    common.optimizers(
      config,
      rows=(('rowwise_adagrad', {'learning_rate': 0.3}),),
      dense=(('adam', {'learning_rate': 1e-2}),),
      dense_final=1.0,
    )
    common.hot_rows(config, bytes=1 << 12, profile_examples=1000)
    common.skipping(config, 'surprise')
    common.phases(config, warm_up=5, window=10, settle=3, period=40)
    common.training(config)
    config.train.epochs = 2
    config.eval.curve_steps = 20
    config.log_steps = 10
    return config
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
  """A folder with a module and a config, the module to be imported."""
  folder = tmp_path / 'own'
  folder.mkdir()
  (folder / 'own_clicks.py').write_text(textwrap.dedent(MODULE))
  (folder / 'mine.py').write_text(textwrap.dedent(CONFIG))
  monkeypatch.syspath_prepend(str(folder))
  monkeypatch.delitem(sys.modules, 'own_clicks', raising=False)
  return folder


def program(name, own, *flags, pythonpath=True):
  environment = dict(os.environ)
  if pythonpath:
    environment['PYTHONPATH'] = str(own)
  command = [sys.executable, '-m', f'experiments.{name}']
  return finished(
    [*command, f'--config={own / "mine.py"}', *flags], env=environment
  )


@pytest.mark.slow
def test_a_run_of_all_of_ones_own(own, tmp_path):
  workdir = tmp_path / 'run'
  done = program('run', own, f'--workdir={workdir}')
  assert done.returncode == 0, done.stderr
  assert 'my clicks' in done.stdout
  summary = summary_of(workdir)
  assert summary['data'] == 'my clicks'
  assert summary['batches'] == 100
  assert summary['examples_dropped'] > 0
  assert {path.name for path in workdir.iterdir()} == {
    *('checkpoints', 'config.json', 'learning_curve.png', 'metrics.jsonl'),
    *('summary.json', 'tensorboard'),
  }
  assert {line['kind'] for line in lines_of(workdir)} == {
    *('train', 'eval', 'decision', 'totals'),
  }
  again = program(
    'run', own, f'--workdir={workdir}', '--config.resume=True', pythonpath=False
  )
  assert again.returncode == 0, again.stderr
  assert 'finished already' in again.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'flags', 'files'),
  [
    (
      'compare',
      ['--seeds=1', '--targets=0.5', '--policies=stale'],
      {
        *('compare.csv', 'compare.html', 'compare.png'),
        *('curve.csv', 'config.json'),
      },
    ),
    (
      'profile',
      ['--steps=20', '--check_steps=10'],
      {'profile.json', 'hit_rate.png'},
    ),
  ],
)
def test_other_programs_take_it_too(name, flags, files, own, tmp_path):
  workdir = tmp_path / name
  done = program(name, own, *flags, f'--workdir={workdir}', pythonpath=False)
  assert done.returncode == 0, done.stderr
  assert {path.name for path in workdir.iterdir()} == files


def test_help_has_the_keys_of_ones_own_config(own):
  done = program('run', own, '--help', pythonpath=False)
  assert (done.returncode, done.stderr) == (0, '')
  assert '--config.data.title=myclicks  said in every summary' in done.stdout
  assert '--config.model.width=8' in done.stdout


@pytest.mark.parametrize(
  ('name', 'said'),
  [
    ('nowhere:f', "No module named 'nowhere'"),
    ('own_clicks:my_modell', 'it has Product, my_model, my_data'),
    ('own_clicks:CONSTANT', 'it has Product'),
    ('own_clicks:two', 'take one argument'),
    ('own_clicks:nothing', 'must return'),
    ('own_clicks:', 'it has'),
    (':f', 'Empty module name'),
    ('broken:f', 'invalid syntax'),
  ],
)
def test_a_function_that_cannot_be(name, said, own):
  (own / 'broken.py').write_text('def f(:\n')
  config = smoke(**{'model.name': name, 'data.source': name})
  with pytest.raises(UserError, match=said) as raised:
    model_of(config.model)
  assert raised.value.where == 'config.model.name'
  with pytest.raises(UserError, match=said) as raised:
    datasets.dataset(config)
  assert raised.value.where == 'config.data.source'


def test_all_names_of_models_are_listed():
  with pytest.raises(UserError, match=r'dlrm, dcn, .*hstu, or my_module'):
    model_of(smoke(**{'model.name': 'dlmr'}).model)


def test_a_source_without_a_function_is_refused():
  with pytest.raises(UserError, match='must name a function'):
    datasets.dataset(smoke(**{'data.source': 'clicks'}))


def test_the_data_of_ones_own_may_come_with_a_model_of_ours(own, tmp_path):
  config = smoke(**{'data.source': 'own_clicks:my_data', 'train.steps': 20})
  with config.unlocked():
    config.data.title = 'mine'
  assert run_job(tmp_path / 'run', config) == 0
  text = (tmp_path / 'run' / 'config.json').read_text()
  assert json.loads(text)['data']['source'] == 'own_clicks:my_data'


def test_a_config_without_a_section_is_told(tmp_path, capsys):
  config = smoke()
  with config.unlocked():
    del config.eval
  assert cli.guarded(lambda c: run_job(tmp_path, c), config) == 0
  assert_one_sentence(capsys.readouterr().err, 'eval.', 'configs/common.py')
