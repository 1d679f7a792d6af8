"""Float64 numpy oracles, written from the papers and not from our code."""

import numpy as np


def mlp(layers, x, activate_last):
  """Output, and the example and pre-activation of every layer."""
  trace = []
  for i, (kernel, bias) in enumerate(layers):
    before = x @ kernel + bias
    active = activate_last or i + 1 < len(layers)
    trace.append((x, before, active))
    x = np.maximum(before, 0) if active else before
  return x, trace


def mlp_backward(layers, trace, gradient):
  """Gradients of every (kernel, bias), and of the example."""
  grads = []
  for (kernel, _), (x, before, active) in zip(
    layers[::-1], trace[::-1], strict=True
  ):
    if active:
      gradient = gradient * (before > 0)
    grads.append((x.T @ gradient, gradient.sum(0)))
    gradient = gradient @ kernel.T
  return grads[::-1], gradient


def pool(rows, inverse, poolings):
  """Embeddings [B, F, D], one lookup at a time."""
  examples, features = inverse.shape[:2]
  out = np.zeros((examples, features, rows.shape[1]))
  for b in range(examples):
    for f in range(features):
      used = [i for i in np.ravel(inverse[b, f]) if i >= 0]
      for i in used:
        share = 1 / len(used) if poolings[f] == 'mean' else 1
        out[b, f] += rows[i] * share
  return out


def pool_backward(rows, inverse, poolings, gradient):
  """Gradient of the rows: the sum over every lookup of each."""
  out = np.zeros_like(rows)
  for b in range(inverse.shape[0]):
    for f in range(inverse.shape[1]):
      used = [i for i in np.ravel(inverse[b, f]) if i >= 0]
      for i in used:
        share = 1 / len(used) if poolings[f] == 'mean' else 1
        out[i] += gradient[b, f] * share
  return out


def dlrm_loss_and_gradients(
  bottom, top, rows, inverse, batch, poolings, first_order
):
  """Loss, and gradients of bottom, top and rows, of a DLRM step.

  bottom, top: lists of (kernel, bias). All float64.
  """
  embeddings = pool(rows, inverse, poolings)
  vectors = embeddings[..., :-1] if first_order else embeddings
  x, bottom_trace = mlp(bottom, batch.dense.astype(np.float64), True)
  met = np.concatenate([x[:, None], vectors], 1)
  pairs = [(i, j) for i in range(met.shape[1]) for j in range(i)]
  dots = np.stack([(met[:, i] * met[:, j]).sum(1) for i, j in pairs], 1)
  logits, top_trace = mlp(top, np.concatenate([x, dots], 1), False)
  logits = logits[:, 0]
  if first_order:
    logits = logits + embeddings[..., -1].sum(1)
  if batch.offset is not None:
    logits = logits + batch.offset
  labels, weights = batch.labels.astype(float), batch.weights.astype(float)
  loss = np.mean(weights * (np.logaddexp(0, logits) - labels * logits))

  probability = 1 / (1 + np.exp(-logits))
  d_logits = weights * (probability - labels) / len(labels)
  top_grads, d_joined = mlp_backward(top, top_trace, d_logits[:, None])
  d_met = np.zeros_like(met)
  for p, (i, j) in enumerate(pairs):
    d_dot = d_joined[:, x.shape[1] + p, None]
    d_met[:, i] += d_dot * met[:, j]
    d_met[:, j] += d_dot * met[:, i]
  d_x = d_joined[:, : x.shape[1]] + d_met[:, 0]
  bottom_grads, _ = mlp_backward(bottom, bottom_trace, d_x)
  d_embeddings = np.zeros_like(embeddings)
  d_embeddings[..., : vectors.shape[-1]] = d_met[:, 1:]
  if first_order:
    d_embeddings[..., -1] = d_logits[:, None]
  d_rows = pool_backward(rows, inverse, poolings, d_embeddings)
  return loss, bottom_grads, top_grads, d_rows


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
