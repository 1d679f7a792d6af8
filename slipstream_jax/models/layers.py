"""Layers that models share: the lookup of rows and the MLP."""

from collections.abc import Sequence
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from slipstream_jax.types import Embeddings, Rows, SequenceEmbeddings


def embed(
  rows: Rows,
  inverse: Int[jax.Array, 'B F'] | Int[jax.Array, 'B F L'],
  poolings: Sequence[str],
) -> Embeddings | SequenceEmbeddings:
  """Looks rows up, and pools multi-hot features but not sequences.

  Args:
    rows: the batch's unique rows, f32[U, D].
    inverse: place in `rows` of each lookup, i32; -1 = padding, which adds
      nothing. A feature without lookups has the embedding 0.
    poolings: 'sum' or 'mean' per feature; the mean is over the lookups that
      are not padding. Or 'none' for all of them.

  Returns:
    f32[B, F, D]; for sequences f32[B, F, L, D], 0 at padding. Its gradient sums
    what duplicate lookups send to a row.
  """
  real = inverse >= 0
  # The host made `inverse` of these rows, so no place is out of bounds. Padding
  # reads row 0, and the mask keeps its gradient from there, too.
  embeddings = rows.at[jnp.maximum(inverse, 0)].get(mode='promise_in_bounds')
  embeddings = jnp.where(
    real[..., None], embeddings, jnp.zeros((), embeddings.dtype)
  )
  if inverse.ndim == 2 or 'none' in poolings:
    return embeddings
  total = embeddings.sum(axis=2)
  if 'mean' not in poolings:
    return total
  count = jnp.maximum(real.sum(axis=2, dtype=jnp.int32), 1)
  # Divided by 1 a sum keeps its bits, so features of both kinds share this.
  is_mean = jnp.asarray([pooling == 'mean' for pooling in poolings])
  divisor = jnp.where(is_mean[None], count, 1).astype(total.dtype)
  return total / divisor[..., None]


# What half precision multiplies, float32 sums.
_dot = functools.partial(
  jax.lax.dot_general, preferred_element_type=jnp.float32
)


class MLP(nn.Module):
  """Dense layers with ReLU between them, initialised as DLRM does.

  Attributes:
    sizes: width of each layer.
    activate_last: whether the last layer has a ReLU, too.
    dtype: what matrix products are computed in; sums and parameters are f32.
  """

  sizes: Sequence[int]
  activate_last: bool = True
  dtype: str = 'float32'

  @nn.compact
  def __call__(self, x: Float[jax.Array, 'B I']) -> Float[jax.Array, 'B O']:
    """Features f32[B, I] to f32[B, sizes[-1]]."""
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
