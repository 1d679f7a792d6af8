"""Trains recommendation models whose tables outgrow the accelerator.

Tables live in host memory. Each batch's unique rows are found and planned on
the host, streamed into a jitted step, and stored back.

  source = slip.batches(dense, {'user': users}, clicks, batch_size=1000, seed=0)
  trainer = slip.Trainer(model, {'user': slip.Table(10**7)})
  trainer.train(source, steps=1000, skip=slip.Skip(drop=0.3))

The names by use; each is documented where it is defined.

Training
  Trainer: trains, evaluates, predicts, saves, restores and exports.
  Metrics: results of `Trainer.evaluate`.
  Checkpoints: checkpoints of a user's own loop.
  UserError: the only error for wrong input, in one sentence.
  reuse_host_memory: makes steps on a CPU faster.
Tables
  Table, Feature, TableSet: tables, and the features that look them up.
  Uniform, Constant: initial values of rows.
Data
  batches: arrays, frames, iterators or packed folders as a source.
  Ragged: lists of ids in one array.
  pack, packed_dataset: write data once into a folder, and read it.
  BatchSource, Batch: base class of a user's own source, and its batches.
  Vocabulary, GrowingVocabulary: map raw ids to rows.
Models
  DLRM, TBSM: the paper's models.
  Functions: a model of two functions.
Row optimizers
  sgd, adagrad, rowwise_adagrad, lazy_adam: members of ROW_OPTIMIZERS.
  skip_stale: skips stale rows in a user's own optax chain.
Skipping
  Skip, Phases: what to skip, and when.
  POLICIES: which examples are skipped, by name.
  SCORERS: models that score examples for policies, by name.
Memory
  PLACEMENTS, cached: which rows are on the device.
  MEMORY, tiered: where the other rows are stored.

The parts of a trainer are in the modules `slipstream_jax.training`,
`.schedules`, `.selection`, `.transforms`, `.placement` and so on.
"""

import importlib
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
  from slipstream_jax.api.trainer import Trainer
  from slipstream_jax.checkpoint.checkpoint import Checkpoints
  from slipstream_jax.columns.read import Ragged
  from slipstream_jax.data.source import BatchSource
  from slipstream_jax.errors import UserError
  from slipstream_jax.inputs.batches import batches
  from slipstream_jax.models.adapters import Functions
  from slipstream_jax.models.dlrm import DLRM
  from slipstream_jax.models.tbsm import TBSM
  from slipstream_jax.packed.dataset import packed_dataset
  from slipstream_jax.packed.pack import pack
  from slipstream_jax.placement import cached, PLACEMENTS
  from slipstream_jax.runtime import reuse_host_memory
  from slipstream_jax.schedules.phases import Phases
  from slipstream_jax.schedules.settings import Skip
  from slipstream_jax.scoring.base import SCORERS
  from slipstream_jax.selection.policies import POLICIES
  from slipstream_jax.store.tiered import MEMORY, tiered
  from slipstream_jax.tables import Constant, Feature, Table, TableSet, Uniform
  from slipstream_jax.training.metrics import Metrics
  from slipstream_jax.transforms.rowwise import (
    adagrad,
    lazy_adam,
    ROW_OPTIMIZERS,
    rowwise_adagrad,
    sgd,
  )
  from slipstream_jax.transforms.skip import skip_stale
  from slipstream_jax.types import Batch
  from slipstream_jax.vocabulary.counted import Vocabulary
  from slipstream_jax.vocabulary.growing import GrowingVocabulary

__version__ = '0.1.0'

# A module is imported when one of its names is first used. So a chain with
# `skip_stale` does not import numba or orbax.
_HOMES = {
  'api.trainer': ('Trainer',),
  'data.source': ('BatchSource',),
  'errors': ('UserError',),
  'models.adapters': ('Functions',),
  'models.dlrm': ('DLRM',),
  'models.tbsm': ('TBSM',),
  'inputs.batches': ('batches',),
  'columns.read': ('Ragged',),
  'packed.dataset': ('packed_dataset',),
  'packed.pack': ('pack',),
  'placement': (
    'PLACEMENTS',
    'cached',
  ),
  'runtime': ('reuse_host_memory',),
  'checkpoint.checkpoint': ('Checkpoints',),
  'schedules.phases': ('Phases',),
  'schedules.settings': ('Skip',),
  'selection.policies': ('POLICIES',),
  'scoring.base': ('SCORERS',),
  'store.tiered': ('MEMORY', 'tiered'),
  'tables': (
    'Constant',
    'Feature',
    'Table',
    'TableSet',
    'Uniform',
  ),
  'training.metrics': ('Metrics',),
  'transforms.rowwise': (
    'ROW_OPTIMIZERS',
    'adagrad',
    'lazy_adam',
    'rowwise_adagrad',
    'sgd',
  ),
  'transforms.skip': ('skip_stale',),
  'types': ('Batch',),
  'vocabulary.counted': ('Vocabulary',),
  'vocabulary.growing': ('GrowingVocabulary',),
}

__all__ = [
  'DLRM',
  'MEMORY',
  'PLACEMENTS',
  'POLICIES',
  'ROW_OPTIMIZERS',
  'SCORERS',
  'TBSM',
  'Batch',
  'BatchSource',
  'Checkpoints',
  'Constant',
  'Feature',
  'Functions',
  'GrowingVocabulary',
  'Metrics',
  'Phases',
  'Ragged',
  'Skip',
  'Table',
  'TableSet',
  'Trainer',
  'Uniform',
  'UserError',
  'Vocabulary',
  'adagrad',
  'batches',
  'cached',
  'lazy_adam',
  'pack',
  'packed_dataset',
  'reuse_host_memory',
  'rowwise_adagrad',
  'sgd',
  'skip_stale',
  'tiered',
]


def __getattr__(name: str) -> Any:
  for home, names in _HOMES.items():
    if name in names:
      module = importlib.import_module(f'{__name__}.{home}')
      globals()[name] = value = getattr(module, name)
      return value
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
