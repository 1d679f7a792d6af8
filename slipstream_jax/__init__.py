"""Trains recommendation models whose tables outgrow the accelerator.

Tables live in host memory as one long array of rows. Each batch's distinct
rows are found and planned on the host, streamed into a jitted step, and
stored back. Every name below is documented where it is defined.

  tables = slip.TableSet((slip.Table('item', 10_000_000),), dim=16)
  recipe = slip.Recipe(
      model, tables, slip.rowwise_adagrad(0.05), optax.adam(1e-3))
  trainer = slip.create_trainer(recipe, 'streamed', dense_features=13)
  with slip.planned(trainer, source) as batches:
    for record in slip.train(trainer, batches, steps=1000):
      ...
  metrics = slip.evaluate(trainer, held_out)

To skip what no longer learns, give the trainer `hot_rows` and train the batches
of `slipstream(trainer, source, settings)` instead.
"""

from slipstream_jax.data.base import (
  BatchSource,
  ColumnBatches,
  Columns,
  Dataset,
)
from slipstream_jax.errors import UserError
from slipstream_jax.models.dlrm import DLRM
from slipstream_jax.models.interaction import dot_interaction
from slipstream_jax.models.tbsm import TBSM
from slipstream_jax.packed.batches import PackedBatches
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.packed.vocabulary import packed_vocabulary
from slipstream_jax.placement import cached, EVICTIONS, Placement, PLACEMENTS
from slipstream_jax.placement.curves import lru_curve, static_curve
from slipstream_jax.runtime import reuse_host_memory
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Settings
from slipstream_jax.selection.base import (
  fit,
  InputFacts,
  Policy,
  select,
  Selection,
)
from slipstream_jax.selection.change import row_change, stale_rows
from slipstream_jax.selection.classify import classify, input_changes
from slipstream_jax.selection.hot import (
  access_counts,
  hot_rows,
  popular_rows,
  popular_rows_by_table,
)
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.selection.threshold import exact_threshold
from slipstream_jax.stream.counters import Counters
from slipstream_jax.tables import Constant, Table, TableSet, Uniform
from slipstream_jax.train.checkpoint import Checkpoints
from slipstream_jax.train.evaluate import evaluate, predict
from slipstream_jax.train.loop import train
from slipstream_jax.train.metrics import Metrics
from slipstream_jax.train.recipe import Recipe
from slipstream_jax.train.trainer import (
  create_trainer,
  planned,
  slipstream,
  Trainer,
)
from slipstream_jax.transforms.rounding import stochastic_round
from slipstream_jax.transforms.rowwise import (
  adagrad,
  lazy_adam,
  ROW_OPTIMIZERS,
  rowwise_adagrad,
  scale_by_lazy_adam,
  scale_by_rowwise_adagrad,
  sgd,
)
from slipstream_jax.transforms.seen import scale_by_data_seen
from slipstream_jax.transforms.skip import skip_stale, SkipStaleState
from slipstream_jax.transforms.weights import weight_aware
from slipstream_jax.types import Batch, HotRows, RowBlock

__version__ = '0.1.0'

__all__ = [
  'DLRM',
  'EVICTIONS',
  'PLACEMENTS',
  'POLICIES',
  'ROW_OPTIMIZERS',
  'TBSM',
  'Batch',
  'BatchSource',
  'Checkpoints',
  'ColumnBatches',
  'Columns',
  'Constant',
  'Counters',
  'Dataset',
  'HotRows',
  'InputFacts',
  'Metrics',
  'PackedBatches',
  'Phases',
  'Placement',
  'Policy',
  'Recipe',
  'RowBlock',
  'Selection',
  'Settings',
  'SkipStaleState',
  'Table',
  'TableSet',
  'Trainer',
  'Uniform',
  'UserError',
  'access_counts',
  'adagrad',
  'cached',
  'classify',
  'create_trainer',
  'dot_interaction',
  'evaluate',
  'exact_threshold',
  'fit',
  'hot_rows',
  'input_changes',
  'lazy_adam',
  'lru_curve',
  'packed_dataset',
  'packed_vocabulary',
  'planned',
  'popular_rows',
  'popular_rows_by_table',
  'predict',
  'reuse_host_memory',
  'row_change',
  'rowwise_adagrad',
  'scale_by_data_seen',
  'scale_by_lazy_adam',
  'scale_by_rowwise_adagrad',
  'select',
  'sgd',
  'skip_stale',
  'slipstream',
  'stale_rows',
  'static_curve',
  'stochastic_round',
  'train',
  'weight_aware',
]
