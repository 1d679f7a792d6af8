"""A synthetic click stream in the shape of Criteo's Kaggle set; NOT real data.

Nothing is stored: batches are computed as they are asked for, from their
position in the stream (`teacher` has the law). Training reads the stream from
position 0 on, testing from `TEST_START` on, so they share no input. As the
true click probabilities are known, so is the best AUC that a model can reach.

Position p is at time p mod 2**40: all parts of the stream start together, and
drift alike, so that a test may be of the day after training.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np
import scipy.special

from slipstream_jax.data.base import Columns, Dataset, to_batch
from slipstream_jax.data.position import checksum, delivered_of
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.synthetic.spec import check_spec, KAGGLE_ROWS, SyntheticSpec
from slipstream_jax.synthetic.teacher import click, draw, law_of
from slipstream_jax.tables import row_dtype, Table
from slipstream_jax.types import Batch

TEST_START = 1 << 40
"""First position of the inputs to test on."""
TRUTH_START = 1 << 41
"""First position of the inputs that measure the Bayes AUC."""
TRUTH_INPUTS = 1 << 18
PROFILE_START = 1 << 43
"""First position of the inputs that tell which rows are popular."""
CALIBRATION_START = 1 << 42
"""First position of the inputs that fit the teacher's weights."""
CALIBRATION_INPUTS = 1 << 16
_EPOCHS = 64  # of drift, over which truth and weights are averaged

InputsAt = Callable[[Any, np.ndarray], 'Inputs']
"""A stream's law: spec and positions i64[n] to the inputs there."""


def synthetic_criteo(
  *,
  rows: Sequence[int] = KAGGLE_ROWS,
  seed: int = 0,
  test_inputs: int = 1 << 18,
) -> Dataset:
  """The click stream with 13 dense features and tables C1, C2, ...

  Args:
    rows: R of each table.
    seed: seed of everything; another one gives another population.
    test_inputs: inputs of one pass over the test part.

  Raises:
    UserError: a table without rows, a negative seed or nothing to test on.
  """
  spec = SyntheticSpec(rows=tuple(rows), seed=seed)
  return synthetic_clicks(spec, test_inputs)


def synthetic_clicks(
  spec: SyntheticSpec, test_inputs: int, *, test_at: int = 0
) -> Dataset:
  """The click stream of any spec; endless to train on.

  Args:
    spec: the stream.
    test_inputs: inputs of one pass over the test part.
    test_at: time of the first of them; it matters where popularity drifts.

  Raises:
    UserError: the spec has a value out of range, or nothing to test on.
  """
  shape = f'{len(spec.rows)} tables of {sum(spec.rows):,} rows together'
  if spec.rows == KAGGLE_ROWS:
    shape = 'Criteo Kaggle shape'
  tables = tuple(Table(f'C{i}', r) for i, r in enumerate(spec.rows, start=1))
  data = stream_dataset(spec, inputs_at, tables, test_inputs, test_at)
  name = f'synthetic click stream (NOT real data), {shape}, seed {spec.seed}'
  return data._replace(name=name, dense_features=spec.dense_features)


def stream_dataset(
  spec: Any,
  law: InputsAt,
  tables: tuple[Table, ...],
  test_inputs: int,
  test_at: int = 0,
) -> Dataset:
  """The data set of any stream whose inputs are computed from positions.

  Args:
    spec: a NamedTuple with a `seed`, a `population` and `drift_inputs`.
    law: what the inputs at some positions are.
    tables: one per feature.
    test_inputs: inputs of one pass over the test part.
    test_at: time of the first of them.

  Returns:
    It has yet to be named, and one dense feature.

  Raises:
    UserError: the spec has a value out of range, or nothing to test on.
  """
  _check_inputs(test_inputs, 'test_inputs')
  source = functools.partial(SyntheticBatches, spec, law=law)
  auc, base_rate = _truth(spec.population, law)
  return Dataset(
    name='synthetic stream (NOT real data)',
    tables=tables,
    dense_features=1,
    train=source,
    test=functools.partial(
      source, first=TEST_START + test_at, inputs=test_inputs
    ),
    profile=functools.partial(source, first=PROFILE_START),
    bayes_auc=auc,
    base_rate=base_rate,
  )


class SyntheticBatches:
  """Consecutive inputs of the stream as batches; a `BatchSource`."""

  def __init__(
    self,
    spec: Any,
    batch_size: int,
    *,
    first: int = 0,
    inputs: int | None = None,
    law: InputsAt | None = None,
  ):
    """Batches of `batch_size` inputs.

    Args:
      spec: the stream.
      batch_size: B.
      first: position of the first input.
      inputs: inputs before the source ends, the last batch padded with inputs
        of weight 0 and lookups of -1; None is endless.
      law: what the inputs at some positions are; None is `inputs_at`.

    Raises:
      UserError: the spec has a value out of range, or a size is below 1.
    """
    _check_inputs(batch_size, 'batch_size')
    if inputs is not None:
      _check_inputs(inputs, 'inputs')
    self._spec, self._batch_size = spec, batch_size
    self._first, self._inputs = first, inputs
    self._law = law or inputs_at
    self._law(spec, np.empty(0, np.int64))  # tells a spec that cannot be
    self._delivered = 0
    what = getattr(self._law, '__name__', '')
    self._fingerprint = checksum([spec, what, batch_size, first, inputs])

  @property
  def endless(self) -> bool:
    """Whether no number of inputs was given."""
    return self._inputs is None

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    start = self._delivered * self._batch_size
    stop = start + self._batch_size
    if self._inputs is not None:
      stop = min(stop, self._inputs)
    if start >= stop:
      raise StopIteration
    positions = np.arange(self._first + start, self._first + stop)
    self._delivered += 1
    return to_batch(self._law(self._spec, positions).columns, self._batch_size)

  def get_state(self) -> dict[str, int]:
    """Batches delivered since the start, and a checksum of the stream."""
    return {'delivered': self._delivered, 'order': self._fingerprint}

  def set_state(self, state: dict[str, int]) -> None:
    """Continues after the batches that `state` counts.

    Raises:
      UserError: it is of another stream, or of batches of another size.
    """
    reads = f'{self._spec} from {self._first} by {self._batch_size}'
    self._delivered = delivered_of(state, self._fingerprint, reads)

  def close(self) -> None:
    """Nothing to give back."""


class Inputs(NamedTuple):
  """Inputs, and what only the teacher knows of them."""

  columns: Columns
  """What a model may see: f32[n, I], integer[n, F] and f32[n]."""
  probabilities: Float[np.ndarray, ' n']
  """True chance of a click, f64."""


def inputs_at(spec: SyntheticSpec, positions: Int[np.ndarray, ' n']) -> Inputs:
  """The inputs at these positions of the stream, i64[n], none negative.

  Raises:
    UserError: the spec has a value out of range.
  """
  check_spec(spec)
  positions = np.asarray(positions, np.int64)
  law, weights = law_of(spec), _weights(spec.population)
  columns, parts = _draw_at(spec, positions)
  probabilities = np.empty(len(positions))
  click(law.inputs, positions, parts, weights, probabilities, columns.labels)
  return Inputs(columns, probabilities)


def _draw_at(
  spec: SyntheticSpec, positions: np.ndarray
) -> tuple[Columns, np.ndarray]:
  """Inputs whose labels are yet to be set; parts of their logits f64[n, 3]."""
  inputs = len(positions)
  columns = Columns(
    np.empty((inputs, spec.dense_features), np.float32),
    np.empty((inputs, len(spec.rows)), row_dtype(sum(spec.rows))),
    np.empty(inputs, np.float32),
  )
  parts = np.empty((inputs, 3))
  draw(law_of(spec), positions, columns.dense, columns.lookups, parts)
  return columns, parts


def bayes_auc(probabilities: Float[np.ndarray, ' n']) -> float:
  """Expected AUC of true click probabilities, over the labels they draw.

  Of two inputs, i is the click and j is not with weight p_i (1 - p_j); ties
  count half. The share of weight where p_i > p_j needs no labels.
  """
  values, place = np.unique(probabilities, return_inverse=True)
  counts = np.bincount(place)
  clicks, others = counts * values, counts * (1 - values)
  below = np.cumsum(others) - others / 2
  return float(clicks @ below / (clicks.sum() * others.sum()))


@functools.lru_cache(maxsize=64)
def _truth(spec: Any, law: InputsAt) -> tuple[float, float]:
  """Bayes AUC, to a standard error below 0.001, and share of clicks."""
  positions = TRUTH_START + _over_time(TRUTH_INPUTS, spec.drift_inputs)
  probabilities = law(spec, positions).probabilities
  return bayes_auc(probabilities), float(probabilities.mean())


def _over_time(inputs: int, drift_inputs: int) -> np.ndarray:
  """Positions within a part: the first ones, or some of each epoch of drift."""
  return np.arange(inputs) * max(1, _EPOCHS * drift_inputs // inputs)


@functools.lru_cache(maxsize=64)
def _weights(spec: SyntheticSpec) -> np.ndarray:
  """Bias, and weight of each part of the logit: f64[4].

  A few rows take most lookups, so the chance effects of these few would move
  base rate and AUC from seed to seed; four numbers fitted to a reserved part
  of the stream prevent it. Rounding hides the platform's last bits.
  """
  positions = CALIBRATION_START + _over_time(
    CALIBRATION_INPUTS, spec.drift_inputs
  )
  _, parts = _draw_at(spec, positions)
  spreads = parts.std(axis=0)
  spreads[spreads < 1e-6] = np.inf  # constant: nothing to weigh
  weights = np.sqrt(spec.signal) / spreads
  weights *= spec.logit_std / max((parts @ weights).std(), 1e-6)
  logits = parts @ weights
  low, high = -1e3, 1e3
  for _ in range(60):
    bias = (low + high) / 2
    too_high = scipy.special.expit(logits + bias).mean() > spec.base_rate
    low, high = (low, bias) if too_high else (bias, high)
  return np.round([low, *weights], 4)


def _check_inputs(inputs: int, where: str) -> None:
  if not is_whole(inputs, 1):
    raise UserError(
      f'{where} must be at least 1',
      got=inputs,
      where=where,
      mend='ask for one input or more',
    )
