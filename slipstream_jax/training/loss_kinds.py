"""What the labels of a loss mean, found by its values at a few points.

So a user's own loss needs no mark. Labels, metrics and skipping follow it.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slipstream_jax.engine.buffers import to_host

LossKind = Literal['clicks', 'numbers', 'unknown']
"""Meaning of the labels of a loss: 'clicks' if they are 0, 1 or a probability
and logits are log odds, 'numbers' if logits predict the labels themselves."""


def kinds_of(loss: Any, heads: int | None) -> tuple[LossKind, ...]:
  """Returns the kind of each head's loss, one if there are no heads.

  Args:
    loss: as `Recipe.loss`.
    heads: T of logits [B, T]. None: logits are [B].
  """
  count = heads or 1
  if callable(loss):
    return (kind_of(loss),) * count
  if len(loss) != count:  # the first step will say so
    loss = [None] * count
  return tuple(map(kind_of, loss))


def kind_of(loss: Any) -> LossKind:
  """Returns the kind of a loss of one head.

  A loss of clicks is at least 0 for the labels 0 and 1, and has no lower bound,
  or no value, for labels on both sides of them. A loss of numbers, such as the
  squared error or the Huber loss, depends on the difference of logit and label
  alone.
  """
  if loss is optax.sigmoid_binary_cross_entropy:
    return 'clicks'
  if loss in (optax.squared_error, optax.l2_loss):
    return 'numbers'
  logits = np.tile(np.linspace(-6, 6, 13, dtype=np.float32), (5, 1))
  logits[4] += 2  # the label moves from 1 to 3 as well
  labels = np.repeat(np.array([-1, 0, 1, 2, 3], np.float32), 13)
  values = _values(loss, logits.ravel(), labels)
  if values is None:
    return 'unknown'
  below, zero, one, above, moved = values.reshape(5, 13)
  valid = [bool((of >= 0).all()) for of in (below, zero, one, above)]
  if valid == [False, True, True, False] or is_logistic(loss):
    return 'clicks'
  alike = np.allclose(one, moved, 1e-3, 1e-4) and np.ptp(one) > 0
  return 'numbers' if alike else 'unknown'


def is_logistic(loss: object) -> bool:
  """Whether a loss is log(1 + exp(-logit)) for clicks, up to a factor.

  A sequence of losses, one per head, is not logistic.
  """
  if loss is optax.sigmoid_binary_cross_entropy:
    return True
  logits = np.tile(np.linspace(-6, 6, 13, dtype=np.float32), 2)
  labels = np.repeat(np.array([0, 1], np.float32), 13)
  values = _values(loss, logits, labels)
  if values is None:
    return False
  wanted = np.logaddexp(0, np.where(labels > 0, -logits, logits))
  factor = values.sum() / wanted.sum()
  near = np.allclose(
    values, factor * wanted, rtol=1e-3, atol=1e-4 * abs(factor)
  )
  return bool(factor > 0 and near)


def _values(
  loss: Any, logits: np.ndarray, labels: np.ndarray
) -> np.ndarray | None:
  """Returns the loss of each example in f64, or None if it has no such."""
  if not callable(loss):
    return None
  try:
    result = jax.jit(lambda: loss(jnp.asarray(logits), jnp.asarray(labels)))()
  except Exception:  # the first step will say what the loss needs
    return None
  values = np.asarray(to_host(result), np.float64)
  return values if values.shape == labels.shape else None
