"""What goes together: schedules with trainers, placements with rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slipstream_jax.engine.buffers import to_host
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
  if recipe.skips_bad_steps:
    raise UserError(
      'a bad step changes nothing only where rows are updated on the device',
      got=f'rows that cross as {rows}',
      where='Recipe.skips_bad_steps',
      hint='stop there, or go back to a checkpoint',
    )
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


def check_offsets(heads: int | None, loss: object) -> None:
  """Looks whether what was left out can be made up for by an offset.

  Args:
    heads: T, of labels [B, T]; None: they are [B].
    loss: as of `Recipe`.

  Raises:
    UserError: it cannot.
  """
  rule = "a policy of correction 'offset' adds to the one logit of each example"
  hint = "take a policy whose correction is 'weight', such as surprise"
  if heads is not None:
    got = f'a model with {heads} heads'
    raise UserError(rule, got=got, where='Skip.policy', hint=hint)
  if not is_logistic(loss):
    raise UserError(
      f'{rule}, which is right for the logistic loss alone',
      got='another loss',
      where='Trainer, loss',
      hint=hint,
    )


def is_logistic(loss: object) -> bool:
  """Whether a loss is log(1 + exp(-logit)) of clicks, up to a factor.

  It is tried at some logits: so a loss of one's own needs no mark, and what
  smooths labels, or counts some errors more than others, shows.

  Args:
    loss: as of `Recipe`; a sequence is of several heads, and is not.
  """
  if loss is optax.sigmoid_binary_cross_entropy:
    return True
  if not callable(loss):
    return False
  logits = np.tile(np.linspace(-6, 6, 13, dtype=np.float32), 2)
  labels = np.repeat(np.array([0, 1], np.float32), 13)
  try:
    given = jax.jit(lambda: loss(jnp.asarray(logits), jnp.asarray(labels)))()
  except Exception:  # it wants something else: the step will say what
    return False
  values = np.asarray(to_host(given), np.float64)
  wanted = np.logaddexp(0, np.where(labels > 0, -logits, logits))
  if values.shape != wanted.shape:
    return False
  factor = values.sum() / wanted.sum()
  near = np.allclose(
    values, factor * wanted, rtol=1e-3, atol=1e-4 * abs(factor)
  )
  return bool(factor > 0 and near)
