"""Linear scorer: logistic regression on rows and dense features.

It is the cheapest scorer. It learns online, with an Adagrad step size per
weight (compare McMahan et al., "Ad click prediction: a view from the trenches",
2013). Weights of rows are in a table at hashes of the rows (the hashing trick,
Weinberger et al., 2009). The table fits the processor's second cache, so that
scoring takes less time than to look up which rows are hot. A row that is seen
rarely shares its weight with others. The first examples teach most. After them
it learns from one example in 16, as learning takes several times as long as
scoring.

`frozen` copies the weights as whole numbers. Their sum is exact in any order,
so the processor may add several at a time.
"""

import math
from typing import Any, NamedTuple, no_type_check

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.hashing import kernel
from slipstream_jax.types import Lookups

BITS = 17
"""The table has 2**BITS weights, and takes 1 MiB with their sums of squares."""
RATE = 0.05
"""Learning rate, slightly the best of 0.05 to 0.2 on synthetic clicks."""
START = 0.1
"""Initial sum of squared gradients of every weight."""
FULL = 1 << 19
"""The first examples, from each of which it learns. On 2 million synthetic
examples the AUC of scores falls from 0.733 to 0.730."""
EVERY = 16
"""After these, it learns from every example whose number this divides."""
UNIT = 2.0**-13
"""Unit of frozen weights."""
MOST = 1 << 16
"""Largest frozen weight in units. Sums of 2**14 of them fit 31 bits."""
_ONE = np.float32(1)  # a plain 1 would promote to f64
# Odd numbers near the golden ratio's and its square's parts of 2**32.
_LOW, _HIGH = np.uint32(0x9E3779B9), np.uint32(0x61C88647)


class LinearScorer(NamedTuple):
  """Scorer of rows and dense features. Learns in place.

  Example:
    >>> scorer = LinearScorer.create(features=1, dense_features=1)
    >>> lookups, dense = np.array([[3], [0]]), np.ones((2, 1), np.float32)
    >>> labels = np.array([1, 0], np.float32)
    >>> float(scorer.learn(lookups, dense, labels)[0])
    0.5
  """

  rows: Float[np.ndarray, ' W']
  """Weight at each hash of a row, f32."""
  squares: Float[np.ndarray, ' W']
  """Sum of squared gradients of each weight, f32."""
  dense: Float[np.ndarray, 'I_and_1 2']
  """Weight and sum of squared gradients, f32, of each dense feature, then of
  the bias."""
  seen: Int[np.ndarray, '']
  """Number of examples scored, i64."""
  features: int
  """F, columns of the lookups."""
  full: int
  """The first examples, from each of which it learns."""

  @classmethod
  def create(
    cls,
    features: int,
    dense_features: int,
    bits: int = BITS,
    full: int = FULL,
  ) -> 'LinearScorer':
    """Returns an untrained scorer: every score is 0.5.

    Args:
      features: F, columns of the lookups.
      dense_features: I, columns of `Batch.dense`.
      bits: of the hashes, 1 to 31. The table has 2**bits weights.
      full: learns from each of that many first examples.
    """
    rows, squares = np.zeros((2, 1 << bits), np.float32)
    squares[:] = START
    dense = np.full((dense_features + 1, 2), [0, START], np.float32)
    return cls(rows, squares, dense, np.array(0), features, full)

  def of_fewer(self, factor: int) -> 'LinearScorer':
    """Returns the same weights, to learn from one example in that many.

    It learns from as large a part of these as this one does of all.
    """
    return self._replace(full=self.full // factor)

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
    features = self.features, len(self.dense) - 1
    where = 'LinearScorer.learn'
    lists = checked_lists(lookups, dense, labels, features, where)
    out = np.empty(len(dense), np.float32)
    self._learn(lists, dense, labels, out, True)
    return out

  def teach(
    self,
    lookups: Lookups,
    dense: Float[np.ndarray, 'n I'],
    labels: Float[np.ndarray, ' n'],
  ) -> None:
    """Learns as `learn` does. See `FreezableScorer.teach`.

    Raises:
      UserError: as `learn`.
    """
    features = self.features, len(self.dense) - 1
    where = 'LinearScorer.teach'
    lists = checked_lists(lookups, dense, labels, features, where)
    out = np.empty(len(dense), np.float32)
    self._learn(lists, dense, labels, out, False)

  def _learn(
    self,
    lists: np.ndarray,
    dense: np.ndarray,
    labels: np.ndarray,
    out: np.ndarray,
    scores: bool,
  ) -> None:
    flat = _flat(lists)
    _learn(
      self.rows,
      self.squares,
      self.dense,
      flat,
      _padding(flat),
      _shift(self.rows),
      int(self.seen),
      self.full,
      np.asarray(dense, np.float32),
      np.asarray(labels, np.float32),
      out,
      scores,
    )
    self.seen[...] += len(out)

  def frozen(self) -> 'FrozenLinear':
    """Returns a copy of the weights that scores in any thread."""
    rows = np.empty(len(self.rows), np.int32)
    _freeze(self.rows, rows)
    return FrozenLinear(rows, self.dense[:, 0].copy(), self.features)

  def get_state(self) -> dict[str, Any]:
    """Returns copies of all weights, 8 bytes each."""
    return {name: getattr(self, name).copy() for name in _STATE}

  def set_state(self, state: dict[str, Any]) -> None:
    """Copies the weights of a state from `get_state`.

    Raises:
      UserError: it is of an older version.
    """
    if not state.keys() >= set(_STATE):
      raise UserError(
        'a position must have the weights of this linear scorer',
        got=f'{", ".join(state)} of a version before it',
        where='LinearScorer.set_state',
        hint='finish the run with the version that began it, or begin anew',
      )
    for name in _STATE:
      getattr(self, name)[...] = state[name]


_STATE = ('rows', 'squares', 'dense', 'seen')


class FrozenLinear(NamedTuple):
  """Weights of a `LinearScorer` at one moment."""

  rows: Int[np.ndarray, ' W']
  """Weight at each hash of a row in `UNIT`, i32."""
  dense: Float[np.ndarray, ' I_and_1']
  """Weight of each dense feature, then the bias, f32."""
  features: int
  """F, columns of the lookups."""

  def score(
    self, lookups: Lookups, dense: Float[np.ndarray, 'n I']
  ) -> Float[np.ndarray, ' n']:
    """Returns click probabilities f32[n]. See `FrozenScorer.score`.

    Raises:
      UserError: the shapes do not match the scorer's features.
    """
    features, out = len(self.dense) - 1, np.empty(len(dense), np.float32)
    where = 'FrozenLinear.score'
    sizes = self.features, features
    flat = _flat(checked_lists(lookups, dense, out, sizes, where))
    how = _padding(flat), _shift(self.rows)
    dense = np.asarray(dense, np.float32)
    _score(self.rows, self.dense, flat, *how, dense, out)
    return out

  def get_state(self) -> dict[str, Any]:
    """Returns the weights, without a copy."""
    return {'rows': self.rows, 'dense': self.dense}

  def set_state(self, state: dict[str, Any]) -> None:
    """Copies the weights of a state from `get_state`."""
    self.rows[...], self.dense[...] = state['rows'], state['dense']


def _flat(lists: np.ndarray) -> np.ndarray:
  """Returns lookups [n, F, L] as unsigned [n, F * L]."""
  flat = lists.reshape(len(lists), math.prod(lists.shape[1:]))
  return flat.view(f'u{flat.itemsize}')


def _padding(flat: np.ndarray) -> np.uint64:
  """Returns what -1 is among unsigned lookups."""
  return np.uint64(2 ** (8 * flat.itemsize) - 1)


def _shift(weights: np.ndarray) -> np.uint32:
  """Returns the shift of a hash to its place among the weights."""
  return np.uint32(33 - len(weights).bit_length())


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
def _place(row: np.uint64, shift: np.uint32) -> np.uint32:
  """Returns the place of a row's weight. Rows of 32 bits take less time."""
  # numba widens products of u32.
  low = np.uint32(np.uint32(row) * _LOW)
  high = np.uint32(np.uint64(row) >> np.uint64(32))
  return np.uint32(low + np.uint32(high * _HIGH)) >> shift


@kernel
@no_type_check
def _weight(
  weights: np.ndarray, row: np.uint64, padding: np.uint64, shift: np.uint32
) -> np.float32:
  """Returns the weight of a row, or 0 for padding."""
  weight = weights[_place(row, shift)]
  return np.float32(0) if np.uint64(row) == padding else weight


@kernel
@no_type_check
def _sum(
  weights: np.ndarray,
  lookups: np.ndarray,
  i: int,
  padding: np.uint64,
  shift: np.uint32,
) -> np.float32:
  """Sums the weights of example i in four chains, which do not wait."""
  a = b = c = d = np.float32(0)
  rest = lookups.shape[1] % 4
  for k in range(rest):
    a += _weight(weights, lookups[i, k], padding, shift)
  for k in range(rest, lookups.shape[1], 4):
    a += _weight(weights, lookups[i, k], padding, shift)
    b += _weight(weights, lookups[i, k + 1], padding, shift)
    c += _weight(weights, lookups[i, k + 2], padding, shift)
    d += _weight(weights, lookups[i, k + 3], padding, shift)
  return (a + b) + (c + d)


@kernel
@no_type_check
def _learn(
  rows: np.ndarray,
  squares: np.ndarray,
  dense_rows: np.ndarray,
  lookups: np.ndarray,
  padding: np.uint64,
  shift: np.uint32,
  seen: int,
  full: int,
  dense: np.ndarray,
  labels: np.ndarray,
  out: np.ndarray,
  scores: bool,
) -> None:
  """Scores n examples, and learns from some, each after it is scored.

  A row that an example looks up twice is updated twice.

  Args:
    rows: f32[W], as in `LinearScorer`. Updated in place.
    squares: f32[W], as its `squares`. Updated in place.
    dense_rows: f32[I + 1, 2], as its `dense`. Updated in place.
    lookups: u32 or u64[n, F * L], rows.
    padding: what -1 is among them.
    shift: of a hash, to its place.
    seen: examples before these.
    full: as in `LinearScorer`.
    dense: f32[n, I].
    labels: f32[n].
    out: f32[n], receives the click probabilities.
    scores: whether to score examples that are not learned from.
  """
  rate, width = np.float32(RATE), dense.shape[1]
  at = np.empty(lookups.shape[1], np.uint32)
  steps = np.empty(lookups.shape[1], np.float32)
  # Separate arrays are contiguous, so that loops can be vectorized.
  weights, dense_squares = dense_rows[:, 0].copy(), dense_rows[:, 1].copy()
  values = np.ones(width + 1, np.float32)  # the bias has value 1
  for i in range(len(out)):
    teaches = seen + i < full or (seen + i) % EVERY == 0
    if not (teaches or scores):
      continue
    logit = np.float32(0)
    for j in range(width):
      values[j] = dense[i, j]
    for j in range(width + 1):
      logit += weights[j] * values[j]
    # Scored before learning, so that the score does not depend on the label.
    logit += _sum(rows, lookups, i, padding, shift)
    out[i] = _ONE / (_ONE + np.exp(-logit))
    if not teaches:
      continue
    slope = out[i] - labels[i]
    square, scaled = slope * slope, rate * slope
    count = 0
    for k in range(len(at)):
      at[count] = _place(lookups[i, k], shift)
      count += np.uint64(lookups[i, k]) != padding
    for k in range(count):
      squares[at[k]] += square
      steps[k] = squares[at[k]]
    for k in range(count):  # vectorized, eight roots at a time
      steps[k] = scaled / np.sqrt(steps[k])
    for k in range(count):
      rows[at[k]] -= steps[k]
    for j in range(width + 1):
      dense_squares[j] += square * values[j] * values[j]
    for j in range(width + 1):
      weights[j] -= scaled * values[j] / np.sqrt(dense_squares[j])
  dense_rows[:, 0], dense_rows[:, 1] = weights, dense_squares


@kernel
@no_type_check
def _freeze(weights: np.ndarray, out: np.ndarray) -> None:
  """Writes weights f32[W] in units, i32[W]."""
  scale, most = np.float32(1 / UNIT), np.float32(MOST)
  for i in range(len(out)):
    out[i] = np.int32(np.rint(min(max(weights[i] * scale, -most), most)))


@kernel
@no_type_check
def _score(
  rows: np.ndarray,
  dense_rows: np.ndarray,
  lookups: np.ndarray,
  padding: np.uint64,
  shift: np.uint32,
  dense: np.ndarray,
  out: np.ndarray,
) -> None:
  """Scores n examples.

  Args:
    rows: i32[W], as in `FrozenLinear`.
    dense_rows: f32[I + 1], as its `dense`.
    lookups: u32 or u64[n, F * L], rows.
    padding: what -1 is among them.
    shift: of a hash, to its place.
    dense: f32[n, I].
    out: f32[n], receives the click probabilities.
  """
  unit, absent = np.float32(UNIT), rows[_place(padding, shift)]
  for i in range(len(out)):
    # Padding is summed and taken off, as loops without a branch are vectorized.
    total, padded = np.int32(0), np.int32(0)
    for k in range(lookups.shape[1]):
      padded += np.int32(lookups[i, k] == padding)
    for k in range(lookups.shape[1]):
      total += rows[_place(lookups[i, k], shift)]
    # numba sums in 64 bits, which takes twice as long unless it is cut to 32.
    out[i] = np.float32(np.int32(total - padded * absent)) * unit
  for i in range(len(out)):
    logit = np.float32(0)
    for j in range(dense.shape[1]):
      logit += dense_rows[j] * dense[i, j]
    out[i] += logit
  bias = dense_rows[-1]
  for i in range(len(out)):
    out[i] = _ONE / (_ONE + np.exp(-(out[i] + bias)))
