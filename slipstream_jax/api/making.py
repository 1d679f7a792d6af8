"""The parts of a trainer, made of what its first source tells."""

from slipstream_jax.api.sources import (
  dense_form,
  DenseForm,
  opened,
  popular,
  Source,
)
from slipstream_jax.data.base import BatchSource
from slipstream_jax.named.sources import Unbound
from slipstream_jax.placement import Placement
from slipstream_jax.saving.facts import Facts
from slipstream_jax.selection.hot import hot_rows
from slipstream_jax.training.compiled import compiled_of
from slipstream_jax.training.parts import make_parts, TrainerParts
from slipstream_jax.training.recipe import check_watched, Recipe
from slipstream_jax.types import HotRows


class Maker:
  """Makes the parts when they can be made.

  Attributes:
    parts: None until then.
  """

  def __init__(
    self,
    recipe: Recipe,
    placements: tuple[Placement, ...],
    hot_bytes: int,
    seed: int,
  ) -> None:
    """Makes nothing yet; arguments as of `Trainer`.

    Raises:
      UserError: there are no such rows to watch.
    """
    check_watched(recipe.watched, 'Trainer, watched')
    self.parts: TrainerParts | None = None
    self._recipe, self._placements = recipe, placements
    self._hot_bytes, self._seed = hot_bytes, seed

  def bind(
    self, source: Source, needs_hot: bool, bound: BatchSource | None = None
  ) -> BatchSource:
    """Batches of the source, for which the parts are then ready.

    Args:
      source: as the user holds it.
      needs_hot: whether hot rows are to be chosen, if there are none.
      bound: what it was bound to before, if that is to go on.

    Raises:
      UserError: what cannot be trained on; nothing has changed.
    """
    source, tables = opened(source), self._recipe.tables
    programs = compiled_of(self._recipe)
    needs_hot = needs_hot or any(one.needs_hot for one in self._placements)
    needs_hot = needs_hot or any(programs.judges)
    form = dense_form(source) if self.parts is None else None
    hot = None
    if needs_hot and (self.parts is None or self.parts.engine.hot is None):
      hot = popular(
        source, tables, self._hot_bytes, programs.hot_row_bytes_by_table
      )
    if bound is None:
      bound = source.bind(tables) if isinstance(source, Unbound) else source
    # Last of all, so that a source that fails does not shape the trainer.
    if form is not None:
      self.parts = self._make(form, hot)
    elif hot is not None:
      assert self.parts is not None
      self.parts.engine.choose_hot(hot)
    return bound

  def of_facts(self, facts: Facts) -> TrainerParts:
    """Parts as those that a checkpoint is of; `parts` stays.

    Raises:
      UserError: they do not fit model or tables.
    """
    hot = facts.hot
    return self._make(
      DenseForm(facts.dense_features, facts.dense_columns),
      None if hot is None else hot_rows(hot, self._recipe.tables.num_rows),
    )

  def _make(self, dense: DenseForm, hot: HotRows | None) -> TrainerParts:
    return make_parts(
      self._recipe._replace(dense_columns=dense.columns),
      self._placements,
      dense.features,
      self._seed,
      hot,
    )
