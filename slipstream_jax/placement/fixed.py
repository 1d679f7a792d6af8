"""Keeps a fixed set of rows on the device: all, none, or the hot ones.

`RESIDENT` keeps all rows, for tables that fit on the device: nothing moves.

`STREAMED` keeps none: each step loads its rows and stores them back, as with a
parameter server (XDL). Frozen rows are the exception. The first step that uses
one loads it, and the device keeps this copy, equal to the host's, until the row
thaws. So a frozen row is loaded at most once, and never stored.

`PINNED` and `SWAPPED` keep the hot rows. Popular rows take most lookups, which
FAE (arXiv 2103.00686), Hotline (2204.05436) and Slipstream (2404.04270) use.
`PINNED` never moves them. `SWAPPED` follows FAE: the hot rows are on the device
while popular examples are trained, and on the host otherwise. The schedule
decides when (`Edge.hot_here`). Under a schedule that never sets it, no row
stays.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Bool
import numpy as np

from slipstream_jax.errors import choose, UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.placement.base import (
  check_hot,
  NO_ROWS,
  Placement,
  Plan,
  plan_with,
)
from slipstream_jax.tables import TableSet
from slipstream_jax.types import HotRows, RowIds, Slots, StaleRows, Unique


def _planning(slots: Callable[[Any, Unique], Slots]) -> Callable[..., Any]:
  """Returns `Placement.plan` that loads and stores the rows without a slot."""

  def plan(state: Any, upcoming: Sequence[Unique]) -> tuple[Any, Plan]:
    return state, plan_with(upcoming[0], slots(state, upcoming[0]))

  return plan


RESIDENT = Placement(
  name='resident',
  keeps=lambda num_rows, hot: None,
  start=lambda num_rows, hot, contents: None,
  plan=_planning(lambda state, batch: batch.rows),
)


class Copies(NamedTuple):
  """The frozen rows, by their places among the hot rows."""

  frozen: Bool[np.ndarray, ' H_and_1'] | None
  """Marks of those that are frozen, with a final False for all cold rows. None:
  none is."""
  there: Bool[np.ndarray, ' H'] | None
  """Marks of those of which the device has a copy. None: of none."""


def _start_streaming(
  num_rows: int, hot: HotRows | None, contents: RowIds | None
) -> Copies:
  if contents is None or hot is None or not len(contents):
    return Copies(None, None)
  return Copies(None, contents[: len(hot.rows)] >= 0)  # `freeze` follows


def _plan_copies(
  copies: Copies, upcoming: Sequence[Unique]
) -> tuple[Copies, Plan]:
  batch = upcoming[0]
  none = np.full(len(batch.rows), -1, np.int64)
  if copies.frozen is None or batch.hot is None:
    return copies, plan_with(batch, none)
  assert copies.there is not None
  # The slot of a copy is its row's place among the hot rows.
  slots = np.where(copies.frozen.take(batch.hot), batch.hot, none)
  copied = np.where(np.append(copies.there, False).take(batch.hot), slots, none)
  plan = plan_with(batch, copied)
  new = slots[plan.load] >= 0
  if new.any():
    copies.there[slots[plan.load[new]]] = True
    plan = plan._replace(slots=slots, store=plan.load[~new])
  return copies, plan


def _freeze(copies: Copies, stale: StaleRows | None) -> Copies:
  if stale is None:
    return Copies(None, None)
  known = copies.frozen is None and copies.there is not None
  there = copies.there if known else np.zeros(len(stale), bool)
  return Copies(np.append(stale, False), there)


STREAMED = Placement(
  name='streamed',
  keeps=lambda num_rows, hot: NO_ROWS,
  start=_start_streaming,
  plan=_plan_copies,
  reads_hot=True,
  freeze=_freeze,
  copies_frozen=True,
)


SwapState = tuple[bool, int]
"""Whether the hot rows are on the device, and H."""


def _keeps(num_rows: int, hot: HotRows | None) -> RowIds:
  return check_hot(hot, 'placement pinned keeps hot rows on the device').rows


def _slots(num_hot: int, batch: Unique) -> Slots:
  assert batch.hot is not None
  slots = np.empty(len(batch.hot), np.int64)
  _slots_of_hot(batch.hot, num_hot, slots)
  return slots


@kernel
@no_type_check
def _slots_of_hot(hot: np.ndarray, num_hot: int, out: np.ndarray) -> None:
  # The device keeps `hot.rows` in order, so a row's place there is its slot.
  for u in range(len(hot)):
    out[u] = hot[u] if hot[u] < num_hot else -1


def _start_swapping(
  num_rows: int, hot: HotRows | None, contents: RowIds | None
) -> SwapState:
  hot = check_hot(hot, 'placement swapped moves hot rows to the device')
  return contents is not None and len(contents) > 0, len(hot.rows)


# Frozen rows are hot and therefore on the device, so `freeze` does nothing.
PINNED = Placement(
  name='pinned',
  keeps=_keeps,
  start=lambda num_rows, hot, contents: len(_keeps(num_rows, hot)),
  plan=_planning(_slots),
  needs_hot=True,
  reads_hot=True,
)

SWAPPED = Placement(
  name='swapped',
  keeps=lambda num_rows, hot: NO_ROWS,
  start=_start_swapping,
  plan=_planning(
    lambda state, batch: _slots(state[1] if state[0] else 0, batch)
  ),
  needs_hot=True,
  reads_hot=True,
  swap=lambda state, here: (here, state[1]),
  swaps=True,
)
"""A swap moves all hot rows, changed or not, as published."""

PLACEMENTS: dict[str, Placement] = {
  p.name: p for p in (RESIDENT, STREAMED, PINNED, SWAPPED)
}
"""The placements without parameters by name. The laws in tests/laws hold for
them and for every `cached` one."""

Placing = (
  Placement | str | Mapping[str, Placement | str] | Sequence[Placement | str]
)
"""One placement or its name, one per table by name, or one per group."""

_WHERE = 'Trainer, placement'
_DEVICE_ROWS = 2**31 - 2**26
"""Most rows that a device can keep. Slots are i32, and the slots of padding lie
beyond them."""


def placements_of(given: Placing, tables: TableSet) -> tuple[Placement, ...]:
  """Returns the placement of each group.

  Raises:
    UserError: there is no such placement, or a group has none or two.
  """
  if isinstance(given, Placement | str):
    return (_placement(given),) * len(tables.groups)
  if isinstance(given, Mapping):
    return _by_table(given, tables)
  if not isinstance(given, Sequence) or len(given) != len(tables.groups):
    groups = ' | '.join(', '.join(group.tables) for group in tables.groups)
    raise UserError(
      'placement must be one for all tables, one for each by name, or a'
      f' sequence of one for each of the groups {groups}',
      got=repr(given),
      where=_WHERE,
      hint="give one name, such as 'streamed'",
    )
  of_groups: Sequence[Placement | str] = [*given]
  return tuple(map(_placement, of_groups))


def _by_table(
  given: Mapping[str, Placement | str], tables: TableSet
) -> tuple[Placement, ...]:
  if set(given) != set(tables.tables):
    raise UserError(
      f'placements by name must name the tables {", ".join(tables.tables)}',
      got=', '.join(map(str, given)) or 'none',
      where=_WHERE,
      hint='name each table once, or give one placement for all of them',
    )
  chosen = []
  for group in tables.groups:
    own = [_placement(given[name]) for name in group.tables]
    if any(one != own[0] for one in own):
      raise UserError(
        f'tables of one dim, dtype and optimizer ({", ".join(group.tables)})'
        ' must have one placement',
        got=', '.join(one.name for one in own),
        where=_WHERE,
        hint='give them the same one',
      )
    chosen.append(own[0])
  return tuple(chosen)


def _placement(given: Placement | str) -> Placement:
  if isinstance(given, Placement):
    return given
  if given == 'cached':
    raise UserError(
      'a cache needs a capacity',
      got=repr(given),
      where=_WHERE,
      hint='give slipstream_jax.cached(rows)',
    )
  return choose(PLACEMENTS, given, _WHERE, 'or cached(rows)')


def check_device_rows(
  placement: Placement, num_rows: int, hot: HotRows | None
) -> None:
  """Checks that i32 slots can number the rows that the placement keeps.

  Raises:
    UserError: there are too many, or needed hot rows are missing.
  """
  rows = placement.keeps(num_rows, hot)
  kept = num_rows if rows is None else len(rows)
  if kept > _DEVICE_ROWS:
    raise UserError(
      f'a device keeps at most {_DEVICE_ROWS} rows',
      got=kept,
      where=f'Trainer, placement {placement.name}',
      hint="use 'streamed', 'pinned' or 'cached', or fewer rows",
    )
