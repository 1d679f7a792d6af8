"""Measures training speed: end to end, by phase, and beside PyTorch.

    python -m experiments.bench --config=configs/criteo.py [--json=FILE]

Times on a shared machine wander, so contenders run in alternation in one
process, on the same batches, and the claim is the ratio of their medians.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import itertools
import pathlib
import platform
import time
from typing import Any

from absl import flags
import jax
import ml_collections
import numpy as np
from rich.console import Console

from experiments.bench import baselines as baselines
from experiments.bench import contest
from experiments.bench import link as bench_link
from experiments.bench import products as bench_products
from experiments.bench import rows as bench_rows
from experiments.common import cli, datasets, errors, record, report
from experiments.common.progress import Bar
from experiments.common.workdir import writable
from slipstream_jax.data.source import Dataset
from slipstream_jax.engine.buffers import to_device
from slipstream_jax.engine.planner import PlannedBatch
from slipstream_jax.training.trainer_parts import planned, TrainerParts
from slipstream_jax.types import Batch

_JSON = flags.DEFINE_string('json', None, 'File to write the figures to.')
_ROUNDS = flags.DEFINE_integer(
  'rounds', 8, 'Turns that each contender takes.', lower_bound=1
)
_STEPS = flags.DEFINE_integer('steps', 25, 'Steps of one turn.', lower_bound=3)
_COUNTED = flags.DEFINE_integer(
  'counted',
  600,
  'Batches over which moved rows are counted; 0: not at all.',
  lower_bound=0,
)
_PRODUCTS = 'products'
_EXAMPLES = 300 * 2048  # premade; so many that their rows do not fit a cache


def main(config: ml_collections.ConfigDict) -> None:
  """Measures and prints; writes the figures with --json."""
  errors.check(config)
  screen = report.console()
  if _JSON.value:  # known to be writable before minutes are spent
    writable(str(pathlib.Path(_JSON.value).parent), '--json')
  config.skip.mode = 'off'  # every batch costs the same
  with Bar(screen, None, 'batch', 'reading') as bar:
    figures = _measured(config, bar)
  _show(screen, figures)
  if _JSON.value:
    record.write_json(pathlib.Path(_JSON.value), figures)


def _measured(config: ml_collections.ConfigDict, bar: Bar) -> dict[str, Any]:
  """All figures; the bar is told what is measured."""
  data = datasets.dataset(config)
  source = data.train(config.data.batch_size)
  count = -(-_EXAMPLES // config.data.batch_size)
  bar.begin('reading', count)
  batches = []
  for batch in itertools.islice(source, count):
    batches.append(batch)
    bar.show(len(batches))
  source.close()
  figures = _machine(config, data)
  figures |= _end_to_end(config, data, bar)
  figures['phases'] = _phases(config, data, batches, bar)
  figures['products_ms'] = figures['phases'].pop(_PRODUCTS)
  contenders = contest.Contest(
    config, data, batches, _ROUNDS.value, _STEPS.value, bar
  )
  figures['cached'] = contest.beside_resident(contenders)
  figures['baselines'] = contest.beside_baselines(contenders)
  if _COUNTED.value:
    figures |= _rows(config, data, bar)
  return figures


def _machine(
  config: ml_collections.ConfigDict, data: Dataset
) -> dict[str, Any]:
  device = jax.devices()[0]
  return {
    'data': data.name,
    'device': f'{device.device_kind}, {platform.machine()}',
    'cpu': bench_products.cpu(),
    'jax': jax.__version__,
    'batch_size': config.data.batch_size,
    'placement': config.placement,
    'row_optimizer': ', '.join(n for n, _ in config.optimizer.rows),
    'baselines_absent': {
      n: why for n in baselines.BASELINES if (why := baselines.absent(n))
    },
  }


def _end_to_end(
  config: ml_collections.ConfigDict, data: Dataset, bar: Bar
) -> dict[str, Any]:
  """Examples/s of the config as it stands, its data source included.

  And what of the link its rows take.
  """
  bar.begin('end to end', _ROUNDS.value, 'turn')
  trainer = contest.trainer_of(config, data)
  batches = planned(
    trainer,
    data.train(config.data.batch_size),
    config.prefetch_batches,
    config.workers,
  )
  contest.turn_of(trainer, batches, _STEPS.value)  # compiles
  before = trainer.engine.counters
  seconds = []
  for turn in range(_ROUNDS.value):
    seconds.append(contest.turn_of(trainer, batches, _STEPS.value))
    bar.show(turn + 1)
  batches.close()
  after, steps = trainer.engine.counters, _STEPS.value * _ROUNDS.value
  moved = (
    (after.bytes_loaded - before.bytes_loaded) / steps,
    (after.bytes_stored - before.bytes_stored) / steps,
  )
  step_seconds = float(np.median(seconds)) / _STEPS.value
  return {
    'examples_per_s': config.data.batch_size / step_seconds,
    'link': bench_link.used(bench_link.speeds(), moved, step_seconds),
  }


def _phases(
  config: ml_collections.ConfigDict,
  data: Dataset,
  batches: Sequence[Batch],
  bar: Bar,
) -> dict[str, float]:
  """Median ms of each phase of a step, one after the other, none hidden.

  And of its matrix products by themselves.
  """
  bar.begin('phases of a step', 2 * _STEPS.value, 'step')
  trainer = contest.trainer_of(config, data)
  source = data.train(config.data.batch_size)
  stream = planned(trainer, contest.Replay(batches), 0)
  spent: dict[str, list[float]] = {}

  def timed(phase: str, call: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = jax.block_until_ready(call())
    spent.setdefault(phase, []).append(1e3 * (time.perf_counter() - started))
    return result

  for step in range(2 * _STEPS.value):
    bar.show(step)
    timed('data', functools.partial(next, source))
    item = timed('plan', functools.partial(next, stream))
    args = timed('load', functools.partial(_load, trainer, item))
    if not step:
      update = trainer.update, trainer.state, *args
      products = bench_products.alone(bench_products.products_of(*update))
    # In alternation with the step whose products they are.
    timed(_PRODUCTS, products)
    trainer.state, blocks, _ = timed(
      'step', functools.partial(trainer.update, trainer.state, *args)
    )
    timed('store', functools.partial(trainer.engine.store, item.plans, blocks))
  stream.close()
  source.close()
  return {phase: float(np.median(ms[5:])) for phase, ms in spent.items()}


def _load(trainer: TrainerParts, item: PlannedBatch) -> tuple[Any, ...]:
  blocks = trainer.engine.load(item.plans)
  inverses = tuple(plan.inverse for plan in item.plans)
  host = inverses, item.batch, np.float32(0), item.row_weights
  return blocks, *to_device(host)


def _rows(
  config: ml_collections.ConfigDict, data: Dataset, bar: Bar
) -> dict[str, Any]:
  """What each placement moves, and the engine by itself."""
  num_rows = sum(data.sizes.values())
  bar.begin('rows that move', unit='placement')
  moved = []
  for by in bench_rows.moved_by_placements(
    config, data, num_rows, _COUNTED.value
  ):
    moved.append(by._asdict())
    bar.show(len(moved), f'{by.placement} {by.policy}')
  sizes, speeds = bench_rows.sizes_that_fit(), {}
  bar.begin('engine alone', len(sizes), 'table')
  for size in sizes:
    speeds[size] = bench_rows.engine_speed(size)
    bar.show(len(speeds))
  return {
    'placements': moved,
    'engine': {
      'lookups_per_s': speeds[max(speeds)],
      'lookups_per_s_by_rows': speeds,
    },
  }


def _show(screen: Console, figures: dict[str, Any]) -> None:
  """Prints the figures for people to read."""

  def say(template: str, values: dict[str, Any]) -> None:
    screen.print(template.format(**values), highlight=False)

  say(
    '{data}\n{cpu}\n{device}, jax {jax}, batch {batch_size}, {placement} with '
    '{row_optimizer}\nend to end: {examples_per_s:,.0f} examples/s',
    figures,
  )
  for title, frame in _frames(figures):
    if frame:
      screen.print(report.table(title, frame))
  say(
    'cache of {capacity:.1%} of the rows: {examples_per_s:,.0f} examples/s, '
    '{ratio_to_resident:.2f} of resident',
    figures['cached'],
  )
  for name, why in figures['baselines_absent'].items():
    say('without {name}: {why}', {'name': name, 'why': why})


def _frames(
  figures: dict[str, Any],
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
  """Titles and frames; these are empty where nothing was measured."""
  phases, link = figures['phases'], figures['link']
  whole = sum(phases.values())
  yield (
    'phases, one after the other',
    [
      {'phase': name, 'ms per step': ms, 'share': ms / whole}
      for name, ms in phases.items()
    ],
  )
  parts = {
    'GB/s': 'gb_per_s',
    'bytes per step': 'bytes_per_step',
    'share of step': 'share_of_step',
  }
  products = figures['products_ms']
  yield (
    'the step beside its matrix products alone',
    [
      {
        'step ms': phases['step'],
        'products ms': products,
        'share of the limit': products / phases['step'],
      }
    ],
  )
  yield (
    'rows on the link',
    [
      {'way': way}
      | {name: link[f'{way}_{part}'] for name, part in parts.items()}
      for way in ('load', 'store')
    ],
  )
  yield (
    'the same batches in PyTorch, in alternation',
    [
      {'baseline': name, **baseline}
      for name, baseline in figures['baselines'].items()
    ],
  )
  yield (
    'rows that move in a step; ms to plan it',
    figures.get('placements', []),
  )
  speeds = figures.get('engine', {}).get('lookups_per_s_by_rows', {})
  yield (
    'engine alone, one thread',
    [{'rows': rows, 'lookups_per_s': speed} for rows, speed in speeds.items()],
  )


if __name__ == '__main__':
  cli.run(main)
