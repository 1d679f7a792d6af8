"""A synthetic click stream in the shape of Criteo's Kaggle set; NOT real data.

Draws examples from the generative model in `teacher`, and fits its weights.
"""

import functools

from jaxtyping import Int
import numpy as np

from slipstream_jax.data.numbered import Columns
from slipstream_jax.synthetic.spec import check_spec, SyntheticSpec
from slipstream_jax.synthetic.stream import (
  CALIBRATION_START,
  Examples,
  over_time,
)
from slipstream_jax.synthetic.teacher import click, click_model, draw
from slipstream_jax.tables import row_dtype

_CALIBRATION_EXAMPLES = 1 << 16


def examples_at(
  spec: SyntheticSpec, positions: Int[np.ndarray, ' n']
) -> Examples:
  """Returns the examples at some positions of the stream, i64[n], from 0 on.

  Raises:
    UserError: the spec has a value out of range.
  """
  check_spec(spec)
  positions = np.asarray(positions, np.int64)
  model, weights = click_model(spec), _weights(spec.population)
  columns, parts = _draw_at(spec, positions)
  probabilities = np.empty(len(positions))
  click(
    model.examples, positions, parts, weights, probabilities, columns.labels
  )
  return Examples(columns, probabilities)


def _draw_at(
  spec: SyntheticSpec, positions: np.ndarray
) -> tuple[Columns, np.ndarray]:
  """Returns examples without labels, and parts of their logits, f64[n, 3]."""
  examples = len(positions)
  columns = Columns(
    np.empty((examples, spec.dense_features), np.float32),
    np.empty((examples, len(spec.rows)), row_dtype(sum(spec.rows))),
    np.empty(examples, np.float32),
  )
  parts = np.empty((examples, 3))
  draw(click_model(spec), positions, columns.dense, columns.lookups, parts)
  return columns, parts


@functools.lru_cache(maxsize=64)
def _weights(spec: SyntheticSpec) -> np.ndarray:
  """Fits the bias and the weight of each part of the logit: f64[4].

  Few rows take most lookups, so the random effects of these rows would change
  base rate and AUC from seed to seed. Four numbers fitted to a reserved part of
  the stream prevent that. Rounding hides platform differences in the last bits.
  """
  positions = over_time(
    CALIBRATION_START, _CALIBRATION_EXAMPLES, spec.drift_examples
  )
  _, parts = _draw_at(spec, positions)
  spreads = parts.std(axis=0)
  spreads[spreads < 1e-6] = np.inf  # a constant part gets weight 0
  weights = np.sqrt(spec.signal) / spreads
  # The parts are correlated, so the sum is scaled too.
  weights *= spec.logit_std / max((parts @ weights).std(), 1e-6)
  bias = _bias(parts @ weights, spec.base_rate)
  return np.round([bias, *weights], 4)


def _bias(logits: np.ndarray, base_rate: float) -> float:
  """Finds the bias of logits for this mean probability, by bisection."""
  # The mean grows with the bias. 60 halvings leave 2e-15 of 2,000.
  low, high = -1e3, 1e3
  for _ in range(60):
    bias = (low + high) / 2
    with np.errstate(over='ignore'):  # to infinity: a probability of 0
      rate = (1 / (1 + np.exp(-(logits + bias)))).mean()
    low, high = (low, bias) if rate > base_rate else (bias, high)
  return low
