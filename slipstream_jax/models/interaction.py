"""The dot interaction of DLRM (arXiv 1906.00091, section 2.1.3)."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np


@functools.cache
def _pairs(vectors: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the flat places of pairs j < i in a [V, V] matrix, and the inverse.

  Returns:
    The flat place of each pair, i32[P], and the pair at each place, i32[V * V],
    which is P on the diagonal.
  """
  i, j = np.tril_indices(vectors, -1)
  pair = np.full((vectors, vectors), len(i), np.int32)
  pair[i, j] = pair[j, i] = np.arange(len(i))
  return (i * vectors + j).astype(np.int32), pair.reshape(-1)


@jax.custom_vjp
def dot_interaction(
  vectors: Float[jax.Array, 'B V D'],
) -> Float[jax.Array, 'B P']:
  """Computes dot products of all P = V (V - 1) / 2 pairs of vectors.

  Pairs (i, j), j < i, run in the order of `np.tril_indices(V, -1)`. The
  gradient is written by hand: (S + S^T) T, with S the pairs' gradients. The
  derived one scatters into [B, V, V], which XLA does one element at a time on a
  CPU.

  Args:
    vectors: any float dtype up to f32.

  Returns:
    The products, f32.
  """
  places, _ = _pairs(vectors.shape[1])
  products = jnp.einsum(
    'bvd,bwd->bvw', vectors, vectors, preferred_element_type=jnp.float32
  )
  return products.reshape(len(vectors), -1)[:, places]


def _forward(
  vectors: Float[jax.Array, 'B V D'],
) -> tuple[Float[jax.Array, 'B P'], Float[jax.Array, 'B V D']]:
  return dot_interaction(vectors), vectors


def _backward(
  vectors: Float[jax.Array, 'B V D'], gradient: Float[jax.Array, 'B P']
) -> tuple[Float[jax.Array, 'B V D']]:
  examples, count, _ = vectors.shape
  _, pair = _pairs(count)
  # The diagonal reads this 0.
  with_zero = jnp.pad(gradient, ((0, 0), (0, 1)))
  symmetric = with_zero[:, pair].reshape(examples, count, count)
  symmetric = symmetric.astype(vectors.dtype)
  summed = jnp.einsum(
    'bvw,bwd->bvd', symmetric, vectors, preferred_element_type=jnp.float32
  )
  return (summed.astype(vectors.dtype),)


dot_interaction.defvjp(_forward, _backward)
