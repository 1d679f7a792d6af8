"""skip_stale in plain numpy, and what its tests share."""

import jax
import numpy as np
import optax

STEPS, ROWS, DIM = 24, 16, 3


apply = jax.jit(optax.apply_updates)


def bits(rows):
  return np.asarray(jax.device_get(rows)).view(np.uint32)


def device_get(tree):
  return jax.tree.map(np.asarray, jax.device_get(tree))


class Simulator:
  """The schedule in plain numpy, one row at a time, one step at a time."""

  def __init__(self, rows, threshold, every, window, min_touches):
    self.rows, self.threshold = rows.copy(), np.float32(threshold)
    self.every, self.window, self.least = every, window, min_touches
    self.count = 0
    self.snapshot = rows.copy()
    self.touches = np.zeros(len(rows), int)
    self.stale = np.zeros(len(rows), bool)

  def step(self, updates):
    phase = self.count % self.every
    if phase == 0 and self.count:
      for i, row in enumerate(self.rows):
        moved = max(abs(row - self.snapshot[i]))
        known = self.touches[i] >= self.least
        self.stale[i] = known and moved < self.threshold
    if phase == self.every - self.window:
      self.snapshot[:], self.touches[:], self.stale[:] = self.rows, 0, False
    for i, update in enumerate(updates):
      if phase >= self.every - self.window and any(x != 0 for x in update):
        self.touches[i] += 1
      if not self.stale[i]:
        self.rows[i] += update
    self.count += 1


def draw_updates(rng, steps=STEPS):
  """Updates [steps, R, D] that touch and move rows very differently."""
  size = 10.0 ** rng.integers(-3, 1, (1, ROWS, 1))
  updates = rng.normal(size=(steps, ROWS, DIM)) * size
  updates *= rng.random((steps, ROWS, 1)) < rng.random((1, ROWS, 1))
  return updates.astype(np.float32)


def run(tx, rows, updates):
  """Rows, mask and update of every step, by lax.scan."""

  def step(carry, update):
    rows, state = carry
    update, state = tx.update(update, state, rows)
    rows = optax.apply_updates(rows, update)
    return (rows, state), (rows, optax.tree.get(state, 'stale'), update)

  return jax.lax.scan(step, (rows, tx.init(rows)), updates)
