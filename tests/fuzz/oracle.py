"""What a case must train to: float64 numpy, one row and one step at a time."""

import numpy as np

from tests.fuzz.worlds import RATE, START


class Oracle:
  """Model, rows and row state; starts from a trainer's first ones.

  Attributes:
    rows: f64[N, D].
    touched: bool[N], rows that some step looked up.
    params: of `worlds.Model`.
    state: leaves of the row optimizer's state, f64[N, ...].
  """

  def __init__(self, world, rows, params):
    self.world, self.steps = world, 0
    self.rows = rows.astype(np.float64)
    self.params = {k: np.float64(v) for k, v in params.items()}
    self.touched = np.zeros(len(rows), bool)
    self.still = np.zeros(len(rows), bool)  # rows that a schedule holds
    shapes = {
      'sgd': [],
      'adagrad': [(START, rows.shape)],
      'rowwise_adagrad': [(START, rows.shape[:1])],
      'lazy_adam': [(0, rows.shape[:1]), (0, rows.shape), (0, rows.shape)],
    }
    self.state = [np.full(s, x, float) for x, s in shapes[world.optimizer]]

  def forward(self, dense, lookups):
    """Logits and embeddings of examples."""
    lookups = np.asarray(lookups).astype(np.int64)
    real = lookups >= 0
    found = self.rows[np.maximum(lookups, 0)] * real[..., None]
    if lookups.ndim == 3 and 'none' not in self.world.poolings:
      found = found.sum(2) / self._shares(real)[..., None]
    params = self.params
    ends = found[:, 0] * found[:, -1]
    logits = np.asarray(dense, float) @ params['slope'] + params['bias']
    logits = logits + ends.reshape(len(ends), -1).sum(1)
    terms = found * params['weight']
    return logits + terms.reshape(len(found), -1).sum(1), found

  def _shares(self, real):
    """What each pooled feature's sum is divided by: f64[B, F]."""
    count = np.maximum(real.sum(2), 1.0)
    return np.where(np.array(self.world.poolings) == 'mean', count, 1.0)

  def log_loss(self, dense, lookups, labels):
    """Of each example."""
    logits, _ = self.forward(dense, lookups)
    return np.logaddexp(0, logits) - np.asarray(labels, float) * logits

  def step(self, batch):
    """Trains a batch; returns its weighted mean loss before the step."""
    logits, found = self.forward(batch.dense, batch.lookups)
    lookups = np.asarray(batch.lookups).astype(np.int64)
    labels = np.asarray(batch.labels, float)
    weights = np.asarray(batch.weights, float)
    losses = weights * (np.logaddexp(0, logits) - labels * logits)
    slope = weights * (1 / (1 + np.exp(-logits)) - labels) / len(labels)
    per_example = slope.reshape(-1, *[1] * (found.ndim - 1))
    d_found = per_example * self.params['weight']
    d_found[:, 0] += per_example[:, 0] * found[:, -1]
    d_found[:, -1] += per_example[:, 0] * found[:, 0]
    if lookups.ndim == 3 and found.ndim == 3:
      d_found = d_found / self._shares(lookups >= 0)[..., None]
      d_found = np.repeat(d_found[:, :, None], lookups.shape[2], 2)
    gradient = np.zeros_like(self.rows)
    real = lookups >= 0
    np.add.at(gradient, lookups[real], d_found[real])
    self._update_rows(np.unique(lookups[real]), gradient)
    d_params = {
      'bias': slope.sum(),
      'slope': np.asarray(batch.dense, float).T @ slope,
      'weight': (per_example * found).sum(0),
    }
    for name, d in d_params.items():
      self.params[name] = self.params[name] - RATE * d
    self.steps += 1
    return losses.sum() / max(weights.sum(), 1e-9)

  def _update_rows(self, used, gradient):
    self.touched[used] = True
    used = used[~self.still[used]]
    g, state, optimizer = gradient[used], self.state, self.world.optimizer
    if optimizer == 'sgd':
      moved = g
    elif optimizer == 'adagrad':
      state[0][used] += g * g
      moved = g / np.sqrt(state[0][used] + 1e-7)
    elif optimizer == 'rowwise_adagrad':
      state[0][used] += (g * g).mean(1)
      moved = g / (np.sqrt(state[0][used]) + 1e-8)[:, None]
    else:
      state[0][used] += 1
      state[1][used] = 0.9 * state[1][used] + 0.1 * g
      state[2][used] = 0.999 * state[2][used] + 0.001 * g * g
      count = state[0][used][:, None]
      mean = state[1][used] / (1 - 0.9**count)
      square = state[2][used] / (1 - 0.999**count)
      moved = mean / (np.sqrt(square) + START)
    self.rows[used] -= RATE * moved
