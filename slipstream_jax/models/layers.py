"""Layers that models share: MLP and dot interaction."""

from collections.abc import Mapping, Sequence
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.types import DenseFeatures

# Products may be in half precision. Their sums are f32.
_dot = functools.partial(
  jax.lax.dot_general, preferred_element_type=jnp.float32
)


def side_by_side(dense: DenseFeatures) -> Float[jax.Array, 'B I']:
  """Returns dense features as one array. Named ones keep their order."""
  if not isinstance(dense, Mapping):
    return dense
  columns = [x[:, None] if x.ndim == 1 else x for x in dense.values()]
  return jnp.concatenate(columns, axis=1)


def widths_to_logit(sizes: Sequence[int]) -> tuple[int, ...]:
  """Returns the layer widths of an MLP that ends in one logit.

  A last width of 1 is the logit's, as in the DLRM reference and TorchRec.

  Raises:
    UserError: a width below 1, or a hidden layer of width 1.
  """
  sizes = tuple(sizes)
  hidden = sizes[:-1] if sizes[-1:] == (1,) else sizes
  if any(size < 2 for size in hidden):
    raise UserError(
      'hidden layers before the logit must have a width of at least 2, as one'
      ' of 1 passes on one number at most',
      got=list(sizes),
      where='DLRM.top or TBSM.final',
      hint='leave it out',
    )
  return (*hidden, 1)


class MLP(nn.Module):
  """Dense layers with ReLU between them, initialised as DLRM does.

  Attributes:
    sizes: width of each layer.
    activate_last: whether the last layer has a ReLU as well.
    dtype: dtype of matrix products. Sums and parameters are f32.
  """

  sizes: Sequence[int]
  activate_last: bool = True
  dtype: str = 'float32'

  @nn.compact
  def __call__(self, x: Float[jax.Array, 'B I']) -> Float[jax.Array, 'B O']:
    """Maps features f32[B, I] to f32[B, sizes[-1]]."""
    for i, size in enumerate(self.sizes):
      x = nn.Dense(
        size,
        kernel_init=nn.initializers.glorot_normal(),
        bias_init=nn.initializers.normal(size**-0.5),
        dtype=self.dtype,
        dot_general=_dot,
      )(x)
      if self.activate_last or i + 1 < len(self.sizes):
        x = nn.relu(x)
    return x


@functools.cache
def _pairs(vectors: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns places of pairs j < i in a flat [V, V] matrix, and the inverse.

  That is the place of each pair, i32[P], and the pair at each place, i32[V *
  V], which is P on the diagonal.
  """
  i, j = np.tril_indices(vectors, -1)
  pair = np.full((vectors, vectors), len(i), np.int32)
  pair[i, j] = pair[j, i] = np.arange(len(i))
  return (i * vectors + j).astype(np.int32), pair.reshape(-1)


@jax.custom_vjp
def dot_interaction(
  vectors: Float[jax.Array, 'B V D'],
) -> Float[jax.Array, 'B P']:
  """Computes dot products of all P = V (V - 1) / 2 pairs of vectors, in f32.

  This is DLRM's interaction (arXiv 1906.00091, section 2.1.3). The order of the
  pairs (i, j), j < i, is that of `np.tril_indices(V, -1)`. The gradient is
  written by hand: (S + S^T) T, with S the pairs' gradients. The derived one
  scatters into [B, V, V], which XLA does one element at a time on a CPU.
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
