"""Float64 numpy oracles, written from the papers and not from our code."""

import numpy as np


def mlp(layers, x, activate_last):
  """Output of layers (kernel, bias) with ReLU between them."""
  for i, (kernel, bias) in enumerate(layers):
    x = x @ kernel + bias
    if activate_last or i + 1 < len(layers):
      x = np.maximum(x, 0)
  return x


class RowOracle:
  """One row optimizer in float64, fed with the gradient of one row a time."""

  def __init__(self, name, rate):
    self.name, self.rate, self.state = name, rate, {}

  def step(self, key, row, g):
    row, g = np.asarray(row, float), np.asarray(g, float)
    if self.name == 'sgd':
      return row - self.rate * g
    if self.name == 'adagrad':
      total = self.state.get(key, 0.1) + g * g
      self.state[key] = total
      return row - self.rate * g / np.sqrt(total + 1e-7)
    if self.name == 'rowwise_adagrad':
      total = self.state.get(key, 0.0) + np.mean(g * g)
      self.state[key] = total
      return row - self.rate * g / (np.sqrt(total) + 1e-8)
    assert self.name == 'lazy_adam'
    t, m, v = self.state.get(key, (0, 0.0, 0.0))
    t, m, v = t + 1, 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    self.state[key] = t, m, v
    m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
    return row - self.rate * m_hat / (np.sqrt(v_hat) + 1e-8)
