"""What a raw data set is: fields of its inputs, before ids have rows.

Each public format is one file that makes a `RawData`; what turns it into a
packed data set (`packed`) is the same for all of them.
"""

from collections.abc import Callable, Iterator, Mapping
import types
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np

MISSING = -1
"""The id that stands for a missing one; every other i64 is an id."""


class Chunk(NamedTuple):
  """Fields of n consecutive inputs."""

  labels: Float[np.ndarray, ' n']
  """1.0 for a click, else 0.0; f32."""
  dense: Float[np.ndarray, 'n I']
  """Dense features as a model gets them, f32."""
  ids: Int[np.ndarray, 'n F'] | Int[np.ndarray, 'n F L']
  """Raw ids of the features, i64; `MISSING` where there is none, -2 where a
  multi-hot list has ended."""


END = -2
"""Fills up a multi-hot list that has ended; stands for no lookup."""


class Part(NamedTuple):
  """Consecutive chunks that can be read by themselves: a file, or a day."""

  name: str
  """Said in progress and errors; unique."""
  size: int
  """Of its files in bytes, for progress; 0 where unknown."""
  chunks: Callable[[], Iterator[tuple[Chunk, int]]]
  """Reads it anew: chunks in order, the same each time, each with the bytes
  of the files read so far. Raises UserError for what cannot be read."""


_NO_SETTINGS: Mapping[str, Any] = types.MappingProxyType({})


class RawData(NamedTuple):
  """A raw data set in a public format."""

  name: str
  """Said in every summary."""
  tables: tuple[str, ...]
  """Name of each feature's table."""
  dense_features: int
  """I."""
  parts: tuple[Part, ...]
  """In the order of their inputs."""
  split: Callable[[int, tuple[int, ...]], dict[str, tuple[int, int]]]
  """Inputs in all and those of each part, to the range [first, last + 1) of
  each split's inputs: 'train', 'test' and, where it is usual, 'validation'."""
  series: int | None = None
  """L of multi-hot ids, [n, F, L]; None for [n, F]."""
  skipped: Callable[[], int] = lambda: 0
  """Bad lines skipped so far, of those that the user allowed."""
  restore: Callable[[int], None] = lambda skipped: None
  """Continues that count: so many were skipped before, in parts that are not
  read again."""
  settings: Mapping[str, Any] = _NO_SETTINGS
  """What else decides which inputs there are and how they look, JSON: a
  preparation is not continued with other ones."""
  format: str = ''
  """Name of the format; '' for one that the library does not know."""
