"""Turns ids into bags of ids, as MLPerf's DLRM-DCNv2 makes its data.

No public click log has bags. So that benchmark replaces each row by a bag: the
row itself, and others of its table that are drawn once for each row, uniformly.
The same row always has the same bag. Here a draw is a hash of the feature, the
row and the place in the bag, so nothing is stored.
"""

from collections.abc import Callable, Sequence

from jaxtyping import Integer
import numpy as np

from slipstream_jax.data.source import BatchSource, Dataset, SourceWrapper
from slipstream_jax.errors import is_whole, UserError
from slipstream_jax.hashing import mix, salt
from slipstream_jax.tables import tables_of, TableSet
from slipstream_jax.types import Batch


def multi_hot(data: Dataset, lengths: Sequence[int]) -> Dataset:
  """Returns a data set with bags of several lookups, which are summed.

  Args:
    data: a data set with one lookup of each feature.
    lengths: lookups of each feature's bags, in the order of the features.

  Raises:
    UserError: there are not as many lengths as features, one is below 1, or the
      features have bags already.
  """
  before = tables_of(data.sizes, data.features)
  whole = all(is_whole(length, 1, 1 << 16) for length in lengths)
  if len(lengths) != before.num_columns or not whole:
    raise UserError(
      f'there must be a length of at least 1 for each of the'
      f' {before.num_columns} lookups of an example',
      got=list(lengths),
      where='multi_hot, lengths',
      hint='give 1 where one lookup shall stay one',
    )
  features = {
    name: feature._replace(combiner='sum', max_length=length)
    for (name, feature), length in zip(
      data.features.items(), lengths, strict=True
    )
  }
  after = tables_of(data.sizes, features)

  def with_bags(
    source: Callable[[int], BatchSource],
  ) -> Callable[[int], BatchSource]:
    return lambda size: _Bags(source(size), before, after)

  return data._replace(
    features=features,
    train=with_bags(data.train),
    test=with_bags(data.test),
    known=tuple(with_bags(part) for part in data.known),
    profile=data.profile and with_bags(data.profile),
    counts=None,
  )


class _Bags(SourceWrapper):
  """Replaces the lookups of each batch of a source by bags."""

  def __init__(
    self, source: BatchSource, before: TableSet, after: TableSet
  ) -> None:
    """Takes over `source`, whose lookups are of the features `before`."""
    super().__init__(source)
    self.batches_per_epoch = source.batches_per_epoch
    self._before, self._after = before, after

  def __next__(self) -> Batch:
    batch = super().__next__()
    columns = batch.lookups.reshape(len(batch.weights), -1)
    names = self._after.features
    bags = [
      self._bags(name, columns[:, self._before.columns[name].start])
      for name in names
    ]
    rows = np.concatenate(bags, axis=1)
    shape = len(rows), *self._after.example_shape
    return batch._replace(lookups=rows.reshape(shape), lookup_weights=None)

  def _bags(
    self, name: str, rows: Integer[np.ndarray, ' n']
  ) -> Integer[np.ndarray, 'n L']:
    """Returns the bags of global rows. Padding has a bag of padding."""
    feature, column = self._after.features[name], self._before.columns[name]
    first = self._after.first_rows[feature.table]
    count = self._after.tables[feature.table].rows
    places = np.arange(1, feature.max_length, dtype=np.uint64)
    own = mix(rows[:, None].astype(np.uint64) ^ salt(column.start))
    drawn = mix(own + places) % np.uint64(count)
    others = np.where(rows[:, None] < 0, -1, drawn.astype(rows.dtype) + first)
    return np.concatenate([rows[:, None], others.astype(rows.dtype)], axis=1)
