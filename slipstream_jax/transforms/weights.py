"""Lets optimizers that forget a gradient's scale feel the examples' weights."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def weight_aware(
  inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Wraps a chain for examples that were kept with chance p and weigh w = 1/p.

  An example of weight w stands for w examples. Its gradient is w times as
  large, but Adagrad, Adam and their kin divide by gradients seen, and so by w
  again: a row that is rarely looked up moves as if nothing had been left out.
  Here the chain sees the gradient over sqrt(w), and its update is multiplied by
  sqrt(w). A sum of squares then grows by w g^2, as w examples would have grown
  it, and the update by sqrt(w), as the sum of 1/sqrt(k) over w updates does
  (for Adam: the square root scaling rule, Malladi et al., arXiv 2205.10287).
  Of SGD the factors cancel; weights of 1 change nothing but rounding.

  Args:
    inner: any chain.

  Returns:
    The chain, whose `update` takes the extra argument `example_weight`: the
    mean weight of the examples behind the gradient, f32[], or f32[U] for
    leaves [U, ...]. Where it is 0, no example is behind the gradient, and it
    is taken as 1. Other extra arguments are passed on.
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
    shrunk = jax.tree.map(lambda g: g / _beside(root, g), updates)
    updates, state = inner.update(shrunk, state, params, **extra_args)
    return jax.tree.map(lambda u: u * _beside(root, u), updates), state

  return optax.GradientTransformationExtraArgs(inner.init, update)


def _beside(root: jax.Array, leaf: jax.Array) -> jax.Array:
  """The root f32[] or f32[U], shaped and typed for a leaf [U, ...]."""
  shape = root.shape + (1,) * (leaf.ndim - root.ndim if root.ndim else 0)
  return root.reshape(shape).astype(leaf.dtype)
