"""Streams whose examples are a function of their position. Nothing is stored.

Training reads a stream from position 0 on, testing from `TEST_START` on. The
true click probabilities are known, and with them the best AUC of any model.

Position p is at time p mod 2**40. All parts of the stream start at time 0 and
drift alike, so that a test may use the day after training.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.numbered import (
  check_batch_size,
  Columns,
  NumberedBatches,
  to_batch,
)
from slipstream_jax.data.source import Dataset
from slipstream_jax.errors import check_whole
from slipstream_jax.synthetic.spec import Spec
from slipstream_jax.types import Batch

# Each is one bit above the 40 of the time, so all parts start at time 0.
TEST_START = 1 << 40
"""First position of the examples to test on."""
TRUTH_START = 1 << 41
"""First position of the examples that measure the Bayes AUC."""
CALIBRATION_START = 1 << 42
"""First position of the examples that fit a teacher's weights."""
PROFILE_START = 1 << 43
"""First position of the examples that rank rows by popularity."""
_TRUTH_EXAMPLES = 1 << 18
_MORE = 'ask for one example or more'
_EPOCHS = 64  # of drift, over which truth and weights are averaged


class Examples(NamedTuple):
  """Examples, and their true click probabilities."""

  columns: Columns
  """Columns that a model may see: f32[n, I], integer[n, F] or [n, F, L], and
  f32[n]."""
  probabilities: Float[np.ndarray, ' n']
  """True chance of a click, f64."""


ExamplesAt = Callable[[Any, np.ndarray], Examples]
"""Computes the examples of a stream from its spec and positions i64[n]."""


def stream_dataset(
  examples_at: ExamplesAt, spec: Spec, test_examples: int, test_at: int = 0
) -> Dataset:
  """Returns the data set of a stream, endless to train on.

  Args:
    examples_at: computes the examples at some positions.
    spec: the stream, of a type that `examples_at` takes.
    test_examples: examples of one pass over the test part.
    test_at: time of the first test example. It matters only with drift.

  Raises:
    UserError: the spec has a value out of range, or there are no test examples.
  """
  check_whole(test_examples, 1, 'stream_dataset, test_examples', _MORE)
  source = functools.partial(stream_batches, examples_at, spec)
  # The population's spec, so that data sets which differ only in the examples'
  # seed share the result.
  auc, log_loss, base_rate = _truth(examples_at, spec.population)
  return Dataset(
    name=f'synthetic {spec.title}, seed {spec.seed}',
    sizes=spec.sizes,
    features=spec.features,
    dense_features=spec.dense_features,
    train=source,
    test=functools.partial(
      source, first=TEST_START + test_at, examples=test_examples
    ),
    profile=functools.partial(source, first=PROFILE_START),
    bayes_auc=auc,
    bayes_log_loss=log_loss,
    base_rate=base_rate,
  )


def stream_batches(
  examples_at: ExamplesAt,
  spec: Spec,
  batch_size: int,
  *,
  first: int = 0,
  examples: int | None = None,
) -> NumberedBatches:
  """Returns consecutive examples of a stream in batches of `batch_size`.

  Args:
    examples_at: as in `stream_dataset`.
    spec: as in `stream_dataset`.
    batch_size: B.
    first: position of the first example.
    examples: number of examples. The last batch is padded. None: endless.

  Raises:
    UserError: the spec has a value out of range, or a size is below 1.
  """
  check_batch_size(batch_size, 'stream_batches, batch_size')
  if examples is not None:
    check_whole(examples, 1, 'stream_batches, examples', _MORE)
  examples_at(spec, np.empty(0, np.int64))  # checks the spec

  def batch_at(number: int) -> Batch:
    start = number * batch_size
    stop = start + batch_size
    if examples is not None:
      stop = min(stop, examples)
    positions = np.arange(first + start, first + stop)
    return to_batch(examples_at(spec, positions).columns, batch_size)

  return NumberedBatches(
    batch_at,
    None if examples is None else -(-examples // batch_size),
    [spec, examples_at.__name__, batch_size, first, examples],
    reads=f'{spec} from {first} by {batch_size}',
  )


def bayes_auc(probabilities: Float[np.ndarray, ' n']) -> float:
  """Returns the expected AUC of true click probabilities over random labels.

  Of two examples, i is clicked and j is not with weight p_i (1 - p_j). Ties
  count half. The share of weight with p_i > p_j needs no labels.
  """
  values, place = np.unique(probabilities, return_inverse=True)
  counts = np.bincount(place)
  clicks, others = counts * values, counts * (1 - values)
  below = np.cumsum(others) - others / 2
  return float(clicks @ below / (clicks.sum() * others.sum()))


def bayes_log_loss(probabilities: Float[np.ndarray, ' n']) -> float:
  """Returns the expected log loss of true click probabilities.

  It is the mean of their entropies, which no model can fall below.
  """
  both = np.stack([probabilities, 1 - probabilities])
  return float(-(both * np.log(np.maximum(both, 1e-300))).sum(0).mean())


@functools.lru_cache(maxsize=64)
def _truth(examples_at: ExamplesAt, spec: Spec) -> tuple[float, float, float]:
  """Returns Bayes AUC and log loss, and the share of clicks.

  The AUC has a standard error below 0.001.
  """
  positions = over_time(TRUTH_START, _TRUTH_EXAMPLES, spec.drift_examples)
  p = examples_at(spec, positions).probabilities
  return bayes_auc(p), bayes_log_loss(p), float(p.mean())


def over_time(
  start: int, examples: int, drift_examples: int
) -> Int[np.ndarray, ' n']:
  """Returns positions i64[examples] from `start` on.

  They are consecutive, or with drift spread over many epochs of it.
  """
  return start + np.arange(examples) * max(
    1, _EPOCHS * drift_examples // examples
  )
