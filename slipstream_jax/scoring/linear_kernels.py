"""Online logistic regression over sparse examples.

Every weight has its own Adagrad step (Duchi et al., 2011), as in click
prediction with sparse features (McMahan et al., 2013). The cost is proportional
to the lookups, not to the number of rows.
"""

import numba
import numpy as np

# Division as in numpy has no branch, so loops can be vectorized.
_kernel = numba.njit(cache=True, nogil=True, error_model='numpy')
_ONE = np.float32(1)  # a plain 1 would promote to f64


@_kernel
def _find(places: np.ndarray, i: int, cold: int, at: np.ndarray) -> int:
  """Fills `at` with the rows of example i's weights. Returns how many."""
  count = 0
  for f in range(places.shape[1]):
    for k in range(places.shape[2]):
      place = places[i, f, k]
      # Cold rows are too rare for a weight each: a table's cold rows share one.
      if place >= 0:
        at[count] = cold + f if place == cold else place
        count += 1
  return count


@_kernel
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


@_kernel
def _update_rows(
  rows: np.ndarray,
  at: np.ndarray,
  steps: np.ndarray,
  gradient: np.float32,
  rate: np.float32,
) -> None:
  """Updates rows[at] by the gradient of the logit. `steps` is scratch."""
  square, scaled = gradient * gradient, rate * gradient
  for k in range(len(at)):
    rows[at[k], 1] += square
    steps[k] = rows[at[k], 1]
  for k in range(len(at)):  # in its own loop: vectorized, eight roots at a time
    steps[k] = scaled / np.sqrt(steps[k])
  for k in range(len(at)):
    rows[at[k], 0] -= steps[k]


@_kernel
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


@_kernel
def learn(
  rows: np.ndarray,
  dense_rows: np.ndarray,
  places: np.ndarray,
  dense: np.ndarray,
  labels: np.ndarray,
  rate: np.float32,
  out: np.ndarray,
) -> None:
  """Scores n examples, and learns from each after scoring it.

  A row that an example looks up twice is updated twice.

  Args:
    rows: f32[H + F, 2], weight and sum of squared gradients, above 0, of each
      hot row, then of each table's cold rows. Updated in place.
    dense_rows: f32[I + 1, 2], the same of each dense feature and the bias.
    places: i32[n, F, L], places among the hot rows. H is cold, -1 padding.
    dense: f32[n, I].
    labels: f32[n], 1 for a click, else 0.
    rate: learning rate.
    out: f32[n], receives the click probabilities.
  """
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
    _update_rows(rows, at_example, steps, gradient, rate)
    _update_dense(dense_weights, squares, values, gradient, rate)
  dense_rows[:, 0], dense_rows[:, 1] = dense_weights, squares
