"""Stochastic rounding: how rows of half precision keep learning.

An update smaller than half the distance between two numbers of a table's
dtype would be lost at every step when rounded to the nearest. Rounded up or
down by chance, it is kept in the mean (Gupta et al., arXiv 1502.02551; for
embedding tables Zhang et al., arXiv 1805.08691).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt32


def stochastic_round(
  values: Float[jax.Array, '...'],
  dtype: jax.typing.DTypeLike,
  bits: UInt32[jax.Array, '...'],
) -> Float[jax.Array, '...']:
  """Values f32 as one of their two neighbours in a narrower float dtype.

  The expected result is the value, to the 24 bits that the choice is made
  with; a value that the dtype holds is itself, whatever the bits.

  Args:
    values: f32, any shape; what overflows the dtype becomes infinite.
    dtype: bfloat16 or float16.
    bits: random, u32, of the same shape.

  Returns:
    Of `dtype`.
  """
  nearest = values.astype(dtype)
  back = nearest.astype(jnp.float32)
  beyond = jnp.where(back < values, jnp.inf, -jnp.inf).astype(dtype)
  other = jnp.nextafter(nearest, beyond)
  gap = jnp.abs(other.astype(jnp.float32) - back)
  # At most 1/2; 0 where nothing is lost; NaN, hence no, where it overflowed.
  chance = jnp.abs(values - back) / gap
  # 24 bits are what f32 holds exactly; draws of more would be uneven.
  draw = (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
  return jnp.where(draw < chance, other, nearest)
