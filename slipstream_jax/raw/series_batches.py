"""Batches of series, cut from a log as they are asked for.

The log is kept as 12 bytes per event; all series at once would take 252 bytes
per input, and one for Taobao has 20 M of them.
"""

from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.data.base import ColumnBatches, Columns
from slipstream_jax.data.numbered import Numbered
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


class SeriesBatches(Numbered):
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
    inputs = np.arange(2 * len(series.points.candidates))
    # What is shuffled and padded are the inputs' numbers.
    numbers = ColumnBatches(
      Columns(
        np.empty((len(inputs), 0), np.float32),
        inputs[:, None],
        series.labels(inputs),
      ),
      batch_size,
      shuffle_seed=shuffle_seed,
      epochs=epochs,
      pad_remainder=pad_remainder,
    )

    def batch_at(number: int) -> Batch:
      batch = numbers.batch_at(number)
      local = series.lookups(batch.lookups[:, 0])
      return batch._replace(
        dense=series.dense(len(local)), lookups=global_rows(local, table_rows)
      )

    points = series.points
    super().__init__(
      batch_at,
      None if epochs is None else epochs * numbers.batches_per_epoch,
      [numbers.get_state()['order'], table_rows, series.steps],
      [points.candidates, points.history, series.negatives.T, series.rows.T],
      reads=f'{len(points.candidates)} points of a log',
    )
