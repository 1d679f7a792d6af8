"""Dense features: from raw values by name to the model's inputs."""

from collections.abc import Callable, Mapping

import numpy as np

from slip_serve.layout import Dense


def _log1p_float32(values: np.ndarray) -> np.ndarray:
  return np.log1p(values.astype(np.float32))


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
  'none': lambda values: values,
  'log1p': lambda values: np.log1p(np.maximum(values, 0)),
  'log1p_float32': _log1p_float32,
  'hour': lambda values: (values % 100).astype(np.float32) / np.float32(24),
  'missing': np.isnan,
}
"""By the name of a transform, a function of values f64[n, c]; NaN is a missing
value. The names are those of `layout.TRANSFORMS`."""


def may_be_missing(features: tuple[Dense, ...], name: str) -> bool:
  """Returns whether null is a value of the dense feature of this name."""
  return all(
    one.fill is not None or one.transform == 'missing'
    for one in features
    if one.name == name
  )


def inputs_of(
  features: tuple[Dense, ...], values: Mapping[str, np.ndarray], count: int
) -> np.ndarray:
  """Returns the model's inputs f32[n, I], with the bits of training.

  Args:
    features: all dense features, in order.
    values: raw values f64[n, columns] of each by name. NaN is a missing value.
    count: n.
  """
  blocks = [np.empty((count, 0), np.float32)]
  for one in features:
    block = values[one.name]
    if one.fill is not None:
      block = np.where(np.isnan(block), one.fill, block)
    blocks.append(FUNCTIONS[one.transform](block).astype(np.float32))
  return np.concatenate(blocks, axis=1)
