"""Rows that a step changes on the host, and hot rows that come and go.

What the baselines do with an engine: a parameter server's rows never leave the
host, and FAE's hot rows are on the device for some stretches of a run.
"""

from collections.abc import Sequence

from jax.profiler import TraceAnnotation

from slipstream_jax.placement import bucket, Plan
from slipstream_jax.placement.base import NO_ROWS
from slipstream_jax.stream.counters import Counters
from slipstream_jax.stream.engine import Engine, Fresh, Plans
from slipstream_jax.types import RowBlock


def gather(
  engine: Engine, plans: Plans, fresh: Fresh | None = None
) -> tuple[RowBlock, ...]:
  """Per group the plan's rows and their state on the host, padded.

  All of them must be there; copies on the device of rows that stand still are
  left alone. Nothing has changed until `scatter`.

  Args:
    engine: owns the rows.
    plans: of the batch.
    fresh: per group, rows that are taken as untrained ones.
  """
  of_groups = zip(engine.groups, plans, fresh or _none(plans), strict=True)
  blocks = []
  for group, plan, rows in of_groups:
    group.write_back()  # what is on its way to the host arrives
    blocks.append(group.gather(rows, plan.rows, bucket(len(plan.rows))))
  return tuple(blocks)


def scatter(
  engine: Engine,
  plans: Plans,
  blocks: Sequence[RowBlock],
  fresh: Fresh | None = None,
) -> None:
  """Puts what `gather` gave back, changed and in numpy's arrays."""
  engine.changed = True
  engine.turn += 1
  of_groups = zip(
    engine.groups, plans, blocks, fresh or _none(plans), strict=True
  )
  for group, plan, block, rows in of_groups:
    group.dirty.mark(plan, group.frozen, rows)
    if len(rows):
      group.renew(plan, rows)
    group.write_back()
    with TraceAnnotation('scatter'):
      group.rows.host.scatter(plan.rows, block)


def _none(plans: Sequence[Plan]) -> Fresh:
  return (NO_ROWS,) * len(plans)


def swap(engine: Engine, here: bool) -> None:
  """Moves the hot rows to the device, or from it, where they are swapped.

  All of them move, as the step before left them, and are counted; where they
  are there already nothing is done.
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
  """Whether hot rows that are swapped are on the device."""
  swapped = [group for group in engine.groups if group.placement.swaps]
  return any(
    group.contents is not None and len(group.contents) for group in swapped
  )
