"""Checks a config, and names its keys in errors.

The library's errors name arguments. `in_config`, through which every program
prints them, puts the config's keys in their place.
"""

import re

import ml_collections

from configs import common
from experiments.common.usage import keys_of
from slipstream_jax.checkpoint.quantize import RAW
from slipstream_jax.errors import choose, UserError

_BY_ARGUMENT = {
  **{
    name: f'{section}.{name}'
    for section, names in {
      'data': (
        'bad_lines batch_size data_dir drift_examples features hash_rows'
        ' history min_count min_history missing_flags per_user sample'
        ' sample_negatives saturation test_examples test_share'
      ),
      'model': 'attention bottom compute_dtype final normalization top',
      'skip': 'alpha drop drop_of min_touches refill threshold',
    }.items()
    for name in names.split()
  },
  'budget_bytes': 'hot.bytes',
  'capacity': 'cache.capacity',
  'depth': 'prefetch_batches',
  'dram_bytes': 'store.dram_bytes',
  'eviction': 'cache.eviction',
  'hot': 'hot.bytes',
  'learning_rate': 'optimizer.rows',
  'look_ahead': 'cache.look_ahead_batches',
  'placement': 'placement',
  'seed': 'seed',
  'shuffle_seed': 'seed',
  'combiner': 'model.pooling',
  'test_split': 'eval.split',
  'workers': 'workers',
}
_BY_PLACE = {
  **{
    f'{owner}.{name}': f'{section}.{name}'
    for owner, section, names in (
      ('FeatureMap', 'data.features', 'dense label tables transform'),
      ('Saving', 'checkpoint', 'policy keep memory_bytes consolidate codec'),
      ('Skip', 'skip', 'mode policy auto_cost scorer uniform'),
    )
    for name in names.split()
  },
  **{
    f'Phases.{name}': f'skip.{name}_batches'
    for name in ('period', 'settle', 'warm_up', 'window')
  },
  'Phases.warm_up_again': 'skip.warm_up_again',
  'Skip.refit': 'skip.refit_batches',
  'Recipe.skips_bad_steps': 'train.on_bad_loss',
  'SequenceSpec.rows': 'data.rows',
  'file.path': 'store.path',
  'Slipstream.batches': 'train.steps',
  'SyntheticSpec.rows': 'data.rows',
  'Table.embedding_dim': 'model.dim',
  'Table.dtype': 'model.table_dtype',
  'Table.initializer': 'model.init_scale',
  'Trainer.dense_optimizer': 'optimizer.dense',
  'Trainer.model': 'model.name',
  'Trainer.row_optimizer': 'optimizer.rows',
  'slipstream.batches': 'train.steps',
  'taobao_raw.seed': 'data.points_seed',
  'taobao_raw.steps': 'data.steps',
  'terabyte_raw.seed': 'data.sample_seed',
  'tfds_raw.name': 'data.path',
  'tfds_raw.test': 'data.test_split',
  'tfds_raw.train': 'data.train_split',
  'train.steps': 'train.steps',
  'open_place.path': 'checkpoint.path',
  'movielens_raw.threshold': 'data.threshold',
  'proxy_dataset.name': 'data.proxy',
}
"""Arguments by their owner, where the name alone would be ambiguous."""
# 'function, argument', 'function, one and other', 'Type.argument', 'argument',
# "Type 'name', argument": more may follow after a comma.
_PLACE = re.compile(
  r"(?:(\w+)(?: [\w']+)?, |([A-Z]\w*)\.)?(\w+(?: and \w+)*)(, .*)?"
)


def in_config(error: UserError) -> UserError:
  """Returns the same error with the config's key in place of the argument.

  An error of a file or a flag, which no config sets, is returned unchanged.
  """
  place = _PLACE.fullmatch(error.where)
  if place is None:
    return error
  owner, names = place[1] or place[2], place[3].split(' and ')
  keys = [_BY_PLACE.get(f'{owner}.{n}', _BY_ARGUMENT.get(n)) for n in names]
  if None in keys:
    return error
  where = ' and '.join(f'config.{key}' for key in keys) + (place[4] or '')
  rule = error.rule.replace(error.where, where)
  return UserError(rule, got=error.got, where=where, hint=error.hint)


_AT_LEAST = {
  'seed': 0,
  'data.batch_size': 1,
  'data.test_examples': 1,
  'train.steps': 0,
  'train.endless_steps': 1,
  'train.epochs': 1,
  'train.checkpoint_steps': 0,
  'train.most_bad_losses': 0,
  'train.largest_element': 0,
  'checkpoint.keep': 1,
  'checkpoint.memory_bytes': 1,
  'checkpoint.consolidate': 0,
  'checkpoint.grace_seconds': 1,
  'eval.batch_size': 1,
  'eval.curve_steps': 0,
  'eval.curve_examples': 1,
  'log_steps': 1,
  'prefetch_batches': 0,
  'hot.profile_examples': 1,
  'skip.min_touches': 0,
  'skip.refit_batches': 0,
}


ON_ERROR = dict.fromkeys(('stop', 'warn'))
"""Choices of `config.checkpoint.on_error`."""
ON_BAD_LOSS = dict.fromkeys(('stop', 'skip', 'rollback'))
"""Choices of `config.train.on_bad_loss`."""


def check(config: ml_collections.ConfigDict) -> None:
  """Checks the config's keys and counts before any work is done.

  Raises:
    UserError: a key is missing, a count too small, or no such choice.
  """
  _check_complete(config)
  off = config.skip.mode == 'off'
  for key, least in _AT_LEAST.items():  # not every config has every key
    section, _, name = key.rpartition('.')
    if section == 'skip' and off:  # unused
      continue
    value = (config[section] if section else config).get(name, least)
    if value < least:
      raise UserError(
        f'config.{key} must be at least {least}',
        got=value,
        where=f'config.{key}',
        hint='set it to that or more',
      )
  choose(ON_ERROR, config.checkpoint.on_error, 'config.checkpoint.on_error')
  train = config.train
  choose(ON_BAD_LOSS, train.on_bad_loss, 'config.train.on_bad_loss')
  if train.on_bad_loss == 'rollback' and not train.checkpoint_steps:
    raise UserError(
      'going back to the last checkpoint needs checkpoints',
      got=train.checkpoint_steps,
      where='config.train.checkpoint_steps',
      hint='set it to the steps between them, such as 1000',
    )
  if train.on_bad_loss == 'rollback' and config.checkpoint.codec != RAW:
    raise UserError(
      f'going back to the last checkpoint needs its rows as {RAW}',
      got=config.checkpoint.codec,
      where='config.checkpoint.codec',
      hint='leave it, and copy checkpoints for an archive in fewer bits',
    )


def _check_complete(config: ml_collections.ConfigDict) -> None:
  """Checks that a config has the keys that all configs share."""
  whole = common.start('', ('',))
  common.files(whole, 'criteo', 1)
  common.model(whole, 'dlrm', 1)
  common.optimizers(whole, (), (), 1.0)
  common.hot_rows(whole, 1, 1)
  common.skipping(whole, 'surprise')
  common.phases(whole, 1, 1, 1, 1)
  common.training(whole)
  keys = {key for key, _ in keys_of(config)}
  own = bool(config.get('data', {}).get('source'))
  for key, _ in keys_of(whole):
    optional = own and key.startswith('data.') and key != 'data.batch_size'
    if key not in keys and not optional:
      raise UserError(
        f'a config must have the key {key}',
        got='none of that name',
        where='--config',
        hint='begin with the functions of configs/common.py, which give all',
      )
