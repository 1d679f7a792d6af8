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
import optax
from rich.table import Table as ShownTable

from experiments import build, cli, peers, record, report
from slipstream_jax.data.batches import Dataset
from slipstream_jax.stream.buffers import to_device
from slipstream_jax.stream.pipeline import PlannedBatch, PlannedBatches
from slipstream_jax.train.loop import planned, train, Trainer
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from slipstream_jax.types import Batch

_JSON = flags.DEFINE_string('json', None, 'File to write the figures to.')
_ROUNDS = flags.DEFINE_integer('rounds', 8, 'Turns that each contender takes.')
_STEPS = flags.DEFINE_integer('steps', 25, 'Steps of one turn.')
_BATCHES = 40  # premade; enough that their rows do not fit a CPU's cache
_PEER_OF = {  # the row optimizer that makes the comparison like for like
  'embedding_bag': 'sgd',
  'fbgemm': 'sgd',
  'fbgemm_rowwise_adagrad': 'rowwise_adagrad',
  'fbgemm_onednn': 'sgd',
}

Turn = Callable[[int], float]
"""Takes that many steps; returns the seconds they took."""


class Replay:
  """Batch source that cycles through batches in memory."""

  def __init__(self, batches: Sequence[Batch]) -> None:
    """Cycles through `batches`, which are not copied."""
    self._batches, self._delivered = batches, 0

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    batch = self._batches[self._delivered % len(self._batches)]
    self._delivered += 1
    return batch

  def get_state(self) -> dict[str, int]:
    """Batches delivered."""
    return {'delivered': self._delivered}

  def set_state(self, state: dict[str, int]) -> None:
    """Continues after the batches that `state` counts."""
    self._delivered = state['delivered']

  def close(self) -> None:
    """Nothing to give back."""


def main(config: ml_collections.ConfigDict) -> None:
  """Measures and prints; writes the figures with --json."""
  build.check(config)
  shown = report.console()
  config.skip.mode = 'off'  # every batch costs the same
  data = build.dataset(config)
  source = data.train(config.data.batch_size)
  batches = list(itertools.islice(source, _BATCHES))
  figures = _machine(config, data)
  figures |= _end_to_end(config, data)
  figures['phases'] = _phases(config, data, batches)
  figures['peers'] = _beside_peers(config, data, batches)
  shown.print(
    '{data}\n{device}, jax {jax}, batch {batch_size}, {placement} with '
    '{row_optimizer}\nend to end: {samples_per_s:,.0f} samples/s'.format(
      **figures
    ),
    highlight=False,
  )
  for table in _tables(figures):
    shown.print(table)
  if figures['peers_absent']:
    shown.print(f'no peers: {figures["peers_absent"]}')
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
    'row_optimizer': config.optimizer.rows,
    'peers_absent': peers.available(),
  }


def _trainer(
  config: ml_collections.ConfigDict, data: Dataset, **changes: Any
) -> Trainer:
  recipe = build.recipe(config, data, steps=1 << 20)
  hot = build.hot(config, data, recipe)
  return build.trainer(config, data, recipe._replace(**changes), hot)


def _turn(trainer: Trainer, batches: PlannedBatches, steps: int) -> float:
  started = time.perf_counter()
  for _ in train(trainer, batches, steps):
    pass
  jax.block_until_ready(trainer.state)
  return time.perf_counter() - started


def _end_to_end(
  config: ml_collections.ConfigDict, data: Dataset
) -> dict[str, float]:
  """Samples/s of the config as it stands, its data source included."""
  trainer = _trainer(config, data)
  batches = planned(
    trainer, data.train(config.data.batch_size), config.prefetch
  )
  _turn(trainer, batches, _STEPS.value)  # compiles
  seconds = [
    _turn(trainer, batches, _STEPS.value) for _ in range(_ROUNDS.value)
  ]
  batches.close()
  per_turn = _STEPS.value * config.data.batch_size
  return {'samples_per_s': per_turn / float(np.median(seconds))}


def _phases(
  config: ml_collections.ConfigDict, data: Dataset, batches: Sequence[Batch]
) -> dict[str, float]:
  """Median ms of each phase of a step, one after the other, none hidden."""
  trainer = _trainer(config, data)
  source = data.train(config.data.batch_size)
  made = planned(trainer, Replay(batches), 0)
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


def _load(trainer: Trainer, item: PlannedBatch) -> tuple[Any, ...]:
  block = trainer.engine.load(item.plan)
  host = item.plan.inverse, item.batch, np.float32(0), item.row_weights
  return block, *to_device(host)


def _beside_peers(
  config: ml_collections.ConfigDict, data: Dataset, batches: Sequence[Batch]
) -> dict[str, dict[str, float]]:
  """Samples/s of each peer, and ours over it with the same row optimizer."""
  if peers.available():
    return {}
  turns, close = _contenders(config, data, batches)
  seconds: dict[str, list[float]] = {name: [] for name in turns}
  for turn in turns.values():
    turn(len(batches))  # compiles, and fills every cache alike
  for _ in range(_ROUNDS.value):
    for name, turn in turns.items():
      seconds[name].append(turn(_STEPS.value))
  close()
  inputs = _STEPS.value * config.data.batch_size
  speed = {name: inputs / float(np.median(s)) for name, s in seconds.items()}
  return {
    name: {
      'samples_per_s': speed[name],
      'ours_samples_per_s': speed[f'ours/{optimizer}'],
      'ratio': speed[f'ours/{optimizer}'] / speed[name],
    }
    for name, optimizer in _PEER_OF.items()
  }


def _contenders(
  config: ml_collections.ConfigDict, data: Dataset, batches: Sequence[Batch]
) -> tuple[dict[str, Turn], Callable[[], None]]:
  """A turn for each of ours and theirs, and what closes ours."""
  turns: dict[str, Turn] = {}
  opened = []
  for optimizer in sorted(set(_PEER_OF.values())):
    trainer = _trainer(
      config,
      data,
      row_optimizer=ROW_OPTIMIZERS[optimizer](0.01),
      dense_optimizer=optax.sgd(0.01),
    )
    made = planned(trainer, Replay(batches), config.prefetch)
    opened.append(made)
    turns[f'ours/{optimizer}'] = functools.partial(_turn, trainer, made)
  rows = tuple(table.rows for table in data.tables)
  model = config.model
  for name in _PEER_OF:
    peer = peers.PEERS[name](
      rows, model.dim, model.bottom, model.top, 0.01, data.dense_features
    )
    turns[name] = _peer_turn(peer, batches)

  def close() -> None:
    for made in opened:
      made.close()

  return turns, close


def _peer_turn(peer: peers.Peer, batches: Sequence[Batch]) -> Turn:
  inputs = itertools.cycle([peer.prepare(batch) for batch in batches])

  def turn(steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
      float(peer.step(next(inputs)))  # ours reads its losses, too
    return time.perf_counter() - started

  return turn


def _tables(figures: dict[str, Any]) -> Iterator[ShownTable]:
  phases = figures['phases']
  table = ShownTable(title='phases, one after the other', title_justify='left')
  for name in ('phase', 'ms per step', 'share'):
    table.add_column(name, justify='left' if name == 'phase' else 'right')
  for phase, ms in phases.items():
    share = ms / sum(phases.values())
    table.add_row(phase, f'{ms:.2f}', f'{share:.1%}')
  yield table
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


if __name__ == '__main__':
  cli.run(main)
