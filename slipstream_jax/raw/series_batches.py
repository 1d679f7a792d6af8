"""Batches of series, cut from a log as they are asked for.

The log is kept as 12 bytes per event; all series at once would take 252 bytes
per input, and one for Taobao has 20 M of them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.base import ColumnBatches, Columns
from slipstream_jax.data.position import checksum, delivered_of
from slipstream_jax.raw.sequences import Points
from slipstream_jax.tables import global_rows
from slipstream_jax.types import Batch

FEATURES = ('user', 'item', 'category')


class Series(NamedTuple):
  """All that the inputs of p points are cut from.

  Input 2 i is point i with its own candidate, input 2 i + 1 with the item that
  was drawn against it.
  """

  rows: Int[np.ndarray, '3 n']
  """Local row of each event's user, item and category, i32."""
  points: Points
  negatives: Int[np.ndarray, '2 p']
  """Local rows of each point's drawn item and its category, i32."""
  steps: int
  """Most events of a history; L is one more."""

  def lookups(self, inputs: Int[np.ndarray, ' b']) -> Int[np.ndarray, 'b 3 L']:
    """Local rows of these inputs, i32; -1 pads short histories at the front.

    The user is repeated at every step. An input of -1 is all padding.
    """
    which = inputs >> 1
    back = np.arange(-self.steps, 1)
    places = self.points.candidates[which][:, None] + back
    there = (-back <= self.points.history[which][:, None]) & (
      inputs[:, None] >= 0
    )
    found = self.rows[:, np.maximum(places, 0)]
    out = np.where(there, found, -1).transpose(1, 0, 2)
    drawn = np.flatnonzero((inputs & 1) & (inputs >= 0))
    out[drawn, 1:, -1] = self.negatives[:, which[drawn]].T
    return np.ascontiguousarray(out)

  def labels(self, inputs: Int[np.ndarray, ' b']) -> Float[np.ndarray, ' b']:
    """1.0 for what the user did, 0.0 for what was drawn; f32."""
    return (inputs % 2 == 0).astype(np.float32)

  def dense(self, count: int) -> Float[np.ndarray, 'b L']:
    """The place of every step in its series, 0 to 1 - 1/L, as in TBSM's code.

    The same for each of `count` inputs; f32.
    """
    length = self.steps + 1
    places = np.arange(length, dtype=np.float32) / np.float32(length)
    return np.tile(places, (count, 1))


class SeriesBatches:
  """Batches of series, cut as they are asked for; a `BatchSource`."""

  def __init__(
    self,
    series: Series,
    table_rows: tuple[int, ...],
    batch_size: int,
    *,
    shuffle_seed: int | None = None,
    epochs: int | None = None,
    pad_remainder: bool = False,
  ):
    """Batches of `batch_size` inputs of `series`; see `ColumnBatches`.

    Args:
      series: the points, and the log they are of.
      table_rows: R of the three tables.
      batch_size: B.
      shuffle_seed: seed of the order of each epoch; None keeps the order.
      epochs: passes over the inputs before the source ends; None is endless.
      pad_remainder: pad the last batch of an epoch rather than drop it.

    Raises:
      UserError: too few inputs for a single batch.
    """
    self._series, self._table_rows = series, table_rows
    inputs = np.arange(2 * len(series.points.candidates))
    # What is shuffled and padded are the inputs' numbers.
    numbers = Columns(
      np.empty((len(inputs), 0), np.float32),
      inputs[:, None],
      series.labels(inputs),
    )
    self._numbers = ColumnBatches(
      numbers,
      batch_size,
      shuffle_seed=shuffle_seed,
      epochs=epochs,
      pad_remainder=pad_remainder,
    )
    points = series.points
    self._fingerprint = checksum(
      [self._numbers.get_state()['order'], table_rows, series.steps],
      [points.candidates, points.history, series.negatives.T, series.rows.T],
    )

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    batch = next(self._numbers)
    local = self._series.lookups(batch.lookups[:, 0])
    return batch._replace(
      dense=self._series.dense(len(local)),
      lookups=global_rows(local, self._table_rows),
    )

  @property
  def endless(self) -> bool:
    """Whether epochs never end."""
    return self._numbers.endless

  def get_state(self) -> dict[str, int]:
    """Batches delivered since the start, and a checksum of their order."""
    return self._numbers.get_state() | {'order': self._fingerprint}

  def set_state(self, state: dict[str, int]) -> None:
    """Continues after the batches that `state` counts.

    Raises:
      UserError: it is of other data or of another order.
    """
    reads = f'{len(self._series.points.candidates)} points of a log'
    delivered = delivered_of(state, self._fingerprint, reads)
    self._numbers.set_state(
      self._numbers.get_state() | {'delivered': delivered}
    )

  def close(self) -> None:
    """Nothing to give back."""
