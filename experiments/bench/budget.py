"""Measures what the host does for a step, phase by phase and in all."""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import gzip
import itertools
import json
import pathlib
import tempfile
import threading
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from experiments.bench.contest import (
  Replay,
  Stopwatch,
  trainer_of,
)
from experiments.bench.runner import Item
from experiments.common import datasets
from experiments.common.progress import Bar
from slipstream_jax.engine.buffers import to_host, to_step
from slipstream_jax.engine.clock import step_ms_to_pay
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.placement.base import bucket, link
from slipstream_jax.schedules.hotline import hotline as hotline_order
from slipstream_jax.schedules.hotline import WORKING_SET
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.scoring.linear import FULL
from slipstream_jax.store.host_table import row_weights, unique_rows_of
from slipstream_jax.training.loop import take_step
from slipstream_jax.training.trainer_parts import (
  planned,
  scheduled,
  slipstream,
  TrainerParts,
)
from slipstream_jax.types import Batch

_TURNS = 6  # of a rate, which leaves out the first
_PROGRAM = 'PjitFunction('  # what JAX's profiler calls the start of a program


def measure(
  config: ml_collections.ConfigDict,
  bar: Bar,
  batches: Sequence[str],
  device_steps_ms: Sequence[str],
  placements: Sequence[str],
  drop: float,
  workers: Sequence[str],
  steps: int,
  hotline: bool,
) -> Iterator[Item]:
  """Yields ms per batch, for batch sizes and numbers of workers.

  The arguments are those of the program `experiments.bench.host`.
  """
  alone, in_all, skipping, of_hotline = [], [], [], []
  threads, steps_ms = [*map(int, workers)], [*map(float, device_steps_ms)]
  for size in map(int, batches):
    config.data.batch_size = size
    data, watch = datasets.dataset(config), Stopwatch()
    with contextlib.closing(data.train(size)) as source:
      some = [watch('data', next, source) for _ in range(_TURNS * steps)]
    bar.begin(f'batch {size}', len(placements), 'placement')
    for number, placement in enumerate(placements):
      bar.show(number, placement)
      config.placement = placement
      head = {'batch': size, 'placement': placement}
      trainer = trainer_of(config, data)
      if not number:  # the same program under every placement
        step = real_step_ms(trainer, some[:steps])
      line = {**head, **watch.medians(), **phases(trainer, some[:steps])}
      starts = dispatches(trainer, some[:steps])
      alone.append({**line, 'step': step, 'dispatches': starts})
      for line in rates(trainer, some, threads, steps_ms):
        in_all.append(head | line)
      if drop:
        trainers = trainer, trainer_of(config, data)
        for line in rates_skipping(trainers, some, drop, threads, steps_ms):
          skipping.append(head | line)
      if hotline and placement == 'pinned':
        for line in rates_of_hotline(trainer, some, threads, steps_ms):
          of_hotline.append(head | line)
  yield 'ms per batch, one phase after the other', alone
  yield 'ms per batch in all, with a step that waits', in_all
  if drop:
    yield f'ms per batch of the source, leaving out {drop:.0%}', skipping
  if hotline:
    yield 'ms per batch of working sets, in all', of_hotline


def phases(trainer: TrainerParts, batches: Sequence[Batch]) -> dict[str, float]:
  """Returns the median ms of what the host does for a batch, in one thread.

  They are sums over all groups of tables. No worker shares `sequential`.
  """
  watches = [
    _phases_of(trainer, number, batches)
    for number in range(len(trainer.engine.groups))
  ]
  medians = [watch.medians() for watch in watches]
  sums = {name: sum(ms[name] for ms in medians) for name in medians[0]}
  return {**sums, 'sequential': sums['plan'] + sums['link']}


def _phases_of(
  trainer: TrainerParts, number: int, batches: Sequence[Batch]
) -> Stopwatch:
  engine, watch = trainer.engine, Stopwatch()
  group, tables = engine.groups[number], engine.tables.groups[number]
  placement, host = group.placement, group.host
  hot = group.hot if placement.reads_hot else None
  state = placement.start(group.num_rows, group.hot, None)
  before = None
  known = [
    watch('unique', unique_rows_of, batch.lookups, tables, hot)
    for batch in batches
  ]
  for at, batch in enumerate(batches):
    window = known[at : at + 1 + placement.look_ahead]
    inverse, count = window[0].inverse, bucket(len(window[0].rows))
    weights = watch('weights', row_weights, inverse, batch.weights, count)
    state, plan = watch('plan', placement.plan, state, window)
    plan = watch('link', link, before or plan, plan)
    assert plan.forward is not None  # as it is linked
    rows = plan.rows[plan.load][plan.forward.at < 0]
    block = watch('gather', host.gather, rows, bucket(len(rows), smallest=1024))
    # The batch's own columns go with the first group's rows.
    columns = (batch.dense, batch.labels, batch.weights) if not number else ()
    inputs = block, plan.inverse, weights, columns
    on_device = watch('put', to_step, inputs)
    watch('get', to_host, on_device[0])
    watch('scatter', host.scatter, rows, block)
    before = plan
  return watch


def real_step_ms(trainer: TrainerParts, batches: Sequence[Batch]) -> float:
  """Returns the median ms of the step: forward, backward and updates."""
  watch, update = Stopwatch(), trainer.update

  def timed_update(*arguments: Any) -> Any:
    jax.block_until_ready(arguments)
    return watch('step', update, *arguments)

  trainer.update = timed_update
  with planned(trainer, Replay(batches), 0) as stream:
    _take(trainer, stream, len(batches))
  trainer.update = update
  return watch.medians()['step']


def _take(trainer: TrainerParts, stream: PlannedBatches, steps: int) -> None:
  for item in itertools.islice(stream, steps):
    take_step(trainer, item)


def dispatches(trainer: TrainerParts, batches: Sequence[Batch]) -> float | None:
  """Returns the mean number of compiled programs that the host starts per step.

  JAX's profiler counts them. None if it gives them another name.
  """
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with (
    tempfile.TemporaryDirectory() as folder,
    planned(trainer, Replay(batches), 0) as stream,
  ):
    _take(trainer, stream, len(batches))  # compiles, and fills a cache
    with jax.profiler.trace(folder, profiler_options=options):
      _take(trainer, stream, len(batches))
    (path,) = pathlib.Path(folder).rglob('*.trace.json.gz')
    events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
  return calls_of(events) / len(batches) or None


def calls_of(events: Sequence[dict[str, Any]]) -> int:
  """Counts the calls of programs; a call within a call is not counted."""
  calls = sorted(
    (event['tid'], event['ts'], event['ts'] + event['dur'])
    for event in events
    if event.get('name', '').startswith(_PROGRAM)
  )
  count, until = 0, dict[int, float]()
  for thread, begin, end in calls:
    if begin >= until.get(thread, 0.0):
      count, until[thread] = count + 1, end
  return count


def rates(
  trainer: TrainerParts,
  batches: Sequence[Batch],
  workers: Sequence[int],
  steps_ms: Sequence[float],
) -> Iterator[dict[str, Any]]:
  """Yields the median ms per batch of the whole pipeline, as in `Turn`.

  Args:
    trainer: takes no real step here.
    batches: of all turns. Each is in one turn, so that a cache misses rows.
    workers: numbers of threads to compare.
    steps_ms: milliseconds that a step takes the device, to compare.
  """
  for number, busy_ms in itertools.product(workers, steps_ms):
    with planned(trainer, Replay(batches), 2, number) as stream:
      turns = [
        _turn(trainer, stream, busy_ms, len(batches) // _TURNS)
        for _ in range(_TURNS)
      ]
    medians = Turn(*np.median(turns[1:], axis=0).tolist())._asdict()
    named = {name.replace('_', ' '): ms for name, ms in medians.items()}
    yield {'workers': number, 'step ms': busy_ms, **named}


def rates_of_hotline(
  trainer: TrainerParts,
  batches: Sequence[Batch],
  workers: Sequence[int],
  steps_ms: Sequence[float],
) -> Iterator[dict[str, Any]]:
  """Yields the median ms per batch of Hotline's order, as `rates`.

  In every other turn no rows are gathered behind popular batches.
  """
  engine, count = trainer.engine, len(batches) // _TURNS // WORKING_SET
  gather = engine.gather_early
  for number, busy_ms in itertools.product(workers, steps_ms):
    turns: dict[bool, list[float]] = {True: [], False: []}
    with scheduled(
      trainer, Replay(batches), hotline_order(), WORKING_SET, number
    ) as stream:
      for early in [True, False] * _TURNS:
        vars(engine)['gather_early'] = gather if early else lambda: None
        turn = _turn(trainer, stream, busy_ms, WORKING_SET * count)
        turns[early].append(turn.ms_per_batch)
    del vars(engine)['gather_early']
    early_ms, late_ms = (float(np.median(x[1:])) for x in turns.values())
    yield {
      'workers': number,
      'step ms': busy_ms,
      'gathered early': early_ms,
      'at the step': late_ms,
      'ratio': early_ms / late_ms,
    }


def rates_skipping(
  trainers: tuple[TrainerParts, TrainerParts],
  batches: Sequence[Batch],
  drop: float,
  workers: Sequence[int],
  steps_ms: Sequence[float],
) -> Iterator[dict[str, Any]]:
  """Yields the median ms per batch of the source without and with skipping.

  Turns of both alternate, once a linear scorer learns from few examples.
  Columns of `cpu` have the host's part of the processor time, `choosing` that
  of the choice, `in order` the part of it that goes in the order of the source,
  and `to pay` the predicted step below which it does not pay.

  Args:
    trainers: one for each of both.
    batches: as for `rates`, like the next two.
    drop: share of all examples to leave out.
    workers: numbers of threads to compare.
    steps_ms: milliseconds that a step takes the device, to compare.
  """
  count, size = len(batches) // _TURNS, len(batches[0].labels)
  settings = Skip(drop=drop, phases=Phases(warm_up=0, settle=count // 2))
  for number, busy_ms in itertools.product(workers, steps_ms):
    turns = []
    with (
      planned(trainers[0], Replay(batches), 2, number) as whole,
      slipstream(
        trainers[1], Replay(batches), settings, depth=2, workers=number
      ) as part,
    ):
      _turn(trainers[1], part, 0.0, FULL // size)
      for _ in range(2 * _TURNS):
        turn = []
        for trainer, stream in zip(trainers, (whole, part), strict=True):
          before = trainer.engine.counters.examples_seen
          chosen = stream.seconds_choosing
          spent = np.array(_turn(trainer, stream, busy_ms, count))
          seen = trainer.engine.counters.examples_seen - before
          choosing = 1e3 * (stream.seconds_choosing - chosen)
          ms, host = spent[:2] * count
          turn += [x * size / seen for x in (ms, host, choosing)]
        turns.append(turn)
      one, none, some = part.clock, whole.clock.host_ms(), part.clock.host_ms()
      least = step_ms_to_pay(some, none, one.threads, one.left_out)
    whole_ms, cpu, _, ms, skip_cpu, choosing = np.median(
      turns[_TURNS:], axis=0
    ).tolist()
    yield {
      'workers': number,
      'step ms': busy_ms,
      'none left out': whole_ms,
      'some left out': ms,
      'ratio': ms / whole_ms,
      'cpu, none': cpu,
      'cpu, some': skip_cpu,
      'choosing': choosing,
      'in order': some.choose,
      'to pay': least,
    }


@functools.partial(jax.jit, keep_unused=True)
def _received(inputs: Any) -> int:
  """Takes what a step takes from the host, and does nothing."""
  return 0


class Turn(NamedTuple):
  """Means over the steps of a turn, in ms per step."""

  ms_per_batch: float
  host_cpu: float
  """The processor's time of all threads but the device's, if it is a CPU. Next
  are its parts."""
  training_cpu: float
  """Of the thread that trains."""
  planner_cpu: float
  worker_cpu: float
  """Of the workers together."""
  device_cpu: float
  """The processor's time of the other threads."""


def _turn(
  trainer: TrainerParts, stream: PlannedBatches, busy_ms: float, steps: int
) -> Turn:
  """Takes some steps that wait, and returns their means."""
  free = 0.0  # when the device will be done with all steps
  real = trainer.update

  def update(state: Any, blocks: Any, *inputs: Any) -> tuple[Any, Any, Any]:
    nonlocal free
    _received(inputs[:-1])  # the last is a word
    free = max(free, time.perf_counter()) + busy_ms / 1e3
    return state, blocks, state.step

  trainer.update = update
  stream.peek()  # so that its threads run
  started, last, spent = time.perf_counter(), 0.0, _cpu_seconds()
  for item in itertools.islice(stream, steps):
    timed = stream.clock.timed(item.spent, item.scheduled, lambda: None)
    with trainer.engine.helped(stream.helpers), timed:
      take_step(trainer, item)
    # As in training, the previous step is awaited once this one is dispatched.
    time.sleep(max(0.0, last - time.perf_counter()))
    last = free
  jax.block_until_ready(trainer.engine.groups[-1].load(item.plans[-1]))
  trainer.update = real
  ms = np.array([time.perf_counter() - started, *_cpu_seconds() - spent])
  wall, process, training, planner, workers = (1e3 * ms / steps).tolist()
  host = training + planner + workers
  return Turn(wall, host, training, planner, workers, process - host)


def _cpu_seconds() -> np.ndarray:
  """Returns the processor's time of the process, this thread, and others."""
  planner = workers = 0.0
  for thread in threading.enumerate():
    if not thread.name.startswith('slipstream') or thread.ident is None:
      continue
    clock = time.pthread_getcpuclockid(thread.ident)
    seconds = time.clock_gettime(clock)
    if thread.name == 'slipstream-planner':
      planner += seconds
    else:
      workers += seconds
  return np.array([time.process_time(), time.thread_time(), planner, workers])
