"""Layers that models share."""

from collections.abc import Sequence
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

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
