"""Sums over bags of rows, with their gradient."""
from collections.abc import Sequence
import functools
import jax
import jax.numpy as jnp
import numpy as np
from slipstream_jax.models import bag_kernels


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def fast(rows, inverse, starts):
  shape = jax.ShapeDtypeStruct((len(inverse), len(starts) - 1, rows.shape[1]), jnp.float32)
  return jax.ffi.ffi_call(bag_kernels.POOL, shape)(rows, inverse, np.array(starts, np.int32))

def fwd(rows, inverse, starts):
  return fast(rows, inverse, starts), (inverse, len(rows))

def bwd(starts, res, g):
  inverse, count = res
  out, *_ = jax.ffi.ffi_call(bag_kernels.SPREAD, (
    jax.ShapeDtypeStruct((count, g.shape[2]), jnp.float32),
    jax.ShapeDtypeStruct((count,), jnp.int32),
    jax.ShapeDtypeStruct((inverse.size,), jnp.int32)))(g, inverse, np.array(starts, np.int32))
  return out, None
fast.defvjp(fwd, bwd)
