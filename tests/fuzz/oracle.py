"""What a case must train to: float64 numpy, a table and a step at a time."""

import numpy as np

from tests.fuzz.worlds import RATE, START


class Rows:
  """The rows of one table and their state, trained one step at a time."""

  def __init__(self, rows, optimizer):
    self.rows, self.optimizer = rows.astype(np.float64), optimizer
    self.touched = np.zeros(len(rows), bool)
    self.still = np.zeros(len(rows), bool)  # rows that a schedule holds
    shapes = {
      'sgd': [],
      'adagrad': [(START, rows.shape)],
      'rowwise_adagrad': [(START, rows.shape[:1])],
      'lazy_adam': [(0, rows.shape[:1]), (0, rows.shape), (0, rows.shape)],
    }
    self.state = [np.full(s, x, float) for x, s in shapes[optimizer]]

  def step(self, used, gradient):
    """Moves the rows `used` against their gradient [R, D]."""
    self.touched[used] = True
    used = used[~self.still[used]]
    g, state, optimizer = gradient[used], self.state, self.optimizer
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


class Oracle:
  """Model, rows and row state; starts from a trainer's first ones.

  Attributes:
    tables: Rows of each table, by name.
    params: of `worlds.Model`.
  """

  def __init__(self, world, rows, params):
    """Of rows [R, D] by table."""
    self.world, self.steps = world, 0
    self.params = {k: np.float64(v) for k, v in params.items()}
    optimizers = world.optimizers
    self.tables = {n: Rows(rows[n], optimizers[n]) for n in world.tables}
    sizes = [len(table.rows) for table in self.tables.values()]
    self.first = dict(zip(self.tables, np.cumsum([0, *sizes]), strict=False))

  def hold(self, rows):
    """These global rows stand still from here on, and no others."""
    for name, table in self.tables.items():
      own = rows - self.first[name]
      table.still[:] = False
      table.still[own[(own >= 0) & (own < len(table.rows))]] = True

  def forward(self, dense, lookups, lookup_weights=None):
    """Logits, and embedding and its parts by feature."""
    examples, params = len(lookups), self.params
    lookups = np.asarray(lookups).astype(np.int64).reshape(examples, -1)
    weights = np.ones(lookups.shape)
    if lookup_weights is not None:
      weights = np.asarray(lookup_weights, float).reshape(examples, -1)
    looked, column = {}, 0
    for name, feature in self.world.features.items():
      own = slice(column, column := column + feature.max_length)
      looked[name] = self._look_up(feature, lookups[:, own], weights[:, own])
    logits = np.asarray(dense, float) @ params['slope'] + params['bias']
    for name, (x, *_) in looked.items():
      terms = x * params[f'weight_{name}']
      logits = logits + terms.reshape(examples, -1).sum(1)
    first, last, dim = self._ends(looked)
    return logits + (first[:, :dim] * last[:, :dim]).sum(1), looked

  def _look_up(self, feature, lookups, weights):
    """Embedding, local ids and the share of each lookup in the embedding."""
    real = lookups >= 0
    ids = np.where(real, lookups - self.first[feature.table], 0)
    shares = real * (weights if feature.weighted else 1.0)
    total = {
      'mean': shares.sum(1),
      'sqrtn': np.sqrt((shares**2).sum(1)),
    }.get(feature.combiner, np.ones(len(shares)))
    shares = shares / np.where(total == 0, np.inf, total)[:, None]
    found = self.tables[feature.table].rows[ids] * shares[..., None]
    pooled = found if feature.combiner == 'none' else found.sum(1)
    return pooled, np.where(real, ids, -1), shares

  def _ends(self, looked):
    names = [*looked]
    ends = [looked[names[0]][0], looked[names[-1]][0]]
    first, last = (x.sum(1) if x.ndim == 3 else x for x in ends)
    return first, last, min(first.shape[1], last.shape[1])

  def log_loss(self, dense, lookups, labels, lookup_weights=None):
    """Of each example."""
    logits, _ = self.forward(dense, lookups, lookup_weights)
    return np.logaddexp(0, logits) - np.asarray(labels, float) * logits

  def step(self, batch):
    """Trains a batch; returns its weighted mean loss before the step."""
    logits, looked = self.forward(
      batch.dense, batch.lookups, batch.lookup_weights
    )
    if batch.offset is not None:  # of training alone
      logits = logits + np.asarray(batch.offset, float)
    labels = np.asarray(batch.labels, float)
    weights = np.asarray(batch.weights, float)
    losses = weights * (np.logaddexp(0, logits) - labels * logits)
    slope = weights * (1 / (1 + np.exp(-logits)) - labels) / len(labels)
    self._update_rows(looked, self._embedding_gradients(looked, slope))
    d_params = {
      'bias': slope.sum(),
      'slope': np.asarray(batch.dense, float).T @ slope,
    }
    for name, (x, *_) in looked.items():
      axes = (-1,) + (1,) * (x.ndim - 1)
      d_params[f'weight_{name}'] = (slope.reshape(axes) * x).sum(0)
    for name, d in d_params.items():
      self.params[name] = self.params[name] - RATE * d
    self.steps += 1
    return losses.sum() / max(weights.sum(), 1e-9)

  def _embedding_gradients(self, looked, slope):
    gradients = {}
    for name, (x, *_) in looked.items():
      weight = self.params[f'weight_{name}']
      axes = (-1,) + (1,) * (x.ndim - 1)
      gradients[name] = slope.reshape(axes) * weight
    first, last, dim = self._ends(looked)
    names = [*looked]
    for name, other in ((names[0], last), (names[-1], first)):
      met = (slope[:, None] * other)[:, :dim]
      if gradients[name].ndim == 3:
        met = met[:, None]
      gradients[name][..., :dim] += met
    return gradients

  def _update_rows(self, looked, gradients):
    d_rows = {n: np.zeros_like(t.rows) for n, t in self.tables.items()}
    used = {name: [] for name in self.tables}
    for name, (x, ids, shares) in looked.items():
      table, d = self.world.features[name].table, gradients[name]
      if x.ndim == 2:
        d = np.repeat(d[:, None], ids.shape[1], 1)
      real = ids >= 0
      np.add.at(d_rows[table], ids[real], (d * shares[..., None])[real])
      used[table].append(ids[real])
    for name, table in self.tables.items():
      table.step(np.unique(np.concatenate(used[name])), d_rows[name])
