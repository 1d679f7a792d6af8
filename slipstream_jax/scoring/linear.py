"""The cheapest scorer: a linear model of the hot rows and dense features.

Learned as the stream goes by: logistic regression with a step size per weight
(McMahan et al., "Ad click prediction: a view from the trenches", 2013; here
Adagrad's). Cold rows of a table share one weight. Every example is scored
before the model learns from it, and nothing of what was chosen enters; so a
score depends on the examples before it alone, and not on how the stream is cut
into batches.
"""

from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.scoring import linear_kernels
from slipstream_jax.types import HotRows, Lookups

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
    >>> float(scorer.learn(lookups, dense, labels)[0])
    0.5
  """

  rows: Float[np.ndarray, 'H_and_F 2']
  """Weight and sum of squared gradients, f32; of each hot row, then of the
  cold rows of each table together."""
  dense: Float[np.ndarray, 'I_and_1 2']
  """The same of each dense feature, and of the bias last."""
  hot: HotRows
  """The H hot rows."""

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
    rows, dense = (np.full((n, 2), [0, START], np.float32) for n in weights)
    return cls(rows, dense, hot)

  def learn(
    self,
    lookups: Lookups,
    dense: Float[np.ndarray, 'n I'],
    labels: Float[np.ndarray, ' n'],
  ) -> Float[np.ndarray, ' n']:
    """Click probability of each example, f32, before it was learned from.

    Args:
      lookups: rows, [n, F] or [n, F, L]; -1 is padding.
      dense: dense features, f32.
      labels: 1 for a click, else 0; f32.

    Raises:
      UserError: the examples are not those of this scorer's features.
    """
    lookups = lookups[..., None] if lookups.ndim == 2 else lookups
    tables = len(self.rows) - len(self.hot.rows)
    # The kernel looks at no bounds: it would write beside its arrays.
    got = lookups.shape[1], *dense.shape, *labels.shape
    if got != (tables, len(lookups), len(self.dense) - 1, len(lookups)):
      raise UserError(
        f'an example has {tables} features, {len(self.dense) - 1} dense ones'
        ' and a label',
        got=f'lookups {list(lookups.shape)}, dense {list(dense.shape)}, labels'
        f' {list(labels.shape)}',
        where='LinearScorer.learn',
        hint='give the examples that the scorer was made for',
      )
    out = np.empty(len(dense), np.float32)
    linear_kernels.learn(
      self.rows,
      self.dense,
      self.hot.places(lookups),
      np.asarray(dense, np.float32),
      np.asarray(labels, np.float32),
      np.float32(RATE),
      out,
    )
    return out

  def get_state(self) -> dict[str, Any]:
    """What was learned so far: 8 bytes per weight, arrays of its own."""
    return {'rows': self.rows.copy(), 'dense': self.dense.copy()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from what another one had learned, which is not changed."""
    self.rows[:], self.dense[:] = state['rows'], state['dense']
