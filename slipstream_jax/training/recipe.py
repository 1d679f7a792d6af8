"""A recipe that stays the same during training, and the state that changes."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, Literal, NamedTuple

import jax
from jaxtyping import Int, UInt32
import optax

from slipstream_jax.models.losses import LossFn
from slipstream_jax.tables import Group, TableSet
from slipstream_jax.training.watch import EntriesOfGroups, Watches
from slipstream_jax.transforms.row_state import (
  check_entries,
  row_state_layout,
  RowStateLayout,
)

Watched = Literal['hot', 'all']
"""Rows that `skip_stale` in a chain judges."""
WATCHED: dict[str, None] = dict.fromkeys(get_args(Watched))
"""All values of `Watched`."""


class Recipe(NamedTuple):
  """Model, tables, optimizers and settings of a training run."""

  model: Any
  """A Flax module, linen or nnx, or `Functions`. Called as
  model(dense, embeddings), it returns logits f32[B], or f32[B, T] of T heads.
  Embeddings are by feature name: f32[B, D], or f32[B, L, D] where a feature is
  not pooled. A model whose first argument is `embeddings` gets no dense
  features unless it names `dense`. It also gets these keywords if it names
  them: `train` (bool), `weights` (f32[B], each example's weight in the loss, 1
  outside of training), `real` (bool[B, L] by feature name, False for padding)
  and `rng` (a key for this step, None outside of training). The seed and the
  step give the key of dropout."""
  tables: TableSet
  """The tables that the model's embeddings are looked up in."""
  row_optimizer: optax.GradientTransformation
  """Optimizer of the rows of all tables without their own. It sees a batch's
  unique rows of a group, f32[U, D], in any storage dtype of the tables. Both
  optimizers may take `batches_seen`, `example_weight` and `value`, the loss."""
  dense_optimizer: optax.GradientTransformation
  """Optimizer of the model's parameters."""
  loss: LossFn | Sequence[LossFn] = optax.sigmoid_binary_cross_entropy
  """Loss of each example. The step weights it and takes the mean over the
  batch. For T heads one for each or one for all: their losses are summed."""
  loss_weights: Sequence[float] | None = None
  """Factor of each head's loss in that sum. None: all 1."""
  dense_columns: Mapping[str, int | None] | None = None
  """Names and widths of the dense features in the order of `Batch.dense`. The
  model gets them by name, f32[B, width], or f32[B] if the width is None. None:
  the model gets one array f32[B, I]."""
  microbatches: int = 1
  """Equal parts of a batch whose gradients are computed one after another and
  summed, which saves memory. The model's state passes through them in order."""
  watched: Watched = 'hot'
  """Rows that `skip_stale` in a chain judges. 'hot': hot rows only. What it
  knows of them stays on the device, and steps leave out stale rows until the
  next window, so that optimizer state before it does not change and nothing
  moves. 'all': every row, and stale rows get an update of zero, as in memory.
  All rows must be `resident`, as the entry of each row would move with it."""
  skips_bad_steps: bool = False
  """Whether a step with a loss or gradients that are not finite changes
  nothing, and its record has a loss that is not finite. Otherwise training
  ends there."""

  def optimizer_of(self, group: Group) -> optax.GradientTransformation:
    """Returns the optimizer of the group's rows."""
    if group.optimizer is None:
      return self.row_optimizer
    own: optax.GradientTransformation = group.optimizer
    return own

  def layout(self, group: Group) -> RowStateLayout:
    """Returns how the state of that optimizer splits between rows and device.

    Raises:
      UserError: it cannot be split, or `skip_stale` cannot watch hot rows.
    """
    optimizer, where = self.optimizer_of(group), self.where(group)
    layout = row_state_layout(optimizer, group.dim, where)
    if layout.skips and self.watched == 'hot':
      check_entries(layout, where)
    return layout

  def where(self, group: Group) -> str:
    """Returns the argument that set the group's optimizer, for errors."""
    if group.optimizer is None:
      return 'Trainer, row_optimizer'
    return f'Table {group.tables[0]!r}, optimizer'


class TrainState(NamedTuple):
  """State on the device that changes from step to step."""

  step: Int[jax.Array, '']
  """Steps taken, i32."""
  params: Any
  """Parameters of the model."""
  model_state: dict[str, Any]
  """Other variables of the model, such as 'batch_stats', {} if none."""
  dense_state: optax.OptState
  """State of the dense optimizer."""
  row_globals: tuple[tuple[jax.Array, ...], ...]
  """Per group, leaves of the row optimizer's state without a row axis."""
  rng: UInt32[jax.Array, ' words']
  """Data of the key that dropout derives its keys from, constant."""
  watch: Watches | None = None
  """Per group, the watch over its hot rows. None where no schedule compares
  rows."""
  entries: EntriesOfGroups = ()
  """Per group, the entries of `skip_stale` of its hot rows. None if it is not
  in the group's chain. Empty if it is in none, or all rows are watched."""

  @property
  def variables(self) -> dict[str, Any]:
    """All variables of the model."""
    return {**self.model_state, 'params': self.params}
