"""Trains recommendation models whose tables outgrow the accelerator.

Tables live in host memory as one long array of rows. Each batch's unique
rows are found and planned on the host, streamed into a jitted step, and
stored back. Every name below is documented where it is defined.

  tables = slip.TableSet({'item': slip.Table(10_000_000, dim=16)})
  recipe = slip.Recipe(
      model, tables, slip.rowwise_adagrad(0.05), optax.adam(1e-3))
  trainer = slip.make_parts(recipe, 'streamed', dense_features=13)
  with slip.planned(trainer, source) as batches:
    for record in slip.train(trainer, batches, steps=1000):
      ...
  metrics = slip.evaluate(trainer, held_out)

To skip what no longer learns, give the trainer `hot_rows` and train the batches
of `slipstream(trainer, source, settings)` instead. The parts of these, for
those who build with them, are in the modules: `slipstream_jax.selection`,
`.transforms`, `.placement`, `.schedules`, `.packed` and so on.
"""

import importlib
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
  from slipstream_jax.data.base import BatchSource, ColumnBatches, Columns
  from slipstream_jax.errors import UserError
  from slipstream_jax.models.dlrm import DLRM
  from slipstream_jax.models.tbsm import TBSM
  from slipstream_jax.packed.dataset import packed_dataset
  from slipstream_jax.placement import cached, PLACEMENTS
  from slipstream_jax.runtime import reuse_host_memory
  from slipstream_jax.saving.checkpoint import Checkpoints
  from slipstream_jax.schedules.phases import Phases
  from slipstream_jax.schedules.settings import Settings
  from slipstream_jax.selection.hot import hot_rows, popular_rows
  from slipstream_jax.selection.policies import POLICIES
  from slipstream_jax.table_set import TableSet
  from slipstream_jax.tables import Feature, Table
  from slipstream_jax.training.evaluate import evaluate, predict
  from slipstream_jax.training.loop import train
  from slipstream_jax.training.parts import (
    make_parts,
    planned,
    slipstream,
  )
  from slipstream_jax.training.recipe import Recipe
  from slipstream_jax.transforms.rowwise import (
    adagrad,
    ROW_OPTIMIZERS,
    rowwise_adagrad,
  )
  from slipstream_jax.transforms.skip import skip_stale
  from slipstream_jax.types import Batch

__version__ = '0.1.0'

# A module is imported when one of its names is first asked for: who composes
# `skip_stale` into a chain of their own pays for neither numba nor orbax.
_HOMES = {
  'data.base': ('BatchSource', 'ColumnBatches', 'Columns'),
  'errors': ('UserError',),
  'models.dlrm': ('DLRM',),
  'models.tbsm': ('TBSM',),
  'packed.dataset': ('packed_dataset',),
  'placement': ('PLACEMENTS', 'cached'),
  'runtime': ('reuse_host_memory',),
  'schedules.settings': ('Settings',),
  'schedules.phases': ('Phases',),
  'selection.hot': ('hot_rows', 'popular_rows'),
  'selection.policies': ('POLICIES',),
  'table_set': ('TableSet',),
  'tables': ('Feature', 'Table'),
  'saving.checkpoint': ('Checkpoints',),
  'training.evaluate': ('evaluate', 'predict'),
  'training.loop': ('train',),
  'training.recipe': ('Recipe',),
  'training.parts': ('make_parts', 'planned', 'slipstream'),
  'transforms.rowwise': ('ROW_OPTIMIZERS', 'adagrad', 'rowwise_adagrad'),
  'transforms.skip': ('skip_stale',),
  'types': ('Batch',),
}

__all__ = [
  'DLRM',
  'PLACEMENTS',
  'POLICIES',
  'ROW_OPTIMIZERS',
  'TBSM',
  'Batch',
  'BatchSource',
  'Checkpoints',
  'ColumnBatches',
  'Columns',
  'Feature',
  'Phases',
  'Recipe',
  'Settings',
  'Table',
  'TableSet',
  'UserError',
  'adagrad',
  'cached',
  'evaluate',
  'hot_rows',
  'make_parts',
  'packed_dataset',
  'planned',
  'popular_rows',
  'predict',
  'reuse_host_memory',
  'rowwise_adagrad',
  'skip_stale',
  'slipstream',
  'train',
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
