"""Engine: executes plans on the rows of all tables, on host and device."""

import collections
from collections.abc import Iterable, Iterator, Sequence
import contextlib
import functools
import weakref

import jax
from jaxtyping import Float, Shaped
import numpy as np

from slipstream_jax.distributed.lanes import Lanes, over_lanes
from slipstream_jax.engine import counters
from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.group_rows import GroupRows, Piece
from slipstream_jax.engine.lane_rows import LaneRows
from slipstream_jax.engine.mesh import Devices
from slipstream_jax.engine.own_rows import open_own
from slipstream_jax.errors import UserError
from slipstream_jax.placement import Placement, Plan
from slipstream_jax.placement.base import NO_ROWS, plan_with
from slipstream_jax.selection.hot import hot_by_group, stale_by_group
from slipstream_jax.store.base import FirstRows, RowStore, Storage
from slipstream_jax.store.host_table import (
  unique_rows_of,
  UntrainedRows,
  Vectors,
)
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.store.threads import ALONE, Helpers
from slipstream_jax.tables import TableSet
from slipstream_jax.types import (
  Array,
  HotRows,
  Lookups,
  ReassignedRows,
  RowBlock,
  RowIds,
  StaleRows,
  Unique,
)

# More steps than any run takes. `step // _MANY_STEPS` counts restores, and the
# remainder counts steps.
_MANY_STEPS = 1 << 40
_ANNOUNCED = 64  # most plans that are remembered before they are loaded

Plans = tuple[Plan, ...]
"""The plans of one batch, one per group."""
Reassigned = Sequence[ReassignedRows]
"""Reassigned rows per group, numbered within it."""


class Engine:
  """Owner of the rows of all tables, on the host or on the device.

  Attributes:
    untrained: the rows' values before their first step.
    groups: the rows of each group.
    hot: the rows that can be watched and pinned, if any were chosen, as global
      rows ordered by group.
    devices: those that share the rows. None: one has all of them.
    counters: what was moved so far.
    changed: whether a step has changed rows since all were last replaced.
    step: number of the next step. A plan holds for one step. Steps after a
      restore have other numbers than those before it.
  """

  def __init__(
    self,
    untrained: UntrainedRows,
    placements: Sequence[Placement],
    hot: HotRows | None = None,
    storage: Storage = MEMORY,
    devices: Devices | None = None,
    lanes: Sequence[Lanes] = (),
  ) -> None:
    """Sets all rows to their first values.

    There is one placement per group. The hot rows come in any order. Several
    devices share the rows of each group by its lanes, and the budget of a
    placement is that of each.

    Raises:
      UserError: a placement needs hot rows.
    """
    self.untrained, self.counters = untrained, Counters()
    tables = self.tables
    self.changed, self.step = False, _MANY_STEPS
    # Plans that were made, and not loaded yet.
    self._announced = collections.deque[Plans](maxlen=_ANNOUNCED)
    of_groups: Sequence[HotRows | None] = [None] * len(tables.groups)
    if hot is not None:
      hot, of_groups = hot_by_group(hot, tables)
    self.hot = hot
    first = [untrained.first(number) for number in range(len(tables.groups))]
    self.devices, self.lanes = devices, lanes
    of_all = zip(
      self._over_devices(placements),
      self._stores(storage, first),
      first,
      of_groups,
      strict=True,
    )
    # A reference cycle would delay freeing the tables.
    count = functools.partial(Engine.count, weakref.proxy(self))
    self._none = (NO_ROWS,) * len(tables.groups)
    if devices is None:
      self.groups = tuple(GroupRows(*values, count) for values in of_all)
    else:
      self.groups = tuple(
        LaneRows(devices, own, *values, count)
        for own, values in zip(lanes, of_all, strict=True)
      )

  def _stores(
    self, storage: Storage, first: Sequence[FirstRows]
  ) -> tuple[RowStore, ...]:
    """Returns an empty store per group, of the rows that this process has."""
    devices = self.devices
    if devices is None or devices.has_all:
      return storage.open(first)
    return open_own(storage, first, self.lanes, devices.own)

  def _over_devices(
    self, placements: Sequence[Placement]
  ) -> Sequence[Placement]:
    if self.devices is None:
      return placements
    return [*map(over_lanes, placements, self.lanes)]

  def choose_hot(self, hot: HotRows, placements: Sequence[Placement]) -> None:
    """Chooses hot rows, in any order, where there are none yet.

    Plan again the batches that were planned before. Rows move only where a
    group gets another placement than it had.
    """
    assert self.hot is None
    self.hot, of_groups = hot_by_group(hot, self.tables)
    for group, own, placement in zip(
      self.groups, of_groups, self._over_devices(placements), strict=True
    ):
      group.choose_hot(own, placement)

  def rows_of(self, table: str) -> Array:
    """Returns a copy of a table's current rows, [R, D] of its dtype."""
    of, at = self.tables.tables[table], 0
    out = np.empty((of.rows, of.embedding_dim), of.dtype)
    for rows in self.pieces_of(table):
      out[at : at + len(rows)] = rows
      at += len(rows)
    return out

  def pieces_of(self, table: str) -> Iterator[Array]:
    """Yields a table's rows in order. See `GroupRows.pieces`."""
    group, start = self._place_of(table)
    for _, block in group.pieces(start, start + self.tables.tables[table].rows):
      yield block.rows

  def set_rows(
    self, table: str, rows: RowIds, values: Shaped[np.ndarray, 'U _D']
  ) -> tuple[int, RowIds]:
    """Sets unique rows of a table, between two steps.

    See `GroupRows.set_rows`. Returns the number of their group, and the rows
    as they are numbered there.
    """
    group, start = self._place_of(table)
    group.set_rows(rows + start, values)
    return self.groups.index(group), rows + start

  def _place_of(self, table: str) -> tuple[GroupRows, int]:
    """Returns the group of a table, and the table's first row in it."""
    first = np.array([self.tables.first_rows[table]])
    parts = self.tables.in_groups(first)
    (number,) = (i for i, (places, _) in enumerate(parts) if len(places))
    return self.groups[number], int(parts[number][1][0])

  def reset(
    self,
    pieces: Sequence[Iterable[Piece]] | None = None,
    seed: int | None = None,
  ) -> None:
    """Sets all rows to their first values, or to those of the pieces.

    Args:
      pieces: per group, other values of some rows, as in `GroupRows.reset`.
      seed: of the first values from here on. None: as before.
    """
    if seed is not None:
      self.untrained = self.untrained._replace(seed=seed)
    self.changed = False
    self.step += _MANY_STEPS  # no plan holds any more
    for number, group in enumerate(self.groups):
      others = () if pieces is None else pieces[number]
      group.reset(self.untrained.first(number), others)

  @property
  def tables(self) -> TableSet:
    """The tables whose rows these are."""
    return self.untrained.tables

  @property
  def row_bytes(self) -> tuple[int, ...]:
    """Per group, bytes that one row and its state take on the link."""
    return tuple(group.row_bytes for group in self.groups)

  @property
  def placements(self) -> tuple[Placement, ...]:
    """Per group, which rows stay on the device between steps."""
    return tuple(group.placement for group in self.groups)

  @property
  def hot_of_groups(self) -> tuple[HotRows | None, ...]:
    """Per group its hot rows, numbered within it."""
    return tuple(group.hot for group in self.groups)

  @property
  def slot_maps(self) -> tuple[RowIds | None, ...]:
    """Per group the row in each slot of the device, as in `Placement.keeps`."""
    return tuple(group.kept.rows for group in self.groups)

  def restored_since(self, step: int) -> bool:
    """Whether all rows were replaced since that step."""
    return step // _MANY_STEPS != self.step // _MANY_STEPS

  def check_step(self, step: int) -> None:
    """Raises UserError if a plan made for `step` is not the next to execute."""
    if step != self.step:
      raise UserError(
        f'the plan holds for step {step % _MANY_STEPS} of the engine',
        got=f'step {self.step % _MANY_STEPS}',
        where='take_step, item',
        hint='train one iterator of planned batches at a time, leave out none '
        'of its batches, and plan anew after a restore',
      )

  def close(self) -> None:
    """Ends the host's threads and closes files. Rows cannot be read then."""
    for group in self.groups:
      group.close()

  @property
  def is_first(self) -> bool:
    """Whether this process writes files. Of several, the first one does."""
    return self.devices is None or not self.devices.process

  def follow(self) -> None:
    """Sends rows to the first process until it calls `meet`.

    It reads all tables or a part of them, group by group.
    """
    for group, of_tables in zip(self.groups, self.tables.groups, strict=True):
      start = 0
      for name in of_tables.tables:
        stop = start + self.tables.tables[name].rows
        assert isinstance(group, LaneRows)
        if not group.answer(start, stop):
          return
        start = stop
    self.meet()

  def meet(self) -> None:
    """Waits until all processes have called it."""
    if self.devices is not None:
      self.devices.agreed(0)

  def prefetch(self, plans: Plans) -> None:
    """Announces plans, in order. Called by the planner's thread."""
    self._announced.append(plans)
    for group, plan in zip(self.groups, plans, strict=True):
      if len(plan.load):
        group.host.prefetch(plan.rows[plan.load])

  def load(
    self,
    plans: Plans,
    reassigned: Reassigned | None = None,
    on_host: bool = False,
    vectors: Sequence[Vectors] | None = None,
  ) -> tuple[RowBlock, ...]:
    """Returns per group the plan's rows. See `GroupRows.load`.

    Reassigned rows get their first values, or vectors of their ids. Only
    `store` changes them where they are kept.

    Raises:
      UserError: a plan expects other rows in the slots. Nothing changed.
    """
    if any(one is plans for one in list(self._announced)):
      while self._announced.popleft() is not plans:
        pass
    for group, plan in zip(self.groups, plans, strict=True):
      group.kept.check(plan)
    for number, group in enumerate(self.groups):
      group.vectors = None if vectors is None else vectors[number]
    of_groups = zip(self.groups, plans, reassigned or self._none, strict=True)
    return tuple(
      group.load(plan, rows, on_host) for group, plan, rows in of_groups
    )

  def store(
    self,
    plans: Plans,
    blocks: Sequence[RowBlock],
    reassigned: Reassigned | None = None,
    on_host: bool = False,
  ) -> None:
    """Stores the step's rows of the plans that were loaded.

    See `GroupRows.store`.
    """
    self.changed = True
    self.step += 1
    for group, plan, block, rows in zip(
      self.groups, plans, blocks, reassigned or self._none, strict=True
    ):
      group.store(plan, block, rows, on_host)
    if self.devices is None:
      self.gather_early()

  def gather_early(self) -> None:
    """Has groups gather while steps run that move none of their rows.

    So Hotline (arXiv 2204.05436) hides the rows of other examples behind
    batches of popular ones.
    """
    upcoming = list(self._announced)
    for number, group in enumerate(self.groups):
      plans = [plans[number] for plans in upcoming]
      moving = [at for at, plan in enumerate(plans) if plan.moves]
      if moving and moving[0] > 0:
        group.gather_early(plans[moving[0]])

  def swap_hot(self, here: bool) -> None:
    """Moves the hot rows to the device, or back, where placements swap them."""
    for group in self.groups:
      group.swap_hot(here)

  @property
  def hot_here(self) -> bool:
    """Whether the hot rows of swapping placements are on the device."""
    return any(group.hot_here for group in self.groups)

  @contextlib.contextmanager
  def helped(self, helpers: Helpers) -> Iterator[None]:
    """Has these threads copy rows, too, for the steps in the block."""
    for group in self.groups:
      group.helpers = helpers
    try:
      yield
    finally:
      for group in self.groups:
        group.helpers = ALONE

  def count(self, step: Counters) -> None:
    """Adds the counts of one step."""
    self.counters = counters.merge(self.counters, step)

  def freeze(self, stale: StaleRows | None) -> None:
    """Freezes the stale rows of all groups. See `GroupRows.freeze`."""
    masks = stale_by_group(stale, self.hot_of_groups)
    for group, mask in zip(self.groups, masks, strict=True):
      group.freeze(mask)

  def plan(self, lookups: Lookups) -> Plans:
    """Returns plans for a single batch outside of training. Moves nothing."""
    groups = self.tables.groups
    return self.plan_found(
      tuple(unique_rows_of(lookups, group) for group in groups)
    )

  def plan_found(self, uniques: Sequence[Unique]) -> Plans:
    """Returns the same as `plan`, given the unique rows of each group."""
    return tuple(
      plan_with(unique, group.kept.slots_of(unique.rows))
      for group, unique in zip(self.groups, uniques, strict=True)
    )

  def look_up(
    self, lookups: Lookups
  ) -> tuple[tuple[Float[jax.Array, '_P _D'], ...], tuple[np.ndarray, ...]]:
    """Returns per group the unique rows [P, D], and the place of each lookup.

    They are of a single batch outside of training. Plans remain valid.
    """
    plans = self.plan(lookups)
    rows = tuple(block.rows for block in self.load(plans))
    return rows, tuple(plan.inverse for plan in plans)

  def read_back(self) -> tuple[RowBlock, ...]:
    """Returns per group all rows with their state on the host, read-only."""
    return tuple(group.read_back() for group in self.groups)
