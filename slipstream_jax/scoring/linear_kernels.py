"""Logistic regression over sparse examples, one example after the other.

Every weight has its own Adagrad step (Duchi et al., 2011), as in
click prediction with sparse features (McMahan et al., 2013). Work is in
proportion to the lookups, never to the number of rows.
"""

import numba
import numpy as np

# Division as in numpy leaves no branch in a loop: it can be vectorized.
_kernel = numba.njit(cache=True, nogil=True, error_model='numpy')
_ONE = np.float32(1)  # a plain 1 would make f64 of all it meets


@_kernel
def _find(places: np.ndarray, i: int, cold: int, at: np.ndarray) -> int:
  """Fills `at` with the rows of the weights of example i; returns how many."""
  count = 0
  for f in range(places.shape[1]):
    for k in range(places.shape[2]):
      place = places[i, f, k]
      # Cold rows are too rare to learn a weight each: a table's share one.
      if place >= 0:
        at[count] = cold + f if place == cold else place
        count += 1
  return count


@_kernel
def _predict(
  rows: np.ndarray, at: np.ndarray, weights: np.ndarray, values: np.ndarray
) -> np.float32:
  """Click probability from rows[at] and the dense weights of some values."""
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
  """Moves rows[at], given the gradient of the logit; `steps` is scratch."""
  square, scaled = gradient * gradient, rate * gradient
  for k in range(len(at)):
    rows[at[k], 1] += square
    steps[k] = rows[at[k], 1]
  for k in range(len(at)):  # alone in its loop: eight roots at a time
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
  """The same for the weights of dense values."""
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
  """Click probabilities of n examples, each learned from after it was scored.

  A row that an example looks up twice moves twice.

  Args:
    rows: f32[H + F, 2], weight and sum of squared gradients, above 0, of each
      hot row, and of the cold ones of each table; updated in place.
    dense_rows: f32[I + 1, 2], the same of each dense feature and the bias.
    places: i32[n, F, L] among the hot rows; H is cold, -1 padding.
    dense: f32[n, I].
    labels: f32[n], 1 for a click, else 0.
    rate: learning rate.
    out: f32[n].
  """
  _, tables, length = places.shape
  at = np.empty(tables * length, np.int32)
  steps = np.empty(tables * length, np.float32)
  # Apart, each is contiguous, so that loops over it can be vectorized.
  dense_weights, squares = dense_rows[:, 0].copy(), dense_rows[:, 1].copy()
  values = np.ones(len(dense_rows), np.float32)  # the bias's stays 1
  for i in range(len(out)):
    at_example = at[: _find(places, i, len(rows) - tables, at)]
    values[:-1] = dense[i]
    # Scored before its label is learned from: else it would know the answer.
    out[i] = _predict(rows, at_example, dense_weights, values)
    gradient = out[i] - labels[i]
    _update_rows(rows, at_example, steps, gradient, rate)
    _update_dense(dense_weights, squares, values, gradient, rate)
  dense_rows[:, 0], dense_rows[:, 1] = dense_weights, squares
