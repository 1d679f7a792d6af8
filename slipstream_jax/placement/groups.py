"""The placement of each group of tables, from a user's choice."""

from collections.abc import Mapping, Sequence

from slipstream_jax.errors import choose, UserError
from slipstream_jax.placement.base import Placement
from slipstream_jax.placement.fixed import PINNED, RESIDENT, STREAMED, SWAPPED
from slipstream_jax.tables import TableSet
from slipstream_jax.types import HotRows

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
