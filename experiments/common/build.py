"""Makes a trainer of a config, and the batches that it trains on."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import tempfile

import jax
import ml_collections
import numpy as np

from experiments.common import interrupts
from experiments.common.models import (
  dense_optimizer,
  model_of,
  row_optimizer,
)
from slipstream_jax.data.profile import row_uses, spread
from slipstream_jax.data.source import BatchSource, Dataset
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.errors import choose, UserError
from slipstream_jax.files import Path
from slipstream_jax.initializers import Uniform
from slipstream_jax.models.normalization import NORMALIZATIONS
from slipstream_jax.models.towers import has_sides
from slipstream_jax.placement import cached, Placement, PLACEMENTS
from slipstream_jax.schedules.base import ScheduleSpec
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.schedules.systems import SCHEDULES, System, SYSTEMS
from slipstream_jax.selection.hot import (
  CUTS,
  hot_rows,
  popular_rows_of_groups,
)
from slipstream_jax.selection.policies import POLICIES
from slipstream_jax.store.base import Storage
from slipstream_jax.store.tiered import STORES
from slipstream_jax.tables import Table, TableSet
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.divided import divided, towers_of
from slipstream_jax.training.evaluate import evaluate
from slipstream_jax.training.metrics import Metrics
from slipstream_jax.training.recipe import Recipe, TrainState
from slipstream_jax.training.retrieval import ranked
from slipstream_jax.training.trainer_parts import (
  make_parts,
  scheduled,
  slipstream,
  TrainerParts,
)
from slipstream_jax.types import HotRows


def total_steps(config: ml_collections.ConfigDict, data: Dataset) -> int:
  """Returns the batches that a run reads: train.steps, or those of its epochs.

  Raises:
    UserError: there are none.
  """
  steps = config.train.steps
  if not steps and data.train_examples is None:
    steps = config.train.endless_steps
  elif not steps:
    per_epoch = data.train_examples // config.data.batch_size
    steps = config.train.epochs * per_epoch
  if steps < 1:
    raise UserError(
      'a run needs at least one step',
      got=steps,
      where='config.train.steps',
      hint='set it, or a batch size that the file can fill',
    )
  return steps


def recipe(
  config: ml_collections.ConfigDict, data: Dataset, steps: int
) -> Recipe:
  """Returns model, tables and optimizers, for a run of `steps` batches.

  Raises:
    UserError: a name or an argument does not exist.
  """
  model, optimizer = config.model, config.optimizer
  choose(NORMALIZATIONS, model.normalization, 'config.model.normalization')
  return Recipe(
    model=model_of(model),
    tables=tables(config, data),
    row_optimizer=row_optimizer(optimizer, steps),
    microbatches=system(config).microbatches,
    skips_bad_steps=config.train.on_bad_loss == 'skip',
    dense_optimizer=dense_optimizer(optimizer, steps),
  )


def tables(config: ml_collections.ConfigDict, data: Dataset) -> TableSet:
  """Returns the data set's tables, with the config's dims, dtype and pooling.

  Raises:
    UserError: there are not as many dims as tables.
  """
  model = config.model
  dims = model.get('dims')
  if dims is None:
    dims = (model.dim,) * len(data.sizes)
  if len(dims) != len(data.sizes):
    raise UserError(
      f'config.model.dims must have a dim for each of {len(data.sizes)} tables',
      got=len(dims),
      where='config.model.dims',
      hint='give as many, or leave it out',
    )
  scale = model.init_scale
  table = Table(
    vocabulary_size=1,  # replaced for each
    dtype=model.table_dtype,
    initializer=None if scale is None else Uniform(scale),
  )
  features = dict(data.features)
  if model.pooling is not None:
    features = {
      name: feature._replace(combiner=model.pooling)
      for name, feature in features.items()
    }
  return TableSet(
    {
      name: table._replace(vocabulary_size=size, embedding_dim=dim)
      for (name, size), dim in zip(data.sizes.items(), dims, strict=True)
    },
    features,
  )


def skips(config: ml_collections.ConfigDict) -> bool:
  """Whether the config asks for Slipstream."""
  return config.skip.mode != 'off'


def hot(
  config: ml_collections.ConfigDict, data: Dataset, recipe: Recipe
) -> HotRows | None:
  """Returns the most popular rows that fit the budget; None if unneeded.

  The data set counted the uses of each row, or a sample of it is counted.
  """
  tables = recipe.tables
  places = placements(config, tables)
  watched = skips(config) or regroups(config)
  watched = watched or any(compiled_of(recipe).judges)
  if not watched and not any(place.needs_hot for place in places):
    return None
  counts = row_counts(config, data, tables.num_rows)
  capacities = [place.capacity for place in places]
  if not watched and None not in capacities:  # to warm caches
    rooms = [capacity or 1 for capacity in capacities]
    rows = popular_rows_of_groups(counts, tables, rooms)
  else:
    sizes = compiled_of(recipe).row_bytes_by_table()
    cut = choose(CUTS, config.hot.cut, 'config.hot.cut')
    rows = cut(counts, config.hot.bytes, sizes, tables.offsets)
  return hot_rows(rows, tables.num_rows)


def row_counts(
  config: ml_collections.ConfigDict, data: Dataset, num_rows: int
) -> np.ndarray:
  """Returns the uses of each row, integer[N], in the data or in a sample."""
  size, learn = config.data.batch_size, config.hot.learn_batches
  if learn:
    with contextlib.closing(data.train(size)) as source:
      first = (batch.lookups for batch in itertools.islice(source, learn))
      return row_uses(first, num_rows)
  if data.counts is not None:
    return data.counts()
  source = (data.profile or data.train)(size)
  wanted = min(config.hot.profile_examples, data.train_examples or 1 << 62)
  whole = max(1, wanted // size) * size
  # An endless stream is alike all along, unless its popularity drifts.
  drifts = config.data.get('drift_examples', 0) > 0
  batches = total_steps(config, data) if drifts else None
  profile = (batch.lookups for batch in spread(source, whole, batches))
  counts = row_uses(profile, num_rows)
  source.close()
  return counts


def trainer(
  config: ml_collections.ConfigDict,
  data: Dataset,
  recipe: Recipe,
  hot: HotRows | None,
) -> TrainerParts:
  """Returns the trainer of a config.

  Raises:
    UserError: an invalid combination of settings.
  """
  places = placements(config, recipe.tables)
  rows = system(config).rows
  dense = data.dense_features
  kept = storage(config)
  towers = towers_of(recipe.model, recipe.tables, config.hosts)
  how = config.parts, config.exchange, config.replicas, config.hosts
  over = divided(config.devices, *how, towers)
  return make_parts(
    recipe, places, dense, config.seed, hot, rows, kept, over=over
  )


def storage(config: ml_collections.ConfigDict) -> Storage:
  """Returns the storage of rows that are not on the device."""
  store = config.store
  make = choose(STORES, store.kind, 'config.store.kind')
  return make(store.dram_bytes, store_folder(config), tuple(store.whole))


def store_folder(config: ml_collections.ConfigDict) -> str:
  """Returns the folder of rows that are kept on a disk."""
  folder: str = config.store.path or tempfile.gettempdir()
  return folder


def table_bytes(recipe: Recipe) -> int:
  """Returns the bytes of all rows with their row state."""
  groups = zip(recipe.tables.groups, compiled_of(recipe).row_bytes, strict=True)
  return sum(group.num_rows * size for group, size in groups)


def checkpoint_bytes(recipe: Recipe, state: TrainState) -> int:
  """Returns the bytes of a checkpoint of all rows and of the dense state."""
  dense = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  return table_bytes(recipe) + dense


def placements(
  config: ml_collections.ConfigDict, tables: TableSet
) -> tuple[Placement, ...]:
  """Returns the placement of each group of tables."""
  name = system(config).placement or config.placement
  if name != 'cached':
    every = {**PLACEMENTS, 'cached': None}  # so that all of them are listed
    choose(every, name, 'config.placement')
    return (PLACEMENTS[name],) * len(tables.groups)
  cache, rows = config.cache, cache_rows(config, tables.num_rows)
  return tuple(
    cached(
      max(1, round(rows * group.num_rows / tables.num_rows)),
      cache.eviction,
      cache.look_ahead_batches,
    )
    for group in tables.groups
  )


def cache_rows(config: ml_collections.ConfigDict, num_rows: int) -> int:
  """Returns the rows that `config.cache.capacity` has room for.

  Raises:
    UserError: the capacity is out of range.
  """
  capacity = config.cache.capacity
  if not 0 < capacity <= num_rows or capacity != capacity:
    raise UserError(
      f'config.cache.capacity must be above 0 and at most {num_rows} rows',
      got=capacity,
      where='config.cache.capacity',
      hint='give a share of the rows up to 1, or a number of rows',
    )
  return round(capacity if capacity > 1 else capacity * num_rows)


def batches(
  config: ml_collections.ConfigDict,
  trainer: TrainerParts,
  data: Dataset,
  steps: int,
) -> PlannedBatches:
  """Returns planned batches of the first `steps` batches of the source.

  Raises:
    UserError: an invalid combination of settings.
  """
  source, depth = data.train(config.data.batch_size), config.prefetch_batches
  workers = config.workers
  spec = order_of(config, data, steps)
  if not skips(config):
    return scheduled(trainer, source, spec, depth, workers)
  settings, regrouping = skip_settings(config, steps), spec.regrouping
  # A source in another order ends by itself, and has more batches.
  ends = regrouping is not None and regrouping.order is not None
  most = None if ends else steps
  ahead = depth, workers
  return slipstream(trainer, source, settings, most, *ahead, regrouping)


def evaluated(
  config: ml_collections.ConfigDict,
  trainer: TrainerParts,
  data: Dataset,
  max_batches: int | None = None,
) -> Metrics:
  """Returns metrics of held-out examples, of all or of some batches.

  Those of a model of users and items have also how well it ranks all items.

  Raises:
    UserError: examples cannot be scored.
    KeyboardInterrupt: a signal came.
  """

  def test() -> BatchSource:
    return interrupts.Checked(data.test(config.eval.batch_size))

  metrics = evaluate(trainer, test(), max_batches)
  if not has_sides(trainer.recipe.model):
    return metrics
  size = config.eval.batch_size
  with contextlib.ExitStack() as opened:
    passes = [
      opened.enter_context(contextlib.closing(interrupts.Checked(part(size))))
      for part in data.known or (data.train,)
    ]
    most = None  # a pass over a stream is as long as its profile
    if not data.known:
      examples = data.train_examples or config.hot.profile_examples
      most = -(-examples // size)
    known = itertools.islice(itertools.chain.from_iterable(passes), most)
    ranks = ranked(trainer, test, known, max_batches)
  return dataclasses.replace(metrics, values={**metrics.values, **ranks})


def system(config: ml_collections.ConfigDict) -> System:
  """Returns the config's system: schedule, placement and what is moved."""
  return choose(SYSTEMS, config.system, 'config.system')


def regroups(config: ml_collections.ConfigDict) -> bool:
  """Whether the config's system changes the order of the examples."""
  return system(config).schedule != 'plain'


def order_of(
  config: ml_collections.ConfigDict, data: Dataset, steps: int
) -> ScheduleSpec:
  """Returns the schedule of the config's system, for `steps` batches."""
  name = system(config).schedule
  make = SCHEDULES[name]
  if name == 'plain':
    return make()
  if name == 'hotline':
    return make(batches=steps, learn=config.hot.learn_batches)
  if name != 'fae':
    return make(batches=steps)
  held_out = data.test(config.eval.batch_size)
  first = next(held_out)
  held_out.close()
  batches, passes = _passes(config, data, steps)
  return make(batches, first, passes=passes)


def _passes(
  config: ml_collections.ConfigDict, data: Dataset, steps: int
) -> tuple[int, int]:
  """Returns the batches of a pass over the source, and the passes of a run."""
  per_epoch = (data.train_examples or 0) // config.data.batch_size
  batches = min(per_epoch or steps, steps)
  return batches, -(-steps // batches)


def most_steps(
  config: ml_collections.ConfigDict, data: Dataset, steps: int
) -> int:
  """Returns the most steps that a run takes for `steps` batches.

  Regrouping makes more batches, because the last of each kind may not be full.
  """
  if not regroups(config):
    return steps
  return steps + 2 * _passes(config, data, steps)[1]


def skip_settings(
  config: ml_collections.ConfigDict, steps: int | None = None
) -> Skip:
  """Returns the settings of `config.skip`.

  Args:
    config: the run's config.
    steps: batches that the run reads. None if the end of skipping is unneeded.

  Raises:
    UserError: the policy does not exist, or `until` is out of range.
  """
  skip = config.skip
  lengths = (
    *(skip.warm_up_batches, skip.window_batches),
    *(skip.settle_batches, skip.period_batches),
  )
  fits = lengths == (None,) * 4 and not skip.warm_up_again
  return Skip(
    mode=skip.mode,
    policy=skip.policy and choose(POLICIES, skip.policy, 'config.skip.policy'),
    drop=skip.drop,
    drop_of=skip.drop_of,
    refit=skip.refit_batches,
    refill=skip.refill,
    uniform=skip.uniform,
    until=_until(skip.until, steps),
    scorer=skip.scorer,
    auto_cost=skip.auto_cost,
    phases=None if fits else Phases(*lengths, skip.warm_up_again),
    alpha=skip.alpha,
    min_touches=skip.min_touches,
    threshold=skip.threshold,
    seed=config.seed,
  )


def _until(share: float | None, steps: int | None) -> int | None:
  if share is None:
    return None
  if not 0 <= share <= 1:  # NaN compares as False
    raise UserError(
      'skipping must end at a share of the run, in [0, 1]',
      got=share,
      where='config.skip.until',
      hint='give 0.875 to train the last eighth whole, or leave it out',
    )
  return None if steps is None else round(share * steps)


def no_disk(config: ml_collections.ConfigDict) -> str | None:
  """Returns a warning if rows for a disk would be kept in memory (tmpfs)."""
  if config.store.kind == 'memory':
    return None
  folder = store_folder(config)
  if not in_memory(folder):
    return None
  return (
    f'{folder} is memory (tmpfs): rows there save none. Name a folder of a '
    'disk: --config.store.path'
  )


def in_memory(folder: Path) -> bool:
  """Whether a folder is on a memory file system such as tmpfs.

  False if the system does not say, or the folder does not exist.
  """
  try:
    device = os.stat(folder).st_dev
    mounts = pathlib.Path('/proc/self/mountinfo').read_text().splitlines()
  except OSError:
    return False
  number = f'{os.major(device)}:{os.minor(device)}'
  # Fields: number, parent, device, ..., a dash, and the file system's type.
  for mount in mounts:
    words = mount.split()
    if words[2] == number:
      return words[words.index('-') + 1] in {'tmpfs', 'ramfs'}
  return False
