"""The system of a config: in which order it trains, and what it skips."""

import ml_collections

from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import choose, UserError
from slipstream_jax.schedules.base import ScheduleSpec
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.schedules.systems import SCHEDULES, System, SYSTEMS
from slipstream_jax.selection.policies import POLICIES


def system(config: ml_collections.ConfigDict) -> System:
  """The way to train: its schedule, placement, and what crosses the link.

  Raises:
    UserError: there is none of that name.
  """
  return choose(SYSTEMS, config.system, 'config.system')


def regroups(config: ml_collections.ConfigDict) -> bool:
  """Whether the config's system changes the order of examples."""
  return system(config).schedule != 'plain'


def order_of(
  config: ml_collections.ConfigDict, data: Dataset, steps: int
) -> ScheduleSpec:
  """The schedule of the config's system, which reads `steps` batches."""
  name = system(config).schedule
  make = SCHEDULES[name]
  if name == 'plain':
    return make()
  if name != 'fae':
    return make(batches=steps)
  held_out = data.test(config.eval.batch_size)
  first = next(held_out)
  held_out.close()
  batches, passes = _passes(config, data, steps)
  return make(batches, first, passes=passes)


def _passes(
  config: ml_collections.ConfigDict, data: Dataset, steps: int
) -> tuple[int, int]:
  """Batches of a pass over the source, and how many passes a run makes."""
  per_epoch = (data.train_examples or 0) // config.data.batch_size
  batches = min(per_epoch or steps, steps)
  return batches, -(-steps // batches)


def most_steps(
  config: ml_collections.ConfigDict, data: Dataset, steps: int
) -> int:
  """Steps that a run takes at most to train `steps` batches of the source.

  More where they are regrouped: the last batch of a kind may not be full.
  """
  if not regroups(config):
    return steps
  return steps + 2 * _passes(config, data, steps)[1]


def skip_settings(
  config: ml_collections.ConfigDict, steps: int | None = None
) -> Skip:
  """Slipstream's settings of `config.skip`, in a run of `steps` batches.

  Args:
    config: of the run.
    steps: batches that it reads; None: nobody asks when skipping ends.

  Raises:
    UserError: the policy does not exist, or it ends after no share of a run.
  """
  skip = config.skip
  return Skip(
    mode=skip.mode,
    policy=choose(POLICIES, skip.policy, 'config.skip.policy'),
    drop=skip.drop,
    drop_of=skip.drop_of,
    refit=skip.refit_batches,
    refill=skip.refill,
    uniform=skip.uniform,
    until=_until(skip.until, steps),
    scorer=skip.scorer,
    auto_cost=skip.auto_cost,
    phases=Phases(
      skip.warm_up_batches,
      skip.window_batches,
      skip.settle_batches,
      skip.period_batches,
      skip.warm_up_again,
    ),
    alpha=skip.alpha,
    min_touches=skip.min_touches,
    threshold=skip.threshold,
    seed=config.seed,
  )


def _until(share: float | None, steps: int | None) -> int | None:
  if share is None:
    return None
  if not 0 <= share <= 1:  # NaN compares as False
    raise UserError(
      'skipping must end at a share of the run, in [0, 1]',
      got=share,
      where='config.skip.until',
      hint='give 0.875 to train the last eighth whole, or leave it out',
    )
  return None if steps is None else round(share * steps)
