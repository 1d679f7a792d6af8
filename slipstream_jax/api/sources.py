"""What a trainer learns from a source: how wide it is, and what is popular."""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
from typing import Any, NamedTuple

import numpy as np

from slipstream_jax.data.profile import row_uses, spread
from slipstream_jax.data.source import (
  BatchSource,
  bound_to,
  CheckpointableIterator,
  Forwarded,
)
from slipstream_jax.errors import UserError
from slipstream_jax.inputs.arrays import PackedExamples, Unbound
from slipstream_jax.inputs.batches import batches
from slipstream_jax.inputs.bind import Replace
from slipstream_jax.selection.hot import hot_rows, popular_rows
from slipstream_jax.tables import TableSet
from slipstream_jax.types import HotRows
from slipstream_jax.vocabulary.growing import GrowingVocabulary
from slipstream_jax.vocabulary.history import Position

Source = Unbound | CheckpointableIterator | Iterable[Any]
"""From `batches`; or what gives global rows; or what `batches` takes alone."""

_PROFILED = 1 << 21  # examples that tell which rows are popular


class DenseForm(NamedTuple):
  """Dense features of examples."""

  features: int
  """I, columns of `Batch.dense`."""
  columns: dict[str, int | None] | None
  """As in `Recipe`."""


def opened(source: Source) -> Unbound | BatchSource:
  """A source that can be trained on; generators and frames by name are made so.

  Raises:
    UserError: nothing that gives examples.
  """
  if isinstance(source, Unbound | BatchSource):
    return source
  if isinstance(source, CheckpointableIterator):
    return Forwarded(source)
  return batches(source)


class Look:
  """Reads ahead in sources and sets them back, even if that fails at first."""

  def __init__(self) -> None:
    """Has looked into none."""
    self._looked_into: tuple[BatchSource, dict[str, int]] | None = None

  @contextlib.contextmanager
  def into(self, source: BatchSource) -> Iterator[None]:
    """Sets the source back to where it is now when the block ends."""
    self._looked_into = source, source.get_state()
    try:
      yield
    finally:
      self.set_back()

  def set_back(self) -> None:
    """Sets back a source that could not be set back before; idempotent."""
    if self._looked_into is not None:
      source, position = self._looked_into
      source.set_state(position)
      self._looked_into = None


def dense_form(source: Unbound | BatchSource, look: Look) -> DenseForm:
  """How wide the dense features are; a source of batches is looked into.

  Raises:
    UserError: it has no batch, or cannot be set back to its position.
  """
  if isinstance(source, Unbound):
    form = source.form
    return DenseForm(form.dense_features, form.dense_columns or None)
  with look.into(source):
    first = next(source, None)
  if first is None:
    raise UserError(
      'a source must give a batch before its trainer can be made',
      got='none',
      where='Trainer, source',
      hint='make it anew',
    )
  return DenseForm(first.dense.shape[1], None)


def popular(
  source: Unbound | BatchSource,
  tables: TableSet,
  budget_bytes: int,
  row_bytes: list[int],
  grown: Mapping[str, Position],
  look: Look,
) -> HotRows:
  """The hot rows that fit, by what is known of all examples, or by 2 M of them.

  Those lie all over a pass, where the source can be set to any of its batches
  and its vocabularies do not grow; else they are the first ones.

  Args:
    source: whose position stays; examples by name are read from their start.
    tables: all tables.
    budget_bytes: of the device, for hot rows and their state.
    row_bytes: per table, bytes of a row and its state.
    grown: by table, its growing vocabulary as trained; none is changed.
    look: sets the source back.

  Raises:
    UserError: no row fits, or no example looks one up.
  """
  counts: np.ndarray | None = None
  bound = bound_to(source, tables, _copies(grown))
  # An iterator that cannot be set back says so before an example is lost.
  bound.check_can_go_back()
  with look.into(bound):
    if isinstance(source, PackedExamples):
      counts = source.row_counts()
    if counts is None:
      parts = (batch.lookups for batch in spread(bound, _PROFILED))
      counts = row_uses(parts, tables.num_rows)
  rows = popular_rows(counts, budget_bytes, row_bytes, tables.offsets).rows
  return hot_rows(rows, tables.num_rows)


def _copies(grown: Mapping[str, Position]) -> Replace:
  """Returns what replaces growing vocabularies to look ahead: copies."""

  def copied(table: str, vocabulary: GrowingVocabulary) -> GrowingVocabulary:
    return vocabulary.copy(grown.get(table))

  return copied
