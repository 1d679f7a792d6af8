"""Scores inputs before they are chosen, at a small part of a step's cost.

A linear model of the hot rows and the dense features, learned as the stream
goes by: logistic regression with a step size per weight (McMahan et al.,
"Ad click prediction: a view from the trenches", 2013; here Adagrad's). Cold
rows of a table share one weight. Every input is scored before the model
learns from it, and nothing of what was chosen enters; so a score depends on
the inputs before it alone, and not on how the stream is cut into batches.
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


class ScorerState(NamedTuple):
  """All that a scorer has learned."""

  rows: Float[np.ndarray, 'H_and_F 2']
  """Weight and sum of squared gradients, f32; of each hot row, then of the
  cold rows of each table together."""
  dense: Float[np.ndarray, 'I_and_1 2']
  """The same of each dense feature, and of the bias last."""


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

  state: ScorerState
  """Updated in place."""

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
    weights = [len(hot.rows) + tables, dense_features + 1]
    return cls(
      ScorerState(*(np.full((n, 2), [0, START], np.float32) for n in weights))
    )

  def score(
    self, places: Places, dense: Float[np.ndarray, 'n I']
  ) -> Float[np.ndarray, ' n']:
    """Click probability of each input, f32; nothing is learned.

    Args:
      places: `hot.places` of the lookups, i32[n, F] or i32[n, F, L].
      dense: dense features, f32.

    Raises:
      UserError: the inputs are not those of this scorer's tables.
    """
    return self.learn(places, dense, *np.zeros((2, len(dense)), np.float32))

  def learn(
    self,
    places: Places,
    dense: Float[np.ndarray, 'n I'],
    labels: Float[np.ndarray, ' n'],
    weights: Float[np.ndarray, ' n'] | None = None,
  ) -> Float[np.ndarray, ' n']:
    """Click probability of each input, f32, before it was learned from.

    Args:
      places: as in `score`.
      dense: as in `score`.
      labels: 1 for a click, else 0; f32.
      weights: of the inputs in the loss, f32; 0 is not learned from. None
        is 1 for all.

    Raises:
      UserError: as `score`.
    """
    places, dense = self._inputs(places, dense)
    if weights is None:
      weights = np.ones(len(dense), np.float32)
    out = np.empty(len(dense), np.float32)
    score_kernels.learn(
      *self.state,
      places,
      dense,
      np.asarray(labels, np.float32),
      np.asarray(weights, np.float32),
      np.float32(RATE),
      out,
    )
    return out

  def copy(self) -> ScorerState:
    """The state as it is now; `restore` takes it."""
    return ScorerState(*(array.copy() for array in self.state))

  def restore(self, state: ScorerState) -> None:
    """Continues from a copied state.

    Raises:
      UserError: it is of other hot rows or other features.
    """
    for own, given in zip(self.state, state, strict=True):
      if own.shape != given.shape:
        raise UserError(
          f'the state of this scorer must hold weights {list(own.shape)}',
          got=list(given.shape),
          where='LinearScorer.restore, state',
          mend='restore the state of a scorer of the same hot rows',
        )
      own[:] = given

  def _inputs(
    self, places: np.ndarray, dense: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Both as the kernels want them; places i32[n, F, L]."""
    places = places[..., None] if places.ndim == 2 else places
    features = len(self.state.dense) - 1
    hot = len(self.state.rows) - places.shape[1]
    if dense.shape != (len(places), features) or places.max(initial=-1) > hot:
      raise UserError(
        f'an input has {features} dense features, and places up to {hot}',
        got=f'dense {list(dense.shape)}, places {list(places.shape)} up to '
        f'{places.max(initial=-1)}',
        where='LinearScorer, places and dense',
        mend='give hot.places of the lookups that the scorer was made for',
      )
    return places, np.asarray(dense, np.float32)
