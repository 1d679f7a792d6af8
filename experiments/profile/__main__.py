r"""Says before training what each placement would move, and picks one.

    python -m experiments.profile --config=configs/criteo.py \
        [--steps=300] [--device_bytes=N] [--host_bytes=N] [--check_steps=100] \
        [--workdir=DIR]

Part of a sample tells which rows are popular, another part is judged: plans are
made as in training, so their counts are those of a run on these batches,
and curves give the hit rate of every capacity. It then trains a while with
what it picked and lays the outcome beside the prediction. What does not fit the
host's memory either goes to a disk: it says of each table which tier answers
how many of its lookups. Writes profile.json and hit_rate.png.
"""

from collections.abc import Iterator
import itertools
import os
import pathlib
import re
from typing import Any

from absl import flags
import jax
import ml_collections
import numpy as np

from experiments.common import build, cli, datasets, errors, record, report
from experiments.common.progress import Bar
from experiments.common.workdir import made_folder
from experiments.profile import report as profile_report
from experiments.profile import tiers
from experiments.profile.predictions import (
  Need,
  predict,
  Prediction,
  recommend,
  Sample,
)
from slipstream_jax.data.profile import row_uses
from slipstream_jax.data.source import BatchSource, Dataset
from slipstream_jax.errors import UserError
from slipstream_jax.placement.sizing import (
  capacity_grid,
  Curve,
  lru_curve,
  static_curve,
)
from slipstream_jax.selection.hot import hot_rows, popular_rows
from slipstream_jax.store.host_table import unique_rows
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.loop import train
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import planned
from slipstream_jax.types import Lookups

_STEPS = flags.DEFINE_integer(
  'steps', 300, 'Batches to judge placements on.', lower_bound=1
)
_CHECKED = flags.DEFINE_integer(
  'check_steps',
  100,
  'Steps to train with what was picked; 0: none.',
  lower_bound=0,
)
_DEVICE_BYTES = flags.DEFINE_integer(
  'device_bytes', None, 'Device memory to use; None: 4/5 of the device.'
)
_HOST_BYTES = flags.DEFINE_integer(
  'host_bytes', None, 'Host memory to use; None: 4/5 of what is available.'
)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/profile', 'Folder to write to.')

ASSUMED_BYTES = 1 << 30
"""Device memory, where the device does not tell."""
_FOLLOWED = 2_000_000  # rows; of more, curves follow a sample


def main(config: ml_collections.ConfigDict) -> None:
  """Predicts, recommends, and trains a while to see."""
  errors.check(config)
  config.skip.mode = 'off'  # placements are judged on all examples
  with made_folder(_WORKDIR.value, '--workdir') as workdir:
    _profile(config, workdir)


def _profile(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Does so in a folder that is there."""
  screen = report.console()
  data = datasets.dataset(config)
  recipe = build.recipe(config, data, steps=1 << 20)
  need = needs(recipe, data)
  budget, whose = device_budget()
  screen.print(data.name, highlight=False)
  with Bar(screen, None, 'batch', 'sampling') as bar:
    sample = take_sample(config, data, need.num_rows, _STEPS.value, bar)
    bar.begin('hit rates', 1, 'curve')
    curves = _curves(sample, recipe.tables.offsets)
    bar.begin('placements', unit='placement')
    predictions = []
    for prediction in predict(sample, need, budget):
      predictions.append(prediction)
      bar.show(len(predictions), f'{prediction.placement} {prediction.policy}')
  picked = recommend(predictions, budget)
  screen.print(profile_report.table(predictions, picked, budget))
  screen.print(
    profile_report.advice(picked, need.row, sample.look_ahead, budget, whose),
    highlight=False,
  )
  names = [*data.sizes]
  below = tiers.tiers_of(picked, need, curves['LRU'], host_budget())
  screen.print(tiers.advice(below), highlight=False)
  lookups = curves['LRU'].lookups.tolist()
  if below.store != 'memory':
    screen.print(
      report.table(
        f'on a disk: {below.rows_read:,.0f} rows read per step',
        tiers.frame(below, dict(data.sizes), lookups),
      )
    )
  figures: dict[str, Any] = {
    'data': data.name,
    'batch_size': config.data.batch_size,
    'steps': len(sample.batches),
    'device_bytes': budget,
    'predictions': [p._asdict() for p in predictions],
    'recommended': picked._asdict(),
    'tiers': below._asdict(),
  }
  profile_report.plot(
    workdir / 'hit_rate.png', curves, predictions, names, sample.largest
  )
  if _CHECKED.value:
    with Bar(screen, _CHECKED.value, 'step', 'training') as bar:
      outcome = check(config, data, picked, sample, bar)
    screen.print(profile_report.outcome_table(picked, outcome))
    figures['outcome'] = outcome
  record.write_json(workdir / 'profile.json', figures)
  screen.print(f'wrote {workdir}/profile.json and hit_rate.png')


def device_budget() -> tuple[int, str]:
  """Device memory to use in bytes, and whose word it is."""
  if _DEVICE_BYTES.value is not None:
    return _DEVICE_BYTES.value, 'given by --device_bytes'
  memory = jax.devices()[0].memory_stats() or {}
  if 'bytes_limit' in memory:
    return int(0.8 * memory['bytes_limit']), '4/5 of what the device has'
  return ASSUMED_BYTES, 'assumed: the device does not tell; see --device_bytes'


def host_budget() -> int:
  """Host memory for tables and planner, in bytes."""
  if _HOST_BYTES.value is not None:
    return _HOST_BYTES.value
  facts = pathlib.Path('/proc/meminfo')
  text = facts.read_text() if facts.exists() else ''
  free = re.search(r'MemAvailable: +(\d+) kB', text)
  pages = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  return int(0.8 * (1024 * int(free[1]) if free else pages))


def needs(recipe: Recipe, data: Dataset) -> Need:
  """Bytes of rows, parameters and their state."""
  programs = compiled_of(recipe)
  state = programs.init_state(data.dense_features, 0)
  (size,) = programs.row_bytes  # data sets of files make one group
  return Need(
    size,
    sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
    recipe.tables.num_rows,
  )


def take_sample(
  config: ml_collections.ConfigDict,
  data: Dataset,
  num_rows: int,
  steps: int,
  bar: Bar,
) -> Sample:
  """Half of a sample to know rows by, and `steps` batches to judge on.

  Raises:
    UserError: the data is too short for both.
  """
  size = config.data.batch_size
  known = max(steps, config.hot.profile_examples // size)
  if data.train_examples is not None:
    whole = data.train_examples // size
    steps, known = min(steps, whole // 2), min(known, whole // 2)
  if steps < 1:
    raise UserError(
      'a profile needs at least two batches',
      got=f'{data.train_examples:,} examples in batches of {size}',
      where='config.data.batch_size',
      hint='set a smaller batch size, or give more examples',
    )
  source = (data.profile or data.train)(size)
  bar.begin('sampling', known + steps)
  lookups = _telling(source, bar)
  counts = row_uses(itertools.islice(lookups, known), num_rows)
  popular = hot_rows(popular_rows(counts, num_rows, 1), num_rows)
  judged: list[Lookups] = list(itertools.islice(lookups, steps))
  source.close()
  batches = [unique_rows(batch, num_rows, popular) for batch in judged]
  return Sample(
    batches,
    popular,
    max(len(batch.rows) for batch in batches),
    config.cache.look_ahead_batches,
    0 if data.profile else known,
  )


def _telling(source: BatchSource, bar: Bar) -> Iterator[Lookups]:
  """Lookups of a source, telling of its batches."""
  for number, batch in enumerate(source):
    yield batch.lookups
    bar.show(number + 1)


def _curves(sample: Sample, starts: np.ndarray) -> dict[str, Curve]:
  grid = capacity_grid(int(starts[-1]))
  followed = min(1.0, _FOLLOWED / max(len(sample.popular.rows), 1))
  popular, batches = sample.popular, sample.batches
  return {
    'LRU': lru_curve(
      batches, starts, grid, first=popular.rows, sample_rate=followed
    ),
    'most popular, pinned': static_curve(batches, starts, grid, popular),
  }


def check(
  config: ml_collections.ConfigDict,
  data: Dataset,
  picked: Prediction,
  sample: Sample,
  bar: Bar,
) -> dict[str, float]:
  """Trains with what was picked; what a step did, in the mean."""
  config = config.copy_and_resolve_references()
  config.placement = picked.placement
  config.cache.capacity = float(picked.rows)
  config.cache.eviction = picked.policy or config.cache.eviction
  recipe = build.recipe(config, data, steps=1 << 20)
  kept = sample.popular.rows[: max(picked.rows, 1)]
  hot = hot_rows(kept, recipe.tables.num_rows)
  trainer = build.trainer(config, data, recipe, hot)
  before = trainer.engine.counters  # what was moved to begin with
  size = config.data.batch_size
  source = data.train(size)
  for _ in range(sample.first):  # of those, the rows are known too well
    next(source)
  with planned(
    trainer, source, config.prefetch_batches, config.workers
  ) as batches:
    for number, at in enumerate(train(trainer, batches, _CHECKED.value)):
      bar.show(number + 1, f'loss {at.loss:.4f}')
  jax.block_until_ready(trainer.state)
  after = trainer.engine.counters
  steps = int(after.examples_seen / size)
  loaded = (after.rows_loaded - before.rows_loaded) / steps
  stored = (after.rows_stored - before.rows_stored) / steps
  return {
    'steps': steps,
    'hit_rate': after.hits / after.lookups,
    'rows_loaded': loaded,
    'rows_stored': stored,
    'device_bytes': sum(array.nbytes for array in jax.live_arrays()),
  }


if __name__ == '__main__':
  cli.run(main)
