"""Rows that a step changes on the host, and hot rows that are swapped.

Baselines use an engine this way: a parameter server's rows never leave the
host, and FAE's hot rows are on the device for some phases of a run.
"""

from collections.abc import Sequence

from jax.profiler import TraceAnnotation

from slipstream_jax.engine.counters import Counters
from slipstream_jax.engine.engine import Engine, Fresh, Plans
from slipstream_jax.placement import bucket, Plan
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.types import RowBlock


def gather(
  engine: Engine, plans: Plans, fresh: Fresh | None = None
) -> tuple[RowBlock, ...]:
  """Returns per group the plan's rows and their state on the host, padded.

  All rows must be on the host. Copies of frozen rows on the device are ignored.
  Nothing changes until `scatter`.

  Args:
    engine: owns the rows.
    plans: of the batch.
    fresh: per group, rows that are returned with their first values.
  """
  of_groups = zip(engine.groups, plans, fresh or _no_fresh(plans), strict=True)
  blocks = []
  for group, plan, rows in of_groups:
    group.write_back()  # completes the write-backs
    blocks.append(group.gather(rows, plan.rows, bucket(len(plan.rows))))
  return tuple(blocks)


def scatter(
  engine: Engine,
  plans: Plans,
  blocks: Sequence[RowBlock],
  fresh: Fresh | None = None,
) -> None:
  """Writes back the blocks of `gather`, changed and as numpy arrays."""
  engine.changed = True
  engine.turn += 1
  of_groups = zip(
    engine.groups, plans, blocks, fresh or _no_fresh(plans), strict=True
  )
  for group, plan, block, rows in of_groups:
    group.dirty.mark(plan, group.frozen, rows)
    if len(rows):
      group.renew(plan, rows)
    group.write_back()
    with TraceAnnotation('scatter'):
      group.rows.host.scatter(plan.rows, block)


def _no_fresh(plans: Sequence[Plan]) -> Fresh:
  return (NO_ROWS,) * len(plans)


def swap(engine: Engine, here: bool) -> None:
  """Moves the hot rows to the device, or back, where placements swap them.

  Moves and counts all of them, as of the last step. Does nothing if they are
  there already.
  """
  for group in engine.groups:
    hot, kept = group.hot, group.contents
    if not group.placement.swaps or hot is None or kept is None:
      continue
    if not len(hot.rows) or here == bool(len(kept)):
      continue
    group.keep(hot.rows if here else NO_ROWS)
    rows = len(hot.rows)
    nbytes = rows * group.row_bytes
    engine.count(
      Counters(rows_loaded=rows, bytes_loaded=nbytes)
      if here
      else Counters(rows_stored=rows, bytes_stored=nbytes)
    )


def hot_here(engine: Engine) -> bool:
  """Whether the hot rows of swapping placements are on the device."""
  swapped = [group for group in engine.groups if group.placement.swaps]
  return any(
    group.contents is not None and len(group.contents) for group in swapped
  )
