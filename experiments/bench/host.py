r"""Measures what the host does for a step, and how fast it can feed a device.

    python -m experiments.bench.host --config=configs/criteo.py \
        [--batches=2048,16384] [--device_step_ms=0.5]

The real step is timed by itself. Then a wait of --device_step_ms that takes no
processor replaces it. What is left is the work of the host, and the work of the
device to gather a step's rows and to put them back.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from absl import flags
import ml_collections

from experiments.bench import runner

if TYPE_CHECKING:
  from experiments.screen.bar import Bar


def bench(
  config: ml_collections.ConfigDict, bar: 'Bar'
) -> Iterator[runner.Item]:
  """Yields ms per batch by batch size and placement."""
  from experiments.bench import budget

  asked = flags.FLAGS
  sizes, workers = ([*map(int, x)] for x in (asked.batches, asked.workers))
  step_ms, steps = asked.device_step_ms, asked.steps
  yield from budget.measure(config, bar, sizes, workers, step_ms, steps)


if __name__ == '__main__':
  flags.DEFINE_list('batches', '2048,16384', 'Batch sizes.')
  flags.DEFINE_float(
    'device_step_ms', 0.5, 'What a step takes; 0: nothing.', lower_bound=0
  )
  flags.DEFINE_list('workers', '1,2', 'Threads to compare.')
  flags.DEFINE_integer('steps', 60, 'Steps of a figure.', lower_bound=9)
  runner.run(bench)
