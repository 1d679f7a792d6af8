"""Linear scorer: logistic regression on hot rows and dense features.

It is the cheapest scorer. It learns online, with an Adagrad step size per
weight (compare McMahan et al., "Ad click prediction: a view from the trenches",
2013). Cold rows of a table share one weight. Every example is scored before the
model learns from it, whether kept or not. So a score depends only on the
examples before it, not on how they are cut into batches.
"""

from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.scoring import linear_kernels
from slipstream_jax.types import HotRows, Lookups

RATE = 0.05
"""Learning rate, slightly the best of 0.05 to 0.2 on synthetic clicks."""
START = 0.1
"""Initial sum of squared gradients of every weight."""


class LinearScorer(NamedTuple):
  """Scorer of hot rows and dense features. Learns in place.

  Example:
    >>> hot = HotRows(np.array([3]), np.array([1, 1, 1, 0, -1], np.int32))
    >>> scorer = LinearScorer.create(hot, tables=1, dense_features=1)
    >>> lookups, dense = np.array([[3], [0]]), np.ones((2, 1), np.float32)
    >>> labels = np.array([1, 0], np.float32)
    >>> float(scorer.learn(lookups, dense, labels)[0])
    0.5
  """

  rows: Float[np.ndarray, 'H_and_F 2']
  """Weight and sum of squared gradients, f32, of each hot row, then of each
  table's cold rows."""
  dense: Float[np.ndarray, 'I_and_1 2']
  """Weight and sum of squared gradients, f32, of each dense feature, then of
  the bias."""
  hot: HotRows
  """The H hot rows."""

  @classmethod
  def create(
    cls, hot: HotRows, tables: int, dense_features: int
  ) -> 'LinearScorer':
    """Returns an untrained scorer: every score is 0.5.

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
    """Returns click probabilities f32[n], each computed before learning.

    Args:
      lookups: rows, [n, F] or [n, F, L]. -1 is padding.
      dense: dense features, f32.
      labels: 1 for a click, else 0, f32.

    Raises:
      UserError: the shapes do not match the scorer's features.
    """
    lookups = lookups[..., None] if lookups.ndim == 2 else lookups
    tables = len(self.rows) - len(self.hot.rows)
    # The kernel does not check bounds and would write out of them.
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
    """Returns copies of all weights, 8 bytes each."""
    return {'rows': self.rows.copy(), 'dense': self.dense.copy()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Copies the weights of a state from `get_state`."""
    self.rows[:], self.dense[:] = state['rows'], state['dense']
