"""What the host does for a step, phase by phase, and how often it is fed.

Each phase is timed by itself, one after the other; the pipeline as it runs,
with a device that is busy for some time or not at all.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import gzip
import itertools
import json
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np

from experiments.bench.contest import Replay
from slipstream_jax.data.prefetch import OrderedResults
from slipstream_jax.engine.buffers import to_host, to_step
from slipstream_jax.engine.pipeline import PlannedBatches
from slipstream_jax.placement.base import bucket, link
from slipstream_jax.store.host_table import row_weights, unique_rows_of
from slipstream_jax.training.loop import take_step
from slipstream_jax.training.trainer_parts import planned, TrainerParts
from slipstream_jax.types import Batch, RowBlock

Spent = dict[str, list[float]]
TURNS = 6
"""Of a rate; the first is left out."""
_WARM = 5  # of everything, the first ones: left out of medians
_PROGRAM = 'PjitFunction('  # so JAX's profiler names the call of one


def timed(spent: Spent, phase: str, call: Callable[[], Any]) -> Any:
  """What the call gives, once it is computed; notes its ms."""
  started = time.perf_counter()
  result = jax.block_until_ready(call())
  spent.setdefault(phase, []).append(1e3 * (time.perf_counter() - started))
  return result


def medians(spent: Spent) -> dict[str, float]:
  """Of each phase, its first turns left out."""
  return {phase: float(np.median(ms[_WARM:])) for phase, ms in spent.items()}


def phases(trainer: TrainerParts, batches: Sequence[Batch]) -> dict[str, float]:
  """Median ms of what the host does for a batch, in one thread.

  The sums of all groups of tables. `sequential` is what no worker shares.
  """
  sums: dict[str, float] = {}
  for number in range(len(trainer.engine.groups)):
    for phase, ms in _phases_of(trainer, number, batches).items():
      sums[phase] = sums.get(phase, 0.0) + ms
  return {**sums, 'sequential': sums['plan'] + sums['link']}


def _phases_of(
  trainer: TrainerParts, number: int, batches: Sequence[Batch]
) -> dict[str, float]:
  group, of_table = (
    trainer.engine.groups[number],
    trainer.engine.tables.groups[number],
  )
  placement, spent = group.placement, Spent()
  state = placement.start(group.num_rows, group.hot, None)
  time_of = functools.partial(timed, spent)
  host, before = group.host, None
  find = functools.partial(unique_rows_of, group=of_table, hot=group.hot)
  known = [
    time_of('unique', functools.partial(find, batch.lookups))
    for batch in batches
  ]
  for at, batch in enumerate(batches):
    window = known[at : at + 1 + placement.look_ahead]
    inverse, count = window[0].inverse, bucket(len(window[0].rows))
    weigh = functools.partial(row_weights, inverse, batch.weights, count)
    weights = time_of('weights', weigh)
    make = functools.partial(placement.plan, state, window)
    state, plan = time_of('plan', make)
    plan = time_of('link', functools.partial(link, before or plan, plan))
    rows = plan.rows[plan.load][plan.forward.at < 0]
    size = bucket(len(rows), smallest=1024)
    gather = functools.partial(host.gather, rows, size)
    block = time_of('gather', gather)
    # The batch's own columns go with the first group's rows.
    columns = (batch.dense, batch.labels, batch.weights) if not number else ()
    inputs = block, plan.inverse, weights, columns
    on_device: tuple[RowBlock, *tuple[Any, ...]]
    on_device = time_of('put', functools.partial(to_step, inputs))
    time_of('get', functools.partial(to_host, on_device[0]))
    scatter = functools.partial(host.scatter, rows, block)
    time_of('scatter', scatter)
    before = plan
  return medians(spent)


def step_ms(trainer: TrainerParts, batches: Sequence[Batch]) -> float:
  """Median ms of the step itself: forward, backward and updates."""
  spent, update = Spent(), trainer.update

  def timed_update(*arguments: Any) -> Any:
    jax.block_until_ready(arguments)
    return timed(spent, 'step', functools.partial(update, *arguments))

  trainer.update = timed_update
  with planned(trainer, Replay(batches), 0) as stream:
    for item in itertools.islice(stream, len(batches)):
      take_step(trainer, item)
  trainer.update = update
  return medians(spent)['step']


def dispatches(trainer: TrainerParts, batches: Sequence[Batch]) -> float | None:
  """Compiled programs that the host starts for a step, in the mean.

  As counted by JAX's profiler; None where it names them otherwise.
  """
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with (
    tempfile.TemporaryDirectory() as folder,
    planned(trainer, Replay(batches), 0) as stream,
  ):
    for item in itertools.islice(stream, len(batches)):
      take_step(trainer, item)  # compiles, and fills a cache
    items = itertools.islice(stream, len(batches))
    with jax.profiler.trace(folder, profiler_options=options):
      for item in items:
        take_step(trainer, item)
    (path,) = pathlib.Path(folder).rglob('*.trace.json.gz')
    with gzip.open(path) as file:
      events = json.load(file)['traceEvents']
  return _calls(events) / len(batches) or None


def _calls(events: Sequence[dict[str, Any]]) -> int:
  """Calls of programs, one within another counted once."""
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
  device_ms: float,
) -> Iterator[dict[str, Any]]:
  """Median ms per batch of the whole pipeline, over several turns.

  `cpu ms` is the processor's time of all threads, those of a CPU that stands
  for the device among them.

  Args:
    trainer: takes no real step here.
    batches: of all turns, each in one of them: a cache must miss some rows.
    workers: threads to compare.
    device_ms: what a step takes the device; nothing is measured as well.
  """
  for number in workers:
    for busy_ms in sorted({0.0, device_ms}):
      with planned(trainer, Replay(batches), 2, number) as stream:
        turns = [
          _turn(trainer, stream, busy_ms, len(batches) // TURNS)
          for _ in range(TURNS)
        ]
      ms, cpu_ms = np.median(turns[1:], axis=0)
      line = {'workers': number, 'step ms': busy_ms}
      yield {**line, 'ms per batch': float(ms), 'cpu ms': float(cpu_ms)}


def unique_rates(
  trainer: TrainerParts, batches: Sequence[Batch], workers: Sequence[int]
) -> Iterator[dict[str, Any]]:
  """Median ms per batch in which so many workers find unique ids, in turns."""
  groups, tables = trainer.engine.groups, trainer.engine.tables.groups

  def find(batch: Batch) -> None:
    for group, of_table in zip(groups, tables, strict=True):
      unique_rows_of(batch.lookups, of_table, group.hot)

  spent: dict[int, list[float]] = {number: [] for number in workers}
  for _ in range(TURNS):
    for number, turns in spent.items():
      with contextlib.closing(
        OrderedResults(iter(batches), find, number)
      ) as all_of:
        started = time.perf_counter()
        for _ in all_of:
          pass
        turns.append(1e3 * (time.perf_counter() - started) / len(batches))
  for number, turns in spent.items():
    yield {'workers': number, 'ms per batch': float(np.median(turns[1:]))}


def _turn(
  trainer: TrainerParts, stream: PlannedBatches, busy_ms: float, steps: int
) -> tuple[float, float]:
  """Ms per batch of so many steps, and those of the processor."""
  free = 0.0  # when the device will be done with all steps
  real = trainer.update

  def update(state: Any, blocks: Any, *_: Any) -> tuple[Any, Any, Any]:
    nonlocal free
    free = max(free, time.perf_counter()) + busy_ms / 1e3
    return state, blocks, state.step

  trainer.update = update
  started, last, cpu = time.perf_counter(), 0.0, time.process_time()
  for item in itertools.islice(stream, steps):
    with trainer.engine.helped(stream.helpers):
      take_step(trainer, item)
    # As in training: the step before is waited for once this one is dispatched.
    time.sleep(max(0.0, last - time.perf_counter()))
    last = free
  jax.block_until_ready(trainer.engine.groups[-1].load(item.plans[-1]))
  trainer.update = real
  spent = time.perf_counter() - started, time.process_time() - cpu
  return 1e3 * spent[0] / steps, 1e3 * spent[1] / steps
