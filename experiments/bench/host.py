r"""Measures what the host does for a step, and how fast it can feed a device.

    python -m experiments.bench.host --config=configs/criteo.py \
        [--batches=2048,16384] [--device_step_ms=0.5]

The real step is timed by itself. Then a wait of --device_step_ms that takes no
processor replaces it. What is left is the work of the host, and the work of the
device to gather a step's rows and to put them back.
"""

from collections.abc import Iterator
from typing import Any

from absl import flags
import ml_collections

from experiments.bench import runner

_BATCHES = flags.DEFINE_list('batches', '2048,16384', 'Batch sizes.')
_STEP_MS = flags.DEFINE_float(
  'device_step_ms', 0.5, 'What a step takes; 0: nothing.', lower_bound=0
)
_WORKERS = flags.DEFINE_list('workers', '1,2', 'Threads to compare.')
_STEPS = flags.DEFINE_integer('steps', 60, 'Steps of a figure.', lower_bound=9)


def bench(config: ml_collections.ConfigDict, bar: Any) -> Iterator[runner.Item]:
  """Yields ms per batch by batch size and placement."""
  from experiments.bench import budget

  sizes, workers = ([*map(int, x.value)] for x in (_BATCHES, _WORKERS))
  asked = sizes, workers, _STEP_MS.value, _STEPS.value
  yield from budget.measure(config, bar, *asked)


if __name__ == '__main__':
  runner.run(bench)
