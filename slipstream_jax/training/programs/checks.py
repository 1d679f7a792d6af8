"""What goes together: schedules with trainers, placements with rows."""

from collections.abc import Sequence

from slipstream_jax.errors import choose, UserError
from slipstream_jax.placement import Placement
from slipstream_jax.placement.base import check_hot
from slipstream_jax.schedules.base import ScheduleSpec
from slipstream_jax.schedules.systems import ROWS
from slipstream_jax.selection.policies import BLIND
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.transforms.row_state import RowStateLayout
from slipstream_jax.types import HotRows


def check_rows(
  rows: str, placements: Sequence[Placement], recipe: Recipe, judges: bool
) -> None:
  """Looks whether rows can cross the link in that way.

  Args:
    rows: a member of `ROWS`.
    placements: of the groups.
    recipe: what is trained.
    judges: whether a chain judges hot rows on the device.

  Raises:
    UserError: there is no such way, or it needs all rows on the host.
  """
  choose(dict.fromkeys(ROWS), rows, 'make_parts, rows')
  if rows == 'stream':
    return
  kept = [p.name for p in placements if p.name not in ('streamed', 'swapped')]
  if kept or judges:
    raise UserError(
      'rows that are updated on the host stay there',
      got=f'placement {kept[0]}' if kept else 'skip_stale, which watches them',
      where='make_parts, placement' if kept else 'make_parts, recipe',
      hint="take placement 'streamed'" if kept else "or watch 'all' rows",
    )
  if rows == 'pooled' and recipe.microbatches > 1:
    raise UserError(
      'embeddings of a batch cross the link at once',
      got=f'{recipe.microbatches} microbatches',
      where='Recipe.microbatches',
      hint='use 1, or another system',
    )


def check_schedule(
  spec: ScheduleSpec,
  hot: HotRows | None,
  layouts: Sequence[RowStateLayout],
  placements: Sequence[Placement],
) -> None:
  """Looks whether a trainer can follow a schedule.

  Raises:
    UserError: it cannot.
  """
  if spec.needs_hot:
    check_hot(hot, 'skipping and regrouping need hot rows')
  if spec.settle is not None and any(layout.skips for layout in layouts):
    raise UserError(
      'rows are compared by one rule, that of skip or of skip_stale in a chain',
      got='both',
      where='Trainer.train, skip',
      hint="leave skip_stale out, or give Skip mode 'examples', no threshold"
      f' and a policy that compares no rows: {", ".join(BLIND)}',
    )
  # A decision waits for a window's end, which must not wait to be planned.
  ahead = max(placement.look_ahead for placement in placements)
  asks = spec.regrouping.settle if spec.regrouping is not None else None
  for where, settle in ('Phases.settle', spec.settle), ('fae, settle', asks):
    if settle is not None and ahead and settle <= ahead:
      raise UserError(
        f'settle must be more than the {ahead} batches held to look ahead',
        got=settle,
        where=where,
        hint='lengthen it, or look less far ahead',
      )
