"""Logistic regression over sparse inputs, one input after the other.

Every weight has its own Adagrad step (Duchi et al., 2011), as in
click prediction with sparse features (McMahan et al., 2013). Work is in
proportion to the lookups, never to the number of rows. As `kernels`, this
file stays out of jaxtyping's import hook, which numba cannot compile through.
"""

import numba
import numpy as np

_kernel = numba.njit(cache=True, nogil=True)
_ONE = np.float32(1)


@_kernel
def _predict(
  rows: np.ndarray,
  dense_rows: np.ndarray,
  places: np.ndarray,
  dense: np.ndarray,
  i: int,
) -> np.float32:
  """Click probability of input i; arguments as of `score`."""
  _, tables, length = places.shape
  cold = len(rows) - tables
  features = dense.shape[1]
  logit = dense_rows[features, 0]
  for j in range(features):
    logit += dense_rows[j, 0] * dense[i, j]
  for f in range(tables):
    for k in range(length):
      place = places[i, f, k]
      if place >= 0:
        logit += rows[cold + f if place == cold else place, 0]
  return _ONE / (_ONE + np.exp(-logit))


@_kernel
def _update(
  rows: np.ndarray,
  dense_rows: np.ndarray,
  places: np.ndarray,
  dense: np.ndarray,
  i: int,
  gradient: np.float32,
  rate: np.float32,
) -> None:
  """Moves the weights of input i, given the gradient of its logit."""
  _, tables, length = places.shape
  cold = len(rows) - tables
  features = dense.shape[1]
  square = gradient * gradient
  for j in range(features):
    value = dense[i, j]
    dense_rows[j, 1] += square * value * value
    step = rate * gradient * value / np.sqrt(dense_rows[j, 1])
    dense_rows[j, 0] -= step
  dense_rows[features, 1] += square
  step = rate * gradient / np.sqrt(dense_rows[features, 1])
  dense_rows[features, 0] -= step
  for f in range(tables):
    for k in range(length):
      place = places[i, f, k]
      if place >= 0:
        if place == cold:
          place = cold + f
        rows[place, 1] += square
        rows[place, 0] -= rate * gradient / np.sqrt(rows[place, 1])


@_kernel
def score(
  rows: np.ndarray,
  dense_rows: np.ndarray,
  places: np.ndarray,
  dense: np.ndarray,
  out: np.ndarray,
) -> None:
  """Fills the click probability of n inputs; changes no weight.

  Args:
    rows: f32[H + F, 2], weight and sum of squared gradients, above 0, of each
      hot row, and of the cold ones of each table.
    dense_rows: f32[I + 1, 2], the same of each dense feature and the bias.
    places: i32[n, F, L] among the hot rows; H is cold, -1 padding.
    dense: f32[n, I].
    out: f32[n].
  """
  for i in range(len(out)):
    out[i] = _predict(rows, dense_rows, places, dense, i)


@_kernel
def learn(
  rows: np.ndarray,
  dense_rows: np.ndarray,
  places: np.ndarray,
  dense: np.ndarray,
  labels: np.ndarray,
  weights: np.ndarray,
  rate: np.float32,
  out: np.ndarray,
) -> None:
  """As `score`, but each input is learned from right after it was scored.

  An input of weight 0 changes nothing. A row that an input looks up twice
  moves twice.

  Args:
    rows: as in `score`; updated in place.
    dense_rows: as in `score`; updated in place.
    places: as in `score`.
    dense: as in `score`.
    labels: f32[n], 1 for a click, else 0.
    weights: f32[n], of each input in the loss.
    rate: learning rate.
    out: f32[n].
  """
  for i in range(len(out)):
    out[i] = _predict(rows, dense_rows, places, dense, i)
    if weights[i] > 0:
      gradient = weights[i] * (out[i] - labels[i])
      _update(rows, dense_rows, places, dense, i, gradient, rate)
