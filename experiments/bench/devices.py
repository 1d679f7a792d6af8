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
which take turns. The third has collectives of the devices. The fourth has
`busiest` for up to 64 devices, each with the config's batch size, on the
synthetic proxies of the papers' data sets. Who owns a row is arithmetic, so it
needs no device.
"""

from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from absl import flags

from experiments.bench import runner

flags.DEFINE_list('devices', '1,2,4,8', 'Numbers of devices to compare.')
flags.DEFINE_integer('rounds', 4, 'Turns of each of them.', lower_bound=2)
flags.DEFINE_integer('steps', 30, 'Steps of a turn.', lower_bound=3)
flags.DEFINE_integer(
  'most_devices', 64, 'Devices of the last table.', lower_bound=2
)
_PARTS = 8
_PROXIES = {'RM1': 'taobao', 'RM2': 'kaggle', 'RM3': 'terabyte', 'RM4': 'avazu'}
_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
_TIMES = 5  # of a collective
_OWN = re.compile(r'--?(devices|rounds|steps|most_devices|output)(=.*)?')
_XLA_FLAGS = os.environ.get('XLA_FLAGS', '')
"""Without the devices that this program asks for."""


def bench(
  config: Any,
  bar: Any,
  devices: list[str],
  rounds: int,
  steps: int,
  most_devices: int,
) -> Iterator[runner.Item]:
  """Yields the machine and the four tables."""
  from experiments.common import cli, machine

  yield 'setting', machine.here(cli.again())
  numbers = [*map(int, devices)]
  size = config.data.batch_size
  named = f'{config.placement}, batch {size}'
  yield named, _compared(config, bar, numbers, rounds, steps)
  yield 'runs of processes', _of_processes(bar, rounds, 10 * steps)
  several = [one for one in numbers if one > 1]
  lines = [line for one in several for line in _collectives(one)]
  yield 'ms of a collective', lines
  yield (
    'rows of the busiest device over the mean',
    [
      {'model': name, **_balance(proxy, size, most_devices)}
      for name, proxy in _PROXIES.items()
    ],
  )


class _Contender(NamedTuple):
  trainer: Any
  batches: Any
  programs: list[Any]
  """Programs that all steps run."""
  rates: list[float]
  """Examples/s of each turn."""
  moved: list[tuple[float, ...]]
  """For each step the busiest device over the mean, and rows in all and sent.
  """


def _compared(
  config: Any, bar: Any, numbers: list[int], rounds: int, steps: int
) -> list[dict[str, Any]]:
  """Returns a line for each number of devices, and one for a whole step."""
  from experiments.bench.budget import dispatches
  from experiments.common import build, datasets

  data = datasets.dataset(config)
  total = (rounds + 1) * steps + 8
  recipe = build.recipe(config, data, total)
  hot, lines = build.hot(config, data, recipe), []
  with contextlib.closing(data.train(config.data.batch_size)) as source:
    some = [next(source) for _ in range(5)]
  over = _PARTS, config.exchange
  pairs = [(1, 1, 'float32'), *((number, *over) for number in numbers)]
  bar.begin('devices', (rounds + 1) * len(pairs), 'turn')
  with contextlib.ExitStack() as opened:
    contenders = []
    for config.devices, config.parts, config.exchange in pairs:
      with _counted() as programs:
        trainer = build.trainer(config, data, recipe, hot)
        batches = build.batches(config, trainer, data, total)
        opened.enter_context(batches)
        one = _Contender(trainer, batches, programs, [], [])
        _turn(one, steps)  # compiles
      one.rates.clear()
      contenders.append(one)
    for number in range(rounds):
      for at, one in enumerate(contenders):
        bar.show(number * len(pairs) + at)
        _turn(one, steps)
    for (count, parts, _), one in zip(pairs, contenders, strict=True):
      line = {'devices': count, 'parts': parts, **_figures(one)}
      one.batches.close()
      lines.append(line | {'started': dispatches(one.trainer, some)})
  return lines


def _of_processes(bar: Any, rounds: int, steps: int) -> list[dict[str, Any]]:
  """Returns the examples/s of runs for each number of processes.

  They are the median over lines of metrics, as some steps wait for programs
  that another process compiles.
  """
  import numpy as np

  from experiments.common import cli, record
  from slipstream_jax.errors import UserError

  rates: dict[int, list[float]] = {1: [], 2: []}
  more = ['skip.mode=off', 'eval.curve_steps=0', f'train.steps={steps}']
  more += [f'parts={_PARTS}', f'log_steps={max(1, steps // 30)}']
  arguments = cli.without(_OWN) + [f'--config.{one}' for one in more]
  bar.begin('processes', rounds * len(rates), 'run')
  with tempfile.TemporaryDirectory(prefix='slipstream-bench-') as folder:
    for turn in range(rounds):
      for number, of_number in rates.items():
        bar.show(turn * len(rates) + number - 1)
        where = pathlib.Path(folder, f'{number}-{turn}')
        command = [sys.executable, '-m', 'experiments.run']
        if number > 1:
          command[-1:] = ['experiments.launch', f'--processes={number}']
        command += [*arguments, f'--workdir={where}']
        environment = os.environ | {'XLA_FLAGS': _XLA_FLAGS}
        done = subprocess.run(
          command, env=environment, capture_output=True, text=True
        )
        if done.returncode:
          raise UserError(
            'a run that is timed must end well',
            got=' '.join(done.stderr.split())[-300:],
            where='experiments.bench.devices',
            hint='try it by itself: ' + shlex.join(command[1:]),
          )
        text = (where / record.METRICS).read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        of_number += [
          one['examples_per_s'] for one in lines if one['kind'] == 'train'
        ]
  return [
    {'processes': number, 'examples/s': float(np.median(of_number))}
    for number, of_number in rates.items()
  ]


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


def _turn(one: _Contender, steps: int) -> None:
  import numpy as np

  from slipstream_jax.training.loop import take_step

  started, examples = time.perf_counter(), 0
  for _ in range(steps):
    item = one.batches.peek()
    examples += len(item.batch.labels)
    for plan, pairs in zip(item.plans, item.exchanges, strict=False):
      own, sent = np.diff(plan.lanes), pairs.traffic.counts
      all_sent = int(sent.sum() - np.trace(sent))
      one.moved.append((own.max() / own.mean(), len(plan.rows), all_sent))
    timed = one.batches.clock.timed(item.spent, item.scheduled, lambda: None)
    with timed:
      loss = take_step(one.trainer, item, one.batches.advance)
  loss.block_until_ready()
  one.rates.append(examples / (time.perf_counter() - started))


def _figures(one: _Contender) -> dict[str, Any]:
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


def _collectives(number: int) -> list[dict[str, Any]]:
  """Returns the median ms to send some bytes of each device to the others."""
  import jax
  import numpy as np

  from slipstream_jax.engine.mesh import devices_of, LANES, SPLIT, WHOLE

  devices = devices_of(number)

  def exchanged(own: Any) -> Any:
    return jax.lax.all_to_all(own, LANES, 0, 0, tiled=True)

  def gathered(own: Any) -> Any:
    return jax.lax.all_gather(own, LANES, tiled=True)

  programs = {
    'all_to_all': devices.compiled(exchanged, (SPLIT,), SPLIT),
    'all_gather': devices.compiled(gathered, (SPLIT,), WHOLE),
  }
  lines = []
  for nbytes in _BYTES:
    line: dict[str, Any] = {'devices': number, 'KiB': nbytes >> 10}
    values = devices.split(np.zeros(number * nbytes // 4, np.float32))
    for name, program in programs.items():
      program(values).block_until_ready()  # compiles
      spent = []
      for _ in range(_TIMES):
        started = time.perf_counter()
        program(values).block_until_ready()
        spent.append(1e3 * (time.perf_counter() - started))
      line[name] = float(np.median(spent))
    lines.append(line)
  return lines


def _balance(name: str, size: int, most: int) -> dict[str, float]:
  """Returns the busiest device's rows over the mean, by number of devices."""
  import numpy as np

  from slipstream_jax.distributed.lanes import owners
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
    rows = [
      unique_rows_of(columns.lookups, group).rows for group in tables.groups
    ]
    counts = sum(
      np.bincount(owners(own, number), minlength=number) for own in rows
    )
    line[f'{number}'] = float(np.max(counts) / np.mean(counts))
    number *= 2
  return line


if __name__ == '__main__':
  os.environ['XLA_FLAGS'] = (
    f'{_XLA_FLAGS} --xla_force_host_platform_device_count=8'
  )
  runner.run(bench)
