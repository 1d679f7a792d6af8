"""Models what a step would take over links that the machine does not have.

Nothing here is measured. The bytes that the engine counted cross a link with a
stated rate, a step takes the device a stated time, and host phases take what
they took here. A small graph of tasks for each system says what may overlap.
All times are means in ms per batch, so batches of unequal size take longer than
the model says.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.reproduce.results import PHASES, Row


class Link(NamedTuple):
  """A link between host and device that carries both directions at once."""

  load_gb_per_s: float
  """1e9 bytes per second to the device, for large copies of pinned memory."""
  store_gb_per_s: float
  """The same from the device."""
  latency_us: float
  """Of each copy, whatever its size."""


LINKS = {
  'PCIe 3 x16': Link(12.0, 12.0, 10.0),
  'PCIe 4 x16': Link(24.0, 24.0, 10.0),
  'PCIe 5 x16': Link(50.0, 50.0, 10.0),
  'NVLink-C2C': Link(375.0, 297.0, 5.0),
}
"""Stated rates: about what large copies get of 15.8, 31.5, 63 and 450 GB/s."""
STEP_MS = (0.25, 0.5, 1.0)
"""Stated times of a step on the device."""
_AHEAD = ('data', 'unique', 'plan')
_IN_TURN = ('gather', 'put', 'step', 'get', 'host_update', 'scatter', 'sync')

Ms = Mapping[str, float]
"""Phase to ms per batch. A phase that some batches lack has its share."""


class StepTime(NamedTuple):
  """The time from one step to the next, in a steady state."""

  ms_per_batch: float
  binds: str
  """Tasks that wait for one another and take this long: 'a + b'."""


class Task(NamedTuple):
  """A part of the work on a batch."""

  name: str
  ms: float
  after: tuple[tuple[str, int], ...]
  """Tasks that it waits for, with the number of batches before. A task waits
  for its own last time, too, unless other tasks imply it."""


def period(tasks: Sequence[Task]) -> StepTime:
  """Returns the time from one batch to the next if tasks repeat endlessly.

  It is the greatest ratio of time to batches over all cycles of tasks that wait
  for one another.

  Args:
    tasks: none may wait for itself within one batch.
  """
  best = StepTime(0.0, '')
  for cycle, batches in _cycles(tasks):
    ms = sum(task.ms for task in cycle) / batches
    names = [task.name for task in tasks if task in cycle and task.ms]
    if ms > best.ms_per_batch:
      best = StepTime(ms, ' + '.join(names))
  return best


def _cycles(tasks: Sequence[Task]) -> Iterator[tuple[list[Task], int]]:
  """Yields each cycle of tasks once, with the batches that it spans."""
  place = {task.name: number for number, task in enumerate(tasks)}

  def back(path: list[Task], batches: int) -> Iterator[tuple[list[Task], int]]:
    for name, distance in path[-1].after:
      if name == path[0].name:
        yield path, batches + distance
      # A cycle is found from its first task only.
      elif place[name] > place[path[0].name] and tasks[place[name]] not in path:
        yield from back([*path, tasks[place[name]]], batches + distance)

  for task in tasks:
    yield from back([task], 0)


def _read_ahead(ms: Ms, workers: int) -> list[Task]:
  """One thread reads batches, and several find their unique rows."""
  return [
    Task('data', ms['data'], (('data', 1), ('unique', workers))),
    Task('unique', ms['unique'], (('data', 0), ('unique', workers))),
    Task('plan', ms['plan'], (('unique', 0), ('plan', 1))),
  ]


def _in_order(
  names: Sequence[str], ms: Ms, first_after: str | None = None
) -> list[Task]:
  """Each task waits for the one before it, and the first for the last."""
  before = [(names[-1], 1), *((name, 0) for name in names)]
  others = [] if first_after is None else [(first_after, 0)]
  return [
    Task(name, ms[name], (one, *(others if name == names[0] else ())))
    for name, one in zip(names, before, strict=False)
  ]


def overlapping(ms: Ms, popular: float, workers: int) -> StepTime:
  """Models Slipstream, where all work overlaps the steps on the device.

  The host thread of a step scatters what left with the step two before it,
  whose loss is known by then, and gathers. Rows that the last step changed are
  taken on the device.
  """
  return period(
    [
      *_read_ahead(ms, workers),
      Task('scatter', ms['scatter'], (('get', 2), ('step', 2), ('gather', 1))),
      Task('gather', ms['gather'], (('scatter', 0), ('plan', 0))),
      Task('put', ms['put'], (('gather', 0), ('put', 1))),
      Task('step', ms['step'], (('put', 0), ('step', 1))),
      Task('get', ms['get'], (('step', 0), ('get', 1))),
    ]
  )


def parameter_server(ms: Ms, popular: float, workers: int) -> StepTime:
  """Models XDL: pull, step, push. Only batches are read ahead."""
  ahead = _read_ahead(ms, workers)
  return period([*ahead, *_in_order(_IN_TURN, ms, 'plan')])


def nothing_overlaps(ms: Ms, popular: float, workers: int) -> StepTime:
  """Models hybrid DLRM."""
  return period(_in_order((*_AHEAD, *_IN_TURN), ms))


def strips(ms: Ms, popular: float, workers: int) -> StepTime:
  """Models FAE: popular batches on the device, others as hybrid DLRM, swaps."""
  step = Task('step', ms['step'], (('plan', 0), ('step', 1)))
  hot = period([*_read_ahead(ms, workers), step])
  # These phases belong to all batches, the others to batches that are not hot.
  less = {name: (1 - popular) * ms[name] for name in (*_AHEAD, 'step')}
  others = nothing_overlaps({**ms, **less}, 0.0, workers)
  total = popular * hot.ms_per_batch + others.ms_per_batch
  parts = [f'popular: {hot.binds}'] if popular else []
  if others.ms_per_batch:
    parts.append(f'others: {others.binds}')
  return StepTime(total, '; '.join(parts))


def working_sets(ms: Ms, popular: float, workers: int) -> StepTime:
  """Models Hotline: cold rows come and go while popular batches run.

  A set's rows are gathered after those of the last set are back, as no row is
  in two places.
  """
  others = (1 - popular) * ms['step']
  return period(
    [
      *_read_ahead(ms, workers),
      Task('gather', ms['gather'], (('scatter', 1), ('plan', 0))),
      Task('put', ms['put'], (('gather', 0),)),
      Task('popular step', ms['step'] - others, (('step', 1), ('plan', 0))),
      Task('step', others, (('put', 0), ('popular step', 0))),
      Task('get', ms['get'], (('step', 0),)),
      Task('scatter', ms['scatter'], (('get', 0),)),
    ]
  )


class Way(NamedTuple):
  """How a system goes about a step."""

  model: Callable[[Ms, float, int], StepTime]
  """Of the phases' ms, the share of popular batches, and the workers."""
  loads: int = 8
  """Copies to the device in a step: rows with two state arrays, positions, and
  the batch's columns."""
  stores: int = 2
  """Copies from the device in a step."""
  rows: bool = True
  """Whether rows cross, so that their positions cross as well."""


WAYS: dict[str, Way] = {
  'plain': Way(overlapping),
  'cached': Way(overlapping),
  'pinned': Way(overlapping),
  'fae_pinned': Way(overlapping),
  'xdl': Way(parameter_server, loads=6, stores=1),
  'dlrm_hybrid': Way(nothing_overlaps, loads=4, stores=1, rows=False),
  'fae': Way(strips, loads=4, stores=1, rows=False),
  'hotline': Way(working_sets),
  'hotline_micro': Way(working_sets),
}


class Counts(NamedTuple):
  """What a step of a system does, on average."""

  system: str
  bytes_loaded: float
  """To the device: rows or embeddings, and swaps."""
  bytes_stored: float
  host_ms: Ms
  """Phases of the host. Those of the link and the device are not used."""
  popular: float = 0.0
  """Share of the examples that look up hot rows only."""
  workers: int = 2
  """Threads that read batches and find their unique rows."""


def modelled(counts: Counts, link: Link, device_step_ms: float) -> StepTime:
  """Returns what a step takes over a link, and what binds.

  Args:
    counts: of the system.
    link: that carries the bytes.
    device_step_ms: of forward, backward and updates on the device.
  """
  way = WAYS[counts.system]
  ms = {**dict.fromkeys(PHASES, 0.0), **counts.host_ms}
  latency_ms = link.latency_us / 1e3
  # 1e9 bytes per second are 1e6 per millisecond.
  loading, storing = 1e6 * link.load_gb_per_s, 1e6 * link.store_gb_per_s
  ms['put'] = counts.bytes_loaded / loading + way.loads * latency_ms
  ms['get'] = counts.bytes_stored / storing
  if counts.bytes_stored:
    ms['get'] += way.stores * latency_ms
  # The device waits for a snapshot. The thread that takes the next batch
  # chooses its examples.
  ms['step'] = device_step_ms + ms['snapshot']
  ms['data'] += ms['choose']
  return way.model(ms, counts.popular, counts.workers)


def counts_of(
  runs: Sequence[Row],
  host_ms: Ms,
  model: Mapping[str, Any],
  workers: int = 2,
) -> Counts | None:
  """Returns the counts of a system: means over its finished runs.

  Args:
    runs: rows of finished runs of one model, system and way to skip.
    host_ms: its phases.
    model: the facts of the model.
    workers: threads that read batches and find their unique rows.

  Returns:
    None where runs or phases are not known.
  """
  runs = [run for run in runs if run.get('step')]
  if not runs or not host_ms or runs[0]['system'] not in WAYS:
    return None

  def per_step(name: str) -> float:
    total = sum(run.get(name, 0) for run in runs)
    return float(total) / sum(run['step'] for run in runs)

  system = runs[0]['system']
  # The engine counts rows. Positions cross beside them as i32.
  lookups = model.get('batch_size', 0) * model.get('features_per_example', 0)
  positions = 4.0 * lookups if WAYS[system].rows else 0.0
  dense = per_step('dense_bytes') / 2 if system == 'xdl' else 0.0  # each way
  return Counts(
    system,
    per_step('bytes_loaded') + positions + dense,
    per_step('bytes_stored') + dense,
    host_ms,
    _popular(runs),
    workers,
  )


def _popular(runs: Sequence[Row]) -> float:
  """Returns the share of popular examples among those trained.

  All examples that are dropped are popular.
  """
  hot = trained = 0.0
  for run in runs:
    if 'examples_hot_share' in run and run.get('examples_seen'):
      dropped = run.get('examples_dropped', 0)
      hot += run['examples_hot_share'] * run['examples_seen'] - dropped
      trained += run['examples_seen'] - dropped
  return min(1.0, max(0.0, hot / trained)) if trained else 0.0
