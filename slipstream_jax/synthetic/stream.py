"""Streams whose inputs are a function of their position; nothing is stored.

Batches are computed as they are asked for. Training reads a stream from
position 0 on, testing from `TEST_START` on, so they share no input. As the true
click probabilities are known, so is the best AUC that a model can reach.

Position p is at time p mod 2**40: all parts of the stream start together, and
drift alike, so that a test may be of the day after training.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.base import Columns, Dataset, to_batch
from slipstream_jax.data.numbered import check_batch_size, Numbered
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.synthetic.spec import Spec
from slipstream_jax.types import Batch

TEST_START = 1 << 40
"""First position of the inputs to test on."""
TRUTH_START = 1 << 41
"""First position of the inputs that measure the Bayes AUC."""
CALIBRATION_START = 1 << 42
"""First position of the inputs that fit a teacher's weights."""
PROFILE_START = 1 << 43
"""First position of the inputs that tell which rows are popular."""
_TRUTH_INPUTS = 1 << 18
_EPOCHS = 64  # of drift, over which truth and weights are averaged


class Inputs(NamedTuple):
  """Inputs, and what only the teacher knows of them."""

  columns: Columns
  """What a model may see: f32[n, I], integer[n, F] or [n, F, L], and f32[n]."""
  probabilities: Float[np.ndarray, ' n']
  """True chance of a click, f64."""


InputsAt = Callable[[Any, np.ndarray], Inputs]
"""A stream's law: spec and positions i64[n] to the inputs there."""


def stream_dataset(
  law: InputsAt, spec: Spec, test_inputs: int, test_at: int = 0
) -> Dataset:
  """The data set of a stream; endless to train on.

  Args:
    law: what the inputs at some positions are.
    spec: the stream, of a type that `law` takes.
    test_inputs: inputs of one pass over the test part.
    test_at: time of the first of them; it matters where popularity drifts.

  Raises:
    UserError: the spec has a value out of range, or nothing to test on.
  """
  _check_count(test_inputs, 'stream_dataset, test_inputs')
  source = functools.partial(stream_batches, law, spec)
  auc, base_rate = _truth(law, spec.population)
  return Dataset(
    name=f'synthetic {spec.title}, seed {spec.seed}',
    tables=spec.tables,
    dense_features=spec.dense_features,
    train=source,
    test=functools.partial(
      source, first=TEST_START + test_at, inputs=test_inputs
    ),
    profile=functools.partial(source, first=PROFILE_START),
    bayes_auc=auc,
    base_rate=base_rate,
  )


def stream_batches(
  law: InputsAt,
  spec: Spec,
  batch_size: int,
  *,
  first: int = 0,
  inputs: int | None = None,
) -> Numbered:
  """Consecutive inputs of a stream as batches of `batch_size`.

  Args:
    law: what the inputs at some positions are.
    spec: the stream.
    batch_size: B.
    first: position of the first input.
    inputs: inputs before the source ends, the last batch padded with inputs
      of weight 0 and lookups of -1; None is endless.

  Raises:
    UserError: the spec has a value out of range, or a size is below 1.
  """
  check_batch_size(batch_size, 'stream_batches, batch_size')
  if inputs is not None:
    _check_count(inputs, 'stream_batches, inputs')
  law(spec, np.empty(0, np.int64))  # refuses a spec that cannot be

  def batch_at(number: int) -> Batch:
    start = number * batch_size
    stop = start + batch_size
    if inputs is not None:
      stop = min(stop, inputs)
    positions = np.arange(first + start, first + stop)
    return to_batch(law(spec, positions).columns, batch_size)

  return Numbered(
    batch_at,
    None if inputs is None else -(-inputs // batch_size),
    [spec, law.__name__, batch_size, first, inputs],
    reads=f'{spec} from {first} by {batch_size}',
  )


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
def _truth(law: InputsAt, spec: Spec) -> tuple[float, float]:
  """Bayes AUC, to a standard error below 0.001, and share of clicks."""
  positions = over_time(TRUTH_START, _TRUTH_INPUTS, spec.drift_inputs)
  probabilities = law(spec, positions).probabilities
  return bayes_auc(probabilities), float(probabilities.mean())


def over_time(
  start: int, inputs: int, drift_inputs: int
) -> Int[np.ndarray, ' n']:
  """Positions from `start` on: the first ones, or some of each epoch of drift.

  i64[inputs].
  """
  return start + np.arange(inputs) * max(1, _EPOCHS * drift_inputs // inputs)


def _check_count(inputs: int, where: str) -> None:
  if not is_whole(inputs, 1):
    raise UserError(
      f'{where.split()[-1]} must be at least 1',
      got=inputs,
      where=where,
      mend='ask for one input or more',
    )
