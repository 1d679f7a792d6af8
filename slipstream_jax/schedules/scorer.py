"""Scores examples before they are chosen, at a small part of a step's cost.

A linear model of the hot rows and the dense features, learned as the stream
goes by: logistic regression with a step size per weight (McMahan et al.,
"Ad click prediction: a view from the trenches", 2013; here Adagrad's). Cold
rows of a table share one weight. Every example is scored before the model
learns from it, and nothing of what was chosen enters; so a score depends on
the examples before it alone, and not on how the stream is cut into batches.
"""

from typing import NamedTuple

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.schedules import score_kernels
from slipstream_jax.selection.classify import Places
from slipstream_jax.types import HotRows

RATE = 0.05
"""Learning rate; of 0.05 to 0.2 the best on synthetic clicks, by little."""
START = 0.1
"""Sum of squared gradients that every weight starts with."""


class LinearScorer(NamedTuple):
  """Predicts clicks from hot rows and dense features; learns in place.

  Example:
    >>> hot = HotRows(np.array([3]), np.array([1, 1, 1, 0, -1], np.int32))
    >>> scorer = LinearScorer.create(hot, tables=1, dense_features=1)
    >>> lookups, dense = np.array([[3], [0]]), np.ones((2, 1), np.float32)
    >>> labels = np.array([1, 0], np.float32)
    >>> float(scorer.learn(hot.places(lookups), dense, labels)[0])
    0.5
  """

  rows: Float[np.ndarray, 'H_and_F 2']
  """Weight and sum of squared gradients, f32; of each hot row, then of the
  cold rows of each table together."""
  dense: Float[np.ndarray, 'I_and_1 2']
  """The same of each dense feature, and of the bias last."""

  @classmethod
  def create(
    cls, hot: HotRows, tables: int, dense_features: int
  ) -> 'LinearScorer':
    """A scorer that knows nothing: every score is 0.5.

    Args:
      hot: the H hot rows.
      tables: F, columns of the lookups.
      dense_features: I, columns of `Batch.dense`.
    """
    weights = len(hot.rows) + tables, dense_features + 1
    return cls(*(np.full((n, 2), [0, START], np.float32) for n in weights))

  def learn(
    self,
    places: Places,
    dense: Float[np.ndarray, 'n I'],
    labels: Float[np.ndarray, ' n'],
  ) -> Float[np.ndarray, ' n']:
    """Click probability of each example, f32, before it was learned from.

    Args:
      places: `hot.places` of the lookups, i32[n, F] or i32[n, F, L].
      dense: dense features, f32.
      labels: 1 for a click, else 0; f32.

    Raises:
      UserError: the examples are not those of this scorer's tables.
    """
    places = places[..., None] if places.ndim == 2 else places
    # The kernel looks at no bounds: it would write beside its arrays.
    features, hot = len(self.dense) - 1, len(self.rows) - places.shape[1]
    if dense.shape != (len(places), features) or places.max(initial=-1) > hot:
      raise UserError(
        f'an example has {features} dense features, and places up to {hot}',
        got=f'dense {list(dense.shape)}, places {list(places.shape)} up to '
        f'{places.max(initial=-1)}',
        where='LinearScorer, places and dense',
        hint='give hot.places of the lookups that the scorer was made for',
      )
    out = np.empty(len(dense), np.float32)
    score_kernels.learn(
      self.rows,
      self.dense,
      places,
      np.asarray(dense, np.float32),
      np.asarray(labels, np.float32),
      np.float32(RATE),
      out,
    )
    return out

  def copy(self) -> 'LinearScorer':
    """One that has learned the same so far."""
    return LinearScorer(self.rows.copy(), self.dense.copy())
