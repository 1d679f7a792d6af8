"""Training with all rows at hand: no engine, no host, no plan.

Each group's block is all of its rows, so that a lookup's place is its row.
"""

import jax
import numpy as np

from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.types import Batch, RowBlock


def blocks(recipe, seed=0):
  """Per group, all rows, drawn; and their row state."""
  rng = np.random.default_rng(seed)
  groups = zip(
    recipe.tables.groups, compiled_of(recipe).untrained_row_state, strict=True
  )
  return tuple(
    RowBlock(
      rng.normal(size=(group.num_rows, group.dim), scale=0.3).astype(
        group.dtype
      ),
      tuple(
        np.broadcast_to(leaf, (group.num_rows, *leaf.shape)).copy()
        for leaf in state
      ),
    )
    for group, state in groups
  )


def inverses(tables, lookups):
  """Per group, the row in it of each lookup, of global rows [B, K]."""
  flat = lookups.reshape(len(lookups), -1)
  return tuple(
    np.where(
      flat[:, group.columns] < 0, -1, flat[:, group.columns] - [group.shifts]
    ).astype(np.int32)
    for group in tables.groups
  )


def draw(tables, examples, dense=0, heads=None, seed=0):
  """A random batch of global rows [B, K], some of them padding."""
  rng = np.random.default_rng(seed)
  first, last = tables.column_rows
  ids = rng.random((examples, tables.num_columns)) ** 2
  lookups = first + (ids * (last - first)).astype(np.int64)
  if any(feature.max_length > 1 for feature in tables.features.values()):
    lookups[rng.random(lookups.shape) < 0.3] = -1
  shape = (examples, heads) if heads else (examples,)
  weights = rng.random(lookups.shape).astype(np.float32)
  return Batch(
    rng.normal(size=(examples, dense)).astype(np.float32),
    lookups,
    (rng.random(shape) < 0.4).astype(np.float32),
    np.ones(examples, np.float32),
    weights if tables.is_weighted else None,
  )


def start(recipe, dense=0, seed=0):
  """State and blocks before the first step."""
  state = compiled_of(recipe).init_state(dense, seed)
  return state, jax.device_put(blocks(recipe))


def train(recipe, state, rows, batches):
  """State, blocks and losses after these batches."""
  programs, losses = compiled_of(recipe), []
  for batch in batches:
    places = inverses(recipe.tables, batch.lookups)
    ones = tuple(np.ones(len(block.rows), np.float32) for block in rows)
    arguments = (places, batch._replace(lookups=None), np.float32(0), ones)
    state, rows, loss = programs.update(state, rows, *jax.device_put(arguments))
    losses.append(float(jax.device_get(loss)))
  return state, rows, losses


def programs_of(recipe):
  """How many programs were compiled of the recipe's step."""
  return compiled_of(recipe).step._cache_size()


def predict(recipe, state, rows, batch):
  """Logits of the batch."""
  places = inverses(recipe.tables, batch.lookups)
  arguments = (places, batch.dense, batch.lookup_weights)
  rows = tuple(block.rows for block in rows)
  logits, _ = compiled_of(recipe).forward(
    state.params, state.model_state, rows, *jax.device_put(arguments)
  )
  return jax.device_get(logits)


def bits(state, rows):
  """All that training changed, as numpy arrays."""
  return jax.tree.leaves(jax.device_get((state, rows)))
