"""Times of steps that are divided, in this process and in runs of several."""

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

import numpy as np

from experiments.common import build, cli, datasets, record
from slipstream_jax.engine.clock import HostMs
from slipstream_jax.errors import UserError
from slipstream_jax.training.loop import take_step

PARTS = 8
_TURNS, _STEPS = 12, 10  # of `timed_step`
_FLAGS = 'devices|rounds|steps|most_devices|output|like'
_OWN = re.compile(rf'--?({_FLAGS})(=.*)?')
_DEVICES = re.compile(r'--xla_force_host_platform_device_count=\d+')


class Contender(NamedTuple):
  """A trainer and its batches, whose steps are timed."""

  trainer: Any
  batches: Any
  programs: list[Any]
  """Programs that all steps run."""
  rates: list[float]
  """Examples/s of each turn."""
  moved: list[tuple[float, ...]]
  """For each step the busiest device over the mean, and rows in all and sent.
  """


def turn(one: Contender, steps: int) -> None:
  """Takes steps, and notes their rate and what they moved."""
  started, examples = time.perf_counter(), 0
  for _ in range(steps):
    item: Any = one.batches.peek()
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


class TimedStep(NamedTuple):
  """Times of a step on one device here, medians over some steps."""

  host: HostMs
  seconds: float
  """From one step to the next."""
  lookups: int
  """Lookups of its examples."""


def timed_step(config: Any, parts: int, examples: int) -> TimedStep:
  """Takes steps of so many examples, cut into parts, and times them."""
  config = config.copy_and_resolve_references()
  config.data.batch_size, config.parts = examples, parts
  config.devices = config.replicas = config.hosts = 1
  data = datasets.dataset(config)
  steps = (_TURNS + 2) * _STEPS
  recipe = build.recipe(config, data, steps)
  trainer = build.trainer(config, data, recipe, build.hot(config, data, recipe))
  with contextlib.closing(
    build.batches(config, trainer, data, steps + 8)
  ) as batches:
    first: Any = batches.peek()
    lookups = first.batch.lookups.size
    one = Contender(trainer, batches, [], [], [])
    turn(one, 2 * _STEPS)  # compiles
    one.rates.clear()
    for _ in range(_TURNS):
      turn(one, _STEPS)
    host = batches.clock.host_ms()
  return TimedStep(host, examples / float(np.median(one.rates)), lookups)


def of_processes(bar: Any, rounds: int, steps: int) -> list[dict[str, Any]]:
  """Returns the examples/s of runs of one process and of two.

  They are the median over lines of metrics, as some steps wait for programs
  that another process compiles.
  """
  rates: dict[int, list[float]] = {1: [], 2: []}
  more = ['skip.mode=off', 'eval.curve_steps=0', f'train.steps={steps}']
  more += [f'parts={PARTS}', f'log_steps={max(1, steps // 30)}']
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
        # XLA takes a blank for the name of a file.
        here = _DEVICES.sub('', os.environ.get('XLA_FLAGS', '')).strip()
        environment = os.environ | {'XLA_FLAGS': here}
        done = subprocess.run(
          command, env=environment, capture_output=True, text=True
        )
        if done.returncode:
          raise UserError(
            'a run that is timed must end well',
            got=' '.join(done.stderr.split())[-300:],
            where='--config',
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
