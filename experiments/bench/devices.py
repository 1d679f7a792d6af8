r"""Measures what a step costs on several devices, made of one machine's CPU.

    python -m experiments.bench.devices --config=configs/criteo.py:smoke \
        [--devices=1,2,4,8] [--output=FILE]

The first table compares numbers of devices, and a step that is not divided
(parts 1). They take turns on the same batches. `started` programs are those of
a step, `compiled` those of all steps. `busiest` is the device with most rows
over the mean, and `sent` the rows that go from one device to another. `find`,
`plan` and `step` are ms of the processor per 2,048 examples, in the threads
that prepare batches and take steps. XLA's own threads are not in them.

The second table compares runs of one process and of two, of a device each,
which take turns. The third has `busiest` for up to 64 devices, each with the
config's batch size, on the synthetic proxies of the papers' data sets. Who owns
a row is arithmetic, so it needs no device. `experiments.bench.link` measures
collectives.
"""

from collections.abc import Iterator
import contextlib
import os
from typing import Any

from absl import flags

from experiments.bench import runner

flags.DEFINE_list('devices', '1,2,4,8', 'Numbers of devices to compare.')
flags.DEFINE_integer('rounds', 4, 'Turns of each of them.', lower_bound=2)
flags.DEFINE_integer('steps', 30, 'Steps of a turn.', lower_bound=3)
flags.DEFINE_integer(
  'most_devices', 64, 'Devices of the last table.', lower_bound=2
)
_PROXIES = {'RM1': 'taobao', 'RM2': 'kaggle', 'RM3': 'terabyte', 'RM4': 'avazu'}


def bench(
  config: Any,
  bar: Any,
  devices: list[str],
  rounds: int,
  steps: int,
  most_devices: int,
) -> Iterator[runner.Item]:
  """Yields the machine and the three tables."""
  from experiments.bench.divided import of_processes
  from experiments.common import cli, machine

  yield 'setting', machine.here(cli.again())
  numbers = [*map(int, devices)]
  size = config.data.batch_size
  named = f'{config.placement}, batch {size}'
  yield named, _compared(config, bar, numbers, rounds, steps)
  yield 'runs of processes', of_processes(bar, rounds, 10 * steps)
  yield (
    'rows of the busiest device over the mean',
    [
      {'model': name, **_balance(proxy, size, most_devices)}
      for name, proxy in _PROXIES.items()
    ],
  )


def _compared(
  config: Any, bar: Any, numbers: list[int], rounds: int, steps: int
) -> list[dict[str, Any]]:
  """Returns a line for each number of devices, and one for a whole step."""
  from experiments.bench.budget import dispatches
  from experiments.bench.divided import Contender, PARTS, turn
  from experiments.common import build, datasets

  data = datasets.dataset(config)
  total = (rounds + 1) * steps + 8
  recipe = build.recipe(config, data, total)
  hot, lines = build.hot(config, data, recipe), []
  with contextlib.closing(data.train(config.data.batch_size)) as source:
    some = [next(source) for _ in range(5)]
  over = PARTS, config.exchange
  pairs = [(1, 1, 'float32'), *((number, *over) for number in numbers)]
  bar.begin('devices', (rounds + 1) * len(pairs), 'turn')
  with contextlib.ExitStack() as opened:
    contenders = []
    for config.devices, config.parts, config.exchange in pairs:
      with _counted() as programs:
        trainer = build.trainer(config, data, recipe, hot)
        batches = build.batches(config, trainer, data, total)
        opened.enter_context(batches)
        one = Contender(trainer, batches, programs, [], [])
        turn(one, steps)  # compiles
      one.rates.clear()
      contenders.append(one)
    for number in range(rounds):
      for at, one in enumerate(contenders):
        bar.show(number * len(pairs) + at)
        turn(one, steps)
    for (count, parts, _), one in zip(pairs, contenders, strict=True):
      line = {'devices': count, 'parts': parts, **_figures(one)}
      one.batches.close()
      lines.append(line | {'started': dispatches(one.trainer, some)})
  return lines


@contextlib.contextmanager
def _counted() -> Iterator[list[Any]]:
  """Yields a list that gets the programs that are made for all devices."""
  from slipstream_jax.engine import mesh

  programs: list[Any] = []
  start = mesh.Program.__init__

  def started(program: Any, function: Any) -> None:
    start(program, function)
    programs.append(program)

  mesh.Program.__init__ = started  # type: ignore[assignment,method-assign]
  mesh._cached.cache_clear()
  try:
    yield programs
  finally:
    mesh.Program.__init__ = start  # type: ignore[method-assign]


def _figures(one: Any) -> dict[str, Any]:
  import numpy as np

  host = one.batches.clock.host_ms()
  size = len(one.batches.peek().batch.labels)
  scale, groups = 2048 / size, len(one.trainer.engine.groups)
  busiest, rows, sent = np.mean(one.moved or [(1.0, 0.0, 0.0)], 0).tolist()
  return {
    'examples/s': float(np.median(one.rates)),
    'compiled': sum(len(program.compiled) for program in one.programs),
    'busiest': busiest,
    'rows': rows * groups,
    'sent': sent * groups,
    'find': host.find * scale,
    'plan': host.plan * scale,
    'step': host.step * scale,
  }


def _balance(name: str, size: int, most: int) -> dict[str, float]:
  """Returns the busiest device's rows over the mean, by number of devices."""
  import numpy as np

  from slipstream_jax.distributed.lanes import lanes_of
  from slipstream_jax.store.host_table import unique_rows_of
  from slipstream_jax.synthetic.proxies import PROXIES
  from slipstream_jax.tables import Table, TableSet

  spec, law = PROXIES[name].spec, PROXIES[name].law
  tables = TableSet(
    {key: Table(rows, 16) for key, rows in spec.sizes.items()}, spec.features
  )
  line, number = dict[str, float](), 2
  while number <= most:
    columns = law(spec, np.arange(number * size)).columns
    counts = sum(
      np.bincount(
        lanes_of(group, number).owners(
          unique_rows_of(columns.lookups, group).rows
        ),
        minlength=number,
      )
      for group in tables.groups
    )
    line[f'{number}'] = float(np.max(counts) / np.mean(counts))
    number *= 2
  return line


if __name__ == '__main__':
  here = os.environ.get('XLA_FLAGS', '')
  more = '--xla_force_host_platform_device_count=8'
  os.environ['XLA_FLAGS'] = f'{here} {more}'
  runner.run(bench)
