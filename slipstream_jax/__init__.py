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
  CSVLog, TensorBoard: callbacks of `Trainer.train` that write its curves.
  auc, log_loss, rmse, mae: metrics for `Trainer(metrics=[...])`.
  METRICS: all metrics by name.
  recall_at_k, ndcg_at_k: quality of the items of `Trainer.top_k`.
  log_counts: how often each item occurs, for `log_q` of a `TwoTower`.
  MeanMetric: a metric of one's own that means over examples define.
  Checkpoints: checkpoints of a user's own loop.
  UserError: the only error for wrong input, in one sentence.
  reuse_host_memory: makes steps on a CPU faster.
Tables
  Table, Feature, TableSet: tables, and the features that look them up.
  Uniform, Constant: initial values of rows. `Table` also takes arrays,
    vectors by id, and functions of `jax.nn.initializers`.
Data
  batches: arrays, frames, iterators or packed folders as a source.
  Ragged: lists of ids in one array.
  pack, packed_dataset: write data once into a folder, and read it.
  BatchSource, Batch: base class of a user's own source, and its batches.
  Vocabulary, GrowingVocabulary: map raw ids to rows.
  learned_hash: a vocabulary of fewer rows, which similar rare ids share.
Models
  DLRM, TBSM: the paper's models.
  DCN, DeepFM, DHEN, WideDeep: click models with other interactions.
  DMT: a DLRM whose features meet in towers first.
  SASRec, HSTU: click models over sequences.
  TwoTower: vectors of users and of items, for retrieval.
  INTERACTIONS: the interactions by name.
  TokenModel: base class of a user's own click model.
  Functions: a model of two functions.
Row optimizers
  sgd, adagrad, rowwise_adagrad, lazy_adam: optimizers of rows.
  ROW_OPTIMIZERS: these four by name.
  skip_stale: skips stale rows in a user's own optax chain.
  cosine_cycles: learning rates of several cycles, for ensembles from one run.
  weight_aware: lets optimizers feel how many examples one stands for.
Optimizers of models
  shampoo, scale_by_shampoo: distributed Shampoo, for `dense_optimizer`.
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
  from slipstream_jax.api.callbacks import CSVLog as CSVLog
  from slipstream_jax.api.callbacks import TensorBoard as TensorBoard
  from slipstream_jax.api.trainer import Trainer as Trainer
  from slipstream_jax.checkpoint.checkpoint import Checkpoints as Checkpoints
  from slipstream_jax.columns.read import Ragged as Ragged
  from slipstream_jax.data.source import BatchSource as BatchSource
  from slipstream_jax.engine.buffers import (
    reuse_host_memory as reuse_host_memory,
  )
  from slipstream_jax.errors import UserError as UserError
  from slipstream_jax.initializers import Constant as Constant
  from slipstream_jax.initializers import Uniform as Uniform
  from slipstream_jax.inputs.batches import batches as batches
  from slipstream_jax.models.adapters import Functions as Functions
  from slipstream_jax.models.dlrm import DLRM as DLRM
  from slipstream_jax.models.dlrm import TokenModel as TokenModel
  from slipstream_jax.models.dmt import DMT as DMT
  from slipstream_jax.models.interactions import INTERACTIONS as INTERACTIONS
  from slipstream_jax.models.sequences import HSTU as HSTU
  from slipstream_jax.models.sequences import SASRec as SASRec
  from slipstream_jax.models.tbsm import TBSM as TBSM
  from slipstream_jax.models.towers import TwoTower as TwoTower
  from slipstream_jax.models.zoo import DCN as DCN
  from slipstream_jax.models.zoo import DeepFM as DeepFM
  from slipstream_jax.models.zoo import DHEN as DHEN
  from slipstream_jax.models.zoo import WideDeep as WideDeep
  from slipstream_jax.packed.dataset import packed_dataset as packed_dataset
  from slipstream_jax.packed.pack import pack as pack
  from slipstream_jax.placement import cached as cached
  from slipstream_jax.placement import PLACEMENTS as PLACEMENTS
  from slipstream_jax.schedules.phases import Phases as Phases
  from slipstream_jax.schedules.settings import Skip as Skip
  from slipstream_jax.scoring.base import SCORERS as SCORERS
  from slipstream_jax.selection.policies import POLICIES as POLICIES
  from slipstream_jax.store.tiered import MEMORY as MEMORY
  from slipstream_jax.store.tiered import tiered as tiered
  from slipstream_jax.tables import Feature as Feature
  from slipstream_jax.tables import Table as Table
  from slipstream_jax.tables import TableSet as TableSet
  from slipstream_jax.training.metrics import auc as auc
  from slipstream_jax.training.metrics import log_loss as log_loss
  from slipstream_jax.training.metrics import mae as mae
  from slipstream_jax.training.metrics import MeanMetric as MeanMetric
  from slipstream_jax.training.metrics import METRICS as METRICS
  from slipstream_jax.training.metrics import Metrics as Metrics
  from slipstream_jax.training.metrics import rmse as rmse
  from slipstream_jax.training.retrieval import log_counts as log_counts
  from slipstream_jax.training.retrieval import ndcg_at_k as ndcg_at_k
  from slipstream_jax.training.retrieval import recall_at_k as recall_at_k
  from slipstream_jax.transforms.rowwise import adagrad as adagrad
  from slipstream_jax.transforms.rowwise import lazy_adam as lazy_adam
  from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS as ROW_OPTIMIZERS
  from slipstream_jax.transforms.rowwise import (
    rowwise_adagrad as rowwise_adagrad,
  )
  from slipstream_jax.transforms.rowwise import sgd as sgd
  from slipstream_jax.transforms.shampoo import (
    scale_by_shampoo as scale_by_shampoo,
  )
  from slipstream_jax.transforms.shampoo import shampoo as shampoo
  from slipstream_jax.transforms.skip import skip_stale as skip_stale
  from slipstream_jax.transforms.weights import cosine_cycles as cosine_cycles
  from slipstream_jax.transforms.weights import weight_aware as weight_aware
  from slipstream_jax.types import Batch as Batch
  from slipstream_jax.vocabulary.counted import Vocabulary as Vocabulary
  from slipstream_jax.vocabulary.growing import (
    GrowingVocabulary as GrowingVocabulary,
  )
  from slipstream_jax.vocabulary.learned import learned_hash as learned_hash

__version__ = '0.1.0'

# A module is imported when one of its names is first used. So a chain with
# `skip_stale` does not import numba or orbax.
_HOMES = {
  'CSVLog': 'api.callbacks',
  'DCN': 'models.zoo',
  'DHEN': 'models.zoo',
  'DLRM': 'models.dlrm',
  'DMT': 'models.dmt',
  'HSTU': 'models.sequences',
  'INTERACTIONS': 'models.interactions',
  'MEMORY': 'store.tiered',
  'METRICS': 'training.metrics',
  'PLACEMENTS': 'placement',
  'POLICIES': 'selection.policies',
  'ROW_OPTIMIZERS': 'transforms.rowwise',
  'SASRec': 'models.sequences',
  'SCORERS': 'scoring.base',
  'TBSM': 'models.tbsm',
  'Batch': 'types',
  'BatchSource': 'data.source',
  'Checkpoints': 'checkpoint.checkpoint',
  'Constant': 'initializers',
  'DeepFM': 'models.zoo',
  'Feature': 'tables',
  'Functions': 'models.adapters',
  'GrowingVocabulary': 'vocabulary.growing',
  'MeanMetric': 'training.metrics',
  'Metrics': 'training.metrics',
  'Phases': 'schedules.phases',
  'Ragged': 'columns.read',
  'Skip': 'schedules.settings',
  'Table': 'tables',
  'TableSet': 'tables',
  'TensorBoard': 'api.callbacks',
  'TokenModel': 'models.dlrm',
  'Trainer': 'api.trainer',
  'TwoTower': 'models.towers',
  'Uniform': 'initializers',
  'UserError': 'errors',
  'Vocabulary': 'vocabulary.counted',
  'WideDeep': 'models.zoo',
  'adagrad': 'transforms.rowwise',
  'auc': 'training.metrics',
  'batches': 'inputs.batches',
  'cached': 'placement',
  'cosine_cycles': 'transforms.weights',
  'lazy_adam': 'transforms.rowwise',
  'log_loss': 'training.metrics',
  'mae': 'training.metrics',
  'learned_hash': 'vocabulary.learned',
  'log_counts': 'training.retrieval',
  'ndcg_at_k': 'training.retrieval',
  'pack': 'packed.pack',
  'packed_dataset': 'packed.dataset',
  'recall_at_k': 'training.retrieval',
  'reuse_host_memory': 'engine.buffers',
  'rmse': 'training.metrics',
  'rowwise_adagrad': 'transforms.rowwise',
  'scale_by_shampoo': 'transforms.shampoo',
  'sgd': 'transforms.rowwise',
  'shampoo': 'transforms.shampoo',
  'skip_stale': 'transforms.skip',
  'tiered': 'store.tiered',
  'weight_aware': 'transforms.weights',
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_HOMES[name]}')
  globals()[name] = value = getattr(module, name)
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
