"""Plans steps on any number of devices, and counts what they would move."""

from collections.abc import Iterator
import contextlib
import functools
import itertools
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from experiments.bench.runner import Item
from experiments.common import build, datasets
from experiments.common.progress import Bar
from slipstream_jax.data.admission import CheckedSource, ExampleShape
from slipstream_jax.data.source import bound_to, Dataset
from slipstream_jax.distributed.exchange import EXCHANGES
from slipstream_jax.distributed.lanes import over_lanes
from slipstream_jax.engine.counters import Counters, merge
from slipstream_jax.engine.group_rows import lanes_of
from slipstream_jax.engine.pipeline import StepProbe
from slipstream_jax.engine.planner import PlannedBatch, Planner, Slices, Start
from slipstream_jax.errors import choose, UserError
from slipstream_jax.placement import bucket, Placement, Plan
from slipstream_jax.schedules.systems import SCHEDULES
from slipstream_jax.selection.hot import hot_by_group
from slipstream_jax.tables import TableSet
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.loop import moved_by_group
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.types import HotRows

_PARTS = 8  # of a batch on several devices, at least


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
  loaded_bytes: np.ndarray
  """Bytes from the host, a mean over the steps."""
  stored_bytes: np.ndarray
  """Bytes of the step's rows to the host, without evicted ones, a mean."""
  sent_bytes: np.ndarray
  """Bytes of rows and gradients to other devices, a mean over the steps."""
  of_tables: list[dict[str, Any]]
  """Per table, its unique rows and loads in a step, means over the steps."""


def plan(
  config: ml_collections.ConfigDict,
  bar: Bar,
  devices: list[str],
  steps: int,
  device_bytes: int | None,
) -> Iterator[Item]:
  """Yields tables of the devices and of the tables, all counted by plans.

  Raises:
    UserError: a number of devices that cannot train, rows that do not fit on
      the most of them, or another system than 'plain' and 'cached'.
  """
  numbers = [_checked(one, config.data.batch_size) for one in devices]
  system = build.system(config)
  if (system.schedule, system.rows) != ('plain', 'stream'):
    raise UserError(
      'plans are of systems that keep the order of examples and move rows',
      got=repr(system.name),
      where='config.system',
      hint="use 'plain' or 'cached'",
    )
  data = datasets.dataset(config)
  recipe = build.recipe(config, data, steps)
  hot = build.hot(config, data, recipe)
  lines, of_tables = list[dict[str, Any]](), list[dict[str, Any]]()
  for number in numbers:
    bar.begin(f'{number} devices', steps, 'step')
    one = simulated(config, data, recipe, hot, number, steps, bar.show)
    lines.append(_line(number, one))
    if number == max(numbers):
      of_tables = one.of_tables
      _check_fits(number, one, device_bytes)
  size = config.data.batch_size
  yield (
    'setting',
    {
      'data': data.name,
      'placement': config.placement,
      'examples a step, of all devices': size,
      'exchange': config.exchange,
      'steps planned': steps,
      'how': 'counted by plans, nothing was run',
    },
  )
  yield 'devices', lines
  yield f'tables on {max(numbers)} devices', of_tables


def _check_fits(number: int, one: Simulated, room: int | None) -> None:
  needed = int(one.kept_bytes.max()) + one.step_bytes
  if room is not None and needed > room:
    raise UserError(
      f'{needed:,} bytes of rows must fit on each of {number} devices',
      got=f'room for {room:,}',
      where='--device_bytes',
      hint='keep fewer rows with config.cache.capacity or config.hot.bytes, or'
      ' take more devices',
    )


def _checked(asked: str, examples: int) -> int:
  """Returns a number of devices."""
  if not asked.isdecimal() or (number := int(asked)) < 1 or number & number - 1:
    raise UserError(
      'devices must be powers of two',
      got=asked,
      where='--devices',
      hint='such as 1,8,64',
    )
  if number > 1 and examples % max(_PARTS, number):
    raise UserError(
      f'{max(_PARTS, number)} parts must divide each batch of {examples}',
      got=f'{number} devices',
      where='--devices',
      hint='set config.data.batch_size to a multiple',
    )
  return number


def simulated(
  config: ml_collections.ConfigDict,
  data: Dataset,
  recipe: Recipe,
  hot: HotRows | None,
  devices: int,
  steps: int,
  tell: Any = lambda step: None,
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
  """
  tables, row_bytes = recipe.tables, compiled_of(recipe).row_bytes
  over = None
  if devices > 1:
    over = Slices(devices, max(_PARTS, devices), config.exchange)
  element = choose(EXCHANGES, config.exchange, 'config.exchange')
  placements = build.placements(config, tables)
  of_groups: Any = [None] * len(tables.groups)
  if hot is not None:
    hot, of_groups = hot_by_group(hot, tables)
  source = _source(config, data, tables)
  schedule = SCHEDULES['plain']().make(source, hot, StepProbe())
  planner = Planner(
    schedule,
    _over(placements, devices),
    tables,
    of_groups,
    lambda: Start((None,) * len(tables.groups), 0),
    over=over,
  )
  total, counts = Counters(), np.zeros((4, devices))
  own = np.zeros((2, len(tables.tables)))
  room = step = 0
  with (
    contextlib.closing(schedule),
    contextlib.closing(planner.plan_all(planner.find_all(1))) as batches,
  ):
    for step, item in enumerate(itertools.islice(batches, steps), 1):
      trained = int(np.count_nonzero(item.scheduled.batch.weights))
      moved = moved_by_group(item, tables, row_bytes, over, trained)
      seen = Counters(item.scheduled.seen, trained, item.scheduled.dropped)
      total = functools.reduce(merge, moved, merge(total, seen))
      counts += _of_devices(item, tables, row_bytes, devices, element)
      own += _of_tables(item, tables)
      room = max(room, _room(item, row_bytes))
      tell(step)
  taken = max(step, 1)  # a source of the user's may end
  used, loaded, stored, sent = counts / taken
  return Simulated(
    total,
    _kept(_over(placements, devices), tables, of_groups, row_bytes, devices),
    room,
    used,
    loaded,
    stored,
    sent,
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
  )


def _source(
  config: ml_collections.ConfigDict, data: Dataset, tables: TableSet
) -> CheckedSource:
  bound = bound_to(data.train(config.data.batch_size), tables)
  return CheckedSource(bound, ExampleShape(tables, data.dense_features))


def _over(
  placements: tuple[Placement, ...], devices: int
) -> tuple[Placement, ...]:
  if devices == 1:
    return placements
  return tuple(over_lanes(one, devices) for one in placements)


def _kept(
  placements: tuple[Placement, ...],
  tables: TableSet,
  hot: Any,
  row_bytes: tuple[int, ...],
  devices: int,
) -> np.ndarray:
  """Returns the bytes that each device keeps between steps."""
  kept = np.zeros(devices)
  for placement, group, own, size in zip(
    placements, tables.groups, hot, row_bytes, strict=True
  ):
    rows = placement.keeps(group.num_rows, own)
    slots = group.num_rows if rows is None else len(rows)
    kept += slots / devices * size
  return kept


def _lanes(plan: Plan) -> np.ndarray:
  return np.array([0, len(plan.rows)]) if plan.lanes is None else plan.lanes


def _of_devices(
  item: PlannedBatch,
  tables: TableSet,
  row_bytes: tuple[int, ...],
  devices: int,
  element: int,
) -> np.ndarray:
  """Returns of each device the rows used, and bytes loaded, stored and sent."""
  counts = np.zeros((4, devices))
  for number, plan in enumerate(item.plans):
    lanes, size = _lanes(plan), row_bytes[number]
    counts[0] += np.diff(lanes)
    counts[1] += size * np.diff(lanes_of(plan.load, lanes))
    counts[2] += size * np.diff(lanes_of(plan.store, lanes))
    if item.exchanges:
      sent = item.exchanges[number].sent_by_device(
        tables.groups[number], element
      )
      counts[3] += sent.within + sent.between
  return counts


def _of_tables(item: PlannedBatch, tables: TableSet) -> np.ndarray:
  """Returns of each table the unique rows and the loaded ones, [2, T]."""
  rows_of = np.zeros((2, len(tables.tables)))
  names = [*tables.tables]
  for group, plan in zip(tables.groups, item.plans, strict=True):
    sizes = [tables.tables[name].rows for name in group.tables]
    ends = np.cumsum([0, *sizes])
    at = [names.index(name) for name in group.tables]
    for line, rows in enumerate((plan.rows, plan.rows[plan.load])):
      rows_of[line, at] += np.histogram(rows, ends)[0]
  return rows_of


def _room(item: PlannedBatch, row_bytes: tuple[int, ...]) -> int:
  """Returns the bytes of a step's rows on each device, with padding."""
  most = (bucket(int(np.diff(_lanes(plan)).max())) for plan in item.plans)
  return sum(map(int.__mul__, most, row_bytes))


def _line(number: int, one: Simulated) -> dict[str, Any]:
  moved = one.loaded_bytes + one.stored_bytes + one.sent_bytes
  megabytes = {
    'kept': one.kept_bytes.max(),
    'step': one.step_bytes,
    'loaded': one.loaded_bytes.max(),
    'stored': one.stored_bytes.max(),
    'sent': one.sent_bytes.max(),
  }
  return {
    'devices': number,
    'rows': float(one.used.max()),
    'hits': one.counters.hits / max(one.counters.lookups, 1),
    **{f'{name}_MB': float(size) / 1e6 for name, size in megabytes.items()},
    'max_over_mean': _most_over_mean(one.used),
    'moved_over_mean': _most_over_mean(moved),
  }


def _most_over_mean(values: np.ndarray) -> float:
  return float(values.max() / values.mean()) if values.any() else 1.0
