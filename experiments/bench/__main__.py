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
from rich.table import Table as ShownTable

from experiments.bench import baselines as peers
from experiments.bench import contest
from experiments.bench import link as bench_link
from experiments.bench import rows as bench_rows
from experiments.bench import sums as bench_sums
from experiments.common import build, cli, datasets, record, report
from slipstream_jax.data.base import Dataset
from slipstream_jax.placement import bucket
from slipstream_jax.store.host_table import distinct
from slipstream_jax.stream.buffers import to_device
from slipstream_jax.stream.pipeline import PlannedBatch
from slipstream_jax.train.trainer import planned, Trainer
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
_INPUTS = 300 * 2048  # premade; so many that their rows do not fit a cache


def main(config: ml_collections.ConfigDict) -> None:
  """Measures and prints; writes the figures with --json."""
  build.check(config)
  shown = report.console()
  config.skip.mode = 'off'  # every batch costs the same
  data = datasets.dataset(config)
  source = data.train(config.data.batch_size)
  count = -(-_INPUTS // config.data.batch_size)
  batches = list(itertools.islice(source, count))
  source.close()
  figures = _machine(config, data)
  figures |= _end_to_end(config, data)
  figures['phases'] = _phases(config, data, batches)
  figures['gradient_sums'] = _gradient_sums(config, data, batches[0])
  contenders = contest.Contest(
    config, data, batches, _ROUNDS.value, _STEPS.value
  )
  figures['cached'] = contest.beside_resident(contenders)
  figures['peers'] = contest.beside_peers(contenders)
  if _COUNTED.value:
    figures |= _rows(config, data)
  shown.print(
    '{data}\n{device}, jax {jax}, batch {batch_size}, {placement} with '
    '{row_optimizer}\nend to end: {samples_per_s:,.0f} samples/s'.format(
      **figures
    ),
    highlight=False,
  )
  for table in _tables(figures):
    shown.print(table)
  shown.print(
    'cache of {capacity:.1%} of the rows: {samples_per_s:,.0f} samples/s, '
    '{ratio_to_resident:.2f} of resident'.format(**figures['cached']),
    highlight=False,
  )
  for name, why in figures['peers_absent'].items():
    shown.print(f'without {name}: {why}', highlight=False)
  if _JSON.value:
    record.write_json(pathlib.Path(_JSON.value), figures)


def _machine(
  config: ml_collections.ConfigDict, data: Dataset
) -> dict[str, Any]:
  device = jax.devices()[0]
  return {
    'data': data.name,
    'device': f'{device.device_kind}, {platform.machine()}',
    'jax': jax.__version__,
    'batch_size': config.data.batch_size,
    'placement': config.placement,
    'row_optimizer': ', '.join(n for n, _ in config.optimizer.rows),
    'peers_absent': {n: why for n in peers.PEERS if (why := peers.absent(n))},
  }


def _end_to_end(
  config: ml_collections.ConfigDict, data: Dataset
) -> dict[str, Any]:
  """Samples/s of the config as it stands, its data source included.

  And what of the link its rows take.
  """
  trainer = contest.trainer_of(config, data)
  batches = planned(
    trainer, data.train(config.data.batch_size), config.prefetch
  )
  contest.turn_of(trainer, batches, _STEPS.value)  # compiles
  before = trainer.engine.counters
  seconds = [
    contest.turn_of(trainer, batches, _STEPS.value)
    for _ in range(_ROUNDS.value)
  ]
  batches.close()
  after, steps = trainer.engine.counters, _STEPS.value * _ROUNDS.value
  moved = (
    (after.bytes_loaded - before.bytes_loaded) / steps,
    (after.bytes_stored - before.bytes_stored) / steps,
  )
  step_seconds = float(np.median(seconds)) / _STEPS.value
  return {
    'samples_per_s': config.data.batch_size / step_seconds,
    'link': bench_link.used(bench_link.speeds(), moved, step_seconds),
  }


def _phases(
  config: ml_collections.ConfigDict, data: Dataset, batches: Sequence[Batch]
) -> dict[str, float]:
  """Median ms of each phase of a step, one after the other, none hidden."""
  trainer = contest.trainer_of(config, data)
  source = data.train(config.data.batch_size)
  made = planned(trainer, contest.Replay(batches), 0)
  spent: dict[str, list[float]] = {}

  def timed(phase: str, call: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = jax.block_until_ready(call())
    spent.setdefault(phase, []).append(1e3 * (time.perf_counter() - started))
    return result

  for _ in range(2 * _STEPS.value):
    timed('data', functools.partial(next, source))
    item = timed('plan', functools.partial(next, made))
    args = timed('load', functools.partial(_load, trainer, item))
    trainer.state, block, _ = timed(
      'step', functools.partial(trainer.update, trainer.state, *args)
    )
    timed('store', functools.partial(trainer.engine.store, item.plan, block))
  made.close()
  source.close()
  return {phase: float(np.median(ms[5:])) for phase, ms in spent.items()}


def _gradient_sums(
  config: ml_collections.ConfigDict, data: Dataset, batch: Batch
) -> dict[str, float]:
  num_rows = sum(table.rows for table in data.tables)
  found = distinct(batch.lookups, num_rows)
  size = bucket(len(found.rows))
  return bench_sums.times(found.inverse, size, config.model.dim)


def _load(trainer: Trainer, item: PlannedBatch) -> tuple[Any, ...]:
  block = trainer.engine.load(item.plan)
  host = item.plan.inverse, item.batch, np.float32(0), item.row_weights
  return block, *to_device(host)


def _rows(config: ml_collections.ConfigDict, data: Dataset) -> dict[str, Any]:
  """What each placement moves, and the engine by itself."""
  num_rows = sum(table.rows for table in data.tables)
  moved = bench_rows.moved_by_placements(config, data, num_rows, _COUNTED.value)
  speeds = {
    size: bench_rows.engine_speed(size) for size in bench_rows.sizes_that_fit()
  }
  return {
    'placements': [each._asdict() for each in moved],
    'engine': {
      'lookups_per_s': speeds[max(speeds)],
      'lookups_per_s_by_rows': speeds,
    },
  }


def _tables(figures: dict[str, Any]) -> Iterator[ShownTable]:
  phases = figures['phases']
  table = ShownTable(title='phases, one after the other', title_justify='left')
  for name in ('phase', 'ms per step', 'share'):
    table.add_column(name, justify='left' if name == 'phase' else 'right')
  for phase, ms in phases.items():
    share = ms / sum(phases.values())
    table.add_row(phase, f'{ms:.2f}', f'{share:.1%}')
  yield table
  yield bench_link.table(figures['link'])
  yield bench_sums.table(figures['gradient_sums'])
  if figures['peers']:
    table = ShownTable(title='the same batches in PyTorch, in alternation')
    for name in ('peer', 'samples/s', 'ours', 'ratio'):
      table.add_column(name, justify='left' if name == 'peer' else 'right')
    for name, peer in figures['peers'].items():
      table.add_row(
        name,
        f'{peer["samples_per_s"]:,.0f}',
        f'{peer["ours_samples_per_s"]:,.0f}',
        f'{peer["ratio"]:.2f}',
      )
    yield table
  if 'placements' in figures:
    yield from bench_rows.tables(figures)


if __name__ == '__main__':
  cli.run(main)
