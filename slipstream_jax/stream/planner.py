"""What the planner's thread does: unique rows and plans, batch by batch."""

import collections
from collections.abc import (
  Callable,
  Generator,
  Iterable,
  Iterator,
  Sequence,
)
import itertools
from typing import Any, NamedTuple

from jax.profiler import TraceAnnotation
from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.in_order import InOrder
from slipstream_jax.placement import bucket, Placement, Plan
from slipstream_jax.placement.base import link
from slipstream_jax.schedules.base import Schedule, Scheduled
from slipstream_jax.selection.hot import stale_by_group
from slipstream_jax.store.host_table import row_weights, unique_rows_of
from slipstream_jax.stream.standing import Judgement, Mask, Standing
from slipstream_jax.table_set import TableSet
from slipstream_jax.types import (
  Batch,
  FreshRows,
  HotRows,
  StaleRows,
  Unique,
)

RowWeights = tuple[Float[np.ndarray, ' P'], ...]


RowIdsOfGroup = Int[np.ndarray, ' _U']
"""Rows of one group of several, which differ in how many they are."""


class PlannedBatch(NamedTuple):
  """A batch ready for its step."""

  scheduled: Scheduled
  plans: tuple[Plan, ...]
  """Per group."""
  row_weights: RowWeights
  """Per group, mean weight of the examples behind each unique row, padded to a
  bucket."""
  turn: int
  """`Engine.turn` at which the plan holds."""
  fresh: tuple[FreshRows, ...] | None = None
  """Per group the rows of `Batch.fresh`, each once; None if there are none."""
  judgement: Judgement = Judgement()
  """What becomes of rows that the chain itself judges."""

  @property
  def batch(self) -> Batch:
    """The examples, with the weights that the step takes."""
    batch, scale = self.scheduled.batch, self.scheduled.scale
    if scale == 1:
      return batch
    return batch._replace(weights=(batch.weights * scale).astype(np.float32))


class Start(NamedTuple):
  """What planning starts from."""

  contents: Sequence[RowIdsOfGroup | None]
  """Per group, rows in the device's slots, as in `Placement.keeps`; None if
  they are those that its placement starts with, unchanged."""
  turn: int
  """`Engine.turn` of the step to plan first."""
  frozen: Sequence[Mask] = ()
  """Per group, rows that the engine holds for standing still; empty: none."""
  standing: Standing | None = None
  """Where chains judge rows themselves."""


class Found(NamedTuple):
  """A batch that is yet to be planned."""

  scheduled: Scheduled
  uniques: tuple[Unique, ...]
  row_weights: RowWeights


class _Read:
  """The batches of a schedule, where a profile names who reads them."""

  def __init__(self, schedule: Iterator[Scheduled]) -> None:
    self._schedule = schedule

  def __iter__(self) -> Iterator[Scheduled]:
    return self

  def __next__(self) -> Scheduled:
    with TraceAnnotation('data'):
      return next(self._schedule)


class Planner(NamedTuple):
  """All that the worker's thread refers to.

  The iterator is not among it: one that nobody uses any more can be collected,
  which ends the thread.
  """

  schedule: Schedule
  placements: Sequence[Placement]
  tables: TableSet
  hot: Sequence[HotRows | None]
  start: Callable[[], Start]
  prefetch: Callable[[tuple[Plan, ...]], None] = lambda plans: None
  """Told of each batch's plans: what they load is wanted soon."""

  def find_all(self, workers: int) -> InOrder[Scheduled, Found]:
    """Every batch of the schedule with its unique rows, by so many threads."""
    return InOrder(_Read(iter(self.schedule)), self._find, workers)

  def plan_all(
    self, batches: InOrder[Scheduled, Found]
  ) -> Generator[PlannedBatch, None, None]:
    """Every batch, planned; ends the threads that find unique rows."""
    try:
      yield from self._plan_all(batches)
    finally:
      batches.close()

  def _plan_all(self, batches: Iterator[Found]) -> Iterator[PlannedBatch]:
    upcoming = collections.deque[Found]()
    start = self.start()
    turn, standing = start.turn, start.standing
    states, previous = self._first_states(start), None
    look_ahead = max(placement.look_ahead for placement in self.placements)
    while True:
      wanted = 1 + look_ahead - len(upcoming)
      upcoming.extend(itertools.islice(batches, wanted))
      if not upcoming:
        return
      item = upcoming[0].scheduled
      # Between the plans of two batches, as the engine does it later between
      # their steps (the rule is in `Edge`): both then know the same rows to
      # stand still at each turn, however far ahead this thread is.
      if item.edge.refreezes:
        states = self._freeze(states, item.edge.stale)
      if item.edge.hot_here is not None:
        here = item.edge.hot_here
        of_groups = zip(self.placements, states, strict=True)
        states = [placement.swap(state, here) for placement, state in of_groups]
      fresh, judgement = self._fresh(item.batch), Judgement()
      if standing is not None:
        judgement = standing.next(fresh)
        for group, mask in judgement.frozen.items():
          states[group] = self.placements[group].freeze(states[group], mask)
        item = item._replace(event=item.event or judgement.event)
      with TraceAnnotation('plan'):
        states, plans = self._plan(states, upcoming)
        if previous is not None:
          pairs = zip(previous, plans, strict=True)
          plans = tuple(link(before, plan) for before, plan in pairs)
      previous = plans
      with TraceAnnotation('prefetch'):
        self.prefetch(plans)
      weights = upcoming.popleft().row_weights
      yield PlannedBatch(item, plans, weights, turn, fresh, judgement)
      turn += 1

  def _fresh(self, batch: Batch) -> tuple[FreshRows, ...] | None:
    if batch.fresh is None or not len(batch.fresh):
      return None
    parts = self.tables.in_groups(np.unique(batch.fresh))
    return tuple(rows for _, rows in parts)

  def _first_states(self, start: Start) -> list[Any]:
    of_groups = zip(
      self.placements, self.tables.groups, self.hot, start.contents, strict=True
    )
    states = [
      placement.start(group.num_rows, hot, rows)
      for placement, group, hot, rows in of_groups
    ]
    for group, mask in enumerate(start.frozen):
      if mask is not None:
        states[group] = self.placements[group].freeze(states[group], mask)
    return states

  def _freeze(self, states: list[Any], stale: StaleRows | None) -> list[Any]:
    masks = stale_by_group(stale, self.hot)
    return [
      placement.freeze(state, mask)
      for placement, state, mask in zip(
        self.placements, states, masks, strict=True
      )
    ]

  def _plan(
    self, states: list[Any], upcoming: Iterable[Found]
  ) -> tuple[list[Any], tuple[Plan, ...]]:
    # Per group, the unique rows of all batches known.
    uniques = zip(*(batch.uniques for batch in upcoming), strict=True)
    planned = [
      placement.plan(state, known)
      for placement, state, known in zip(
        self.placements, states, uniques, strict=True
      )
    ]
    return [state for state, _ in planned], tuple(plan for _, plan in planned)

  def _find(self, item: Scheduled) -> Found:
    lookups, weights = item.batch.lookups, item.batch.weights
    with TraceAnnotation('unique'):
      uniques = tuple(
        unique_rows_of(lookups, group, hot)
        for group, hot in zip(self.tables.groups, self.hot, strict=True)
      )
      of_rows = tuple(
        row_weights(one.inverse, weights, bucket(len(one.rows)))
        for one in uniques
      )
    return Found(item, uniques, of_rows)
