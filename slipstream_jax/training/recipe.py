"""What training is made of: a recipe that never changes, a state that does."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, Literal, NamedTuple

import jax
from jaxtyping import Int, UInt32
import optax

from slipstream_jax.errors import choose
from slipstream_jax.models.losses import LossFn
from slipstream_jax.tables import Group, TableSet
from slipstream_jax.training.watch import Watches
from slipstream_jax.transforms.entries import Entries
from slipstream_jax.transforms.row_state import (
  check_entries,
  row_state_layout,
  RowStateLayout,
)

Watched = Literal['hot', 'all']
"""Rows that `skip_stale` in a chain judges."""
WATCHED: tuple[Watched, ...] = get_args(Watched)


class Recipe(NamedTuple):
  """Everything about training that stays the same from step to step."""

  model: Any
  """A Flax module, linen or nnx, or `Functions`. Called as model(dense,
  embeddings) -> f32[B], or f32[B, T] of T heads, with embeddings by feature
  name, f32[B, D] or, not pooled, f32[B, L, D], and with those keywords that it
  names: `train` (bool), `weights` (f32[B], each example's weight in the loss;
  all 1 where there is no loss), `real` (bool[B, L] by feature name, which
  lookups are no padding) and `rng` (a key for this step; None outside
  training). One whose first argument is `embeddings` gets no dense features,
  unless it names `dense`. Dropout's key is made of the seed and the step."""
  tables: TableSet
  """The tables whose rows the model's embeddings are."""
  row_optimizer: optax.GradientTransformation
  """Any chain, for the rows of all tables that have none of their own; sees the
  batch's unique rows f32[U, D] of a group, whatever dtype the tables keep. Both
  chains may take `batches_seen`, `example_weight` and `value` (the loss)."""
  dense_optimizer: optax.GradientTransformation
  """Any chain; sees the model's parameters."""
  loss: LossFn | Sequence[LossFn] = optax.sigmoid_binary_cross_entropy
  """Per example; weighted and averaged over the batch by the step. Of T heads
  that of each head, or one for all; an example's loss is their sum."""
  loss_weights: Sequence[float] | None = None
  """Factor of each head's loss in that sum; None: all 1."""
  dense_columns: Mapping[str, int | None] | None = None
  """Names of the dense features in the order of `Batch.dense`: the model gets
  them by name, f32[B, width], or f32[B] where the width is None. None: it gets
  one array f32[B, I]."""
  microbatches: int = 1
  """Equal parts of a batch whose gradients are summed one after the other, for
  less memory: one update is made of them. The model's state goes through them
  in order."""
  watched: Watched = 'hot'
  """Rows that `skip_stale` in a chain judges. 'hot': what it knows of the hot
  rows stays on the device, and a row that it finds stale is left out of steps
  until the next window: the optimizer state before it stands still, too, and
  nothing of it moves. 'all': of every row, which then travels with the row;
  stale rows get an update of zero, as in memory."""
  skips_bad_steps: bool = False
  """Whether a step whose loss or gradients are not finite changes nothing, and
  its record has a loss that is not; else training ends there."""

  def optimizer_of(self, group: Group) -> optax.GradientTransformation:
    """The chain that trains the rows of the group."""
    if group.optimizer is None:
      return self.row_optimizer
    own: optax.GradientTransformation = group.optimizer
    return own

  def layout(self, group: Group) -> RowStateLayout:
    """How that chain's state splits between rows and device.

    Raises:
      UserError: it does not, or `skip_stale` is where it cannot watch hot rows.
    """
    optimizer, where = self.optimizer_of(group), self.where(group)
    layout = row_state_layout(optimizer, group.dim, where)
    if layout.skips and self.watched == 'hot':
      check_entries(layout, where)
    return layout

  def where(self, group: Group) -> str:
    """The argument that the group's chain comes from."""
    if group.optimizer is None:
      return 'Trainer, row_optimizer'
    return f'Table {group.tables[0]!r}, optimizer'


class TrainState(NamedTuple):
  """What changes from step to step and stays on the device."""

  step: Int[jax.Array, '']
  """Steps taken, i32."""
  params: Any
  """The model's parameters: what is trained."""
  model_state: dict[str, Any]
  """What else it holds, e.g. 'batch_stats'; {} if nothing."""
  dense_state: optax.OptState
  """State of the dense optimizer."""
  row_globals: tuple[tuple[jax.Array, ...], ...]
  """Per group, leaves of the row optimizer's state without a row axis."""
  rng: UInt32[jax.Array, ' words']
  """What dropout draws from, with the step; it never changes."""
  watch: Watches | None = None
  """Per group, of its hot rows, where a schedule depends on how far they
  move."""
  entries: tuple[Entries | None, ...] = ()
  """Per group, of its hot rows what `skip_stale` knows of them; None where it
  is not in the chain. Empty where it is in none, or all rows are watched."""

  @property
  def variables(self) -> dict[str, Any]:
    """All that the model holds."""
    return {**self.model_state, 'params': self.params}


def check_watched(watched: object, where: str) -> None:
  """Looks whether there are such rows to watch.

  Raises:
    UserError: there are not.
  """
  choose(dict.fromkeys(WATCHED), watched, where)
