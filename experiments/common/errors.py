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

_SAME_NAME = {
  '': 'devices exchange hosts parts placement replicas seed workers',
  'cache': 'capacity eviction',
  'checkpoint': (
    'Saving.codec Saving.consolidate Saving.keep Saving.memory_bytes'
    ' Saving.policy open_place.path'
  ),
  'data': (
    'SequenceSpec.rows SyntheticSpec.rows bad_lines batch_size data_dir'
    ' drift_examples features hash_rows history min_count min_history'
    ' missing_flags movielens_raw.split movielens_raw.steps'
    ' movielens_raw.threshold per_user sample sample_negatives saturation'
    ' taobao_raw.steps test_examples test_share'
  ),
  'data.features': (
    'FeatureMap.dense FeatureMap.label FeatureMap.tables FeatureMap.transform'
  ),
  'model': (
    'DMT.form DMT.towers DMT.width attention bottom compute_dtype final'
    ' normalization top'
  ),
  'skip': (
    'Phases.warm_up_again Skip.auto_cost Skip.mode Skip.policy Skip.scorer'
    ' Skip.uniform alpha drop drop_of min_touches refill threshold'
  ),
  'store': 'dram_bytes file.path tiered.whole',
  'optimizer': 'cosine_cycles.cycles',
  'train': 'cosine_cycles.steps train.steps',
}
"""Arguments that have the name of their key, by section. The owner stands
before an argument whose name alone would be ambiguous."""
KEYS = {
  'Phases.period': 'skip.period_batches',
  'Phases.settle': 'skip.settle_batches',
  'Phases.warm_up': 'skip.warm_up_batches',
  'Phases.window': 'skip.window_batches',
  'Recipe.skips_bad_steps': 'train.on_bad_loss',
  'Skip.refit': 'skip.refit_batches',
  'Slipstream.batches': 'train.steps',
  'Table.dtype': 'model.table_dtype',
  'Table.embedding_dim': 'model.dim',
  'Table.initializer': 'model.init_scale',
  'Trainer.dense_optimizer': 'optimizer.dense',
  'Trainer.model': 'model.name',
  'Trainer.row_optimizer': 'optimizer.rows',
  'budget_bytes': 'hot.bytes',
  'combiner': 'model.pooling',
  'depth': 'prefetch_batches',
  'hot': 'hot.bytes',
  'learning_rate': 'optimizer.rows',
  'multi_hot.lengths': 'data.multi_hot',
  'look_ahead': 'cache.look_ahead_batches',
  'proxy_dataset.name': 'data.proxy',
  'shuffle_seed': 'seed',
  'slipstream.batches': 'train.steps',
  'taobao_raw.seed': 'data.points_seed',
  'terabyte_raw.seed': 'data.sample_seed',
  'test_split': 'eval.split',
  'tfds_raw.name': 'data.path',
  'tfds_raw.test': 'data.test_split',
  'tfds_raw.train': 'data.train_split',
} | {
  argument: f'{section}.{argument.rpartition(".")[2]}'.removeprefix('.')
  for section, arguments in _SAME_NAME.items()
  for argument in arguments.split()
}
"""Config keys by the arguments of the library that they set."""
# 'function, argument', 'function, one and other', 'Type.argument', 'argument',
# "Type 'name', argument": more may follow after a comma.
_PLACE = re.compile(
  r"(?:(\w+)(?: [\w']+)?, |([A-Z]\w*)\.)?(\w+(?: and \w+)*)(, .*)?"
)


def key_of(owner: str | None, argument: str) -> str | None:
  """Returns the config key that sets an argument, or None."""
  return KEYS.get(f'{owner}.{argument}') or KEYS.get(argument)


def in_config(error: UserError) -> UserError:
  """Returns the same error with the config's key in place of the argument.

  An error of a file or a flag, which no config sets, is returned unchanged.
  """
  place = _PLACE.fullmatch(error.where)
  if place is None:
    return error
  owner, names = place[1] or place[2], place[3].split(' and ')
  keys = [key_of(owner, name) for name in names]
  if None in keys:
    return error
  where = ' and '.join(f'config.{key}' for key in keys) + (place[4] or '')
  rule = error.rule.replace(error.where, where)
  return UserError(rule, got=error.got, where=where, hint=error.hint)


_AT_LEAST = {
  'seed': 0,
  'data.batch_size': 1,
  'data.proxy_seed': 0,
  'data.test_examples': 1,
  'optimizer.cycles': 0,
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
  'hang_seconds': 0,
  'prefetch_batches': 0,
  'hot.profile_examples': 1,
  'hot.learn_batches': 0,
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
    if value is not None and value < least:
      raise UserError(
        f'config.{key} must be at least {least}',
        got=value,
        where=f'config.{key}',
        hint='set it to that or more',
      )
  choose(ON_ERROR, config.checkpoint.on_error, 'config.checkpoint.on_error')
  train = config.train
  if config.optimizer.cycles > 1 and not train.keep_checkpoint:
    raise UserError(
      'the members of an ensemble are checkpoints, which must be kept',
      got=f'config.optimizer.cycles={config.optimizer.cycles} without',
      where='config.train.keep_checkpoint',
      hint='leave it True, or give one cycle',
    )
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
  common.on_large_logs(whole)
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
