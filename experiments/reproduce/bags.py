"""A synthetic multi-hot stream: bags of lookups in place of single ones.

An example with L lookups per feature is made of L examples of the click stream.
A bag holds the feature's lookups in all of them, and the dense features are
those of the first. Its logit is the sum of theirs, scaled to the spread of one,
so a model can learn it as a sum over each bag. L * L consecutive clicks are
ranked by their least popular row and cut into L examples. Without this, almost
no example would look up hot rows only. NOT real data.
"""

import functools
from typing import Any, NamedTuple

from jaxtyping import Int
import numpy as np

from slipstream_jax.data.numbered import Columns
from slipstream_jax.data.source import Dataset
from slipstream_jax.hashing import GOLDEN, mix
from slipstream_jax.synthetic.clicks import examples_at, key_of
from slipstream_jax.synthetic.spec import SyntheticSpec
from slipstream_jax.synthetic.stream import (
  Examples,
  PROFILE_START,
  stream_batches,
  TEST_START,
)
from slipstream_jax.tables import Feature, offsets

_PARTS = TEST_START  # positions of a part of the stream: training, testing


class BagSpec(NamedTuple):
  """Parameters of the stream. Equal specs give equal examples."""

  of: SyntheticSpec
  """Parameters of the clicks that bags are made of."""
  length: int
  """Lookups of a bag."""


def bags_at(spec: BagSpec, positions: Int[np.ndarray, ' n']) -> Examples:
  """Returns the examples at positions of the stream, i64[n], none negative.

  Lookups are integer[n, F, L].

  Raises:
    UserError: the spec has a value out of range.
  """
  positions = np.asarray(positions, np.int64)
  length, tables = spec.length, len(spec.of.rows)
  part, time = positions & -_PARTS, positions & (_PARTS - 1)
  numbers = part + time // length
  blocks, block = np.unique(numbers, return_inverse=True)
  clicks = _ranked(spec, blocks)
  # Where the clicks of each example are among those of all blocks.
  first = block * length**2 + time % length * length
  index = first[:, None] + np.arange(length)
  chances = clicks.probabilities[index]
  lookups = clicks.columns.lookups[index].reshape(-1, length, tables)
  odds = np.log(chances / (1 - chances))
  # L draws have a sum of sqrt(L) times the spread of one. The mean of logits
  # that have a spread is farther from 0 than the logit of their base rate.
  usual = np.log(spec.of.base_rate / (1 - spec.of.base_rate))
  usual *= (1 + np.pi / 8 * spec.of.logit_std**2) ** 0.5
  logits = usual + (odds - usual).sum(axis=1) / length**0.5
  probabilities = 1 / (1 + np.exp(-logits))
  key = key_of(spec.of.seed, 'bags')
  bits = mix(key + (positions + 1).astype(np.uint64) * GOLDEN)
  draws = (bits >> np.uint64(11)) * 2.0**-53
  columns = Columns(
    clicks.columns.dense[index[:, 0]],
    np.ascontiguousarray(lookups.swapaxes(1, 2)),
    (draws < probabilities).astype(np.float32),
  )
  return Examples(columns, probabilities)


def _ranked(spec: BagSpec, blocks: np.ndarray) -> Examples:
  """Returns the clicks of blocks, each block ordered by least popular row.

  Blocks are numbered within their part of the stream.
  """
  size = spec.length**2
  starts = (blocks & -_PARTS) + (blocks & (_PARTS - 1)) * size
  positions = (starts[:, None] + np.arange(size)).reshape(-1)
  clicks = examples_at(spec.of, positions)
  # A row's number is its rank in its table.
  ranks = (clicks.columns.lookups - offsets(spec.of.rows)[:-1]).max(axis=1)
  order = np.argsort(ranks.reshape(-1, size), axis=1, kind='stable')
  order = (order + size * np.arange(len(blocks))[:, None]).reshape(-1)
  return Examples(clicks.columns.take(order), clicks.probabilities[order])


def bag_dataset(spec: BagSpec, test_examples: int) -> Dataset:
  """Returns the stream as a data set with endless training examples.

  Raises:
    UserError: the spec has a value out of range, or no test examples.
  """
  any_spec: Any = spec
  source = functools.partial(stream_batches, bags_at, any_spec)
  return Dataset(
    name=(
      f'synthetic bags of {spec.length} lookups (NOT real data), of a '
      f'{spec.of.title}, seed {spec.of.seed}'
    ),
    sizes=spec.of.sizes,
    features={
      name: Feature(name, max_length=spec.length) for name in spec.of.sizes
    },
    dense_features=spec.of.dense_features,
    train=source,
    test=functools.partial(source, first=TEST_START, examples=test_examples),
    profile=functools.partial(source, first=PROFILE_START),
    base_rate=spec.of.base_rate,
  )
