"""Hotline's order: popular examples in batches of their own (arXiv 2204.05436).

A popular example looks up hot rows only. Where hot rows stay on the device, a
batch of such examples moves no row, and the rows of the others can be gathered
meanwhile. `hotline` takes some batches together, a working set. It returns the
full batches of popular examples first, then those of the others. Examples that
fill no batch wait for the next set. While it still learns which rows are hot,
it keeps the order. `hotline_micro` keeps the batches, and puts
popular examples first in each. In equal parts (`Recipe.microbatches`), most
parts hold nothing else, as in the paper's later form.
"""

import functools

from slipstream_jax.errors import check_whole
from slipstream_jax.schedules.base import (
  check_batches,
  Regrouping,
  ScheduleSpec,
)
from slipstream_jax.schedules.rebatch import PopularFirstQueue, WorkingSetQueue
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.schedules.slipstream import slipstream

WORKING_SET = 4
"""Batches in a working set, as published. 1 is slow."""
_NOTHING = Skip(0, 'random', until=0)  # settings that skip nothing


def hotline(
  working_set: int = WORKING_SET,
  batches: int | None = None,
  learn: int = 0,
) -> ScheduleSpec:
  """Trains full batches of popular examples, then others, by working sets.

  Args:
    working_set: W, batches of the source that are regrouped together.
    batches: of the source to read before the schedule ends. None: all.
    learn: first batches, which keep their order. In the paper accesses are
      learned from them: 5 % of a run, or 15 or 20 %.

  Raises:
    UserError: a number out of range.
  """
  hint = f'use {WORKING_SET}, as published'
  check_whole(working_set, 1, 'hotline, working_set', hint)
  check_batches(batches, 'hotline')
  check_whole(learn, 0, 'hotline, learn', 'use 0 to regroup from the start')
  queue = functools.partial(WorkingSetQueue, working_set, learn)
  name = f'hotline {working_set}' + (f', after {learn}' if learn else '')
  regrouping = Regrouping(name, queue=queue)
  return slipstream(_NOTHING, batches, regrouping)


def hotline_micro(batches: int | None = None) -> ScheduleSpec:
  """Puts popular examples first in each batch, and keeps its examples.

  Args:
    batches: of the source to read before the schedule ends. None: all.

  Raises:
    UserError: a number out of range.
  """
  check_batches(batches, 'hotline_micro')
  regrouping = Regrouping('hotline_micro', queue=PopularFirstQueue)
  return slipstream(_NOTHING, batches, regrouping)
