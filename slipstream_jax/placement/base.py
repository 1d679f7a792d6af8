"""Interface of a placement: a pure plan of the rows that a step moves.

`plan(state, upcoming)` runs on the host, reads no table and no device, and is a
function of the ids. `upcoming[0]` is the batch to plan, followed by the batches
known to come next. The planner's thread calls `start`, `plan` and `freeze` in
the order of the batches, some batches before the engine executes the plans.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel, place_slot
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


class ForwardedRows(NamedTuple):
  """The rows that a step takes from an earlier step's block. See `link`."""

  before: Int[np.ndarray, ' V']
  """The rows of the last plan that moved rows. The identity of this array tells
  whether it was that of the last such step."""
  at: Int[np.ndarray, ' load']
  """For each row to load, its place among those that the step stores, or -1."""


class Plan(NamedTuple):
  """The rows that one step moves, and the slots of its rows."""

  rows: RowIds
  """Unique rows of the batch, i64[U], in the order of everything below."""
  inverse: Inverse
  """Position in `rows` of each lookup."""
  slots: Slots
  """Slot of each row in the device's array, i64[U], or -1. A loaded row with a
  slot stays there after the step."""
  load: Positions
  """Positions in `rows` of the rows to move host -> device before the step."""
  store: Positions
  """Positions in `rows` of the rows to move device -> host after the step."""
  hot: Int[np.ndarray, ' U'] | None
  """As in `Unique`."""
  lookups: int
  """Lookups of the batch without padding."""
  hits: int
  """Lookups whose row was on the device before the step."""
  evict: RowIds = NO_ROWS
  """Rows to move device -> host before the step, as others take their slots,
  i64[E]. None is in the batch. Only rows that may have changed are listed."""
  evict_slots: Slots = NO_ROWS
  """The slots of the evicted rows, i64[E]."""
  lanes: Int[np.ndarray, ' W_and_1'] | None = None
  """Where the rows of each device begin in `rows`. None: there is one device.
  See `distributed.lanes`."""
  forward: ForwardedRows | None = None
  """The rows of `load` that an earlier step's block has. None: not linked."""

  @property
  def moves(self) -> bool:
    """Whether any row crosses between host and device."""
    return bool(len(self.load) or len(self.store) or len(self.evict))


class Placement(NamedTuple):
  """A rule for which rows stay on the device between steps."""

  name: str
  """Its key in `PLACEMENTS`."""
  keeps: Callable[[int, HotRows | None], RowIds | None]
  """Returns the rows that the device keeps and the step changes, given N and
  the hot rows. Slot 0's row is first, -1 is an empty slot, and None means all N
  in order. The engine calls it when it is given all rows: at creation and at a
  restore."""
  start: Callable[[int, HotRows | None, RowIds | None], Any]
  """Returns the planner's first state, given N, the hot rows and the rows now
  in the slots (None: those of `keeps`, unchanged). Called before the first
  plan, and again whenever plans made ahead are dropped."""
  plan: Callable[[Any, Sequence[Unique]], tuple[Any, Plan]]
  """Returns the next state and the plan of upcoming[0], given state and
  `upcoming`. It may change the given state in place, so do not reuse that
  state. Called once per batch, in the order of training."""
  freeze: Callable[[Any, StaleRows | None], Any] = lambda state, stale: state
  """Returns the next state, given the state and the rows frozen from here on
  (None: no row). Called before the plan of the first batch for which it holds.
  A frozen row that the device does not keep may stay there from its next load
  until it thaws. Its slot is then its place among the hot rows."""
  copies_frozen: bool = False
  """Whether plans keep such copies."""
  swap: Callable[[Any, bool], Any] = lambda state, here: state
  """Returns the next state, given the state and whether the hot rows are on the
  device from here on. Called like `freeze`. A change moves all hot rows. The
  slot of each is its place among the hot rows."""
  swaps: bool = False
  """Whether plans rely on `swap`."""
  look_ahead: int = 0
  """How many batches after the planned one `plan` can use."""
  needs_hot: bool = False
  """Whether it needs hot rows, to keep them or to start with them."""
  reads_hot: bool = False
  """Whether `plan` reads `Unique.hot`."""
  capacity: int | None = None
  """C, the rows that it has room for. None: all, none, or the hot rows."""


def check_hot(hot: HotRows | None, rule: str) -> HotRows:
  """Returns the hot rows, or raises UserError by the rule that needs them."""
  if hot is None:
    raise UserError(
      rule,
      got='no hot rows',
      where='Trainer, hot',
      hint='give it hot_rows(popular_rows(...), num_rows)',
    )
  return hot


def plan_with(batch: Unique, slots: Slots) -> Plan:
  """Returns the plan that loads and stores the rows without a slot."""
  room = np.empty(len(slots), np.int64)
  absent, lookups, hits = _missing(batch.counts, slots, room)
  missing = room[:absent]
  return Plan(
    batch.rows, batch.inverse, slots, missing, missing, batch.hot, lookups, hits
  )


@kernel
@no_type_check
def _missing(
  counts: np.ndarray, slots: np.ndarray, missing: np.ndarray
) -> tuple[int, int, int]:
  """Writes and counts the places of rows without a slot, integer[U].

  Also returns the lookups, i32[U], in all and of rows with a slot.
  """
  # Kernels fill arrays of their caller: an interrupt while one returns an array
  # would be a SystemError.
  absent = lookups = hits = 0
  for u in range(len(slots)):
    missing[absent] = u
    absent += slots[u] < 0
    lookups += counts[u]
    hits += counts[u] * (slots[u] >= 0)
  return absent, lookups, hits


def link(previous: Plan, plan: Plan) -> Plan:
  """Returns the plan with `forward` set: rows that an earlier step holds.

  Rows that a step stores are on their way to the host while the next step is
  prepared. A row in both steps would wait for two transfers. Instead, the
  device takes it from the earlier step's block. No step in between may move a
  row, so its block still has the row as it is.
  """
  held, rows = previous.rows.take(previous.store), plan.rows.take(plan.load)
  at = np.empty(len(rows), np.int64)
  # At least twice as many places as rows keep the probes short.
  scratch = np.empty(1 << max(1, 2 * len(held) - 1).bit_length(), np.int32)
  _find(held, rows, scratch, at)
  return plan._replace(forward=ForwardedRows(previous.rows, at))


@kernel
@no_type_check
def _find(
  held: np.ndarray, rows: np.ndarray, scratch: np.ndarray, out: np.ndarray
) -> None:
  """Writes the place of each row in `held`, i64[U], or -1. Both are unique."""
  scratch[:] = -1
  for v in range(len(held)):
    scratch[place_slot(scratch, held, held[v])] = v
  for u in range(len(rows)):
    out[u] = scratch[place_slot(scratch, held, rows[u])]


def bucket(count: int, smallest: int = 256) -> int:
  """Rounds a number of rows up to one of few sizes, so that little is compiled.

  Sizes are 4, 5, 6 or 7 times a power of two. At most a quarter is padding, and
  a run with similar batches uses one or two sizes.
  """
  if count <= smallest:
    return smallest
  # Keeps the three leading bits, rounded up: 4 to 7 times a power of two.
  step = 1 << max(0, (count - 1).bit_length() - 3)
  return -(-count // step) * step
