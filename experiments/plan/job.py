"""Plans steps on any number of devices, and counts what they would move."""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import itertools
import re
import shlex
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from experiments.bench.divided import PARTS, timed_step
from experiments.bench.runner import Item
from experiments.common import build, cli, datasets
from experiments.common.progress import Bar
from experiments.plan import rivals, times
from experiments.plan.machine import Link, Machine, machine_of
from experiments.plan.times import exchanged
from experiments.profile.predictions import SHARES
from slipstream_jax.data.admission import CheckedSource, ExampleShape
from slipstream_jax.data.source import bound_to, Dataset
from slipstream_jax.distributed.exchange import (
  Exchange,
  EXCHANGES,
  SMALLEST,
  traffic,
)
from slipstream_jax.distributed.lanes import Lanes, over_lanes
from slipstream_jax.engine.counters import Counters, merge
from slipstream_jax.engine.group_rows import lanes_of
from slipstream_jax.engine.pipeline import StepProbe
from slipstream_jax.engine.planner import PlannedBatch, Planner, Slices, Start
from slipstream_jax.errors import choose, UserError
from slipstream_jax.models.dmt import DMT
from slipstream_jax.placement import bucket, Placement, Plan
from slipstream_jax.schedules.systems import SCHEDULES
from slipstream_jax.selection.hot import hot_by_group
from slipstream_jax.tables import Group, TableSet
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.divided import towers_of
from slipstream_jax.training.loop import moved_by_group
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.types import HotRows, Unique

_OWN = re.compile(
  r'--?(devices|machine|steps|device_bytes|measure|output)(=.*)?'
)
_WORTH = 1.01  # how many times the least time a smaller cache may take
_RATIO = 2  # elements of rows by those that towers return, as in the paper


class Simulated(NamedTuple):
  """Counts of some steps on W devices, each array with one for each device."""

  counters: Counters
  """Sums of the steps, as a run has them, without what is loaded before."""
  kept_bytes: np.ndarray
  """Rows with their state that a device keeps between steps."""
  step_bytes: int
  """Room on each device for the rows of a step."""
  used: np.ndarray
  """Unique rows of the device, a mean over the steps."""
  row_bytes: np.ndarray
  """Bytes of these rows with their state."""
  loaded_bytes: np.ndarray
  """Bytes from the host, a mean over the steps."""
  stored_bytes: np.ndarray
  """Bytes of the step's rows to the host, without evicted ones, a mean."""
  near_bytes: np.ndarray
  """Bytes of rows and gradients to devices of its host, a mean over the steps.
  """
  far_bytes: np.ndarray
  """The same to devices of other hosts."""
  crossing: times.Crossing
  """Messages and bytes of the busiest device, with padding, means."""
  of_tables: list[dict[str, Any]]
  """Per table, its unique rows and loads in a step, means over the steps."""
  wanted: np.ndarray
  """Unique rows of each table in each slice, a mean over the steps, [T, W]."""
  wanted_near: np.ndarray
  """The same in all slices of devices with one number on their host, [T, L]."""

  @property
  def busiest(self) -> tuple[float, float, float, times.Crossing]:
    """Bytes of the busiest device's rows, loaded and stored, and its exchange.

    `times.step_time` takes them.
    """
    most = (self.row_bytes, self.loaded_bytes, self.stored_bytes)
    rows, loaded, stored = (float(one.max()) for one in most)
    return rows, loaded, stored, self.crossing

  @property
  def sent_bytes(self) -> np.ndarray:
    """Bytes of rows and gradients to other devices, a mean over the steps."""
    return self.near_bytes + self.far_bytes


class Candidate(NamedTuple):
  """A way to place rows on devices, with its modelled time."""

  replicas: int
  hosts: int
  """Between which a row crosses once. 1: rows go to each slice."""
  counts: Simulated
  time: times.StepTime

  @property
  def needed(self) -> int:
    """Bytes of rows that must fit on each device."""
    return int(self.counts.kept_bytes.max()) + self.counts.step_bytes


def plan(
  config: ml_collections.ConfigDict,
  bar: Bar,
  devices: list[str],
  steps: int,
  device_bytes: int | None,
  machine: str,
  measure: list[str],
  batch_each: bool,
) -> Iterator[Item]:
  """Yields tables of the plans, their rivals and the tables.

  All is counted by plans, and times are modelled.

  Raises:
    UserError: a number of devices that cannot train, rows that do not fit on
      the most of them, or another system than 'plain' and 'cached'.
  """
  size, of = config.data.batch_size, machine_of(machine)
  numbers = [_checked(one, size, batch_each) for one in devices]
  system = build.system(config)
  if (system.schedule, system.rows) != ('plain', 'stream'):
    raise UserError(
      'plans are of systems that keep the order of examples and move rows',
      got=repr(system.name),
      where='config.system',
      hint="use 'plain' or 'cached'",
    )
  asked = _asked(config, steps, of, batch_each, [*map(_examples, measure)])
  room = of.room if device_bytes is None else device_bytes
  lines, plans, others, first = [], [], [], 0.0
  for number in numbers:
    candidates = _candidates(asked, number, bar)
    best = _best(candidates, room)
    rate = asked.examples(number) / number
    first = first or rate / best.time.total
    plans += [
      {'devices': number, 'replicas': one.replicas, 'hosts': one.hosts}
      | _timed(one, room, one is best)
      | {'efficiency': rate / one.time.total / first}
      for one in candidates
    ]
    lines.append({'devices': number, **_line(best)})
    others += _rivals(asked, best.counts) if number > 1 else []
    if number == max(numbers):
      last = best
  _check_fits(max(numbers), last, room, device_bytes is None)
  how = 'counted by plans, times modelled, nothing was run'
  if measure:
    sizes = ' and '.join(measure)
    how = f'counted by plans, times modelled from steps of {sizes} examples'
  yield (
    'setting',
    {
      'data': asked.data.name,
      'placement': config.placement,
      'examples a step': f'{size} of {"each device" if batch_each else "all"}',
      'exchange': config.exchange,
      'steps planned': steps,
      'machine': of.name,
      'rates': of.how,
      'how': how,
    },
  )
  yield 'devices', lines
  yield 'plans', plans
  if others:
    yield 'rivals', others
  most, capacities = max(numbers), list[dict[str, Any]]()
  if config.placement == 'cached':
    capacities = _capacities(asked, most, last, room, bar)
    yield f'capacities of a cache on each of {most} devices', capacities
  yield f'tables on {most} devices', last.counts.of_tables
  settings = {'devices': most, 'replicas': last.replicas, 'hosts': last.hosts}
  settings['data.batch_size'] = asked.examples(most)
  for line in capacities:
    if line['plan'] == 'best':
      settings['cache.capacity'] = line['capacity']
  yield 'to train so', _command(settings)


def _command(settings: dict[str, int]) -> str:
  """Returns the command of a run with settings, by name in the config."""
  arguments = [x for x in cli.without(_OWN) if x.lstrip('-') != 'batch_each']
  arguments += [f'--config.{name}={value}' for name, value in settings.items()]
  return shlex.join(['python', '-m', 'experiments.run', *arguments])


class _Asked(NamedTuple):
  """A run that is planned, and the machine that it is planned for."""

  config: ml_collections.ConfigDict
  data: Dataset
  recipe: Recipe
  hot: HotRows | None
  steps: int
  machine: Machine
  work: times.Work
  measured: times.Measured | None
  batch_each: bool

  def examples(self, devices: int) -> int:
    """Returns the examples of a step of all devices."""
    size: int = self.config.data.batch_size
    return size * devices if self.batch_each else size

  def time(
    self,
    devices: int,
    row_bytes: float,
    loaded: float,
    stored: float,
    crossing: times.Crossing,
    replicas: int = 1,
  ) -> times.StepTime:
    """Returns the time of a step, given what the busiest device moves."""
    return times.step_time(
      self.machine,
      self.work,
      devices,
      self.examples(devices),
      row_bytes,
      loaded,
      stored,
      crossing,
      self.measured,
      replicas,
    )


def _asked(
  config: ml_collections.ConfigDict,
  steps: int,
  machine: Machine,
  batch_each: bool,
  measure: Sequence[int],
) -> _Asked:
  data = datasets.dataset(config)
  recipe = build.recipe(config, data, steps)
  hot = build.hot(config, data, recipe)
  measured = _measured(config, measure) if measure else None
  work = times.work_of(data, recipe, config.data.batch_size)
  return _Asked(
    config, data, recipe, hot, steps, machine, work, measured, batch_each
  )


def _candidates(asked: _Asked, devices: int, bar: Bar) -> list[Candidate]:
  """Returns a plan for each number of replicas that may be best."""
  return [
    _candidate(asked, devices, *choice, bar)
    for choice in _choices(asked, devices)
  ]


def _candidate(
  asked: _Asked, devices: int, replicas: int, hosts: int, bar: Bar
) -> Candidate:
  name = f'{devices} devices, {replicas} replicas, {hosts} hosts'
  bar.begin(name, asked.steps, 'step')
  counts = simulated(
    asked.config,
    asked.data,
    asked.recipe,
    asked.hot,
    devices,
    asked.steps,
    bar.show,
    replicas=replicas,
    hosts=hosts,
    within=asked.machine.devices,
    examples=asked.examples(devices),
  )
  time = asked.time(devices, *counts.busiest, replicas=replicas)
  return Candidate(replicas, hosts, counts, time)


def _capacities(
  asked: _Asked, devices: int, best: Candidate, room: float, bar: Bar
) -> list[dict[str, Any]]:
  """Returns a line for each capacity of a cache on each device."""
  tables = asked.recipe.tables
  rows = {round(share * tables.num_rows) for share in SHARES}
  row = build.table_bytes(asked.recipe) / tables.num_rows  # a mean
  fitting = int((room - best.counts.step_bytes) / row)
  all_of_lane = -(-tables.num_rows * best.replicas // devices)
  rows.add(min(fitting, all_of_lane))
  lines = []
  for capacity in sorted(rows):
    if not 1 < capacity <= all_of_lane:
      continue
    config = asked.config.copy_and_resolve_references()
    config.cache.capacity = capacity
    hot = build.hot(config, asked.data, asked.recipe)
    of_config = asked._replace(config=config, hot=hot)
    one = _candidate(of_config, devices, best.replicas, best.hosts, bar)
    moved = ('rows', 'hits', 'kept_MB', 'loaded_MB', 'stored_MB')
    figures = _line(one)
    lines.append(
      {'capacity': capacity}
      | {name: figures[name] for name in moved}
      | {
        'copies_ms': 1e3 * one.time.copies,
        'step_ms': 1e3 * one.time.total,
        'plan': '' if one.needed <= room else 'no room',
      }
    )
  there = [line for line in lines if not line['plan']]
  if there:
    # A larger cache must be worth its memory.
    least = min(line['step_ms'] for line in there)
    chosen = next(x for x in there if x['step_ms'] <= _WORTH * least)
    chosen['plan'] = 'best'
  return lines


def _choices(asked: _Asked, devices: int) -> list[tuple[int, int]]:
  """Returns numbers of replicas, and of hosts between which rows cross once.

  There is one replica in all, one for each host, or one for each device.
  """
  near, towers = asked.machine.devices, isinstance(asked.recipe.model, DMT)
  choices = []
  for replicas in sorted({1, max(1, devices // near), devices}):
    of_replica = max(1, devices // replicas // near)
    if not towers:
      choices += [(replicas, hosts) for hosts in sorted({1, of_replica})]
    elif replicas == 1 and asked.config.hosts <= devices:
      choices.append((1, asked.config.hosts))
    else:
      choices.append((replicas, 1))
  return choices


def _best(candidates: Sequence[Candidate], room: float) -> Candidate:
  """Returns the fastest one that fits, or the smallest if none does."""
  fitting = [one for one in candidates if one.needed <= room]
  if fitting:
    return min(fitting, key=lambda one: one.time.total)
  return min(candidates, key=lambda one: one.needed)


def _check_fits(
  number: int, one: Candidate, room: float, of_machine: bool
) -> None:
  if one.needed > room:
    raise UserError(
      f'{one.needed:,} bytes of rows must fit on each of {number} devices',
      got=f'room for {int(room):,}',
      where='--machine' if of_machine else '--device_bytes',
      hint='keep fewer rows with config.cache.capacity or config.hot.bytes, or'
      ' take more devices',
    )


def _checked(asked: str, examples: int, of_each: bool) -> int:
  """Returns a number of devices."""
  if not asked.isdecimal() or (number := int(asked)) < 1 or number & number - 1:
    raise UserError(
      'devices must be powers of two',
      got=asked,
      where='--devices',
      hint='such as 1,8,64',
    )
  examples *= number if of_each else 1
  if number > 1 and examples % max(PARTS, number):
    raise UserError(
      f'{max(PARTS, number)} parts must divide each batch of {examples}',
      got=f'{number} devices',
      where='--devices',
      hint='set config.data.batch_size to a multiple, or --batch_each',
    )
  return number


def _examples(asked: str) -> int:
  """Returns the number of examples of a step to measure."""
  if not asked.isdecimal() or not int(asked) or int(asked) % PARTS:
    raise UserError(
      f'steps to measure must have a multiple of {PARTS} examples',
      got=asked,
      where='--measure',
      hint='such as 256,4096',
    )
  return int(asked)


def _measured(
  config: ml_collections.ConfigDict, sizes: Sequence[int]
) -> times.Measured:
  """Returns the times of a step on one device here, fitted to some batches."""
  timed = [timed_step(config, PARTS, size) for size in sizes]
  host = [1e-3 * (one.host.find + one.host.plan) for one in timed]
  step = [one.seconds for one in timed]
  return times.Measured(_line_through(sizes, step), _line_through(sizes, host))


def _line_through(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
  if len(sizes) == 1:
    return Link(0.0, seconds[0] / sizes[0])
  slope, start = np.polyfit(sizes, seconds, 1)
  return Link(max(0.0, float(start)), float(slope))


def counted(
  config: ml_collections.ConfigDict, devices: int, within: int, steps: int = 5
) -> tuple[times.Work, Any]:
  """Returns the work of a step, and its counts for `times.step_time`."""
  data = datasets.dataset(config)
  recipe = build.recipe(config, data, steps)
  hot = build.hot(config, data, recipe)
  counts = simulated(config, data, recipe, hot, devices, steps, within=within)
  work = times.work_of(data, recipe, config.data.batch_size)
  return work, counts.busiest


def _looked_up(counts: Simulated, recipe: Recipe) -> rivals.Tables:
  tables = recipe.tables
  of_groups = [(g, _tables_of(g, tables)[0]) for g in tables.groups]
  sizes = np.zeros(len(tables.tables))
  row_bytes = compiled_of(recipe).row_bytes
  for (_, numbers), size in zip(of_groups, row_bytes, strict=True):
    sizes[numbers] = size
  used, loaded = (
    np.array([line[name] for line in counts.of_tables])
    for name in ('used a step', 'loaded a step')
  )
  wanted = counts.wanted, counts.wanted_near
  return rivals.Tables(used, loaded, *wanted, of_groups, sizes)


def _rivals(asked: _Asked, counts: Simulated) -> list[dict[str, Any]]:
  """Returns a line for each way to place tables, the fastest first."""
  tables = _looked_up(counts, asked.recipe)
  devices, element = tables.devices, EXCHANGES[asked.config.exchange]
  near = min(asked.machine.devices, devices)
  plans = {
    'rows of each table on all devices': rivals.everywhere(tables),
    'each table on one device, costliest first': rivals.costliest_first(tables),
    'each table on one device, in turn': rivals.in_turn(tables),
  }
  if near < devices:
    by_host = rivals.costliest_first(tables, near)
    plans['each table on one host, costliest first'] = by_host
  loads = {
    name: (rivals.load_of(tables, spread, element, near), 1)
    for name, spread in plans.items()
  }
  if near < devices:
    examples = asked.examples(devices)
    load = rivals.towers_of(tables, element, examples, _RATIO)
    # Hosts add the sums of the model's gradients in pairs, as replicas do.
    loads[f'a tower on each host, vectors / {_RATIO}'] = load, devices // near
  lines = []
  for name, (load, replicas) in loads.items():
    moved = load.row_bytes, load.loaded, load.loaded, load.crossing
    time = asked.time(devices, *moved, replicas=replicas)
    lines.append(
      {
        'devices': devices,
        'plan': name,
        'rows': float(load.rows.max()),
        'max_over_mean': _most_over_mean(load.rows),
        'near_MB': load.crossing.near_bytes / 1e6,
        'far_MB': load.crossing.far_bytes / 1e6,
        'exchange_ms': 1e3 * time.exchange,
        'step_ms': 1e3 * time.total,
        'binds': time.binds,
      }
    )
  return sorted(lines, key=lambda line: line['step_ms'])


def _counted(
  unique: Unique, lanes: Lanes, slices: int, parts: int, _: Any, hosts: int
) -> Exchange:
  """Returns what devices exchange, without places."""
  del parts
  none = (np.empty(0, np.int32),) * 5
  return Exchange(*none, traffic(unique, lanes, slices, hosts))


def simulated(
  config: ml_collections.ConfigDict,
  data: Dataset,
  recipe: Recipe,
  hot: HotRows | None,
  devices: int,
  steps: int,
  tell: Any = lambda step: None,
  *,
  replicas: int = 1,
  hosts: int | None = None,
  within: int | None = None,
  examples: int | None = None,
) -> Simulated:
  """Plans the first steps of a run on some devices, and counts.

  Args:
    config: of the run.
    data: its data.
    recipe: model, tables and optimizers.
    hot: the hot rows that the run would choose.
    devices: W.
    steps: how many to plan.
    tell: called with the number of each step.
    replicas: R.
    hosts: H of each replica. None: as the config says.
    within: devices of a host. None: all are on one.
    examples: of a step. None: as the config says.
  """
  tables, row_bytes = recipe.tables, compiled_of(recipe).row_bytes
  over = None
  if devices > 1:
    hosts = config.hosts if hosts is None else hosts
    towers = towers_of(recipe.model, tables, hosts)
    form = config.exchange, replicas, hosts, towers
    over = Slices(devices, max(PARTS, devices), *form)
  element = choose(EXCHANGES, config.exchange, 'config.exchange')
  placements = _over(build.placements(config, tables), tables, over)
  of_groups: Any = [None] * len(tables.groups)
  if hot is not None:
    hot, of_groups = hot_by_group(hot, tables)
  source = _source(examples or config.data.batch_size, data, tables)
  schedule = SCHEDULES['plain']().make(source, hot, StepProbe())
  planner = Planner(
    schedule,
    placements,
    tables,
    of_groups,
    lambda: Start((None,) * len(tables.groups), 0),
    over=over,
    exchange=_counted,
  )
  total, counts = Counters(), np.zeros((6, devices))
  own = np.zeros((2, len(tables.tables)))
  near = min(within or devices, devices)
  wanted = np.zeros((len(tables.tables), devices + near))
  crossing = np.zeros(4)
  room = step = 0
  with (
    contextlib.closing(schedule),
    contextlib.closing(planner.plan_all(planner.find_all(1))) as batches,
  ):
    for step, item in enumerate(itertools.islice(batches, steps), 1):
      trained = int(np.count_nonzero(item.scheduled.batch.weights))
      moved = moved_by_group(item, tables, row_bytes, over, trained)
      seen = Counters(item.scheduled.seen, trained, item.scheduled.dropped)
      if over is not None:
        vectors = over.bytes_between_hosts(len(item.batch.labels))
        seen = seen._replace(bytes_between_hosts=vectors)
        counts[4:] += _vectors(over, vectors / devices, near)[1::2, None]
        crossing += _vectors(over, _padded(over, item), near)
      total = functools.reduce(merge, moved, merge(total, seen))
      counts += _of_devices(item, tables, row_bytes, devices, element, within)
      own += _of_tables(item, tables)
      wanted += _wanted(item, tables, devices, near)
      crossing += _crossing(item, tables, element, devices, within)
      room = max(room, _room(item, row_bytes))
      tell(step)
  taken = max(step, 1)  # a source of the user's may end
  used, sizes, loaded, stored, near, far = counts / taken
  return Simulated(
    total,
    _kept(
      placements, tables, of_groups, row_bytes, devices, devices // replicas
    ),
    room,
    used,
    sizes,
    loaded,
    stored,
    near,
    far,
    times.Crossing(*map(float, crossing / taken)),
    [
      {
        'table': name,
        'rows': table.rows,
        'dim': table.embedding_dim,
        'used a step': float(used),
        'loaded a step': float(loaded),
      }
      for (name, table), used, loaded in zip(
        tables.tables.items(), *(own / taken), strict=True
      )
    ],
    *np.split(wanted / taken, [devices], axis=1),
  )


def _source(examples: int, data: Dataset, tables: TableSet) -> CheckedSource:
  bound = bound_to(data.train(examples), tables)
  return CheckedSource(bound, ExampleShape(tables, data.dense_features))


def _over(
  placements: tuple[Placement, ...], tables: TableSet, over: Slices | None
) -> tuple[Placement, ...]:
  if over is None:
    return placements
  return tuple(map(over_lanes, placements, map(over.lanes_of, tables.groups)))


def _kept(
  placements: tuple[Placement, ...],
  tables: TableSet,
  hot: Any,
  row_bytes: tuple[int, ...],
  devices: int,
  lanes: int,
) -> np.ndarray:
  """Returns the bytes that each device keeps between steps."""
  kept = np.zeros(devices)
  for placement, group, own, size in zip(
    placements, tables.groups, hot, row_bytes, strict=True
  ):
    rows = placement.keeps(group.num_rows, own)
    slots = group.num_rows if rows is None else len(rows)
    kept += slots / lanes * size
  return kept


def _lanes(plan: Plan) -> np.ndarray:
  return np.array([0, len(plan.rows)]) if plan.lanes is None else plan.lanes


def _of_devices(
  item: PlannedBatch,
  tables: TableSet,
  row_bytes: tuple[int, ...],
  devices: int,
  element: int,
  within: int | None,
) -> np.ndarray:
  """Returns of each device the rows used, and their bytes.

  These are all, loaded, stored, sent within the host, and sent to others.
  """
  counts = np.zeros((6, devices))
  for number, plan in enumerate(item.plans):
    lanes, size = _lanes(plan), row_bytes[number]
    replicas = devices // (len(lanes) - 1)
    of_lanes = [np.diff(lanes), size * np.diff(lanes)]
    for moved in (plan.load, plan.store):
      of_lanes.append(size * np.diff(lanes_of(moved, lanes)))
    counts[:4] += np.tile(of_lanes, replicas)
    if item.exchanges:
      group = tables.groups[number]
      counts[4:] += item.exchanges[number].traffic.sent(group, element, within)
  return counts


def _crossing(
  item: PlannedBatch,
  tables: TableSet,
  element: int,
  devices: int,
  within: int | None,
) -> np.ndarray:
  """Returns the fields of `Crossing`."""
  total = np.zeros(4)
  for group, one in zip(tables.groups, item.exchanges, strict=False):
    counts, towers = one.traffic.counts, one.traffic.hosts
    near, lanes, own = within or devices, len(counts), len(counts) // towers
    if (of_hosts := one.traffic.of_hosts) is not None:
      hosts = of_hosts.shape[1] * lanes // devices
      own //= hosts
      counts = counts.reshape(hosts, own, -1).sum(0)
      # Devices of one number on each host, some of which are neighbours.
      here, most = max(1, near // own), int(of_hosts.max())
      total += exchanged(group, element, min(here, hosts), hosts, most)
    # A device looks up rows for slices of all hosts with towers.
    most = towers * bucket(int(counts.max()), SMALLEST)
    total += exchanged(group, element, min(own, near), own, most)
    size = bucket(int(one.traffic.used.max())) * group.dim * element
    distance = lanes
    while distance < devices:  # replicas add their sums in pairs
      total[[0, 1] if distance < near else [2, 3]] += 1, size
      distance *= 2
  return total


def _padded(over: Slices, item: PlannedBatch) -> float:
  """Returns the bytes that a device sends of vectors, as wide as the widest."""
  if over.towers is None:
    return 0
  most = max(map(len, over.towers.features)) * over.towers.width * 4
  examples = len(item.batch.labels) // over.devices
  return 2 * (over.hosts - 1) * examples * most


def _vectors(over: Slices, nbytes: float, near: int) -> np.ndarray:
  """Returns the fields of `Crossing` for bytes of vectors that a device sends.

  They go to one device of each other host, some of which are neighbours.
  """
  if over.towers is None:
    return np.zeros(4)
  peers = over.hosts - 1
  here = max(1, near // (over.devices // over.hosts)) - 1
  share = here / peers
  return np.array(
    [2 * here, share * nbytes, 2 * (peers - here), (1 - share) * nbytes]
  )


def _of_tables(item: PlannedBatch, tables: TableSet) -> np.ndarray:
  """Returns of each table the unique rows and the loaded ones, [2, T]."""
  rows_of = np.zeros((2, len(tables.tables)))
  for group, plan in zip(tables.groups, item.plans, strict=True):
    at, ends = _tables_of(group, tables)
    for line, rows in enumerate((plan.rows, plan.rows[plan.load])):
      rows_of[line, at] += np.histogram(rows, ends)[0]
  return rows_of


def _tables_of(group: Group, tables: TableSet) -> tuple[list[int], np.ndarray]:
  """Returns the numbers of a group's tables, and where each ends in it."""
  names, sizes = [*tables.tables], [0]
  sizes += [tables.tables[name].rows for name in group.tables]
  return [names.index(name) for name in group.tables], np.cumsum(sizes)


def _wanted(
  item: PlannedBatch, tables: TableSet, devices: int, near: int
) -> np.ndarray:
  """Returns the unique rows of each table in slices, [T, W + L].

  The last L are in all slices whose devices have one number on their host.
  """
  counts = np.zeros((len(tables.tables), devices + near))
  for group, plan in zip(tables.groups, item.plans, strict=True):
    at, ends = _tables_of(group, tables)
    table = np.searchsorted(ends, plan.rows, side='right') - 1
    share = len(plan.inverse) // devices
    seen = functools.partial(_seen, table, len(group.tables))
    of_near = np.zeros((near, len(plan.rows) + 1), bool)
    for number in range(devices):
      own = plan.inverse[number * share : (number + 1) * share]
      there = np.zeros(len(plan.rows) + 1, bool)
      there[own.reshape(-1)] = True  # padding, -1, is the last place
      counts[at, number] += seen(there)
      of_near[number % near] |= there
    for number, there in enumerate(of_near):
      counts[at, devices + number] += seen(there)
  return counts


def _seen(table: np.ndarray, tables: int, there: np.ndarray) -> np.ndarray:
  """Returns the number of each table's rows that are there, [T]."""
  return np.bincount(table[there[:-1]], minlength=tables)


def _room(item: PlannedBatch, row_bytes: tuple[int, ...]) -> int:
  """Returns the bytes of a step's rows on each device, with padding."""
  most = (bucket(int(np.diff(_lanes(plan)).max())) for plan in item.plans)
  return sum(map(int.__mul__, most, row_bytes))


def _line(one: Candidate) -> dict[str, Any]:
  counts, total = one.counts, one.counts.counters
  moved = counts.loaded_bytes + counts.stored_bytes + counts.sent_bytes
  megabytes = {
    'kept': counts.kept_bytes.max(),
    'step': counts.step_bytes,
    'loaded': counts.loaded_bytes.max(),
    'stored': counts.stored_bytes.max(),
    'near': counts.near_bytes.max(),
    'far': counts.far_bytes.max(),
  }
  return {
    'replicas': one.replicas,
    'hosts': one.hosts,
    'rows': float(counts.used.max()),
    'hits': total.hits / max(total.lookups, 1),
    **{f'{name}_MB': float(size) / 1e6 for name, size in megabytes.items()},
    'max_over_mean': _most_over_mean(counts.used),
    'moved_over_mean': _most_over_mean(moved),
  }


def _timed(one: Candidate, room: float, best: bool) -> dict[str, Any]:
  ms = {f'{name}_ms': 1e3 * s for name, s in one.time._asdict().items()}
  plan = 'best' if best else ''
  return {
    'plan': plan if one.needed <= room else 'no room',
    'max_over_mean': _most_over_mean(one.counts.used),
    'far_MB': float(one.counts.far_bytes.max()) / 1e6,
    **ms,
    'step_ms': 1e3 * one.time.total,
    'binds': one.time.binds,
  }


def _most_over_mean(values: np.ndarray) -> float:
  return float(values.max() / values.mean()) if values.any() else 1.0
