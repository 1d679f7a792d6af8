"""Measures training end to end, by phase, and beside PyTorch."""

from collections.abc import Iterator
import contextlib
from typing import Any

import ml_collections
import numpy as np
import optax

from experiments.bench import baselines, limits
from experiments.bench.contest import (
  Contest,
  premade,
  Replay,
  seconds_of,
  Stopwatch,
  stream_of,
  take_steps,
  trainer_of,
  Turn,
)
from experiments.bench.runner import Item
from experiments.common import build, cli, datasets, machine
from experiments.common.progress import Bar
from slipstream_jax.engine.buffers import to_device
from slipstream_jax.engine.planner import PlannedBatch
from slipstream_jax.models.layers import widths_to_logit
from slipstream_jax.training.trainer_parts import planned, TrainerParts
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS

_EXAMPLES = 300 * 2048  # premade; too many for their rows to fit a cache


def measure(
  config: ml_collections.ConfigDict, bar: Bar, rounds: int, steps: int
) -> Iterator[Item]:
  """Yields all figures of a config, from turns of a number of steps."""
  data = datasets.dataset(config)
  bar.begin('reading batches')
  batches = premade(config, data, -(-_EXAMPLES // config.data.batch_size))
  contest = Contest(config, data, batches, rounds, steps, bar)
  yield 'setting', _setting(contest)
  bar.begin('end to end')
  yield 'end to end', {'examples_per_s': _end_to_end(contest)}
  bar.begin('phases of a step')
  phases = _phases(contest)
  products, step = phases.pop('products'), phases['step']
  whole = sum(phases.values())
  yield (
    'phases, one after the other',
    [
      {'phase': name, 'ms per step': ms, 'share': ms / whole}
      for name, ms in phases.items()
    ],
  )
  share = products / step
  least = {'step ms': step, 'products ms': products, 'share of limit': share}
  yield 'the step and its matrix products alone', [least]
  yield 'a cache and all rows on the device', _cache(contest)
  theirs = _beside_baselines(contest)
  if theirs:
    yield 'the same batches in PyTorch, in alternation', theirs


def _setting(contest: Contest) -> dict[str, Any]:
  config = contest.config
  facts = {
    'data': contest.data.name,
    **machine.here(cli.again()),
    'batch_size': config.data.batch_size,
    'placement': config.placement,
    'row_optimizer': ', '.join(n for n, _ in config.optimizer.rows),
  }
  for name in baselines.BASELINES:
    facts[f'without {name}'] = baselines.absent(name)
  return facts


def _end_to_end(contest: Contest) -> float:
  """Returns examples/s with the config's own source."""
  config, data = contest.config, contest.data
  trainer = trainer_of(config, data)
  source = data.train(config.data.batch_size)
  with stream_of(config, trainer, source) as stream:
    take_steps(trainer, stream, contest.steps)  # compiles
    seconds = [
      seconds_of(take_steps, trainer, stream, contest.steps)
      for _ in range(contest.rounds)
    ]
  examples = contest.steps * config.data.batch_size
  return examples / float(np.median(seconds))


def _phases(contest: Contest) -> dict[str, float]:
  """Returns the median ms of each phase of a step, none hidden by another.

  Adds `products`, its matrix products alone.
  """
  watch, data = Stopwatch(), contest.data
  trainer = trainer_of(contest.config, data)
  with (
    contextlib.closing(data.train(contest.config.data.batch_size)) as source,
    planned(trainer, Replay(contest.batches), 0) as stream,
  ):
    for step in range(2 * contest.steps):
      watch('data', next, source)
      item = watch('plan', next, stream)
      args = watch('load', _load, trainer, item)
      if not step:
        update = trainer.update, trainer.state, *args
        products = limits.alone(limits.products_of(*update))
      # In alternation with the step whose products they are.
      watch('products', products)
      update_step = trainer.update, trainer.state, *args
      trainer.state, blocks, _ = watch('step', *update_step)
      watch('store', trainer.engine.store, item.plans, blocks)
  return watch.medians()


def _load(trainer: TrainerParts, item: PlannedBatch) -> tuple[Any, ...]:
  blocks = trainer.engine.load(item.plans)
  inverses = tuple(plan.inverse for plan in item.plans)
  host = inverses, item.batch, np.float32(0), item.row_weights
  return blocks, *to_device(host)


def _cache(contest: Contest) -> dict[str, Any]:
  contenders, num_rows = {}, sum(contest.data.sizes.values())
  for name in ('resident', 'cached'):
    config = contest.config.copy_and_resolve_references()
    config.placement = name
    contenders[name] = trainer_of(config, contest.data)
  speed = contest.speeds('cache', contenders)
  return {
    'share of rows': build.cache_rows(contest.config, num_rows) / num_rows,
    'examples_per_s': speed['cached'],
    'resident_examples_per_s': speed['resident'],
    'ratio to resident': speed['cached'] / speed['resident'],
  }


def _beside_baselines(contest: Contest) -> list[dict[str, Any]]:
  """Lists each baseline that is installed beside ours.

  Ours has the baseline's row optimizer.
  """
  data, model = contest.data, contest.config.model
  top = widths_to_logit(model.top, 'DLRM.top')[
    :-1
  ]  # a baseline adds the logit itself
  shape = tuple(data.sizes.values()), model.dim, model.bottom, top, 0.01
  contenders: dict[str, TrainerParts | Turn] = {}
  optimizers = {}
  for name, make in baselines.BASELINES.items():
    if baselines.absent(name) is not None:
      continue
    optimizer = 'sgd'
    if name.endswith('rowwise_adagrad'):
      optimizer = 'rowwise_adagrad'
    optimizers[name] = optimizer
    if optimizer not in contenders:
      contenders[optimizer] = trainer_of(
        contest.config,
        data,
        row_optimizer=ROW_OPTIMIZERS[optimizer](0.01),
        dense_optimizer=optax.sgd(0.01),
      )
    baseline = make(*shape, data.dense_features)
    contenders[name] = baselines.turn_of(baseline, contest.batches)
  speed = contest.speeds('baselines', contenders) if contenders else {}
  return [
    {
      'baseline': name,
      'examples_per_s': speed[name],
      'ours_examples_per_s': speed[optimizer],
      'ratio': speed[optimizer] / speed[name],
    }
    for name, optimizer in optimizers.items()
  ]
