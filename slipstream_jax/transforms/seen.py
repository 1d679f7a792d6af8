"""Learning rates that follow the data read rather than the steps."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def scale_by_data_seen(
  schedule: optax.Schedule,
) -> optax.GradientTransformationExtraArgs:
  """Scales updates by a schedule of the batches read from the source.

  `optax.scale_by_schedule` counts steps, so it would not reach its end where
  examples are dropped.

  Args:
    schedule: maps the batches read so far, f32[], to a factor.

  Returns:
    A stateless transformation whose `update` takes `batches_seen`, f32[].
  """

  def update(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
    *,
    batches_seen: Any,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    del params, extra_args
    factor = jnp.asarray(schedule(batches_seen))
    # Cast, as an f32 factor would widen updates of half precision.
    scaled = jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
    return scaled, state

  def init(params: optax.Params) -> optax.EmptyState:
    del params
    return optax.EmptyState()

  return optax.GradientTransformationExtraArgs(init, update)
