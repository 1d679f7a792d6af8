"""Metrics of click models, computed from their predictions."""

import math
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError


class Predictions(NamedTuple):
  """Labels and logits of scored examples, which is all that metrics need."""

  labels: Float[np.ndarray, ' n'] | Float[np.ndarray, 'n T'] | None
  """1.0 for a click, else 0.0; [n, T] of T heads. None if an example has no
  label."""
  logits: Float[np.ndarray, ' n'] | Float[np.ndarray, 'n T']
  """Log odds of a click."""


class Metrics(NamedTuple):
  """Quality of predictions. None where the labels do not define a metric."""

  examples: int
  """Examples scored."""
  auc: float | None
  """Area under the ROC curve. None if one class is absent."""
  log_loss: float
  """Mean cross entropy in nats."""
  normalized_entropy: float | None
  """Log loss divided by the log loss of the base rate (He et al., 2014)."""
  accuracy: float
  """Share of examples on the right side of probability 0.5."""
  calibration: float | None
  """Mean predicted probability over the share of clicks; 1 is ideal."""
  heads: tuple['Metrics', ...] = ()
  """Metrics of each head, where the model has several. The other fields are
  then means over heads, or None where a head's field is None."""


def merge(parts: list[Predictions]) -> Predictions:
  """Concatenates predictions."""
  nothing = np.empty(0, np.float32)
  labels, logits = zip(*(parts or [Predictions(nothing, nothing)]), strict=True)
  known = all(part is not None for part in labels)
  return Predictions(
    np.concatenate(labels) if known else None, np.concatenate(logits)
  )


def compute(predictions: Predictions) -> Metrics:
  """Computes the metrics of at least one scored example, in float64.

  Raises:
    UserError: there is no example, or one has no label.
  """
  labels, logits = predictions
  if not len(logits):
    raise UserError(
      'metrics need at least one scored example',
      got='none',
      where='evaluate, source',
      hint='give a source that has not ended, with examples of some weight',
    )
  if labels is None:
    raise UserError(
      'metrics compare predictions with labels',
      got='examples without labels',
      where='evaluate, source',
      hint='give labels, or only predict',
    )
  labels, logits = labels.astype(np.float64), logits.astype(np.float64)
  with np.errstate(invalid='ignore'):  # a model that diverged gives NaN
    if labels.ndim == 1:
      return _compute(labels, logits)
    heads = tuple(map(_compute, labels.T, logits.T))
  means = {
    name: _mean_over_heads([getattr(head, name) for head in heads])
    for name in Metrics._fields[1:-1]
  }
  return Metrics(len(labels), **means, heads=heads)


def _mean_over_heads(values: list[float | None]) -> Any:
  numbers = [value for value in values if value is not None]
  return float(np.mean(numbers)) if len(numbers) == len(values) else None


def _compute(labels: np.ndarray, logits: np.ndarray) -> Metrics:
  rate = labels.mean()
  # From logits, because the logarithm of a probability of 0 is infinite.
  log_loss = float(np.mean(np.logaddexp(0.0, logits) - labels * logits))
  both = 0.0 < rate < 1.0
  entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate) if both else 0.0
  mean_probability = float(np.mean(probabilities(logits)))
  return Metrics(
    examples=len(labels),
    auc=auc(labels, logits) if 0 < (labels > 0.5).mean() < 1 else None,
    log_loss=log_loss,
    normalized_entropy=float(log_loss / entropy) if both else None,
    accuracy=float(np.mean((logits > 0) == (labels > 0.5))),
    calibration=mean_probability / float(rate) if rate > 0 else None,
  )


def probabilities(logits: Float[np.ndarray, '...']) -> Float[np.ndarray, '...']:
  """Returns probabilities of clicks, with the shape and dtype of the logits."""
  # 1 / (1 + e^-x) in a form that no logit makes overflow.
  return np.exp(-np.logaddexp(0.0, -logits))


def auc(
  labels: Float[np.ndarray, ' n'], scores: Float[np.ndarray, ' n']
) -> float:
  """Returns the area under the ROC curve; ties count one half (Mann-Whitney).

  It is NaN if a score is NaN.
  """
  if np.isnan(scores).any():
    return math.nan
  _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
  # Equal scores share the mean of their ranks, which count from 1.
  ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
  clicks = labels > 0.5
  positive = float(np.count_nonzero(clicks))
  negative = len(labels) - positive
  above = ranks[clicks].sum() - positive * (positive + 1) / 2
  return float(above / (positive * negative))
