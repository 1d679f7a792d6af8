"""A step whose loss or gradients are not finite, as if it had not been taken.

Parameters, rows, row state and all else stay to the bit; only steps are counted
on, so that what follows draws as it would have.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from slipstream_jax.training.recipe import TrainState


def is_good(loss: Float[jax.Array, ''], *changes: Any) -> Bool[jax.Array, '']:
  """Whether the loss is finite, and every element of these trees."""
  leaves = [
    leaf
    for leaf in jax.tree.leaves(changes)
    if jnp.issubdtype(leaf.dtype, jnp.floating)
  ]
  good = jnp.isfinite(loss)
  for leaf in leaves:
    good &= jnp.isfinite(leaf).all()
  return good


def state_if(
  good: Bool[jax.Array, ''], new: TrainState, old: TrainState
) -> TrainState:
  """The new state, or else the old one, a step later."""

  def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(good, new, old)

  state: TrainState = jax.tree.map(chosen, new, old._replace(step=new.step))
  return state


def loss_if(
  good: Bool[jax.Array, ''], loss: Float[jax.Array, '']
) -> Float[jax.Array, '']:
  """The loss; not finite where the step was none, whatever the loss was."""
  return jnp.where(good | ~jnp.isfinite(loss), loss, jnp.nan)
