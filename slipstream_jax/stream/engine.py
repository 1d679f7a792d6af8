"""The engine: carries out plans on the host's and the device's rows.

What is of rows is done group by group, in the order of `TableSet.groups`; the
whole has one turn and one count of what moved.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import weakref

import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.placement import Placement, Plan, StaleRows
from slipstream_jax.placement.base import NO_ROWS, plan_with
from slipstream_jax.selection.hot import hot_by_group, stale_by_group
from slipstream_jax.store.base import Storage
from slipstream_jax.store.helpers import ALONE, Helpers
from slipstream_jax.store.host_table import unique_rows_of, Untrained
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.stream import counters
from slipstream_jax.stream.counters import Counters
from slipstream_jax.stream.group_engine import GroupEngine
from slipstream_jax.stream.group_rows import Piece
from slipstream_jax.table_set import TableSet
from slipstream_jax.types import (
  Array,
  FreshRows,
  HotRows,
  Lookups,
  RowBlock,
  RowIds,
  Rows,
)

# More than any run takes: above it a turn counts restores, below it steps.
_MANY_TURNS = 1 << 40

Plans = tuple[Plan, ...]
"""Of one batch, one per group."""
Fresh = Sequence[FreshRows]
"""Per group, in its numbers."""


class Engine:
  """Owns the rows of all tables, on the host or on the device.

  Attributes:
    untrained: what rows are before their first step.
    groups: what owns the rows of each group.
    hot: the rows that may be watched and pinned, if any were chosen: global
      ones, group by group.
    counters: what was moved so far.
    changed: whether a step has changed rows since they were all given.
    turn: number of the next step; a plan holds at one turn alone.
  """

  def __init__(
    self,
    untrained: Untrained,
    placements: Sequence[Placement],
    hot: HotRows | None = None,
    storage: Storage = MEMORY,
  ) -> None:
    """All rows as they are before the first step.

    Args:
      untrained: the tables, and what their rows are then.
      placements: one per group.
      hot: the hot rows, of any order.
      storage: what keeps the rows that the device does not.

    Raises:
      UserError: a placement needs hot rows.
    """
    self.untrained, self.counters = untrained, Counters()
    tables = self.tables
    self.changed, self.turn = False, _MANY_TURNS
    of_groups: Sequence[HotRows | None] = [None] * len(tables.groups)
    if hot is not None:
      hot, of_groups = hot_by_group(hot, tables)
    self.hot = hot
    first = [untrained.first(number) for number in range(len(tables.groups))]
    of_all = zip(placements, storage.open(first), first, of_groups, strict=True)
    # Tables are freed at once: in a cycle they would wait for the collector.
    me, rows_of = weakref.proxy(self), Engine._rows_of
    count = functools.partial(Engine.count, me)
    self.groups = tuple(
      GroupEngine(*values, count, functools.partial(rows_of, me, number))
      for number, values in enumerate(of_all)
    )

  def choose_hot(self, hot: HotRows, placements: Sequence[Placement]) -> None:
    """Chooses hot rows where there are none yet.

    Batches that were planned before know none of them. Plan them again.

    Args:
      hot: the hot rows, of any order.
      placements: one per group, from here on. Rows move only where a group
        gets another placement than it had.
    """
    assert self.hot is None
    self.hot, of_groups = hot_by_group(hot, self.tables)
    for group, own, placement in zip(
      self.groups, of_groups, placements, strict=True
    ):
      group.choose_hot(own, placement)

  def rows_of(self, table: str) -> Array:
    """The rows of a table as they are now, [R, D] of its dtype; a copy."""
    of, at = self.tables.tables[table], 0
    out = np.empty((of.rows, of.dim), of.dtype)
    for rows in self.pieces_of(table):
      out[at : at + len(rows)] = rows
      at += len(rows)
    return out

  def pieces_of(self, table: str) -> Iterator[Array]:
    """The same in their order, some MiB at a time; no step comes between."""
    first, size = self.tables.first_rows[table], self.tables.tables[table].rows
    parts = self.tables.in_groups(np.array([first]))
    (number,) = (i for i, (places, _) in enumerate(parts) if len(places))
    start = int(parts[number][1][0])
    for _, block in self.groups[number].rows.pieces(start, start + size):
      yield block.rows

  def renew_as(self, seed: int) -> None:
    """Rows that get another id start from here on as those of this seed."""
    self.untrained = self.untrained._replace(seed=seed)

  def _rows_of(self, group: int, rows: RowIds) -> RowBlock:
    """Rows of a group as they are before their first step."""
    return self.untrained.rows(group, rows)  # of a restored seed, too

  def reset(self, pieces: Sequence[Iterable[Piece]] | None = None) -> None:
    """Makes all rows untrained ones again, or those of the pieces.

    Args:
      pieces: per group, rows that are others, as of `GroupEngine.reset`.
    """
    self._all_others()
    for number, group in enumerate(self.groups):
      others = () if pieces is None else pieces[number]
      group.reset(self.untrained.first(number), others)

  def _all_others(self) -> None:
    self.changed = False
    self.turn += _MANY_TURNS  # no plan of before holds any more

  def restore(self, blocks: Iterable[RowBlock]) -> None:
    """Replaces all rows by those of one host table per group, taken over."""
    self._all_others()
    for group, block in zip(self.groups, blocks, strict=True):
      group.restore(block)

  @property
  def tables(self) -> TableSet:
    """The tables whose rows these are."""
    return self.untrained.tables

  @property
  def num_rows(self) -> int:
    """N, rows of all tables."""
    return self.tables.num_rows

  @property
  def row_bytes(self) -> tuple[int, ...]:
    """Per group, what one row and its state take on the link."""
    return tuple(group.row_bytes for group in self.groups)

  @property
  def placements(self) -> tuple[Placement, ...]:
    """Per group, which rows stay on the device between steps."""
    return tuple(group.placement for group in self.groups)

  @property
  def hot_of_groups(self) -> tuple[HotRows | None, ...]:
    """Per group its hot rows, in its own numbers."""
    return tuple(group.hot for group in self.groups)

  @property
  def contents(self) -> tuple[RowIds | None, ...]:
    """Per group the row in each slot of the device, as `Placement.keeps`."""
    return tuple(group.contents for group in self.groups)

  def restored_since(self, turn: int) -> bool:
    """Whether all rows were replaced since that turn."""
    return turn // _MANY_TURNS != self.turn // _MANY_TURNS

  def check_turn(self, turn: int) -> None:
    """Looks whether a plan made for `turn` holds now.

    Raises:
      UserError: other steps were taken since, or not taken.
    """
    if turn != self.turn:
      raise UserError(
        f'the plan holds for turn {turn % _MANY_TURNS} of the engine',
        got=f'turn {self.turn % _MANY_TURNS}',
        where='take_step, item',
        hint='train one iterator of planned batches at a time, leave out none '
        'of its batches, and plan anew after a restore',
      )

  def close(self) -> None:
    """Ends the host's threads and files; nothing can be read then."""
    for group in self.groups:
      group.rows.host.close()

  def prefetch(self, plans: Plans) -> None:
    """Says that these plans are carried out soon; for the planner's thread."""
    for group, plan in zip(self.groups, plans, strict=True):
      if len(plan.load):
        group.rows.host.prefetch(plan.rows[plan.load])

  def load(
    self, plans: Plans, fresh: Fresh | None = None
  ) -> tuple[RowBlock, ...]:
    """Per group the plan's rows on the device; see `GroupEngine.load`.

    Args:
      plans: of the batch.
      fresh: per group, rows that are loaded as untrained ones. They become
        that with `store`: until then, nothing but what is loaded differs.

    Raises:
      UserError: a plan was made for other contents; nothing has changed.
    """
    pairs = list(zip(self.groups, plans, strict=True))
    for group, plan in pairs:
      group.check(plan)
    of_groups = fresh or (NO_ROWS,) * len(pairs)
    return tuple(
      group.load(plan, rows)
      for (group, plan), rows in zip(pairs, of_groups, strict=True)
    )

  def store(
    self,
    plans: Plans,
    blocks: Sequence[RowBlock],
    fresh: Fresh | None = None,
  ) -> None:
    """Puts the step's rows, of the plans that `load` got, back.

    It waits for no step: rows for the host are on their way then.
    """
    self.changed = True
    self.turn += 1
    of_groups = fresh or (NO_ROWS,) * len(plans)
    for group, plan, rows, new in zip(
      self.groups, plans, blocks, of_groups, strict=True
    ):
      group.store(plan, rows, new)

  @contextlib.contextmanager
  def helped(self, helpers: Helpers) -> Iterator[None]:
    """Steps in the block have their rows copied by these threads, too."""
    for group in self.groups:
      group.helpers = helpers
    try:
      yield
    finally:
      for group in self.groups:
        group.helpers = ALONE

  def count(self, step: Counters) -> None:
    """Adds what one step did."""
    self.counters = counters.merge(self.counters, step)

  def freeze(self, stale: StaleRows | None) -> None:
    """Readies the rows that stand still from here on; None: none does.

    The first step planned with them must not have been loaded yet.
    """
    masks = stale_by_group(stale, self.hot_of_groups)
    self.freeze_groups(dict(enumerate(masks)))

  def freeze_groups(self, masks: Mapping[int, StaleRows | None]) -> None:
    """The same of some groups, by their numbers."""
    for group, mask in masks.items():
      self.groups[group].freeze(mask)

  def hot_rows_now(self) -> tuple[Rows, ...]:
    """Per group the hot rows [H_g, D_g] as they are.

    They may be the very arrays that the device keeps, which the next `store`
    donates and so deletes: copy them, or be done with them before that.
    """
    return tuple(group.hot_rows_now() for group in self.groups)

  def plan(self, lookups: Lookups) -> Plans:
    """The plans of a lone batch, outside of training; moves nothing."""
    plans = []
    for group, of_table in zip(self.groups, self.tables.groups, strict=True):
      unique = unique_rows_of(lookups, of_table, group.hot)
      plans.append(plan_with(unique, group.slots_of(unique.rows)))
    return tuple(plans)

  def read_back(self) -> tuple[RowBlock, ...]:
    """Per group all rows with their state on the host, not to be written.

    Not counted as stores: how often a program looks is its own affair.
    """
    return tuple(group.read_back() for group in self.groups)
