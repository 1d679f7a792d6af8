r"""What the host does for a step, in ms, and how fast it could feed a device.

    python -m experiments.bench.host --config=configs/criteo.py \
        [--batches=2048,16384] [--device_step_ms=0.5]

The real step is timed by itself. Then the device is busy for `--device_step_ms`
in its place, a wait that takes no processor: what is left is what the host does
for it, and what the device itself does to put a step's rows together and back
in their places.
"""

import functools
import pathlib

from absl import flags
import ml_collections

from experiments.bench import budget
from experiments.bench.contest import trainer_of
from experiments.common import cli, datasets, errors, record, report
from experiments.common.progress import Bar
from experiments.common.workdir import writable
from slipstream_jax.data.source import Dataset
from slipstream_jax.types import Batch

_BATCHES = flags.DEFINE_list('batches', ['2048', '16384'], 'Batch sizes.')
_STEP_MS = flags.DEFINE_float(
  'device_step_ms', 0.5, 'What a step takes; 0: nothing.', lower_bound=0
)
_WORKERS = flags.DEFINE_list('workers', ['1', '2'], 'Threads to compare.')
_STEPS = flags.DEFINE_integer('steps', 60, 'Steps of a figure.', lower_bound=9)
_JSON = flags.DEFINE_string('json', None, 'File to write the figures to.')
_PLACEMENTS = ('resident', 'pinned', 'cached', 'streamed')


def main(config: ml_collections.ConfigDict) -> None:
  """Measures and prints; writes the figures with --json."""
  errors.check(config)
  screen = report.console()
  if _JSON.value:
    writable(str(pathlib.Path(_JSON.value).parent), '--json')
  config.skip.mode = 'off'  # every batch costs the same
  workers = [*map(int, _WORKERS.value)]
  phases, rates, unique = [], [], []
  with Bar(screen, None, 'placement', 'the host') as bar:
    for size in map(int, _BATCHES.value):
      config.data.batch_size = size
      data = datasets.dataset(config)
      batches, data_ms = _read(config, data)
      some = batches[: _STEPS.value]
      for number, placement in enumerate(_PLACEMENTS):
        bar.show(number, f'{placement}, batch {size}')
        config.placement = placement
        head = {'batch': size, 'placement': placement}
        trainer = trainer_of(config, data)
        if not number:  # the same program under every placement
          step = budget.step_ms(trainer, some)
        spent = budget.phases(trainer, some)
        count = budget.dispatches(trainer, some)
        phases.append(
          {**head, 'data': data_ms, **spent, 'step': step, 'dispatches': count}
        )
        turns = budget.rates(trainer, batches, workers, _STEP_MS.value)
        rates += [{**head, **one} for one in turns]
        if placement == 'pinned':
          searched = budget.unique_rates(trainer, batches, workers)
          unique += [{'batch': size, **one} for one in searched]
  screen.print(report.table('ms per batch, one after the other', phases))
  title = f'ms per batch in all, with a step of {_STEP_MS.value} ms'
  screen.print(report.table(title, rates))
  screen.print(report.table('ms per batch to find unique ids', unique))
  if _JSON.value:
    figures = {'phases': phases, 'rates': rates, 'unique': unique}
    path, step = pathlib.Path(_JSON.value), _STEP_MS.value
    record.write_json(path, {**figures, 'step_ms': step})


def _read(
  config: ml_collections.ConfigDict, data: Dataset
) -> tuple[list[Batch], float]:
  """Premade batches, and the median ms that one took."""
  source = data.train(config.data.batch_size)
  spent = budget.Spent()
  batches = [
    budget.timed(spent, 'data', functools.partial(next, source))
    for _ in range(budget.TURNS * _STEPS.value)
  ]
  source.close()
  return batches, budget.medians(spent)['data']


if __name__ == '__main__':
  cli.run(main)
