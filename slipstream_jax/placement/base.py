"""What a placement is: a pure plan of which rows move for a step.

`plan(state, upcoming)` runs on the host, touches no table and no device, and
gives the same answer for the same ids: it is the planner, the simulator of a
sizing tool, and what property tests attack. `upcoming[0]` is the batch to
plan; the others are the batches known to come next. Planning is ahead of
training: the planner's thread calls `start`, `plan` and `freeze`, in the order
of the batches and some batches before the engine carries the plans out.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.placement import link_kernels as kernels
from slipstream_jax.types import (
  HotRows,
  Inverse,
  Positions,
  RowIds,
  Slots,
  StaleRows,
  Unique,
)

NO_ROWS: RowIds = np.empty(0, np.int64)


class Forward(NamedTuple):
  """What a step takes from the one before, on the device; from `link`."""

  before: Int[np.ndarray, ' V']
  """The rows of the plan before: the very array, which tells whether that is
  the step that was taken."""
  at: Int[np.ndarray, ' load']
  """Of each row to load, its place among those that the step before stores; -1
  if it does not."""


class Plan(NamedTuple):
  """What one step moves, and where it finds its rows."""

  rows: RowIds
  """Unique rows of the batch, i64[U]; the order of everything below."""
  inverse: Inverse
  """Position in `rows` of each lookup."""
  slots: Slots
  """Slot of each row in the device's array, i64[U]; -1 if it has none. A
  loaded row that has one stays in it after the step."""
  load: Positions
  """Positions in `rows` of those to move host -> device before the step."""
  store: Positions
  """Positions in `rows` of those to move device -> host after it."""
  hot: Int[np.ndarray, ' U'] | None
  """As in `Unique`."""
  lookups: int
  """Lookups of the batch, padding left out."""
  hits: int
  """Lookups whose row was on the device before the step."""
  evict: RowIds = NO_ROWS
  """Rows to move device -> host before the step, as others take their slots;
  i64[E]. None of the batch's, and only rows that changed on the device."""
  evict_slots: Slots = NO_ROWS
  """Where those are, i64[E]."""
  forward: Forward | None = None
  """Which of `load` the step before still holds; None: nobody has looked."""


class Placement(NamedTuple):
  """A placement: which rows stay on the device between steps."""

  name: str
  """Its key in `PLACEMENTS`."""
  keeps: Callable[[int, HotRows | None], RowIds | None]
  """N and the hot rows to the rows that the device keeps and the step
  changes, row of slot 0 first, -1 for an empty slot; None for all N in
  order. Called by the engine when it is given all rows: when it is made, and
  at a restore."""
  start: Callable[[int, HotRows | None, RowIds | None], Any]
  """N, the hot rows, and the rows now in the device's slots (None: those of
  `keeps`, unchanged), to the planner's first state. Called before the first
  plan, and again whenever what was planned ahead is dropped."""
  plan: Callable[[Any, Sequence[Unique]], tuple[Any, Plan]]
  """State and `upcoming` to the next state and the plan of upcoming[0]. It may
  change the state it got in place, so that one is not to be used again. Called
  once per batch, in the order in which they are trained."""
  freeze: Callable[[Any, StaleRows | None], Any] = lambda state, stale: state
  """State and rows that stand still from here on (None: no row does) to the
  next state. Called before the plan of the first batch for which it holds. A
  row that is not kept anyway may be copied to the device until it thaws, at
  the slot of its place among the hot rows."""
  copies_frozen: bool = False
  """Whether `freeze` counts on such copies."""
  swap: Callable[[Any, bool], Any] = lambda state, here: state
  """State, and whether the hot rows are on the device from here on, to the
  next state; called as `freeze` is. When they come, and when they leave, all
  of them are moved, each in the slot of its place among the hot ones."""
  swaps: bool = False
  """Whether `swap` counts on that."""
  look_ahead: int = 0
  """Batches after the one to plan that it wants to know."""
  needs_hot: bool = False
  """Whether hot rows are to be chosen for it: it keeps them, or starts with
  them."""
  capacity: int | None = None
  """Rows that it has room for; None: all, none, or as many as are hot."""


def check_hot(hot: HotRows | None, rule: str) -> HotRows:
  """The hot rows, where something cannot do without.

  Raises:
    UserError: none were chosen.
  """
  if hot is None:
    raise UserError(
      rule,
      got='no hot rows',
      where='Trainer, hot',
      hint='give it hot_rows(popular_rows(...).rows, num_rows)',
    )
  return hot


def plan_with(batch: Unique, slots: Slots) -> Plan:
  """The plan that moves, there and back, the rows without a slot."""
  room = np.empty(len(slots), np.int64)
  moves = kernels.moves(batch.inverse.reshape(-1), slots, room)
  missing, lookups, hits = room[: moves[0]], *moves[1:]
  return Plan(
    batch.rows, batch.inverse, slots, missing, missing, batch.hot, lookups, hits
  )


def link(previous: Plan, plan: Plan) -> Plan:
  """The plan, with which of its rows the step before still holds.

  What a step stores is on its way to the host while the next one is prepared. A
  row of both would have to wait for that way and for the one back: it is taken
  on the device instead, out of the rows that the step before has just stored.

  Args:
    previous: of the step before, whose rows may not have reached the host.
    plan: of the step; whatever it was linked with is forgotten.

  Returns:
    `plan` with its `forward`, by which nothing else of it changes.
  """
  held, rows = previous.rows[previous.store], plan.rows[plan.load]
  at = np.full(len(rows), -1, np.int64)
  if len(held) and len(rows):
    # Twice as many places as rows, at least: probes stay short.
    scratch = np.empty(1 << (2 * len(held) - 1).bit_length(), np.int32)
    kernels.places(held, rows, scratch, at)
  return plan._replace(forward=Forward(previous.rows, at))


def bucket(count: int, smallest: int = 256) -> int:
  """Rounds a number of rows up, so that few shapes are ever compiled.

  Sizes are 4, 5, 6 or 7 times a power of two: at most a quarter is padding,
  and a run whose batches resemble one another sees one or two sizes.
  """
  if count <= smallest:
    return smallest
  # The three leading bits stay, rounded up: 4 to 7 times a power of two.
  step = 1 << max(0, (count - 1).bit_length() - 3)
  return -(-count // step) * step
