"""How long a batch takes where some tasks wait for others: a graph per system.

All that is of a step is in ms per batch, in the mean: of what is not done for
every batch, its share.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class StepTime(NamedTuple):
  """What comes out."""

  ms_per_batch: float
  """From one step to the next, once all is under way."""
  binds: str
  """What takes this long: tasks that wait for one another, 'a + b'."""


class Task(NamedTuple):
  """What is done for every batch, or every set of them."""

  name: str
  ms: float
  after: tuple[tuple[str, int], ...]
  """Tasks that it waits for, and of how many batches before; itself, too, as
  whatever does it does one at a time."""


def period(tasks: Sequence[Task]) -> StepTime:
  """Time from one batch to the next of tasks repeated for ever.

  It is the most that a cycle of tasks that wait for one another takes per batch
  that it spans: time over distance, the greatest of all cycles.

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
  """Every cycle of tasks, each once, and the batches that it spans."""
  place = {task.name: number for number, task in enumerate(tasks)}

  def back(path: list[Task], batches: int) -> Iterator[tuple[list[Task], int]]:
    for name, distance in path[-1].after:
      if name == path[0].name:
        yield path, batches + distance
      # A cycle is found from its first task alone.
      elif place[name] > place[path[0].name] and tasks[place[name]] not in path:
        yield from back([*path, tasks[place[name]]], batches + distance)

  for task in tasks:
    yield from back([task], 0)


_AHEAD = ('data', 'unique', 'plan')
_IN_TURN = ('gather', 'put', 'step', 'get', 'host_update', 'scatter', 'sync')


def _read_ahead(ms: Mapping[str, float], workers: int) -> list[Task]:
  """Batches are read by one thread at a time, and looked at by several."""
  return [
    Task('data', ms['data'], (('data', 1), ('unique', workers))),
    Task('unique', ms['unique'], (('data', 0), ('unique', workers))),
    Task('plan', ms['plan'], (('unique', 0), ('plan', 1))),
  ]


def _in_order(
  names: Sequence[str], ms: Mapping[str, float], first: str | None = None
) -> list[Task]:
  """Each after the one before it, and the first one after the last.

  Args:
    names: of the tasks.
    ms: what they take.
    first: what the first one waits for, too.
  """
  before = [(names[-1], 1), *((name, 0) for name in names)]
  others = [] if first is None else [(first, 0)]
  return [
    Task(name, ms[name], (one, *(others if name == names[0] else ())))
    for name, one in zip(names, before, strict=False)
  ]


def overlapping(
  ms: Mapping[str, float], popular: float, workers: int
) -> StepTime:
  """Ours: all of it overlaps the step, which the next one is dispatched behind.

  In its turn a step's thread puts away what left with the step two before, by
  whose end its loss is known, and gathers; what the step before changed is
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


def parameter_server(
  ms: Mapping[str, float], popular: float, workers: int
) -> StepTime:
  """XDL: pull, step, push; what needs no row is done ahead."""
  ahead = _read_ahead(ms, workers)
  return period([*ahead, *_in_order(_IN_TURN, ms, 'plan')])


def nothing_overlaps(
  ms: Mapping[str, float], popular: float, workers: int
) -> StepTime:
  """Hybrid DLRM: one thing after the other."""
  return period(_in_order((*_AHEAD, *_IN_TURN), ms))


def strips(ms: Mapping[str, float], popular: float, workers: int) -> StepTime:
  """FAE: popular batches on the device, others as hybrid DLRM, and swaps."""
  hot = period(
    [
      *_read_ahead(ms, workers),
      Task('step', ms['step'], (('plan', 0), ('step', 1))),
    ]
  )
  # What is of every batch, but for those of popular strips.
  less = {name: (1 - popular) * ms[name] for name in (*_AHEAD, 'step')}
  others = nothing_overlaps({**ms, **less}, 0.0, workers)
  of_all = popular * hot.ms_per_batch + others.ms_per_batch
  parts = [f'popular: {hot.binds}'] if popular else []
  if others.ms_per_batch:
    parts.append(f'others: {others.binds}')
  return StepTime(of_all, '; '.join(parts))


def working_sets(
  ms: Mapping[str, float], popular: float, workers: int
) -> StepTime:
  """Hotline: the others' rows come and go while popular batches run.

  No row is in two places: the next set's are gathered once this one's are back.
  All ms are per batch, and so is the time, however many batches a set has.
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
