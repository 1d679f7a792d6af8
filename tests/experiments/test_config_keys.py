"""Whatever is wrong with a config, the sentence names the key to set.

The library knows no config: `experiments.common.errors` has the keys of its
arguments, and here every key of every config is tried.
"""

import pytest

from configs import avazu, criteo, movielens, taobao, terabyte, tfds
from experiments.common import errors
from slipstream_jax.errors import UserError
from tests.support.runs import assert_one_sentence, changed, run_job

CONFIGS = {
  module.__name__.rpartition('.')[2]: module.get_config('smoke')
  for module in (criteo, avazu, movielens, taobao, terabyte)
} | {'tfds': tfds.get_config()}
# Keys with a value that cannot be, on a proxy: of criteo's config where not
# another one has to be named.
BAD = {
  'seed': -1,
  'processes': 0,
  'data.batch_size': 0,
  'data.proxy': 'tera',
  'data.source': 'nowhere:data',
  'data.rows': (5, 0),
  'data.test_examples': 0,
  'data.proxy_seed': -1,
  'data.drift_examples': -1,
  'data.saturation': -1.0,
  'model.name': 'dlmr',
  'model.dim': 0,
  'model.bottom': (64, 12),
  'model.dims': (16,),
  'model.normalization': 'group',
  'model.compute_dtype': 'float64',
  'model.table_dtype': 'int8',
  'model.pooling': 'max',
  'model.init_scale': float('nan'),
  'model.towers': ((0,),),
  'model.width': 0,
  'model.form': 'deep',
  'optimizer.rows': (('rowwise_adagard', {}),),
  'optimizer.dense': (('adamm', {}),),
  'optimizer.cycles': -1,
  'hot.bytes': 0,
  'hot.cut': 'size',
  'hot.profile_examples': 0,
  'hot.learn_batches': -1,
  'skip.mode': 'example',
  'skip.policy': 'surprising',
  'skip.drop': 1.5,
  'skip.auto_cost': 2.0,
  'skip.drop_of': 'most',
  'skip.scorer': 'forest',
  'skip.refit_batches': -1,
  'skip.uniform': 1.5,
  'skip.until': 1.5,
  'skip.alpha': 30,
  'skip.min_touches': -1,
  'skip.threshold': -1.0,
  'skip.warm_up_batches': -1,
  'skip.window_batches': -1,
  'skip.settle_batches': 0,
  'skip.period_batches': 5,
  'system': 'cloud',
  'placement': 'cloud',
  'cache.capacity': 0.0,
  'cache.eviction': 'fifo',
  'cache.look_ahead_batches': -1,
  'store.kind': 'tape',
  'store.dram_bytes': 0,
  'store.whole': ('nobody',),
  'store.path': '/none/of/these',
  'checkpoint.path': 'none://of/these',
  'checkpoint.policy': 'now_and_then',
  'checkpoint.keep': 0,
  'checkpoint.memory_bytes': 0,
  'checkpoint.consolidate': -1.0,
  'checkpoint.codec': 'int5',
  'checkpoint.on_error': 'hope',
  'checkpoint.grace_seconds': 0.0,
  'prefetch_batches': -1,
  'workers': 0,
  'devices': 3,
  'parts': 3,
  'exchange': 'float16',
  'replicas': 3,
  'hosts': 0,
  'hang_seconds': -1.0,
  'train.steps': -1,
  'train.epochs': 0,
  'train.endless_steps': 0,
  'train.checkpoint_steps': -1,
  'train.on_bad_loss': 'hope',
  'train.most_bad_losses': -1,
  'train.largest_element': -1.0,
  'eval.batch_size': 0,
  'eval.curve_steps': -1,
  'eval.curve_examples': 0,
  'log_steps': 0,
}
# What a file must be read for; 'config.key' and value.
BAD_OF_FILES = {
  'criteo': {
    'data.format': 'criteos',
    'data.bad_lines': -1,
    'data.test_share': 1.5,
    'data.min_count': 0,
    'data.hash_rows': 0,
  },
  'movielens': {
    'data.split': 'by_hand',
    'data.threshold': 9.0,
    'data.history': -1,
    'data.steps': -1,
  },
  'taobao': {
    'data.steps': 0,
    'data.per_user': 0,
    'data.min_history': 0,
    'data.points_seed': -1,
  },
  'terabyte': {
    'data.sample': 1.5,
    'data.sample_negatives': -0.5,
    'data.sample_seed': -1,
  },
}
DMT = {'model.name': 'dmt', 'model.towers': (tuple(range(26)),)}
NEEDS = {  # what has to be so for the key to matter
  'model.width': DMT,
  'model.form': DMT,
  'skip.min_touches': {'skip.policy': 'stale'},
  'skip.window_batches': {'skip.policy': 'stale'},
  'cache.capacity': {'placement': 'cached'},
  'cache.eviction': {'placement': 'cached'},
  'cache.look_ahead_batches': {'placement': 'cached'},
  'store.dram_bytes': {'store.kind': 'tiered'},
  'store.whole': {'store.kind': 'tiered'},
  'store.path': {'store.kind': 'file'},
}
# Any value is good, or absl judges it, or the sentence names the file itself.
NEVER_BAD = {
  *(
    'resume',
    'profile',
    'data.path',
    'data.raw',
    'data.shuffle',
    'data.missing_flags',
  ),
  *(
    'skip.refill',
    'skip.warm_up_again',
    'model.first_order',
    'train.keep_checkpoint',
  ),
}
# Tried by tests of formats and of packed folders, or below.
ELSEWHERE = {
  *('data.data_dir', 'data.train_split', 'data.test_split', 'eval.split'),
  *('data.features.tables', 'data.features.label', 'data.features.dense'),
  *('data.features.transform', 'data.multi_hot'),
}
# Widths and rates are for Flax and optax to judge.
FREE = {
  *('model.top', 'model.attention', 'model.final', 'optimizer.dense_final'),
  'optimizer.rows_fall',
}


def keys_of(section, before=''):
  for name, value in section.items():
    if hasattr(value, 'items'):
      yield from keys_of(value, f'{before}{name}.')
    else:
      yield before + name


def test_every_key_is_tried():
  tried = {*BAD, *NEVER_BAD, *ELSEWHERE, *FREE}
  tried |= {key for keys in BAD_OF_FILES.values() for key in keys}
  assert {key for c in CONFIGS.values() for key in keys_of(c)} == tried


@pytest.mark.parametrize('key', BAD)
def test_a_bad_value_is_named_by_its_key(key, tmp_path, capsys):
  config = criteo.get_config('smoke')
  changed(config, NEEDS.get(key, {}) | {key: BAD[key]})
  assert run_job(tmp_path / 'run', config) == 1
  assert_one_sentence(capsys.readouterr().err, f'config.{key}')


def test_settings_of_a_mode_that_is_off_do_not_matter(tmp_path):
  bad = {key: value for key, value in BAD.items() if key.startswith('skip.')}
  off = {'skip.mode': 'off', 'train.steps': 1, 'eval.curve_steps': 0}
  config = changed(criteo.get_config('smoke'), bad | off)
  assert run_job(tmp_path / 'run', config) == 0


@pytest.mark.parametrize(
  ('name', 'key'),
  [(name, key) for name, keys in BAD_OF_FILES.items() for key in keys],
)
def test_a_bad_value_for_a_file_is_named_by_its_key(
  name, key, tmp_path, capsys
):
  path = tmp_path / 'clicks'
  if name == 'terabyte':
    path.mkdir()
    path = path / 'day_0'
  path.write_text('\t'.join(['1'] + ['2'] * 13 + ['0a1b2c3d'] * 26) + '\n')
  config = CONFIGS[name].copy_and_resolve_references()
  changes = {'data.path': str(path), key: BAD_OF_FILES[name][key]}
  assert run_job(tmp_path / 'run', changed(config, changes)) == 1
  assert_one_sentence(capsys.readouterr().err, f'config.{key}')


@pytest.mark.parametrize(
  ('where', 'key'),
  [
    ('Skip.alpha', 'config.skip.alpha'),
    ('criteo_raw, bad_lines', 'config.data.bad_lines'),
    ('taobao_raw, seed', 'config.data.points_seed'),
    ('Trainer, seed', 'config.seed'),
    ('budget_bytes', 'config.hot.bytes'),
    ('tfds_raw, features, of avazu', 'config.data.features, of avazu'),
    ('tfds_raw, name, in /data', 'config.data.path, in /data'),
    ('line 3, column hour', 'line 3, column hour'),
    ('Table C3, initializer', 'config.model.init_scale'),
    (
      'tfds_raw, train and test',
      'config.data.train_split and config.data.test_split',
    ),
    ('data/kaggle.txt, line 3', 'data/kaggle.txt, line 3'),
    ('clicks.rows', 'clicks.rows'),
    ('Trainer, row_optimizer', 'config.optimizer.rows'),
    ('Trainer, dense_optimizer', 'config.optimizer.dense'),
    ('Trainer, model', 'config.model.name'),
    ('--workdir', '--workdir'),
    ('train, batches', 'train, batches'),
  ],
)
def test_an_argument_becomes_its_key(where, key):
  error = UserError(f'{where} must be so', got=1, where=where, hint='do')
  mapped = errors.in_config(error)
  assert mapped.where == key
  assert str(mapped) == f'{key} must be so, got 1 ({key}); do.'


def test_every_key_that_is_mapped_to_is_there():
  there = {key for c in CONFIGS.values() for key in keys_of(c)}
  there |= {'data.features'}
  assert {*errors.KEYS.values()} <= there
