"""The parts of a trainer, made of what its first source tells."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from slipstream_jax.api.sources import (
  dense_form,
  DenseForm,
  Look,
  opened,
  popular,
  Source,
)
from slipstream_jax.checkpoint.state import Facts
from slipstream_jax.data.interrupts import Turns
from slipstream_jax.data.source import (
  BatchSource,
  bound_in_order,
  bound_to,
  Known,
)
from slipstream_jax.errors import check_optimizer, choose, UserError
from slipstream_jax.inputs.arrays import Unbound
from slipstream_jax.models.losses import check_losses
from slipstream_jax.placement import Placement
from slipstream_jax.placement.fixed import STREAMED
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.store.base import Storage
from slipstream_jax.tables import Feature, Table, TableSet
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.evaluate import frozen_vocabularies
from slipstream_jax.training.parts import make_parts, TrainerParts
from slipstream_jax.training.recipe import Recipe, WATCHED
from slipstream_jax.types import HotRows

T = TypeVar('T')


def table_set(
  tables: Mapping[str, Table] | TableSet,
  features: Mapping[str, Feature] | None,
) -> TableSet:
  """Tables and features as `Trainer` takes them.

  Raises:
    UserError: what they cannot be.
  """
  if not isinstance(tables, TableSet):
    return TableSet(tables, {} if features is None else features)
  if features is not None:
    raise UserError(
      'a table set has its features already',
      got='features beside it',
      where='Trainer, features',
      hint='leave them out, or give tables by name',
    )
  return tables


class Learned(NamedTuple):
  """Facts that a trainer learned from its sources."""

  names: Known
  """Names of dense features and labels."""
  examples: int
  """Examples seen so far."""


class Maker:
  """Makes the parts when they can be made.

  Attributes:
    parts: None until then.
    turns: of the parts, also before there are any.
  """

  def __init__(
    self,
    recipe: Recipe,
    placements: tuple[Placement, ...],
    hot_bytes: int,
    seed: int,
    storage: Storage,
  ) -> None:
    """Makes nothing yet; arguments as of `Trainer`.

    Raises:
      UserError: something else in the place of an optimizer or a loss, or no
        such rows to watch.
    """
    check_optimizer(recipe.row_optimizer, 'Trainer, row_optimizer')
    check_optimizer(recipe.dense_optimizer, 'Trainer, dense_optimizer')
    choose(WATCHED, recipe.watched, 'Trainer, watched')
    check_losses(recipe.loss, 'Trainer, loss')
    self.parts: TrainerParts | None = None
    self._recipe, self._placements = recipe, placements
    self._hot_bytes, self._seed, self._storage = hot_bytes, seed, storage
    self.turns, self._look = Turns(), Look()
    self._opened: list[tuple[Source, Unbound | BatchSource]] = []

  def bind(self, source: Source, needs_hot: bool) -> BatchSource:
    """Returns batches to train on, for which the parts are then ready.

    Args:
      source: as the user holds it.
      needs_hot: whether to choose hot rows if there are none.

    Raises:
      UserError: what cannot be trained on; nothing has changed.
    """
    return self.turns.run(lambda: self._bind(source, needs_hot, trains=True))

  def learned(self) -> Learned:
    """Returns the facts learned so far."""
    if self.parts is None:
      return Learned(Known(), 0)
    seen = self.parts.engine.counters.examples_seen
    return Learned(self.parts.names, seen)

  def has_learned_only_names(self, before: Learned) -> bool:
    """Whether names were learned since, but nothing was trained."""
    now = self.learned()
    return now.examples == before.examples and now.names != before.names

  def score(
    self, source: Source, call: Callable[[TrainerParts, BatchSource], T]
  ) -> T:
    """Calls what scores the batches of a source, in its turn.

    If that fails, the names of the source are forgotten.

    Raises:
      UserError: what cannot be scored.
    """

    def scored() -> T:
      before = self.learned()
      try:
        bound = self._bind(source, needs_hot=False, trains=False)
        assert self.parts is not None
        return call(self.parts, bound)
      except Exception:
        if self.parts is not None:
          self.parts.names = before.names
        raise

    return self.turns.run(scored)

  def _bind(self, given: Source, needs_hot: bool, trains: bool) -> BatchSource:
    # To score, vocabularies are frozen, and examples by name come in the order
    # in which they were given.
    source, tables = self._open(given, trains), self._recipe.tables
    programs = compiled_of(self._recipe)
    # Parts that were restored without hot rows get those of the first source
    # that they are trained on, whatever they score before.
    if trains or self.parts is None:
      needs_hot = needs_hot or any(one.needs_hot for one in self._placements)
      needs_hot = needs_hot or any(programs.judges)
    self._look.set_back()
    form = dense_form(source, self._look) if self.parts is None else None
    grown = {} if self.parts is None else self.parts.grown
    hot = None
    if needs_hot and (self.parts is None or self.parts.engine.hot is None):
      sizes = programs.hot_row_bytes_by_table
      hot = popular(source, tables, self._hot_bytes, sizes, grown, self._look)
    if trains:
      bound = bound_to(source, tables)
    else:
      bound = bound_in_order(source, tables, frozen_vocabularies(grown))
    # Last of all, so that a source that fails does not shape the trainer.
    if self.parts is None:
      assert form is not None
      self.parts = self._make(form, hot, self._placements)
    elif hot is not None and self.parts.engine.hot is None:
      self.parts.engine.choose_hot(hot, self._placements)
    self.parts.arrange(bound)
    return bound

  def _open(self, source: Source, trains: bool) -> Unbound | BatchSource:
    """Opens a source, or returns it as it was opened before.

    What was read of an iterator for a call that failed is then not lost.
    """
    for known, batches in self._opened:
      if known is source:
        return batches
    batches = opened(source)
    if trains:
      old = self._opened
      self._opened = [
        one for one in old if isinstance(one[1], Unbound) and one[1].in_use
      ]
      self._opened.append((source, batches))
    return batches

  def last_trained(self) -> Unbound | BatchSource | None:
    """Returns the source that was last opened to train on."""
    return self._opened[-1][1] if self._opened else None

  def of_facts(self, facts: Facts) -> TrainerParts:
    """Parts as those that a checkpoint is of; `parts` stays.

    A checkpoint without hot rows does not say what a placement keeps that needs
    them. Its rows stay on the host until `bind` chooses some.

    Raises:
      UserError: they do not fit model or tables.
    """
    form = DenseForm(facts.dense_features, facts.dense_columns)
    if facts.hot is not None:
      hot = hot_rows(facts.hot, self._recipe.tables.num_rows)
      return self._make(form, hot, self._placements)
    placements = (
      STREAMED if one.needs_hot else one for one in self._placements
    )
    return self._make(form, None, tuple(placements))

  def _make(
    self,
    dense: DenseForm,
    hot: HotRows | None,
    placements: tuple[Placement, ...],
  ) -> TrainerParts:
    parts = make_parts(
      self._recipe._replace(dense_columns=dense.columns),
      placements,
      dense.features,
      self._seed,
      hot,
      storage=self._storage,
    )
    parts.turns = self.turns
    return parts
