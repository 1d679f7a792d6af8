"""One tiny shop that all tests of the trainer train on, compiled once."""

from flax import linen as nn
import jax
import numpy as np
import optax

import slipstream_jax as slip
from slipstream_jax.placement import cached, PLACEMENTS

BATCH, EXAMPLES = 16, 328  # the last of 21 batches is not full
STEPS = 60
# Two windows, two decisions, and skipping after each.
PHASES = slip.Phases(4, 5, 3, 25)
SKIPS = {
  'none': None,
  'surprise': slip.Skip(0.3, 'surprise', phases=PHASES),
  'stale': slip.Skip(0.4, 'stale', phases=PHASES, refill=True),
  'rows': slip.Skip(0.4, mode='rows', phases=PHASES),
  'model': slip.Skip(0.3, scorer='model', phases=slip.Phases(6, 0, 3, 25)),
}
PLACINGS = {name: name for name in PLACEMENTS} | {
  'by value': cached(30, look_ahead=2),
  'by table': {'user': 'pinned', 'item': 'resident'},
}


class Recommender(nn.Module):
  @nn.compact
  def __call__(self, dense, e):
    match = (nn.Dense(3)(e['user']) * e['item']).sum(-1)
    return match + nn.Dense(1)(dense)[:, 0]


_rng = np.random.default_rng(0)
USERS = np.minimum(_rng.zipf(1.3, EXAMPLES) - 1, 59)
ITEMS = np.minimum(_rng.zipf(1.5, EXAMPLES) - 1, 19)
CLICKS = ((USERS + ITEMS) % 2).astype(np.float32)
DENSE = _rng.normal(size=(EXAMPLES, 3)).astype(np.float32)
IDS = {'user': USERS, 'item': ITEMS}
TABLES = {
  'user': slip.Table(60, embedding_dim=4),
  'item': slip.Table(20, embedding_dim=3),
}
# The same objects, so that all trainers share what is compiled.
MODEL, ROWS, ADAM = Recommender(), slip.rowwise_adagrad(0.1), optax.adam(1e-2)


def trainer(**arguments):
  arguments = {
    'row_optimizer': ROWS,
    'dense_optimizer': ADAM,
    'hot_bytes': 600,
  } | arguments
  tables = arguments.pop('tables', TABLES)
  return slip.Trainer(arguments.pop('model', MODEL), tables, **arguments)


def source(labels=CLICKS, **arguments):
  arguments = {'batch_size': BATCH, 'seed': 1} | arguments
  return slip.batches(DENSE, IDS, labels, **arguments)


def held_out(labels=CLICKS):
  return source(labels, seed=None, epochs=1)


def dicts(batches=20, size=BATCH):
  """The examples in order, as a pipeline gives them."""
  for number in range(batches):
    at = slice(number * size, (number + 1) * size)
    ids = {name: column[at] for name, column in IDS.items()}
    yield ids | {'dense': DENSE[at], 'label': CLICKS[at]}


def state_of(trainer):
  """All that training changes, as numpy."""
  state = trainer.parts.state
  leaves = jax.tree.leaves((state.params, state.dense_state, state.step))
  rows = [trainer.rows(name) for name in trainer.tables.tables]
  return [*map(np.asarray, jax.device_get(leaves)), *rows]


def assert_same(one, other):
  for a, b in zip(state_of(one), state_of(other), strict=True):
    np.testing.assert_array_equal(a, b)


def examples_of(trainer):
  """What was counted of examples; what was moved depends on resuming."""
  counters = trainer.parts.engine.counters
  return [v for k, v in counters._asdict().items() if k.startswith('examples')]
