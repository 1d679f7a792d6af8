"""What a decision looks at: examples of some batches, put together."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Bool, Float
import numpy as np

from slipstream_jax.selection.classify import Places


class Sampled(NamedTuple):
  """What a decision looks at of n examples."""

  places: Places
  """`hot.places` of their lookups."""
  hot: Bool[np.ndarray, ' n']
  """They look up nothing but rows that are hot by now."""
  labels: Float[np.ndarray, ' n']
  """f32."""
  scores: Float[np.ndarray, ' n'] | None
  """Click probabilities, f32, where the policy asks for them."""


def only_hot(places: Places, number: int) -> Bool[np.ndarray, ' n']:
  """Which examples look up nothing but hot rows, of which there are so many."""
  # H, of cold rows, is the largest place, and -1, of padding, the smallest.
  axes = tuple(range(1, places.ndim))
  hot: np.ndarray = places.max(axis=axes, initial=-1) < number
  return hot


def together(parts: Sequence[Sampled]) -> Sampled:
  """All of the examples; of one part at least."""
  places, hot, labels, scores = zip(*parts, strict=True)
  return Sampled(
    np.concatenate(places),
    np.concatenate(hot),
    np.concatenate(labels),
    None if scores[0] is None else np.concatenate(scores),
  )
