"""Measures training speed: end to end, by phase, and beside PyTorch.

    python -m experiments.bench --config=configs/criteo.py [--output=FILE]

Times on a shared machine wander. So contenders take turns in one process, on
the same batches, and what is claimed is the ratio of their medians. What each
placement moves is counted by `python -m experiments.profile`.
"""

from collections.abc import Iterator
from typing import Any

from absl import flags
import ml_collections

from experiments.bench import runner

_ROUNDS = flags.DEFINE_integer(
  'rounds', 8, 'Turns that each contender takes.', lower_bound=1
)
_STEPS = flags.DEFINE_integer('steps', 25, 'Steps of one turn.', lower_bound=3)


def bench(config: ml_collections.ConfigDict, bar: Any) -> Iterator[runner.Item]:
  """Yields all figures of a config."""
  from experiments.bench import training

  yield from training.measure(config, bar, _ROUNDS.value, _STEPS.value)


if __name__ == '__main__':
  runner.run(bench)
