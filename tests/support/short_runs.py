"""Short runs under every placement and schedule, and what they come to."""

import functools

import numpy as np
import optax

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.schedules.phases import Phases
from slipstream_jax.schedules.settings import Skip
from slipstream_jax.training.loop import train
from slipstream_jax.training.trainer_parts import (
  make_parts,
  planned,
  slipstream,
)
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from slipstream_jax.transforms.skip import skip_stale
from tests.support import small
from tests.support.small import BATCH, everything

BATCHES = 14
COLUMNS = small.columns(BATCH * BATCHES, seed=5)
HOT = small.hot(COLUMNS, 200)
WHERE = PLACEMENTS | {
  'lru': cached(60, 'lru'),
  'look_ahead': cached(60, 'look_ahead', look_ahead=2),
}
# The last: what a chain lets stand still by itself.
SCHEDULES = ('plain', 'rows', 'examples', 'auto', 'model', 'chain')
PHASES = Phases(warm_up=2, window=3, settle=3, period=10)


def start(placement, schedule, depth):
  of = small.recipe('adagrad') if schedule != 'chain' else chain()
  trainer = make_parts(of, WHERE[placement], small.DENSE, 3, HOT)
  return trainer, batches_for(trainer, schedule, depth)


@functools.cache
def chain():
  skips = skip_stale(np.inf, every=8, window=2)
  rows = optax.chain(ROW_OPTIMIZERS['adagrad'](0.05), skips)
  return small.recipe('adagrad')._replace(row_optimizer=rows)


def batches_for(trainer, schedule, depth):
  if schedule in ('plain', 'chain'):
    return planned(trainer, source(), depth)
  return slipstream(trainer, source(), skip(schedule), None, depth)


def source():
  return ColumnBatches(COLUMNS, BATCH, shuffle_seed=1, epochs=2)


def skip(mode):
  if mode == 'auto':
    return Skip('auto', phases=PHASES, seed=3)
  if mode == 'model':
    return Skip(0.4, 'surprise', phases=PHASES, seed=3, scorer='model')
  return Skip(0.5, 'stale', mode, PHASES, seed=3, refill=True)


UNBROKEN = {}


def unbroken(placement, schedule):
  """What is there after a run that nothing cuts off; counters last."""
  key = placement, schedule
  if key not in UNBROKEN:
    trainer, batches = start(placement, schedule, 0)
    with batches:
      for _ in train(trainer, batches, 10_000):
        pass
    UNBROKEN[key] = everything(trainer), trainer.engine.counters
  return UNBROKEN[key]
