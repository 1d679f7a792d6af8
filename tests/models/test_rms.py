"""The papers' models RM1 to RM4 train, on proxies and on real samples."""

import gzip
import pathlib

import numpy as np
import pytest

from configs import avazu, criteo, taobao, terabyte
from experiments.common import build, datasets
from slipstream_jax.packed.prepare import prepare
from slipstream_jax.training.loop import train

SAMPLES = pathlib.Path(__file__).resolve().parents[3] / 'shared' / 'data'
STEPS = 50
MODELS = {'rm1': taobao, 'rm2': criteo, 'rm3': terabyte, 'rm4': avazu}
# A hundredth of the tables: what 50 steps touch is far less.
ROWS = {
  'rm1': (9880, 41_620, 94),
  'rm2': (15, 6, 101_312, 22_026, 4, 3, 126, 7, 3, 932, 57, 83_516, 32)
  + (4, 150, 54_613, 4, 57, 22, 4, 70_466, 4, 5, 2862, 4, 1426),
  'rm3': tuple(max(rows // 100, 3) for rows in terabyte.get_config().data.rows),
  'rm4': (7, 7, 47, 77, 26, 85, 56, 36, 26_800, 67_200, 83, 5, 4)
  + (26, 8, 9, 4, 4, 68, 172, 60),
}
SAMPLE_OF = {
  'rm1': 'taobao/UserBehavior.csv.gz',
  'rm2': 'criteo/train.txt',
  'rm3': 'criteo/train.txt',
  'rm4': 'avazu/train.csv',
}


def config_of(model):
  """The paper's layers; a batch size and rates for few and small steps."""
  config = MODELS[model].get_config()
  config.data.batch_size = 128
  config.data.test_examples = 1024
  config.skip.mode = 'off'
  config.placement = 'streamed'
  config.train.steps = STEPS
  ((name, arguments),) = config.optimizer.rows
  config.optimizer.rows = ((name, {**arguments, 'learning_rate': 0.1}),)
  return config


def losses(config):
  data = datasets.dataset(config)
  recipe = build.recipe(config, data, STEPS)
  trainer = build.trainer(config, data, recipe, None)
  with build.batches(config, trainer, data, STEPS) as batches:
    return [record.loss for record in train(trainer, batches, STEPS)]


def assert_learns(told):
  assert len(told) == STEPS
  assert np.isfinite(told).all()
  assert np.mean(told[-20:]) < np.mean(told[:5])


@pytest.mark.slow
@pytest.mark.parametrize('model', MODELS)
def test_trains_on_its_proxy(model):
  config = config_of(model)
  config.data.rows = ROWS[model]
  assert_learns(losses(config))


@pytest.mark.parametrize(
  'model',
  [pytest.param(m, marks=[pytest.mark.slow] * (m != 'rm2')) for m in MODELS],
)
def test_trains_on_a_real_sample(model, tmp_path):
  path = SAMPLES / SAMPLE_OF[model]
  if not path.exists():
    pytest.skip('shared samples absent')
  config = config_of(model)
  if model == 'rm1':
    config.data.min_history = 1
    config.data.bad_lines = 1  # its last line is cut off
  if model == 'rm3':  # lines of the same form, as two days
    config.data.sample = 1.0
    config.data.hash_rows = 10_000
    lines = path.read_bytes().splitlines(keepends=True)
    for day, part in enumerate((lines[:8000], lines[8000:])):
      packed = gzip.compress(b''.join(part), mtime=0)
      (tmp_path / f'day_{day}.gz').write_bytes(packed)
    path = tmp_path
  raw = datasets.raw_data(config.data, str(path))
  folder, hashed = tmp_path / 'packed', config.data.hash_rows
  for _ in prepare(raw, folder, hash_rows=hashed):
    pass
  config.data.path = str(folder)
  assert_learns(losses(config))
