"""Contenders that take turns on the same batches, in one process.

Times on a shared machine wander; the ratio of two medians does so less.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import itertools
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import optax

from experiments.bench import baselines as baselines
from experiments.common import build
from experiments.common.progress import Bar
from slipstream_jax.data.source import Dataset
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.models.layers import widths_to_logit
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import planned, TrainerParts
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from slipstream_jax.types import Batch

Turn = Callable[[int], float]
"""Takes that many steps; returns the seconds they took."""


class Contest(NamedTuple):
  """What contenders contend on."""

  config: ml_collections.ConfigDict
  data: Dataset
  batches: Sequence[Batch]
  rounds: int
  """Turns that each takes."""
  steps: int
  """Of one turn."""
  bar: Bar
  """Is told of the turns."""


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


def trainer_of(
  config: ml_collections.ConfigDict, data: Dataset, **changes: Any
) -> TrainerParts:
  """The config's trainer, with `changes` to its recipe."""
  recipe = build.recipe(config, data, steps=1 << 20)
  hot = build.hot(config, data, recipe)
  return build.trainer(config, data, recipe._replace(**changes), hot)


def turn_of(
  trainer: TrainerParts, batches: PlannedBatches, steps: int
) -> float:
  """Takes `steps` steps; returns the seconds they took, to the last bit."""
  started = time.perf_counter()
  for _ in train(trainer, batches, steps):
    pass
  jax.block_until_ready(trainer.state)
  return time.perf_counter() - started


def beside_resident(contest: Contest) -> dict[str, float]:
  """Examples/s with a device cache, and with all rows on the device."""
  turns: dict[str, Turn] = {}
  config = contest.config
  num_rows = sum(contest.data.sizes.values())
  with contextlib.ExitStack() as opened:
    for name in ('resident', 'cached'):
      changed = config.copy_and_resolve_references()
      changed.placement = name
      trainer = trainer_of(changed, contest.data)
      stream = planned(
        trainer,
        Replay(contest.batches),
        config.prefetch_batches,
        config.workers,
      )
      opened.enter_context(stream)
      turns[name] = functools.partial(turn_of, trainer, stream)
    speed = alternate(contest, turns, 'cache')
  return {
    'capacity': build.cache_rows(config, num_rows) / num_rows,
    'examples_per_s': speed['cached'],
    'resident_examples_per_s': speed['resident'],
    'ratio_to_resident': speed['cached'] / speed['resident'],
  }


def beside_baselines(contest: Contest) -> dict[str, dict[str, float]]:
  """Examples/s of each baseline, and ours over it with the same row optimizer.

  Those that are not installed are left out.
  """
  with contextlib.ExitStack() as opened:
    turns = _ours(contest, opened) | _theirs(contest)
    speed = alternate(contest, turns, 'baselines')
  return {
    name: {
      'examples_per_s': speed[name],
      'ours_examples_per_s': speed[f'ours/{optimizer}'],
      'ratio': speed[f'ours/{optimizer}'] / speed[name],
    }
    for name, optimizer in _present().items()
  }


def _present() -> dict[str, str]:
  """Baselines with the row optimizer that ours is compared with them by."""
  return {
    name: 'rowwise_adagrad' if name.endswith('rowwise_adagrad') else 'sgd'
    for name in baselines.BASELINES
    if baselines.absent(name) is None
  }


def _ours(contest: Contest, opened: contextlib.ExitStack) -> dict[str, Turn]:
  """A turn for each optimizer of a baseline."""
  turns: dict[str, Turn] = {}
  for optimizer in sorted(set(_present().values())):
    trainer = trainer_of(
      contest.config,
      contest.data,
      row_optimizer=ROW_OPTIMIZERS[optimizer](0.01),
      dense_optimizer=optax.sgd(0.01),
    )
    stream = planned(
      trainer,
      Replay(contest.batches),
      contest.config.prefetch_batches,
      contest.config.workers,
    )
    opened.enter_context(stream)
    turns[f'ours/{optimizer}'] = functools.partial(turn_of, trainer, stream)
  return turns


def _theirs(contest: Contest) -> dict[str, Turn]:
  data, model = contest.data, contest.config.model
  rows = tuple(data.sizes.values())
  top = widths_to_logit(model.top)[:-1]  # a baseline adds the logit itself
  sizes = rows, model.dim, model.bottom, top
  return {
    name: _baseline_turn(
      baselines.BASELINES[name](*sizes, 0.01, data.dense_features),
      contest.batches,
    )
    for name in _present()
  }


def _baseline_turn(
  baseline: baselines.Baseline, batches: Sequence[Batch]
) -> Turn:
  examples = itertools.cycle([baseline.prepare(batch) for batch in batches])

  def turn(steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
      float(baseline.step(next(examples)))  # ours reads its losses, too
    return time.perf_counter() - started

  return turn


def alternate(
  contest: Contest, turns: dict[str, Turn], phase: str
) -> dict[str, float]:
  """Examples/s of each, from the medians of turns taken in alternation."""
  seconds: dict[str, list[float]] = {name: [] for name in turns}
  bar = contest.bar
  bar.begin(f'{phase}, warming up', len(turns), 'turn')
  for number, turn in enumerate(turns.values()):
    turn(len(contest.batches))  # compiles, and fills every cache alike
    bar.show(number + 1)
  bar.begin(phase, contest.rounds * len(turns))
  for round_ in range(contest.rounds):
    for number, (name, turn) in enumerate(turns.items()):
      seconds[name].append(turn(contest.steps))
      bar.show(round_ * len(turns) + number + 1, name)
  examples = contest.steps * contest.config.data.batch_size
  return {name: examples / float(np.median(s)) for name, s in seconds.items()}
