r"""Measures a machine, for the times that `experiments.plan` models.

    python -m experiments.bench.link --config=configs/criteo.py:smoke \
        --output=machine.json
    python -m experiments.plan --config=CONFIG --machine=machine.json

The file describes this machine: rates of the device's memory, of its matrix
products and of copies, what the host needs to find and plan rows, and two
constants for an exchange, one for a message and one for a byte. What is not
there to be measured, such as a second GPU, is as `--like` says.

On a CPU, each process counts as a host with one device. Two of them exchange
arrays, which gives the time of a byte. The time of a message is that of real
steps, as two processes wait longer for each other while they compute: a run of
two takes longer than one of a single process, and the difference is shared
among the step's messages. Both run the config, best with small batches.
"""

from collections.abc import Iterator
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

from experiments.bench import runner

flags.DEFINE_string(
  'like', 'h100', 'Machine that has what cannot be measured here.'
)
flags.DEFINE_integer('rounds', 3, 'Runs for each time.', lower_bound=1)
flags.DEFINE_integer('steps', 300, 'Steps of a run.', lower_bound=30)
_BYTES = (64 << 10, 1 << 20, 8 << 20)
_TIMES = 15  # of a copy, a product or an exchange
_NAME = 'exchanges.json'
_LIMIT_S = 300


def bench(
  config: Any, bar: Any, like: str, rounds: int, steps: int
) -> Iterator[runner.Item]:
  """Yields the machine, and the times that it is made of."""
  import jax

  from experiments.common import cli, machine
  from experiments.plan.machine import as_facts, machine_of

  yield 'setting', machine.here(cli.again())
  of, on_cpu = machine_of(like), jax.default_backend() == 'cpu'
  rates, copies = _device()
  of = of._replace(**rates, **_host(config))
  if on_cpu:
    times = _between_processes()
    between = _fitted(times, 'exchange', 'bytes')
    of = of._replace(devices=1, shared=True, between=between)
    of = _with_messages(config, bar, of, rounds, steps)
  elif (number := len(jax.devices())) > 1:
    times = _exchanges(number)
    inside = _fitted(times, 'exchange', 'bytes')
    of = of._replace(devices=number, inside=inside)
  else:
    times = []
  yield 'copies', copies
  if times:
    yield 'exchanges', times
  facts = machine.here('')
  name = f'{facts["cpu"]}, {facts["device"]}'
  of = of._replace(name=name, how=f'measured, the rest as of {like}')
  yield 'machine', as_facts(of)


def _median(call: Any) -> float:
  """Returns the median seconds of a call, which compiles first."""
  import jax
  import numpy as np

  jax.block_until_ready(call())
  spent = []
  for _ in range(_TIMES):
    started = time.perf_counter()
    jax.block_until_ready(call())
    spent.append(time.perf_counter() - started)
  return float(np.median(spent))


def _fitted(lines: list[dict[str, Any]], name: str, by: str) -> Any:
  """Returns a link whose times by bytes are as in a table, in ms."""
  import numpy as np

  from experiments.plan.machine import Link

  nbytes = np.array([line[by] for line in lines], float)
  seconds = np.array([line[name] for line in lines]) / 1e3
  # Relative errors count, so that small copies are not forgotten.
  rows = np.stack([np.ones(len(lines)), nbytes], 1) / seconds[:, None]
  call, byte = np.linalg.lstsq(rows, np.ones(len(lines)))[0]
  return Link(max(0.0, float(call)), max(1e-13, float(byte)))


def _device() -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Returns rates of the device, and the times of copies."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from slipstream_jax.engine.buffers import to_device, to_host

  size, rows, width = 1024, 1 << 20, 16
  square = to_device(np.ones((size, size), np.float32))
  table = to_device(np.ones((rows, width), np.float32))
  at = to_device(
    np.random.default_rng(0).integers(0, rows, rows >> 2, np.int32)
  )
  multiply, take = jax.jit(jnp.matmul), jax.jit(lambda x, i: x[i])
  start, one = jax.jit(lambda x: x + x), to_device(np.float32(1))
  products = 2 * size**3 / _median(lambda: multiply(square, square))
  # Each row is read and written.
  moved = 2 * (rows >> 2) * width * 4
  memory = moved / _median(lambda: take(table, at))
  lines = []
  for nbytes in _BYTES:
    values = np.ones(nbytes // 4, np.float32)
    copy = to_device(values)
    lines.append(
      {
        'bytes': nbytes,
        'load': 1e3 * _median(lambda values=values: to_device(values)),
        'store': 1e3 * _median(lambda copy=copy: to_host(start(copy))),
      }
    )
  rates = {
    'products': products,
    'memory': memory,
    'program': _median(lambda: start(one)),
    'load': _fitted(lines, 'load', 'bytes'),
    'store': _fitted(lines, 'store', 'bytes'),
  }
  return rates, lines


def _host(config: Any) -> dict[str, Any]:
  """Returns the times to find and plan rows, and the number of threads."""
  import numpy as np

  from experiments.bench.divided import PARTS, timed_step
  from experiments.plan.machine import Link

  size = config.data.batch_size
  few, many = (timed_step(config, PARTS, n) for n in (size, 8 * size))
  lookups = [few.lookups, many.lookups]
  slope, start = np.polyfit(lookups, [few.host.plan, many.host.plan], 1) / 1e3
  return {
    'find': many.host.find / 1e3 / many.lookups,
    'plan': Link(max(0.0, float(start)), max(0.0, float(slope))),
    'threads': os.cpu_count() or 1,
  }


def _exchanged(own: Any) -> Any:
  import jax

  from slipstream_jax.engine.mesh import LANES

  return jax.lax.all_to_all(own, LANES, 0, 0, tiled=True)


def _exchanges(number: int) -> list[dict[str, Any]]:
  """Returns the ms of exchanges, by the bytes that a device sends to others."""
  import numpy as np

  from slipstream_jax.engine.mesh import devices_of, SPLIT

  devices = devices_of(number)
  program = devices.compiled(_exchanged, (SPLIT,), SPLIT)
  lines = []
  for nbytes in _BYTES:
    values = devices.split(np.zeros(number**2 * nbytes // 4, np.float32))
    lines.append(
      {
        'devices': number,
        'bytes': (number - 1) * nbytes,
        'exchange': 1e3 * _median(lambda values=values: program(values)),
      }
    )
  return lines


def _between_processes() -> list[dict[str, Any]]:
  """Returns the ms of exchanges of two processes with a device each."""
  from slipstream_jax.errors import UserError

  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  with tempfile.TemporaryDirectory(prefix='slipstream-bench-') as folder:
    code = f'from experiments.bench import link; link.as_process({folder!r})'
    children = [
      subprocess.Popen(
        [sys.executable, '-c', code],
        env=os.environ
        | {
          'JAX_COORDINATOR_ADDRESS': address,
          'JAX_NUM_CPU_DEVICES': '1',
          'JAX_PROCESS_ID': str(number),
          'JAX_NUM_PROCESSES': '2',
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
      )
      for number in range(2)
    ]
    try:
      codes = [child.wait(_LIMIT_S) for child in children]
    except subprocess.TimeoutExpired:
      codes = [1]
    finally:
      for child in children:
        child.kill()
    if any(codes):
      raise UserError(
        'two processes must exchange arrays on this machine',
        got=f'exit codes {codes}',
        where='experiments.bench.link',
        hint='try experiments.launch --processes=2, and look at what it says',
      )
    lines: list[dict[str, Any]] = json.loads(
      pathlib.Path(folder, _NAME).read_text()
    )
  return lines


def as_process(folder: str) -> None:
  """Measures exchanges as one of two processes. The first writes them."""
  import jax

  number = int(os.environ['JAX_PROCESS_ID'])
  jax.distributed.initialize(num_processes=2, process_id=number)
  lines = _exchanges(2)
  if not number:
    pathlib.Path(folder, _NAME).write_text(json.dumps(lines))


def _with_messages(
  config: Any, bar: Any, of: Any, rounds: int, steps: int
) -> Any:
  """Returns the machine with the time of a message within a step."""
  from experiments.bench.divided import of_processes
  from experiments.plan.job import counted
  from experiments.plan.machine import Link
  from experiments.plan.times import Measured, step_time

  one, two = (
    config.data.batch_size / line['examples/s']
    for line in of_processes(bar, rounds, steps)
  )
  work, (rows, loaded, stored, crossing) = counted(config, 2, of.devices)
  lookups = config.data.batch_size * work.lookups
  host = lookups * of.find + of.plan.seconds(1, lookups)

  def with_call(call: float) -> Any:
    return of._replace(between=Link(call, of.between.byte))

  def model(call: float) -> float:
    return step_time(
      with_call(call),
      work,
      2,
      config.data.batch_size,
      rows,
      loaded,
      stored,
      crossing,
      Measured(Link(one, 0.0), Link(host, 0.0)),
    ).total

  without = model(0.0)
  return with_call(max(0.0, two - without) / (model(1.0) - without))


if __name__ == '__main__':
  runner.run(bench)
