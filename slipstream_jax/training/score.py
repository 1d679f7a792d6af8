"""The loss of held-out examples, by which a schedule may decide."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from slipstream_jax.models.losses import example_losses
from slipstream_jax.training.forward import GroupRows, Inverses, make_forward
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.types import Batch


def make_loss(recipe: Recipe) -> Callable[..., Float[jax.Array, '']]:
  """The weighted mean loss of a batch's examples, not in training."""
  forward = make_forward(recipe)

  def loss(
    params: Any,
    state: dict[str, Any],
    rows: GroupRows,
    inverses: Inverses,
    batch: Batch,
  ) -> Float[jax.Array, '']:
    logits, _ = forward(
      params, state, rows, inverses, batch.dense, batch.lookup_weights
    )
    losses = example_losses(
      recipe.loss, recipe.loss_weights, logits, batch.labels
    )
    return (batch.weights * losses).sum() / jnp.maximum(
      batch.weights.sum(), 1e-9
    )

  return loss
