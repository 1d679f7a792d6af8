"""Batches of a packed folder, for a trainer of the tables it was packed for."""

from collections.abc import Callable
import copy
from typing import Any, cast

from jaxtyping import Integer
import numpy as np

from slipstream_jax.data.numbered import batches_of
from slipstream_jax.data.source import (
  BatchSource,
  Dataset,
  Forwarded,
  Known,
  Widths,
)
from slipstream_jax.errors import UserError
from slipstream_jax.files import Path
from slipstream_jax.inputs.growing import Replace
from slipstream_jax.inputs.known import completed, Order, order_of
from slipstream_jax.inputs.sources import Cut, Form, Unbound, WHERE
from slipstream_jax.packed.dataset import packed_dataset
from slipstream_jax.tables import TableSet
from slipstream_jax.types import Batch


class PackedExamples(Unbound):
  """Examples of one split of a packed folder."""

  def __init__(self, folder: Path, split: str, cut: Cut) -> None:
    """Opens the folder; the split to train on is 'train'.

    Raises:
      UserError: it is not finished, or has no such split; or arguments out of
        range.
    """
    cut.check()
    held_out = 'test' if split == 'train' else split
    self._folder, self._split, self._cut = str(folder), split, cut
    self._dataset: Dataset = packed_dataset(
      folder, shuffle_seed=cut.seed, test_split=held_out
    )

  @property
  def folder(self) -> str:
    """The folder."""
    return self._folder

  @property
  def dataset(self) -> Dataset:
    """The folder as a data set."""
    return self._dataset

  @property
  def form(self) -> Form:
    """What a model must know of the examples."""
    names = self._dataset.names
    dense, labels = (dict.fromkeys(columns) for columns in names)
    known = Known(dense, labels)
    heads = self._dataset.heads
    return Form(self._dataset.dense_features, {}, True, heads, known)

  @property
  def endless(self) -> bool:
    """Whether the batches never end."""
    return self._cut.epochs is None

  def in_order(self) -> 'PackedExamples':
    """The same examples in the order of the folder."""
    same = copy.copy(self)
    same._cut = self._cut.in_order()
    return same

  def row_counts(self) -> Integer[np.ndarray, ' N'] | None:
    """Uses of each row by the examples to train on; None of another split."""
    counts = self._dataset.counts
    return counts() if counts and self._split == 'train' else None

  def bind(
    self, tables: TableSet, replace: Replace | None = None
  ) -> BatchSource:
    """Returns batches of the examples, from the start.

    A folder has no growing vocabularies, so `replace` is not called.

    Raises:
      UserError: the tables or features are not those that were packed.
    """
    del replace
    sizes = {name: table.rows for name, table in tables.tables.items()}
    _check_same('tables', sizes, dict(self._dataset.sizes), self._folder)
    lengths, packed = (
      {name: (f.table, f.max_length) for name, f in features.items()}
      for features in (tables.features, self._dataset.features)
    )
    _check_same('features', lengths, packed, self._folder)
    size, seed, epochs, pad = self._cut
    batches_of(epochs, 1, WHERE)
    # Both are of `PackedBatches`, which takes these as well.
    how = {'epochs': epochs, 'remainder': 'pad' if pad else 'drop'}
    if self._split == 'train':
      how['shuffle_seed'] = seed
    make = self._dataset.train if self._split == 'train' else self._dataset.test
    batches = cast(Callable[..., BatchSource], make)(size, **how)
    if not any(self._dataset.names):
      return batches
    return PackedByName(batches, self.form.names, self._folder)


class PackedByName(Forwarded):
  """Batches of a folder whose columns have names."""

  def __init__(self, source: BatchSource, names: Known, folder: str) -> None:
    """Takes over `source`, whose columns have these names."""
    super().__init__(source)
    self._names, self._folder = names, folder
    self.batches_per_epoch = source.batches_per_epoch
    self._dense: Order | None = None
    self._labels: Order | None = None

  def arrange(self, known: Known, widths: Widths) -> Known:
    """As `BatchSource.arrange`."""
    known = completed(known, self._names, widths)
    dense, labels = self._names
    where = f'{WHERE}, data, {self._folder}'
    orders = (
      order_of(known.dense, dense, 'dense feature', where),
      order_of(known.labels, labels, 'label', where),
    )
    self._dense, self._labels = orders
    return known

  def __next__(self) -> Batch:
    batch = super().__next__()
    if self._dense is not None:
      batch = batch._replace(dense=batch.dense[:, self._dense])
    if self._labels is not None and batch.labels is not None:
      batch = batch._replace(labels=batch.labels[:, self._labels])
    return batch


def _check_same(
  what: str, given: dict[str, Any], packed: dict[str, Any], folder: str
) -> None:
  if [*given.items()] != [*packed.items()]:
    raise UserError(
      f'the {what} must be those of {folder}, in their order: {packed}',
      got=given,
      where=f'{WHERE}, data',
      hint='make them by its sizes, rows of unknown ids included',
    )
