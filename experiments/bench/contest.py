"""Contenders that take turns on the same batches, in one process.

Times on a shared machine wander. The ratio of two medians wanders less.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import itertools
import time
from typing import Any, NamedTuple, TypeVar

import jax
import ml_collections
import numpy as np

from experiments.common import build
from experiments.common.progress import Bar
from slipstream_jax.data.source import BatchSource, Dataset
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import planned, TrainerParts
from slipstream_jax.types import Batch

_WARM = 5  # calls of a phase that its median leaves out
T = TypeVar('T')
Turn = Callable[[int], object]
"""Takes a number of steps."""


class Stopwatch:
  """Collects how long named phases take.

  Attributes:
    ms: milliseconds of each call, by phase.
  """

  def __init__(self) -> None:
    """Starts without phases."""
    self.ms: dict[str, list[float]] = {}

  def __call__(self, phase: str, call: Callable[..., T], *args: Any) -> T:
    """Returns what the call returns, once the device has computed it."""
    started = time.perf_counter()
    result: T = jax.block_until_ready(call(*args))
    ms = 1e3 * (time.perf_counter() - started)
    self.ms.setdefault(phase, []).append(ms)
    return result

  def medians(self) -> dict[str, float]:
    """Returns the median of each phase without its first calls."""
    return {name: float(np.median(ms[_WARM:])) for name, ms in self.ms.items()}


class Replay(BatchSource):
  """Cycles through batches in memory."""

  endless = True

  def __init__(self, batches: Sequence[Batch]) -> None:
    """Does not copy the batches."""
    self._batches, self._delivered = batches, 0

  def __next__(self) -> Batch:
    self._delivered += 1
    return self._batches[(self._delivered - 1) % len(self._batches)]

  def get_state(self) -> dict[str, int]:
    """Returns the number of batches delivered."""
    return {'delivered': self._delivered}

  def set_state(self, state: dict[str, int]) -> None:
    """Continues after as many batches."""
    self._delivered = state['delivered']


class Contest(NamedTuple):
  """The same batches for all contenders."""

  config: ml_collections.ConfigDict
  data: Dataset
  batches: Sequence[Batch]
  rounds: int
  """Turns that each contender takes."""
  steps: int
  """Steps of one turn."""
  bar: Bar

  def speeds(
    self, phase: str, contenders: Mapping[str, TrainerParts | Turn]
  ) -> dict[str, float]:
    """Returns the examples/s of each, by medians of turns in alternation."""
    seconds = self.seconds(phase, contenders)
    examples = self.steps * self.config.data.batch_size
    return {name: examples / float(np.median(s)) for name, s in seconds.items()}

  def seconds(
    self, phase: str, contenders: Mapping[str, TrainerParts | Turn]
  ) -> dict[str, list[float]]:
    """Returns the seconds of each turn, taken in alternation."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as opened:
      turns: dict[str, Turn] = {}
      for name, one in contenders.items():
        if isinstance(one, TrainerParts):
          source = Replay(self.batches)
          stream = opened.enter_context(stream_of(self.config, one, source))
          one = functools.partial(take_steps, one, stream)
        turns[name] = one
      self.bar.begin(f'{phase}, warming up', len(turns), 'turn')
      for number, turn in enumerate(turns.values()):
        turn(len(self.batches))  # compiles, and fills every cache alike
        self.bar.show(number + 1)
      self.bar.begin(phase, self.rounds * len(turns))
      for done in range(self.rounds * len(turns)):
        name = [*turns][done % len(turns)]
        seconds[name].append(seconds_of(turns[name], self.steps))
        self.bar.show(done + 1, name)
    return seconds


def seconds_of(call: Callable[..., object], *args: Any) -> float:
  """Returns the seconds that a call takes."""
  started = time.perf_counter()
  call(*args)
  return time.perf_counter() - started


def take_steps(
  trainer: TrainerParts, batches: PlannedBatches, steps: int
) -> None:
  """Trains, and waits until the device is done."""
  for _ in train(trainer, batches, steps):
    pass
  jax.block_until_ready(trainer.state)


def stream_of(
  config: ml_collections.ConfigDict, trainer: TrainerParts, source: BatchSource
) -> PlannedBatches:
  """Returns the planned batches of a source, prepared as the config says."""
  return planned(trainer, source, config.prefetch_batches, config.workers)


def trainer_of(
  config: ml_collections.ConfigDict, data: Dataset, **changes: Any
) -> TrainerParts:
  """Returns the config's trainer, with changes to its recipe."""
  recipe = build.recipe(config, data, steps=1 << 20)
  hot = build.hot(config, data, recipe)
  return build.trainer(config, data, recipe._replace(**changes), hot)


def premade(
  config: ml_collections.ConfigDict, data: Dataset, count: int
) -> list[Batch]:
  """Reads the first batches of a data set into memory."""
  with contextlib.closing(data.train(config.data.batch_size)) as source:
    return list(itertools.islice(source, count))
