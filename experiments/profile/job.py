"""Judges placements on a sample, and trains with the one it recommends."""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import os
import pathlib
from typing import Any

import jax
import ml_collections
import numpy as np
from rich.table import Table

from experiments.common import build, datasets, errors, page, record, report
from experiments.common.machine import memory_left
from experiments.common.progress import Bar
from experiments.common.workdir import made_folder
from experiments.profile.predictions import (
  FOLLOWED,
  Need,
  predict,
  Prediction,
  recommend,
  Sample,
  Tiers,
  tiers_of,
)
from slipstream_jax.data.profile import row_uses
from slipstream_jax.data.source import BatchSource, Dataset
from slipstream_jax.engine.clock import Payoff
from slipstream_jax.errors import UserError
from slipstream_jax.placement.sizing import (
  capacity_grid,
  Curve,
  lru_curve,
  static_curve,
)
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.selection.hot import hot_rows, popular_rows
from slipstream_jax.store.host_table import unique_rows
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.loop import train
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import planned, TrainerParts
from slipstream_jax.types import Lookups

_MARKS = {'lru': ('s', 'c0'), 'lfu': ('^', 'c2'), 'look_ahead': ('o', 'c1')}
_TABLES_SHOWN = 6
_MANY = 1 << 20  # batches, so that no schedule ends


def profile(
  config: ml_collections.ConfigDict,
  steps: int,
  check_steps: int,
  device_bytes: int | None,
  host_bytes: int | None,
  workdir: str,
) -> None:
  """Predicts, recommends, and trains a while to check.

  The arguments are those of the program.

  Raises:
    UserError: bad settings or data, or a device that is too small.
  """
  errors.check(config)
  skipping = config.copy_and_resolve_references()
  config.skip.mode = 'off'  # placements are judged on all examples
  device = _device_budget() if device_bytes is None else device_bytes
  host = _host_budget() if host_bytes is None else host_bytes
  with made_folder(workdir, '--workdir') as folder:
    _profile(config, skipping, folder, steps, check_steps, device, host)


def _profile(
  config: ml_collections.ConfigDict,
  skipping: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  steps: int,
  check_steps: int,
  device_bytes: int,
  host_bytes: int,
) -> None:
  screen = report.console()
  data = datasets.dataset(config)
  recipe = build.recipe(config, data, _MANY)
  need = _needs(recipe, data)
  screen.print(data.name, highlight=False)
  with Bar(screen, None, 'batch', 'sampling') as bar:
    sample = _sample(config, data, need.num_rows, steps, bar)
    bar.begin('hit rates', 1, 'curve')
    lru, pinned = _curves(sample, recipe.tables.offsets)
    bar.begin('placements', unit='placement')
    predictions = []
    for prediction in predict(sample, need, device_bytes):
      predictions.append(prediction)
      bar.show(len(predictions), f'{prediction.placement} {prediction.policy}')
  picked = recommend(predictions, device_bytes)
  tiers = tiers_of(picked, need, lru, host_bytes, sample, data.sizes, pinned)
  screen.print(table(predictions, picked, device_bytes))
  screen.print(
    f'for {report.size(device_bytes)} of device memory: '
    f'{_keys(picked, tiers, need.row, sample.look_ahead)}\n'
    f'which moves {report.size(picked.bytes_moved)} per step in the long run '
    f'and keeps {report.size(picked.device_bytes)} on the device',
    highlight=False,
  )
  if tiers.disk_bytes:
    screen.print(_tiers_in_words(tiers, picked), highlight=False)
    rows = _tier_rows(tiers, data.sizes, lru.lookups)
    screen.print(report.table('where lookups of the busiest tables end', rows))
  drawn = _drawn(lru, pinned, predictions, [*data.sizes], sample.largest)
  drawn.savefig(workdir / 'hit_rate.png', dpi=130)
  figures: dict[str, Any] = {
    'data': data.name,
    'batch_size': config.data.batch_size,
    'steps': len(sample.batches),
    'device_bytes': device_bytes,
    'predictions': [p._asdict() for p in predictions],
    'recommended': picked._asdict(),
    'tiers': tiers._asdict(),
  }
  if check_steps:
    with Bar(screen, check_steps, 'step', 'training') as bar:
      outcome = _check(config, data, picked, sample, check_steps, bar)
    screen.print(outcome_table(picked, outcome))
    figures['outcome'] = outcome
  if check_steps and build.skips(skipping):
    with Bar(screen, None, 'step', 'skipping') as bar:
      paid = _payoff(skipping, data, picked, need.row, sample, check_steps, bar)
    if paid is not None:
      screen.print(_payoff_in_words(paid), highlight=False)
      figures['payoff'] = paid._asdict()
  record.write_json(workdir / 'profile.json', figures)
  screen.print(f'wrote {workdir}/profile.json and hit_rate.png')


def _device_budget() -> int:
  """Returns 4/5 of the device's memory, or 1 GiB on a CPU."""
  memory = jax.devices()[0].memory_stats() or {}
  limit = memory.get('bytes_limit')
  return 1 << 30 if limit is None else int(0.8 * limit)


def _host_budget() -> int:
  """Returns 4/5 of the host memory that is left."""
  pages = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  left = memory_left()
  return int(0.8 * (pages if left is None else left))


def _needs(recipe: Recipe, data: Dataset) -> Need:
  programs = compiled_of(recipe)
  state = programs.init_state(data.dense_features, 0)
  (size,) = programs.row_bytes  # data sets of files make one group
  dense = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  return Need(size, dense, recipe.tables.num_rows)


def _sample(
  config: ml_collections.ConfigDict,
  data: Dataset,
  num_rows: int,
  steps: int,
  bar: Bar,
) -> Sample:
  """Learns popularity from one part of a sample, and keeps another to judge on.

  Raises:
    UserError: the data is too short for both.
  """
  size = config.data.batch_size
  known = max(steps, config.hot.profile_examples // size)
  if data.train_examples is not None:
    half = data.train_examples // size // 2
    steps, known = min(steps, half), min(known, half)
  if steps < 1:
    raise UserError(
      'a profile needs at least two batches',
      got=f'{data.train_examples:,} examples in batches of {size}',
      where='config.data.batch_size',
      hint='set a smaller batch size, or give more examples',
    )
  source = (data.profile or data.train)(size)
  bar.begin('sampling', known + steps)
  lookups = _shown(source, bar)
  counts = row_uses(itertools.islice(lookups, known), num_rows)
  popular = hot_rows(popular_rows(counts, num_rows, 1), num_rows)
  judged = list(itertools.islice(lookups, steps))
  source.close()
  return Sample(
    [unique_rows(batch, num_rows, popular) for batch in judged],
    popular,
    config.cache.look_ahead_batches,
    0 if data.profile else known,
  )


def _shown(source: BatchSource, bar: Bar) -> Iterator[Lookups]:
  for number, batch in enumerate(source):
    yield batch.lookups
    bar.show(number + 1)


def _curves(sample: Sample, starts: np.ndarray) -> tuple[Curve, Curve]:
  """Returns the curves of LRU, and of the most popular rows."""
  grid = capacity_grid(int(starts[-1]))
  rate = min(1.0, FOLLOWED / max(len(sample.popular.rows), 1))
  batches, popular = sample.batches, sample.popular
  return (
    lru_curve(batches, starts, grid, first=popular.rows, sample_rate=rate),
    static_curve(batches, starts, grid, popular),
  )


def _check(
  config: ml_collections.ConfigDict,
  data: Dataset,
  picked: Prediction,
  sample: Sample,
  steps: int,
  bar: Bar,
) -> dict[str, float]:
  """Trains with the recommended placement and returns means per step."""
  trainer = _trainer(config, data, picked, sample, picked.rows)
  before = trainer.engine.counters  # what was moved to begin with
  size = config.data.batch_size
  source = data.train(size)
  for _ in range(sample.first):  # popularity was learned from these
    next(source)
  with planned(
    trainer, source, config.prefetch_batches, config.workers
  ) as batches:
    for number, at in enumerate(train(trainer, batches, steps)):
      bar.show(number + 1, f'loss {at.loss:.4f}')
  jax.block_until_ready(trainer.state)
  after = trainer.engine.counters
  steps = after.examples_seen // size  # as a source may end early
  return {
    'steps': steps,
    'hit_rate': after.hits / after.lookups,
    'rows_loaded': (after.rows_loaded - before.rows_loaded) / steps,
    'rows_stored': (after.rows_stored - before.rows_stored) / steps,
    'device_bytes': sum(array.nbytes for array in jax.live_arrays()),
  }


def _trainer(
  config: ml_collections.ConfigDict,
  data: Dataset,
  picked: Prediction,
  sample: Sample,
  hot: int,
) -> TrainerParts:
  """Returns a trainer with the recommended placement and that many hot rows."""
  config = config.copy_and_resolve_references()
  config.placement = picked.placement
  config.cache.capacity = float(picked.rows)
  config.cache.eviction = picked.policy or config.cache.eviction
  recipe = build.recipe(config, data, _MANY)
  kept = sample.popular.rows[: max(hot, 1)]
  rows = hot_rows(kept, recipe.tables.num_rows)
  return build.trainer(config, data, recipe, rows)


def _payoff(
  config: ml_collections.ConfigDict,
  data: Dataset,
  picked: Prediction,
  row_bytes: int,
  sample: Sample,
  steps: int,
  bar: Bar,
) -> Payoff | None:
  """Trains while leaving examples out, and returns whether that saves time.

  None if the data ends before that is measured.
  """
  skip = config.skip
  phases = build.skip_settings(config).chosen_phases
  # The warm-up is such that whole batches are measured, too.
  skip.warm_up_batches, skip.window_batches = 30, phases.window
  skip.settle_batches, skip.period_batches = phases.settle, phases.period
  if skip.drop == 'auto':  # what it finds later is not known
    skip.drop = Skip().drop
  steps += skip.warm_up_batches + skip.window_batches + skip.settle_batches
  pinned = picked.placement == 'pinned'
  hot = picked.rows if pinned else config.hot.bytes // row_bytes
  trainer = _trainer(config, data, picked, sample, hot)
  with build.batches(config, trainer, data, _MANY) as batches:
    for number, at in enumerate(train(trainer, batches, steps)):
      bar.show(number + 1, f'loss {at.loss:.4f}')
    return batches.clock.payoff()


def _payoff_in_words(paid: Payoff) -> str:
  what = f'leaving out {paid.left_out:.0%} of the examples saves'
  here = f'{paid.step_ms:.3g} ms'
  if paid.step_ms_to_pay is None:
    not_ = '' if paid.pays else 'no '
    return f'{what} {not_}time here, where a step takes the CPU {here}'
  return (
    f'{what} time where a step takes the device more than '
    f'{paid.step_ms_to_pay:.3g} ms; here it takes {here}'
  )


def table(
  predictions: Sequence[Prediction], picked: Prediction, budget: int
) -> Table:
  """Returns the predictions. What does not fit is dim, `picked` is bold."""
  styles = [
    'dim' if p.device_bytes > budget else 'bold' if p == picked else None
    for p in predictions
  ]
  title = (
    'predicted: rows that the device keeps; per step, lookups that hit, rows '
    'loaded and stored, bytes moved; bytes on device and host'
  )
  headings = {
    **{'hit_rate': 'hits', 'rows_loaded': 'loaded', 'rows_stored': 'stored'},
    **{'bytes_moved': 'moved', 'device_bytes': 'device', 'host_bytes': 'host'},
  }
  rows = [p._asdict() for p in predictions]
  return report.table(title, rows, styles, headings)


def outcome_table(picked: Prediction, outcome: Mapping[str, float]) -> Table:
  """Returns the prediction of `picked` beside the outcome."""
  rows = [
    {
      'per step': key.replace('_', ' '),
      'predicted': report.text(key, predicted),
      'outcome': report.text(key, outcome[key]),
      'outcome / predicted': outcome[key] / predicted if predicted else None,
    }
    for key, predicted in picked._asdict().items()
    if key in outcome
  ]
  return report.table(f'{outcome["steps"]} steps of training', rows)


def _keys(
  picked: Prediction, tiers: Tiers, row_bytes: int, look_ahead: int
) -> str:
  """Returns what a command line says for a placement and the store below it."""
  keys: dict[str, Any] = {'placement': picked.placement}
  if picked.placement == 'cached':
    keys |= {'cache.capacity': picked.rows, 'cache.eviction': picked.policy}
  if picked.policy == 'look_ahead':
    keys['cache.look_ahead_batches'] = look_ahead
  if picked.placement == 'pinned':
    keys['hot.bytes'] = picked.rows * row_bytes
  keys |= {'skip.mode': 'off', 'store.kind': tiers.store}  # skipping moves more
  if tiers.store == 'tiered':
    keys['store.dram_bytes'] = tiers.dram_bytes
    if tiers.whole:
      keys['store.whole'] = '"({},)"'.format(','.join(map(repr, tiers.whole)))
  if tiers.disk_bytes:
    keys['store.path'] = 'FOLDER'
  return ' '.join(f'--config.{key}={value}' for key, value in keys.items())


def _tiers_in_words(tiers: Tiers, picked: Prediction) -> str:
  """Returns why rows are on the device, in memory and on the disk."""
  others = len(tiers.uses) - len(tiers.by_table)
  kept = f'{len(tiers.whole)} tables are' if tiers.whole else 'no table is'
  return (
    f'device: rows by popularity, of which a step loads '
    f'{picked.rows_loaded:,.0f}; with whole tables instead it would load '
    f'{tiers.loads_by_table:,.0f}, of the {others} that do not fit\n'
    f'memory: {kept} kept whole, by rows used per row of the table; '
    f'{tiers.rows_read:,.0f} rows are read from the disk per step, and '
    f'{tiers.read_by_lru:,.0f} with one LRU cache for all tables'
  )


def _tier_rows(
  tiers: Tiers, sizes: Mapping[str, int], lookups: np.ndarray
) -> list[dict[str, Any]]:
  """Returns a row for each of the tables that ask the lower tiers most."""
  missed = lookups * (1 - np.array(tiers.shares['device']))
  return [
    {
      'table': [*sizes][t],
      'rows': [*sizes.values()][t],
      'used per step': tiers.uses[t],
    }
    | {f'share of {tier}': parts[t] for tier, parts in tiers.shares.items()}
    | {'whole in memory': 'yes' if [*sizes][t] in tiers.whole else 'no'}
    for t in np.argsort(-missed, kind='stable')[:8]
  ]


def _drawn(
  lru: Curve,
  pinned: Curve,
  predictions: Sequence[Prediction],
  names: Sequence[str],
  largest: int,
) -> Any:
  """Draws hit rate against capacity, of all tables and of the busiest ones."""
  figure, (left, right) = page.figure(4.4, width=11, ncols=2, sharey=True)
  ink, muted = page.color('ink'), page.color('muted')
  left.plot(lru.capacities, 100 * lru.hit_rate, color=ink, label='LRU')
  rate = 100 * pinned.hit_rate
  left.plot(
    pinned.capacities, rate, '--', color=ink, label='most popular, pinned'
  )
  for policy, (mark, color) in _MARKS.items():
    points = [p for p in predictions if p.policy == policy]
    xs, ys = [p.rows for p in points], [100 * p.hit_rate for p in points]
    look = {'color': page.color(color), 'fillstyle': 'none'}
    left.plot(xs, ys, mark, label=f'cached, {policy} (planned)', **look)
  missed = lru.lookups - lru.hits[:, len(lru.capacities) // 2]
  busiest = np.argsort(-missed)[:_TABLES_SHOWN]
  for number, t in enumerate(busiest):
    rate = 100 * lru.hits[t] / max(lru.lookups[t], 1)
    color = page.color(number)
    right.plot(lru.capacities, rate, color=color, label=names[t])
  left.set(title='all tables', ylabel='lookups found on the device, %')
  right.set(title=f'the {len(busiest)} tables that miss most, LRU')
  for axis in (left, right):
    label = 'less than a batch' if axis is left else None
    edges = lru.capacities[0], largest
    axis.axvspan(*edges, color=muted, alpha=0.15, linewidth=0, label=label)
    page.log_axis(axis.xaxis)
    axis.set(xlabel='rows that the device keeps', ylim=(0, 101))
    axis.legend(frameon=False, fontsize=8, loc='lower right')
  return figure
