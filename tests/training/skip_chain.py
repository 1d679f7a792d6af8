"""Chains with `skip_stale` in an engine, and oracles of what they do."""

import functools

from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax

from slipstream_jax.data.numbered import ColumnBatches
from slipstream_jax.engine.planner import Windows
from slipstream_jax.models.adapters import Functions
from slipstream_jax.placement import cached, PLACEMENTS
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.training.trainer_parts import make_parts, planned
from slipstream_jax.transforms.row_state import join, split
from slipstream_jax.transforms.rowwise import ROW_OPTIMIZERS
from slipstream_jax.transforms.skip import skip_stale
from slipstream_jax.types import RowBlock
from tests.support import by_hand, small

BATCH = 32
COLUMNS = small.columns(BATCH * 20)
HOT = small.hot(COLUMNS, 150)
NUMBERS = {'threshold': 0.1, 'every': 12, 'window': 4, 'min_touches': 1}
WHERE = PLACEMENTS | {
  'lru': cached(40, 'lru'),
  'look_ahead': cached(120, 'look_ahead', look_ahead=3),
}


# Of gradients that are sums of few halves of halves: exact, so that a table in
# memory has the bits of a batch's rows, in whatever order either adds.
_SLOPES = 2.0 ** -np.arange(8, dtype=np.float32)


def _init(key, dense, embeddings):
  return {'unused': jnp.zeros(1)}


def _apply(params, dense, embeddings):
  return sum((rows * _SLOPES[None]).sum(1) for rows in embeddings.values())


def _loss(logits, labels):
  return logits * (1 - 2 * labels)


@st.composite
def skip_numbers(draw):
  every = draw(st.integers(1, 16))
  return {
    'threshold': draw(st.sampled_from([0.0, 0.01, 0.03, 0.1, np.inf])),
    'every': every,
    'window': draw(st.integers(1, every)),
    'min_touches': draw(st.integers(0, 3)),
  }


@functools.cache  # else each run would be compiled anew
def recipe(watched='hot', optimizer='rowwise_adagrad', dtype='float32'):
  """With numbers that are in the state, so that others are not compiled."""
  chain = optax.chain(
    ROW_OPTIMIZERS[optimizer](0.05),
    optax.inject_hyperparams(skip_stale)(**NUMBERS),
  )
  return Recipe(
    Functions(_init, _apply),
    small.tables(dtype=dtype),
    chain,
    optax.sgd(0.1),
    _loss,
    watched=watched,
  )


def start(of, placement='streamed', **numbers):
  """A trainer before its first step, with other numbers in its chain."""
  trainer = make_parts(of, WHERE[placement], small.DENSE, 3, HOT)
  numbers = NUMBERS | numbers
  if trainer.windows[0]:
    trainer.windows = (Windows(numbers['every'], numbers['window']),)
  trainer.state = with_numbers(of, trainer.state, numbers)
  return trainer


def with_numbers(of, state, numbers):
  (layout,), (row_globals,) = compiled_of(of).layouts, state.row_globals
  none = (0,) * sum(layout.has_row_axis)
  values = {
    name: jax.device_put(
      np.asarray(value, 'f4' if isinstance(value, float) else 'i4')
    )
    for name, value in numbers.items()
  }
  chain = optax.tree.set(join(layout, none, row_globals), **values)
  return state._replace(row_globals=(copied(split(layout, chain)[1]),))


@jax.jit
def copied(tree):
  return jax.tree.map(jnp.copy, tree)


def batches_for(trainer, depth=2):
  return planned(trainer, source(), depth)


def source():
  return ColumnBatches(COLUMNS, BATCH, shuffle_seed=1)


def in_memory(of, rows, numbers, steps, still_at):
  """Training with all rows at hand: they with their state, and parameters.

  Args:
    of: the recipe.
    rows: the group's, with all leaves of their state.
    numbers: of the chain.
    steps: to take.
    still_at: step, rows, and which the last step touched, to those that stand
      still in this one.
  """
  programs, batches = compiled_of(of), source()
  state = programs.init_state(small.DENSE, 3)
  state, touched = with_numbers(of, state, NUMBERS | numbers), None
  rows = jax.device_put((rows,))
  for step in range(steps):
    batch = next(batches)
    still = still_at(step, np.asarray(jax.device_get(rows[0].rows)), touched)
    arguments = (
      by_hand.inverses(of.tables, batch.lookups),
      batch._replace(lookups=None),
      np.float32(step),
      (np.ones(len(still), np.float32),),
      (still,),
    )
    state, rows, _, (touched,) = programs.step(
      state, rows, *jax.device_put(arguments)
    )
    touched = np.asarray(jax.device_get(touched))
  return jax.device_get((rows[0], state.params))


class Bystander:
  """Judges hot rows in numpy, as one does who sees whole tables.

  Attributes:
    stale: which of the hot rows stand still.
    stood: how many did in all steps together.
  """

  def __init__(self, threshold, every, window, min_touches):
    self.threshold, self.least = np.float32(threshold), min_touches
    self.every, self.window = every, window
    self.snapshot = np.zeros((len(HOT.rows), 8), np.float32)
    self.touches = np.zeros(len(HOT.rows), int)
    self.stale = np.zeros(len(HOT.rows), bool)
    self.stood = 0

  def __call__(self, step, rows, touched):
    phase, opens = step % self.every, self.every - self.window
    hot = rows[HOT.rows].astype(np.float32)
    if step and (step - 1) % self.every >= opens:
      self.touches = self.touches + touched[HOT.rows]
    if step and phase == 0:
      change = np.abs(hot - self.snapshot).max(1)
      enough = self.touches >= self.least
      self.stale = (change < self.threshold) & enough
    if phase == opens % self.every:
      self.snapshot, self.touches = hot, np.zeros(len(hot), int)
      self.stale = np.zeros(len(hot), bool)
    self.stood += self.stale.sum()
    still = np.zeros(len(rows), bool)
    still[HOT.rows] = self.stale
    return still


def never_judged(block):
  """The rows with entries that leave it to others to judge them."""
  count = len(block.rows)
  entries = (
    np.zeros((count, 8), np.float32),
    np.zeros(count, np.int32),
    np.zeros(count, bool),
    np.full(count, np.iinfo(np.int32).max),
  )
  return RowBlock(block.rows, (*block.state, *entries))
