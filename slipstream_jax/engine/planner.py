"""Work of the planner's thread: unique rows and plans, batch by batch."""

import collections
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
import itertools
import time
from typing import Any, NamedTuple

from jax.profiler import TraceAnnotation
from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.data.prefetch import OrderedResults, Turns
from slipstream_jax.distributed.exchange import Exchange
from slipstream_jax.distributed.exchange import exchange as places_of
from slipstream_jax.distributed.lanes import in_lanes, Lanes, lanes_of
from slipstream_jax.engine.clock import HostMs
from slipstream_jax.placement import bucket, Placement, Plan
from slipstream_jax.placement.base import link
from slipstream_jax.schedules.base import Emitted, Schedule, ScheduledBatch
from slipstream_jax.selection.hot import stale_by_group
from slipstream_jax.store.host_table import (
  row_weights,
  unique_rows_of,
  Vectors,
  vectors_of_rows,
)
from slipstream_jax.tables import Group, TableSet
from slipstream_jax.types import Batch, HotRows, ReassignedRows, Unique

SETTLE = 4
"""Steps from a judgement to the first plan that uses it. They hide the copy to
the host and the planning ahead."""

Mask = Bool[np.ndarray, ' _H'] | None
"""Which hot rows of a group are frozen. None: none is."""


class Windows(NamedTuple):
  """When `skip_stale` judges the rows of a group, in steps."""

  every: int
  """Steps from window to window."""
  window: int
  """Steps of a window, in [1, every]."""

  def closed(self, step: int) -> int | None:
    """Returns the first step after the last judgement. None if none holds."""
    since = step % self.every
    judged = step >= self.every and since < self.every - self.window
    return step - since if judged else None

  def opens(self, step: int) -> bool:
    """Whether frozen rows thaw before this step."""
    longest = self.every - self.window
    return 0 < longest == step % self.every and step > self.every


class Judgement(NamedTuple):
  """Changes to the frozen hot rows before a step, in this order."""

  frozen: Mapping[int, Mask] = {}
  """Masks of the rows that the host treats as frozen from here on, by group
  number. Other groups keep theirs."""
  closes: tuple[int, ...] = ()
  """Groups whose window has closed, so that the device judges their rows."""
  opens: tuple[int, ...] = ()
  """Groups whose rows thaw."""

  @property
  def event(self) -> dict[str, Any] | None:
    """What the host learned, for the metrics, or None."""
    masks = [mask for mask in self.frozen.values() if mask is not None]
    if not masks:
      return None
    stale = sum(int(np.count_nonzero(mask)) for mask in masks)
    return {'kind': 'judgement', 'rows_stale': stale}


class FrozenRows:
  """Schedule of frozen rows for chains that judge stale rows themselves.

  The device judges and freezes rows at once. The host gets the mask some steps
  later, at a step that depends on step numbers alone. From then on frozen rows
  are neither loaded nor stored. The step freezes them either way.
  """

  def __init__(
    self,
    windows: Sequence[Windows | None],
    hot: Sequence[HotRows | None],
    step: int,
    frozen: Sequence[Mask],
    stale: Sequence[Mask],
    judged: Callable[[int], Sequence[Mask]],
  ) -> None:
    """Starts before a step.

    Args:
      windows: per group, or None where nothing judges.
      hot: per group, its hot rows.
      step: number of the next step.
      frozen: per group, the rows that the engine treats as frozen.
      stale: per group, the rows that the device freezes.
      judged: waits for the masks judged n steps after this one, or later.
    """
    self._windows, self._hot, self._judged = windows, hot, judged
    self._step = self._first = step
    self._frozen: list[Any] = list(frozen)
    self._stale = stale
    # Hot rows that were reassigned since the last judgement.
    self._reassigned: list[Int[np.ndarray, ' _n']] = [
      np.empty(0, np.int32) for _ in windows
    ]

  def next(self, reassigned: Sequence[ReassignedRows] | None) -> Judgement:
    """Returns the changes to frozen rows before the next step.

    Per group, some rows are reassigned with that step.
    """
    step, self._step = self._step, self._step + 1
    frozen, closes, opens = {}, [], []
    for group, windows in enumerate(self._windows):
      if windows is None:
        continue
      closed = windows.closed(step)
      if closed == step:
        closes.append(group)
        self._reassigned[group] = self._reassigned[group][:0]
      if windows.opens(step):
        opens.append(group)
      hot = self._hot[group]
      if reassigned is not None and hot is not None:
        places = hot.places(reassigned[group])
        places = places[places < len(hot.rows)]
        self._reassigned[group] = np.append(self._reassigned[group], places)
      settled = closed is not None and step - closed >= SETTLE
      mask: Any = self._mask(group, closed or 0) if settled else None
      if not np.array_equal(mask, self._frozen[group]):
        self._frozen[group] = frozen[group] = mask
    return Judgement(frozen, tuple(closes), tuple(opens))

  def _mask(self, group: int, closed: int) -> Mask:
    """Returns the rows judged stale before step `closed` and not reassigned."""
    mask = self._frozen[group]
    if mask is None:
      known = closed < self._first
      of_groups = self._stale if known else self._judged(closed - self._first)
      mask = of_groups[group]
    assert mask is not None
    if mask[self._reassigned[group]].any():
      mask = mask.copy()
      mask[self._reassigned[group]] = False
    return mask


RowWeights = tuple[Float[np.ndarray, ' P'], ...]


class PlannedBatch(NamedTuple):
  """A batch ready for its step."""

  scheduled: ScheduledBatch
  plans: tuple[Plan, ...]
  """One plan per group."""
  row_weights: RowWeights
  """Per group, mean weight of the examples behind each unique row, padded to a
  bucket."""
  step: int
  """`Engine.step` for which the plan holds."""
  reassigned: tuple[ReassignedRows, ...] | None = None
  """Per group the unique rows of `Batch.fresh`. None if there are none."""
  judgement: Judgement = Judgement()
  """Changes to frozen rows that the chain itself judges."""
  spent: HostMs = HostMs()
  """What the host spent on it, but for its step."""
  vectors: tuple[Vectors, ...] | None = None
  """Per group, the reassigned rows that start from a vector of their id."""
  exchanges: tuple[Exchange, ...] = ()
  """Per group, what several devices exchange. Empty: there is one device."""
  predicted: tuple[tuple[Unique, ...], ...] = ()
  """Unique rows per group, for each batch of `Edge.predicts`."""

  @property
  def batch(self) -> Batch:
    """The examples, with the weights that the step uses."""
    batch, scale = self.scheduled.batch, self.scheduled.scale
    if scale == 1:
      return batch
    return batch._replace(weights=(batch.weights * scale).astype(np.float32))


class Start(NamedTuple):
  """State of the engine where planning starts."""

  slot_maps: Sequence[Int[np.ndarray, ' _U'] | None]
  """Per group, rows in the device's slots, as in `Placement.keeps`. None: the
  rows that its placement starts with, unchanged."""
  step: int
  """`Engine.step` of the first step to plan."""
  frozen: Sequence[Mask] = ()
  """Per group, rows that the engine treats as frozen. Empty: none."""
  freezing: FrozenRows | None = None
  """The frozen rows, step after step, where chains judge rows themselves."""


class HostTowers(NamedTuple):
  """Towers of features, each of which a host of its own has."""

  features: tuple[tuple[str, ...], ...]
  """For each of H hosts those of its tower, whose tables it has."""
  width: int
  """E, elements of a vector that a tower returns. It returns as many vectors as
  it has features."""


class Slices(NamedTuple):
  """How the examples of a step are divided."""

  devices: int
  """W, each of which computes a slice of the examples and has a lane."""
  parts: int
  """G, a multiple of W: the parts into which all examples are cut."""
  exchange: str = 'float32'
  """In what they exchange rows and gradients, a member of `EXCHANGES`."""
  replicas: int = 1
  """R, a divisor of W: the devices that have the same lane."""
  hosts: int = 1
  """H, a divisor of M: hosts, to each of which a row crosses at most once."""
  towers: HostTowers | None = None
  """If each host has a tower, to which no row crosses at all."""

  @property
  def lanes(self) -> int:
    """M, the number of lanes. W is R * M."""
    return self.devices // self.replicas

  def bytes_between_hosts(self, examples: int) -> int:
    """Returns the bytes of towers' vectors and gradients that leave their host.

    Those of an example go to the host that computes it, and back. Each host
    computes equally many, so one in H stays.
    """
    if self.towers is None:
      return 0
    away = examples - examples // self.hosts
    vectors = sum(map(len, self.towers.features))
    return 2 * away * vectors * self.towers.width * 4

  def lanes_of(self, group: Group) -> Lanes:
    """Returns which lane has each row of a group."""
    features = () if self.towers is None else self.towers.features
    return lanes_of(group, self.lanes, features)

  def columns_of(self, group: Group) -> tuple[tuple[int, ...], ...] | None:
    """Returns for each tower the columns of its features among the group's.

    None: hosts have no towers.
    """
    if self.towers is None:
      return None
    spans = dict(zip(group.features, group.spans, strict=True))
    return tuple(
      tuple(
        column
        for name, span in spans.items()
        if name in own
        for column in range(*span)
      )
      for own in self.towers.features
    )


class UniqueBatch(NamedTuple):
  """A batch with its unique rows, not planned yet."""

  scheduled: ScheduledBatch
  uniques: tuple[Unique, ...]
  row_weights: RowWeights
  spent: HostMs
  exchanges: tuple[Exchange, ...] = ()
  predicted: tuple[tuple[Unique, ...], ...] = ()


def _read(schedule: Schedule) -> Iterator[tuple[ScheduledBatch, HostMs]]:
  while True:
    started, before = time.thread_time(), schedule.seconds_reading
    with TraceAnnotation('data'):
      item = next(schedule, None)
    if item is None:
      return
    spent = HostMs(read=_ms_since(started))
    if schedule.seconds:  # it chooses
      read = 1e3 * (schedule.seconds_reading - before)
      spent = HostMs(read, choose=spent.read - read)
    yield item, spent


def _ms_since(started: float) -> float:
  """Returns the processor's time of this thread since then."""
  return 1e3 * (time.thread_time() - started)


class Planner(NamedTuple):
  """Everything that the worker's thread refers to.

  It does not refer to the iterator, so that garbage collection of an unused
  iterator ends the thread.
  """

  schedule: Schedule
  placements: Sequence[Placement]
  """One per group."""
  tables: TableSet
  hot: Sequence[HotRows | None]
  """Per group its hot rows, if any were chosen."""
  start: Callable[[], Start]
  """Returns the engine's state before the first batch is planned, and again
  after `set_state`."""
  prefetch: Callable[[tuple[Plan, ...]], None] = lambda plans: None
  """Called with each batch's plans, whose rows will be loaded soon."""
  over: Slices | None = None
  """How a step is divided. None: it is not."""
  exchange: Callable[..., Exchange] = places_of
  """Returns what devices exchange, called as `exchange`."""

  def find_all(self, workers: int) -> OrderedResults[Any, UniqueBatch]:
    """Returns all batches with their unique rows, found by some threads."""
    stages = self.schedule.stages() if workers > 1 else None
    if stages is None:
      return OrderedResults(_read(self.schedule), self._find, workers)

    def copied(emitted: Emitted) -> UniqueBatch:
      started = time.thread_time()
      item = emitted.scheduled()
      seconds = time.thread_time() - started
      stages.spend(seconds)
      read, choose, score = 1e3 * np.array(emitted.spent)
      spent = HostMs(read, choose, score=score + 1e3 * seconds)
      return self._find((item, spent))

    turns = Turns(stages.prepare, stages.open_before, stages.take_turn)
    return OrderedResults(stages.read, copied, workers, turns)

  def plan_all(
    self, batches: OrderedResults[Any, UniqueBatch]
  ) -> Generator[PlannedBatch, None, None]:
    """Yields every batch, planned. Closes `batches` at the end."""
    try:
      yield from self._plan_all(batches)
    finally:
      batches.close()

  def _plan_all(self, batches: Iterator[UniqueBatch]) -> Iterator[PlannedBatch]:
    upcoming = collections.deque[UniqueBatch]()
    start = self.start()
    step, freezing = start.step, start.freezing
    states = self._first_states(start)
    # Per group, the last plan that moved rows.
    previous: tuple[Plan | None, ...] = (None,) * len(states)
    look_ahead = max(placement.look_ahead for placement in self.placements)
    while True:
      wanted = 1 + look_ahead - len(upcoming)
      upcoming.extend(itertools.islice(batches, wanted))
      if not upcoming:
        return
      item = upcoming[0].scheduled
      # The engine does the same between the steps of these batches (see
      # `Edge`). So both treat the same rows as frozen at each step, however far
      # ahead this thread is.
      if item.edge.refreezes:
        masks = stale_by_group(item.edge.stale, self.hot)
        self._freeze(states, dict(enumerate(masks)))
      if item.edge.hot_here is not None:
        here = item.edge.hot_here
        of_groups = zip(self.placements, states, strict=True)
        states = [placement.swap(state, here) for placement, state in of_groups]
      reassigned, vectors = self._reassigned(item.batch)
      judgement = Judgement()
      if freezing is not None:
        judgement = freezing.next(reassigned)
        self._freeze(states, judgement.frozen)
        item = item._replace(event=item.event or judgement.event)
      started = time.thread_time()
      with TraceAnnotation('plan'):
        uniques = zip(*(batch.uniques for batch in upcoming), strict=True)
        planned = [
          placement.plan(state, known)
          for placement, state, known in zip(
            self.placements, states, uniques, strict=True
          )
        ]
        states = [state for state, _ in planned]
        plans = tuple(plan for _, plan in planned)
        pairs = [*zip(previous, plans, strict=True)]
        plans = tuple(
          plan if before is None else link(before, plan)
          for before, plan in pairs
        )
        previous = tuple(
          plan if plan.moves else before for before, plan in pairs
        )
      with TraceAnnotation('prefetch'):
        self.prefetch(plans)
      done = upcoming.popleft()
      yield PlannedBatch(
        item,
        plans,
        done.row_weights,
        step,
        reassigned,
        judgement,
        done.spent._replace(plan=_ms_since(started)),
        vectors,
        done.exchanges,
        done.predicted,
      )
      step += 1

  def _reassigned(
    self, batch: Batch
  ) -> tuple[tuple[ReassignedRows, ...] | None, tuple[Vectors, ...] | None]:
    """Returns per group the reassigned rows, and those with a vector."""
    if batch.fresh is None or not len(batch.fresh):
      return None, None
    # The last one of equal rows, as the last id has the row.
    rows, at = np.unique(batch.fresh[::-1], return_index=True)
    parts = self.tables.in_groups(rows)
    vectors = None
    if batch.fresh_vectors is not None:
      numbers = batch.fresh_vectors[::-1][at]
      vectors = vectors_of_rows(self.tables, rows, numbers)
    return tuple(own for _, own in parts), vectors

  def _first_states(self, start: Start) -> list[Any]:
    of_groups = zip(
      self.placements,
      self.tables.groups,
      self.hot,
      start.slot_maps,
      strict=True,
    )
    states = [
      placement.start(group.num_rows, hot, rows)
      for placement, group, hot, rows in of_groups
    ]
    frozen = {i: m for i, m in enumerate(start.frozen) if m is not None}
    self._freeze(states, frozen)
    return states

  def _freeze(self, states: list[Any], masks: Mapping[int, Mask]) -> None:
    for group, mask in masks.items():
      states[group] = self.placements[group].freeze(states[group], mask)

  def _find(self, read: tuple[ScheduledBatch, HostMs]) -> UniqueBatch:
    (item, spent), started = read, time.thread_time()
    lookups, weights = item.batch.lookups, item.batch.weights
    with TraceAnnotation('unique'):
      uniques = tuple(
        unique_rows_of(lookups, group, hot if placement.reads_hot else None)
        for placement, group, hot in zip(
          self.placements, self.tables.groups, self.hot, strict=True
        )
      )
      exchanges: tuple[Exchange, ...] = ()
      if self.over is not None:
        over, groups = self.over, self.tables.groups
        lanes = tuple(map(over.lanes_of, groups))
        uniques = tuple(map(in_lanes, uniques, lanes))
        exchanges = tuple(
          self.exchange(one, own, over.devices, over.parts, columns, over.hosts)
          for one, own, columns in zip(
            uniques, lanes, map(over.columns_of, groups), strict=True
          )
        )
      of_rows = tuple(
        row_weights(one.inverse, weights, bucket(len(one.rows)))
        for one in uniques
      )
      predicts, groups = item.edge.predicts, self.tables.groups
      predicted = tuple(
        tuple(unique_rows_of(batch.lookups, group) for group in groups)
        for _, batch in (() if predicts is None else predicts.batches)
      )
    spent = spent._replace(find=_ms_since(started))
    return UniqueBatch(item, uniques, of_rows, spent, exchanges, predicted)
