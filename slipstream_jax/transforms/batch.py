"""Learning rates that follow the data rather than the steps.

Skipping takes fewer steps over the same data, each for more inputs. Both
transformations here take what the step tells every dense chain as extra
arguments; in a run that skips nothing they change no bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def scale_by_data_seen(
  schedule: optax.Schedule,
) -> optax.GradientTransformationExtraArgs:
  """Scales updates by a schedule of the batches read from the source.

  `optax.scale_by_schedule` counts steps; where inputs are left out it would
  stop short of its end.

  Args:
    schedule: batches read so far, f32[], to a factor.

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
    return _scaled(updates, schedule(batches_seen)), state

  return optax.GradientTransformationExtraArgs(_init, update)


def scale_by_mean_weight() -> optax.GradientTransformationExtraArgs:
  """Scales updates by the mean weight of the batch's inputs.

  Of inputs that were kept with probability p and weigh 1/p, a batch stands
  for 1/p times as many. With SGD the weights in the loss make the step that
  much longer; Adam and its kin forget the gradient's scale, so the step is
  scaled here (the linear scaling rule, Goyal et al., arXiv 1706.02677).

  Returns:
    A stateless transformation whose `update` takes `mean_weight`, f32[].
  """

  def update(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
    *,
    mean_weight: Any,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    del params, extra_args
    return _scaled(updates, mean_weight), state

  return optax.GradientTransformationExtraArgs(_init, update)


def _init(params: optax.Params) -> optax.EmptyState:
  del params
  return optax.EmptyState()


def _scaled(updates: optax.Updates, factor: Any) -> optax.Updates:
  return jax.tree.map(
    lambda u: u * jnp.asarray(factor).astype(u.dtype), updates
  )
