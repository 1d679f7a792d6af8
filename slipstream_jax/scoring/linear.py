"""Linear scorer: logistic regression on hot rows and dense features.

It is the cheapest scorer. It learns online, with an Adagrad step size per
weight (compare McMahan et al., "Ad click prediction: a view from the trenches",
2013). Cold rows of a table share one weight.
"""

from typing import Any, NamedTuple, no_type_check

from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.types import HotRows, Lookups

RATE = 0.05
"""Learning rate, slightly the best of 0.05 to 0.2 on synthetic clicks."""
START = 0.1
"""Initial sum of squared gradients of every weight."""
_ONE = np.float32(1)  # a plain 1 would promote to f64


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
    """Returns an untrained scorer: every score is 0.5. `tables` is F."""
    weights = len(hot.rows) + tables, dense_features + 1
    rows, dense = (np.full((n, 2), [0, START], np.float32) for n in weights)
    return cls(rows, dense, hot)

  def learn(
    self,
    lookups: Lookups,
    dense: Float[np.ndarray, 'n I'],
    labels: Float[np.ndarray, ' n'],
  ) -> Float[np.ndarray, ' n']:
    """Returns click probabilities f32[n]. See `Scorer.learn`.

    Raises:
      UserError: the shapes do not match the scorer's features.
    """
    features = len(self.rows) - len(self.hot.rows), len(self.dense) - 1
    where = 'LinearScorer.learn'
    lookups = checked_lists(lookups, dense, labels, features, where)
    out = np.empty(len(dense), np.float32)
    _learn(
      self.rows,
      self.dense,
      self.hot.places(lookups),
      np.asarray(dense, np.float32),
      np.asarray(labels, np.float32),
      out,
    )
    return out

  def get_state(self) -> dict[str, Any]:
    """Returns copies of all weights, 8 bytes each."""
    return {'rows': self.rows.copy(), 'dense': self.dense.copy()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Copies the weights of a state from `get_state`."""
    self.rows[:], self.dense[:] = state['rows'], state['dense']


def checked_lists(
  lookups: Lookups,
  dense: np.ndarray,
  labels: np.ndarray,
  features: tuple[int, int],
  where: str,
) -> np.ndarray:
  """Returns lookups [n, F] or [n, F, L] as [n, F, L].

  Raises:
    UserError: the shapes do not match `features`, F and I.
  """
  lists = lookups[..., None] if lookups.ndim == 2 else lookups
  # Kernels do not check bounds and would write out of them.
  shapes = lists.shape[1], *dense.shape, *labels.shape
  if shapes != (features[0], len(lists), features[1], len(lists)):
    raise UserError(
      f'an example has {features[0]} features, {features[1]} dense ones and a'
      ' label',
      got=f'lookups {list(lists.shape)}, dense {list(dense.shape)}, labels'
      f' {list(labels.shape)}',
      where=where,
      hint='give the examples that the scorer was made for',
    )
  return lists


@kernel
@no_type_check
def _find(places: np.ndarray, i: int, cold: int, at: np.ndarray) -> int:
  """Writes the rows of example i's weights to `at`, and returns how many."""
  count = 0
  for f in range(places.shape[1]):
    for k in range(places.shape[2]):
      place = places[i, f, k]
      # Cold rows are too rare for a weight each: a table's cold rows share one.
      if place >= 0:
        at[count] = cold + f if place == cold else place
        count += 1
  return count


@kernel
@no_type_check
def _predict(
  rows: np.ndarray, at: np.ndarray, weights: np.ndarray, values: np.ndarray
) -> np.float32:
  """Returns the click probability from rows[at] and weighted dense values."""
  logit = np.float32(0)
  for j in range(len(values)):
    logit += weights[j] * values[j]
  for k in range(len(at)):
    logit += rows[at[k], 0]
  return _ONE / (_ONE + np.exp(-logit))


@kernel
@no_type_check
def move_rows(
  table: np.ndarray,
  at: np.ndarray,
  gradient: np.float32,
  rate: np.float32,
  start: np.float32,
  steps: np.ndarray,
) -> None:
  """Applies Adagrad to the weights table[at]. `steps` is scratch."""
  square, scaled = gradient * gradient, rate * gradient
  for k in range(len(at)):
    table[at[k], 1] += square
    steps[k] = table[at[k], 1]
  for k in range(len(at)):  # in its own loop: vectorized, eight roots at a time
    steps[k] = scaled / np.sqrt(start + steps[k])
  for k in range(len(at)):
    table[at[k], 0] -= steps[k]


@kernel
@no_type_check
def _update_dense(
  weights: np.ndarray,
  squares: np.ndarray,
  values: np.ndarray,
  gradient: np.float32,
  rate: np.float32,
) -> None:
  """Updates the weights of dense values by the gradient of the logit."""
  square, scaled = gradient * gradient, rate * gradient
  for j in range(len(values)):
    squares[j] += square * values[j] * values[j]
  for j in range(len(values)):
    weights[j] -= scaled * values[j] / np.sqrt(squares[j])


@kernel
@no_type_check
def _learn(
  rows: np.ndarray,
  dense_rows: np.ndarray,
  places: np.ndarray,
  dense: np.ndarray,
  labels: np.ndarray,
  out: np.ndarray,
) -> None:
  """Scores n examples, and learns from each after scoring it.

  A row that an example looks up twice is updated twice.

  Args:
    rows: f32[H + F, 2], as in `LinearScorer`. Updated in place.
    dense_rows: f32[I + 1, 2], as its `dense`. Updated in place.
    places: i32[n, F, L], places among the hot rows. H is cold, -1 padding.
    dense: f32[n, I].
    labels: f32[n].
    out: f32[n], receives the click probabilities.
  """
  rate = np.float32(RATE)
  _, tables, length = places.shape
  at = np.empty(tables * length, np.int32)
  steps = np.empty(tables * length, np.float32)
  # Separate arrays are contiguous, so that loops can be vectorized.
  dense_weights, squares = dense_rows[:, 0].copy(), dense_rows[:, 1].copy()
  values = np.ones(len(dense_rows), np.float32)  # the bias has value 1
  for i in range(len(out)):
    at_example = at[: _find(places, i, len(rows) - tables, at)]
    values[:-1] = dense[i]
    # Scored before learning, so that the score does not depend on the label.
    out[i] = _predict(rows, at_example, dense_weights, values)
    gradient = out[i] - labels[i]
    move_rows(rows, at_example, gradient, rate, np.float32(0), steps)
    _update_dense(dense_weights, squares, values, gradient, rate)
  dense_rows[:, 0], dense_rows[:, 1] = dense_weights, squares
