"""Makes the parts of a trainer from its first source or from a checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import os
from typing import Any, TypeVar

import numpy as np

from slipstream_jax.api.given import given_vectors, vectors_for
from slipstream_jax.checkpoint.checkpoint import Checkpoints, Position
from slipstream_jax.checkpoint.state import Facts, facts_of
from slipstream_jax.data.interrupts import held, TurnLock
from slipstream_jax.data.profile import row_uses, spread
from slipstream_jax.data.source import (
  BatchSource,
  bound_in_order,
  bound_to,
  CheckpointableIterator,
  ColumnNames,
  SourceWrapper,
)
from slipstream_jax.engine.drawing import draws_of
from slipstream_jax.engine.planner import Slices
from slipstream_jax.errors import check_optimizer, choose, UserError
from slipstream_jax.inputs.arrays import PackedExamples, UnboundExamples
from slipstream_jax.inputs.batches import batches
from slipstream_jax.models.losses import check_losses
from slipstream_jax.placement import Placement
from slipstream_jax.placement.fixed import STREAMED
from slipstream_jax.selection.hot import hot_rows, popular_rows
from slipstream_jax.store.base import Storage
from slipstream_jax.tables import TableSet
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.evaluate import frozen_vocabularies
from slipstream_jax.training.recipe import Recipe, WATCHED
from slipstream_jax.training.trainer_parts import (
  make_parts,
  start_watch,
  TrainerParts,
)
from slipstream_jax.transforms.weights import weight_aware
from slipstream_jax.types import HotRows
from slipstream_jax.vocabulary.growing import GrowingVocabulary
from slipstream_jax.vocabulary.growing import Position as VocabularyState

T = TypeVar('T')

Source = (
  UnboundExamples
  | CheckpointableIterator
  | Iterable[Any]
  | Callable[[], Iterable[Any]]
)
"""A source from `batches`, or of batches in global rows, or what `batches`
takes as its only argument."""

Dense = tuple[int, dict[str, int | None] | None]
"""I, columns of `Batch.dense`, and their widths by name, as in `Recipe`."""

_PROFILED = 1 << 21  # examples that show which rows are popular


class Maker:
  """Makes the parts of a trainer when its first source comes.

  Attributes:
    parts: the trainer's parts, None until then.
    turns: the turns of the parts, also before they exist.
  """

  def __init__(
    self,
    recipe: Recipe,
    placements: tuple[Placement, ...],
    hot_bytes: int,
    seed: int,
    storage: Storage,
    over: Slices | None,
  ) -> None:
    """Makes nothing yet. Arguments are those of `Trainer` and `make_parts`.

    Raises:
      UserError: something else in the place of an optimizer or a loss, or
        `watched` is not one of `WATCHED`.
    """
    check_optimizer(recipe.row_optimizer, 'Trainer, row_optimizer')
    check_optimizer(recipe.dense_optimizer, 'Trainer, dense_optimizer')
    choose(WATCHED, recipe.watched, 'Trainer, watched')
    check_losses(recipe.loss, 'Trainer, loss')
    draws_of(recipe.tables)  # checks the functions
    self.parts: TrainerParts | None = None
    self._recipe, self._placements = _weight_aware(recipe), placements
    self._hot_bytes, self._seed, self._storage = hot_bytes, seed, storage
    self._over = over
    self.turns, self._look = TurnLock(), Preview()
    self._opened: list[tuple[Source, UnboundExamples | BatchSource]] = []

  def bind(self, source: Source, needs_hot: bool) -> BatchSource:
    """Returns batches to train on, and makes the parts if there are none.

    Args:
      source: the user's object.
      needs_hot: whether to choose hot rows if there are none.

    Raises:
      UserError: the source cannot be trained on. Nothing has changed.
    """
    return self.turns.run(lambda: self._bind(source, needs_hot, trains=True))

  @property
  def learned(self) -> tuple[ColumnNames, int]:
    """Names of dense features and labels, and examples seen so far."""
    if self.parts is None:
      return ColumnNames(), 0
    return self.parts.names, self.parts.engine.counters.examples_seen

  def score(
    self, source: Source, call: Callable[[TrainerParts, BatchSource], T]
  ) -> T:
    """Calls `call` with the parts and the batches of a source to score.

    If that fails, the trainer forgets the names of the source.

    Raises:
      UserError: the source cannot be scored.
    """

    def scored() -> T:
      names, _ = self.learned
      try:
        bound = self._bind(source, needs_hot=False, trains=False)
        assert self.parts is not None
        return call(self.parts, bound)
      except Exception:
        if self.parts is not None:
          self.parts.names = names
        raise

    return self.turns.run(scored)

  def _bind(self, source: Source, needs_hot: bool, trains: bool) -> BatchSource:
    """Binds a source, to train on, or to score in order without growth."""
    unbound, tables = self.open(source, trains), self._recipe.tables
    programs = compiled_of(self._recipe)
    # Parts that were restored without hot rows get those of the first source
    # that they are trained on, whatever they score before.
    if trains or self.parts is None:
      needs_hot = needs_hot or any(one.needs_hot for one in self._placements)
      needs_hot = needs_hot or any(programs.judges)
    self._look.set_back()
    dense = dense_of(unbound, self._look) if self.parts is None else None
    grown = {} if self.parts is None else self.parts.grown
    hot = None
    if needs_hot and (self.parts is None or self.parts.engine.hot is None):
      sizes = programs.row_bytes_by_table()
      hot = popular(unbound, tables, self._hot_bytes, sizes, grown, self._look)
    if trains:
      bound = bound_to(unbound, tables)
    else:
      bound = bound_in_order(unbound, tables, frozen_vocabularies(grown))
    # Last of all, so that a source that fails does not shape the trainer.
    if self.parts is None:
      assert dense is not None
      self.parts = self._make(dense, hot, self._placements, unbound)
    elif hot is not None and self.parts.engine.hot is None:
      self.parts.engine.choose_hot(hot, self._placements)
    self.parts.arrange(bound)
    return bound

  def open(self, source: Source, trains: bool) -> UnboundExamples | BatchSource:
    """Opens a source, or returns it as it was opened before.

    So items that were read from an iterator for a failed call are not lost.
    `trains` remembers it, in place of the one before.
    """
    for known, unbound in self._opened:
      if known is source:
        return unbound
    unbound = opened(source)
    if trains:
      old = self._opened
      self._opened = [
        one
        for one in old
        if isinstance(one[1], UnboundExamples) and one[1].in_use
      ]
      self._opened.append((source, unbound))
    return unbound

  def last_trained(self) -> UnboundExamples | BatchSource | None:
    """Returns the source that was last opened to train on."""
    return self._opened[-1][1] if self._opened else None

  def set_rows(
    self, table: str, ids: Any, values: Any, source: Source | None
  ) -> None:
    """Sets rows of a table. Arguments and errors are as in `Trainer`."""

    def put() -> None:
      given = self.last_trained()
      if source is not None:
        if self.parts is None:
          self._bind(source, needs_hot=False, trains=True)
        given = self.open(source, trains=False)
      if given is None or self.parts is None:
        raise UserError(
          'a source must say which id has which row',
          got='none that was trained since the trainer was made',
          where='Trainer.set_rows, source',
          hint='give one with the same vocabularies',
        )
      parts = self.parts
      parts.check_consistent()
      tables, grown = parts.recipe.tables, parts.grown
      rows, vectors = vectors_for(tables, table, ids, values, given, grown)
      with held(), parts.changing('a change of rows'):
        parts.set_rows(table, rows, vectors)

    self.turns.run(put)

  def restore(
    self, path: str | os.PathLike[str], step: int | None = None
  ) -> Position:
    """Replaces the parts by those of a checkpoint, and returns its position.

    Arguments are those of `Trainer.restore`.

    Raises:
      UserError: as `Checkpoints.restore`, or the facts are damaged. The parts
        have not changed.
    """
    with contextlib.closing(Checkpoints(path)) as checkpoints:
      facts, parts = checkpoints.facts(step), self.parts
      if parts is None or not _same(facts_of(parts), facts):
        parts = self._of_facts(facts)
      watches = parts.state.watch
      if not facts.watched:
        parts.state = parts.state._replace(watch=None)
      elif watches is None:
        start_watch(parts)
      try:
        position = checkpoints.restore(parts, step=step)
      except BaseException:
        parts.state = parts.state._replace(watch=watches)
        raise
    if not facts.watched:
      parts.engine.freeze(None)
    self.parts = parts
    return position

  def _of_facts(self, facts: Facts) -> TrainerParts:
    """Returns new parts for a checkpoint with these facts.

    A placement that needs hot rows keeps its rows on the host if the checkpoint
    has none, until `bind` chooses some.
    """
    dense = facts.dense_features, facts.dense_columns
    if facts.hot is not None:
      hot = hot_rows(facts.hot, self._recipe.tables.num_rows)
      return self._make(dense, hot, self._placements, None)
    placements = (
      STREAMED if one.needs_hot else one for one in self._placements
    )
    return self._make(dense, None, tuple(placements), None)

  def _make(
    self,
    dense: Dense,
    hot: HotRows | None,
    placements: tuple[Placement, ...],
    source: UnboundExamples | BatchSource | None,
  ) -> TrainerParts:
    """Makes the parts, by the first source if it is not for a checkpoint."""
    features, columns = dense
    recipe = self._recipe._replace(dense_columns=columns)
    parts = make_parts(
      recipe,
      placements,
      features,
      self._seed,
      hot,
      storage=self._storage,
      given=given_vectors(recipe.tables, source),
      over=self._over,
    )
    parts.turns = self.turns
    return parts


def _same(own: Facts, saved: Facts) -> bool:
  """Whether parts with the first facts can hold a checkpoint of the second."""
  columns = own.dense_columns, saved.dense_columns
  # Dicts are equal in any order, but here the order counts.
  one, other = (None if c is None else [*c.items()] for c in columns)
  if own.dense_features != saved.dense_features or one != other:
    return False
  if own.hot is None or saved.hot is None:
    return own.hot is saved.hot
  return np.array_equal(own.hot, saved.hot)


class Preview:
  """Reads ahead in a source and sets it back, even if that fails at first."""

  def __init__(self) -> None:
    """Has read no source."""
    self._source: tuple[BatchSource, dict[str, Any]] | None = None

  @contextlib.contextmanager
  def into(self, source: BatchSource) -> Iterator[None]:
    """Sets the source back to where it is now when the block ends."""
    self._source = source, source.get_state()
    try:
      yield
    finally:
      self.set_back()

  def set_back(self) -> None:
    """Sets back a source that could not be set back before. Idempotent."""
    if self._source is not None:
      source, position = self._source
      source.set_state(position)
      self._source = None


def opened(source: Source) -> UnboundExamples | BatchSource:
  """Returns the source, or the batches of a generator or frame by name.

  Raises:
    UserError: it gives no examples.
  """
  if isinstance(source, UnboundExamples | BatchSource):
    return source
  if isinstance(source, CheckpointableIterator):
    return SourceWrapper(source)
  if isinstance(source, tuple | Mapping | np.ndarray):
    raise UserError(
      'a source must have batches',
      got=f'a {type(source).__name__} of columns',
      where='Trainer, source',
      hint='give slip.batches(dense, ids, clicks, batch_size=1024)',
    )
  return batches(source)


def dense_of(source: UnboundExamples | BatchSource, look: Preview) -> Dense:
  """Returns the dense features. It reads a batch of a source of batches.

  Raises:
    UserError: it has no batch, or cannot be set back to its position.
  """
  if isinstance(source, UnboundExamples):
    form = source.form
    return form.dense_features, form.dense_columns or None
  with look.into(source):
    first = next(source, None)
  if first is None:
    raise UserError(
      'a source must give a batch before its trainer can be made',
      got='none',
      where='Trainer, source',
      hint='make it anew',
    )
  return first.dense.shape[1], None


def popular(
  source: UnboundExamples | BatchSource,
  tables: TableSet,
  budget_bytes: int,
  row_bytes: list[int],
  grown: Mapping[str, VocabularyState],
  look: Preview,
) -> HotRows:
  """Returns the most popular rows that fit into a budget.

  Uses counts of all examples if the source has them, else a sample of 2 M
  examples. They are spread over a pass if the source can be set to any of its
  batches and its vocabularies do not grow. Otherwise they are the first ones.

  Args:
    source: keeps its position. Examples by name are read from their start.
    tables: all tables.
    budget_bytes: device memory for hot rows and their state.
    row_bytes: per table, bytes of a row and its state.
    grown: by table, its growing vocabulary as trained. None is changed.
    look: sets the source back.

  Raises:
    UserError: no row fits, or no example looks one up.
  """
  counts: np.ndarray | None = None

  def copied(table: str, words: GrowingVocabulary) -> GrowingVocabulary:
    return words.copy(grown.get(table))

  bound = bound_to(source, tables, copied)
  # Before an example is lost, as some iterators cannot be set back.
  bound.check_can_go_back()
  with look.into(bound):
    if isinstance(source, PackedExamples):
      counts = source.row_counts()
    if counts is None:
      parts = (batch.lookups for batch in spread(bound, _PROFILED))
      counts = row_uses(parts, tables.num_rows)
  rows = popular_rows(counts, budget_bytes, row_bytes, tables.offsets)
  return hot_rows(rows, tables.num_rows)


def _weight_aware(recipe: Recipe) -> Recipe:
  """Returns the recipe with all optimizers so, those of tables included."""
  tables = {
    name: table
    if table.optimizer is None
    else table._replace(optimizer=weight_aware(table.optimizer))
    for name, table in recipe.tables.tables.items()
  }
  return recipe._replace(
    tables=dataclasses.replace(recipe.tables, tables=tables),
    row_optimizer=weight_aware(recipe.row_optimizer),
    dense_optimizer=weight_aware(recipe.dense_optimizer),
  )
