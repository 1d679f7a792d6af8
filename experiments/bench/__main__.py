"""Measures training speed: end to end, by phase, and beside PyTorch.

    python -m experiments.bench --config=configs/criteo.py [--output=FILE]

Times on a shared machine wander. So contenders take turns in one process, on
the same batches, and what is claimed is the ratio of their medians. What each
placement moves is counted by `python -m experiments.profile`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from absl import flags
import ml_collections

from experiments.bench import runner

if TYPE_CHECKING:
  from experiments.screen.bar import Bar


def bench(config: ml_collections.ConfigDict, bar: 'Bar') -> Iterator[runner.Item]:
  """Yields all figures."""
  from experiments.bench import training

  yield from training.measure(
    config, bar, flags.FLAGS.rounds, flags.FLAGS.steps
  )


if __name__ == '__main__':
  flags.DEFINE_integer(
    'rounds', 8, 'Turns that each contender takes.', lower_bound=1
  )
  flags.DEFINE_integer('steps', 25, 'Steps of one turn.', lower_bound=3)
  runner.run(bench)
