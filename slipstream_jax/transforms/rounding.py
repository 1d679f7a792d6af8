"""Stochastic rounding, so that rows of half precision keep learning.

Rounding to nearest would lose every update below half the distance between two
numbers of the table's dtype. Rounding up or down at random keeps it in
expectation (Gupta et al., arXiv 1502.02551, and for embedding tables Zhang et
al., arXiv 1805.08691).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, UInt32


def stochastic_round(
  values: Float[jax.Array, '...'],
  dtype: jax.typing.DTypeLike,
  bits: UInt32[jax.Array, '...'],
) -> Float[jax.Array, '...']:
  """Rounds f32 values at random to a neighbour in a narrower float dtype.

  The expected result is the value, up to the 24 bits of the draw. A value that
  the dtype can represent is returned for any bits.

  Args:
    values: f32, any shape. Values that overflow the dtype become infinite.
    dtype: bfloat16 or float16.
    bits: random u32 of the same shape.

  Returns:
    An array of `dtype`.
  """
  nearest = values.astype(dtype)
  back = nearest.astype(jnp.float32)
  beyond = jnp.where(back < values, jnp.inf, -jnp.inf).astype(dtype)
  other = jnp.nextafter(nearest, beyond)
  gap = jnp.abs(other.astype(jnp.float32) - back)
  # At most 1/2. 0 if exact. NaN after an overflow, which compares as false.
  chance = jnp.abs(values - back) / gap
  # f32 holds 24 bits exactly. More would make draws uneven.
  draw = (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
  return jnp.where(draw < chance, other, nearest)
