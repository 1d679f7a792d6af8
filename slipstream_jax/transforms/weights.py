"""Transformations for loops that drop examples: their weights, their rates."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def weight_aware(
  inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Wraps a chain for examples that were kept with chance p and weigh w = 1/p.

  An example of weight w counts as w examples. Its gradient is w times as large,
  but Adagrad, Adam and similar optimizers divide by past gradients, which
  cancels w: a row that is rarely looked up moves as if no example had been
  dropped. Here the chain gets the gradient over sqrt(w), and its update is
  multiplied by sqrt(w). A sum of squares then grows by w g^2, as with w
  examples. The update grows by sqrt(w), as the sum of 1/sqrt(k) over w updates
  does (for Adam: the square root scaling rule, Malladi et al., arXiv
  2205.10287). The factors cancel for SGD, and for weights of 1.

  Args:
    inner: any chain.

  Returns:
    The chain, whose `update` takes the extra argument `example_weight`: the
    mean weight of the examples behind the gradient, f32[], or f32[U] for leaves
    [U, ...]. A weight of 0, for rows without examples, is taken as 1.
  """
  inner = optax.with_extra_args_support(inner)

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    *,
    example_weight: Any = 1.0,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    weight = jnp.asarray(example_weight, jnp.float32)
    root = jnp.sqrt(jnp.where(weight > 0, weight, 1))
    shrunk = jax.tree.map(lambda g: g / _broadcast(root, g), updates)
    updates, state = inner.update(shrunk, state, params, **extra_args)
    return jax.tree.map(lambda u: u * _broadcast(root, u), updates), state

  return optax.GradientTransformationExtraArgs(inner.init, update)


def _broadcast(root: jax.Array, leaf: jax.Array) -> jax.Array:
  """Shapes and casts the root f32[] or f32[U] for a leaf [U, ...]."""
  shape = root.shape + (1,) * (leaf.ndim - root.ndim if root.ndim else 0)
  return root.reshape(shape).astype(leaf.dtype)


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
    **_: Any,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    del params
    factor = jnp.asarray(schedule(batches_seen))
    # Cast, as an f32 factor would widen updates of half precision.
    scaled = jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
    return scaled, state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
