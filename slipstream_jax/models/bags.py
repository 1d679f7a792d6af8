"""Sums of bags of rows, in the order of lookups.

On a CPU they are kernels (`row_kernels`), and elsewhere XLA's. Both give the
same bits, wherever floats below 2**-126 become 0. Where lookups have weights,
XLA may round a product and its sum together.
"""

from collections.abc import Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.types import Rows

_UNROLLED = 512  # rows of a bag that XLA sums in one loop over the bags


class Unsummed(NamedTuple):
  """Rows whose gradient is not summed: that of their bags' sums is enough."""

  rows: Rows
  sums: Float[jax.Array, 'B G D']
  """Receives the gradient of the sums. Its value is not read."""


def bag_sums(
  rows: Rows | Unsummed,
  inverse: Int[jax.Array, 'B K'],
  lengths: tuple[int, ...],
  shares: Float[jax.Array, 'B K'] | None = None,
  portable: bool = False,
) -> Float[jax.Array, 'B G D']:
  """Sums the rows of each of an example's G bags.

  Args:
    rows: f32[P, D]. If `Unsummed`, there are no shares.
    inverse: place in `rows` of each lookup, or -1, which adds nothing, i32.
    lengths: columns of each bag.
    shares: factor of each lookup, 0 for padding. None: all are 1.
    portable: whether the compiled program must run where this package is not.
  """
  if isinstance(rows, Unsummed):
    return _unsummed(rows, inverse, lengths)
  if portable or not _has_kernels(rows, inverse):
    return _by_xla(rows, inverse, lengths, shares)
  return _by_platform(rows, inverse, shares, lengths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _unsummed(
  rows: Unsummed, inverse: jax.Array, lengths: tuple[int, ...]
) -> jax.Array:
  return bag_sums(rows.rows, inverse, lengths)


def _unsummed_forward(
  rows: Unsummed, inverse: jax.Array, lengths: tuple[int, ...]
) -> tuple[jax.Array, Any]:
  return bag_sums(rows.rows, inverse, lengths), rows.rows


def _unsummed_backward(
  lengths: tuple[int, ...], rows: jax.Array, gradient: jax.Array
) -> tuple[Unsummed, None]:
  return Unsummed(jnp.zeros_like(rows), gradient), None


_unsummed.defvjp(_unsummed_forward, _unsummed_backward)


def _has_kernels(rows: jax.Array, inverse: jax.Array) -> bool:
  from slipstream_jax import row_kernels  # numba, which loads slowly

  fits = rows.dtype == np.float32 and inverse.dtype == np.int32
  # XLA sums nothing for a single lookup, so that -0.0 does not become 0.0.
  fits = fits and rows.size > 0 and inverse.size > 1
  return fits and row_kernels.register()


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_platform(
  rows: jax.Array,
  inverse: jax.Array,
  shares: jax.Array | None,
  lengths: tuple[int, ...],
) -> jax.Array:
  from slipstream_jax import row_kernels

  def kernel(*arrays: jax.Array) -> jax.Array:
    shape = len(inverse), len(lengths), rows.shape[1]
    result = jax.ShapeDtypeStruct(shape, np.float32)
    call = jax.ffi.ffi_call(row_kernels.POOL, result, vmap_method='sequential')
    return call(*arrays[:2], starts(lengths), *arrays[2:])

  def by_xla(
    rows: jax.Array, inverse: jax.Array, *weighted: jax.Array
  ) -> jax.Array:
    return _by_xla(rows, inverse, lengths, *weighted)

  arrays = (rows, inverse) if shares is None else (rows, inverse, shares)
  return jax.lax.platform_dependent(*arrays, cpu=kernel, default=by_xla)


def _forward(
  rows: jax.Array,
  inverse: jax.Array,
  shares: jax.Array | None,
  lengths: tuple[int, ...],
) -> tuple[jax.Array, Any]:
  kept = rows, inverse, shares
  return _by_platform(*kept, lengths), kept


def _backward(
  lengths: tuple[int, ...], kept: Any, gradient: jax.Array
) -> tuple[jax.Array, None, jax.Array | None]:
  from slipstream_jax import row_kernels

  rows, inverse, shares = kept
  weighted = [] if shares is None else [shares]

  def kernel(gradient: jax.Array, *arrays: jax.Array) -> jax.Array:
    numbers = jax.ShapeDtypeStruct((inverse.size,), np.int32)
    results = (
      jax.ShapeDtypeStruct(rows.shape, np.float32),
      jax.ShapeDtypeStruct(rows.shape[:1], np.int32),
      numbers,
      *[numbers.update(dtype=np.float32)] * len(weighted),
    )
    call = jax.ffi.ffi_call(
      row_kernels.SPREAD, results, vmap_method='sequential'
    )
    return call(gradient, arrays[0], starts(lengths), *arrays[1:])[0]

  def by_xla(gradient: jax.Array, *arrays: jax.Array) -> jax.Array:
    return spread(rows, gradient, arrays[0], lengths, *arrays[1:])

  to_rows = jax.lax.platform_dependent(
    gradient, inverse, *weighted, cpu=kernel, default=by_xla
  )
  if shares is None:
    return to_rows, None, None
  # A step has no use for it, and XLA then leaves it out.
  _, back = jax.vjp(lambda x: _by_xla(rows, inverse, lengths, x), shares)
  return to_rows, None, back(gradient)[0]


_by_platform.defvjp(_forward, _backward)


def spread(
  rows: Rows,
  sums: Float[jax.Array, 'B G D'],
  inverse: Int[jax.Array, 'B K'],
  lengths: tuple[int, ...],
  shares: Float[jax.Array, 'B K'] | None = None,
) -> Rows:
  """Returns the gradient of rows from that of their bags' sums, by XLA."""
  # Linear, so no value of the rows is read.
  _, back = jax.vjp(lambda rows: _by_xla(rows, inverse, lengths, shares), rows)
  gradient: jax.Array = back(sums)[0]
  return gradient


def starts(lengths: Sequence[int]) -> np.ndarray:
  """Returns the first column of each bag, and the end of the last, i32."""
  return np.cumsum([0, *lengths], dtype=np.int32)


def _by_xla(
  rows: jax.Array,
  inverse: jax.Array,
  lengths: tuple[int, ...],
  shares: jax.Array | None = None,
) -> jax.Array:
  # The host computed `inverse` for these rows, so no place is out of bounds.
  # Padding reads row 0. The mask also removes its gradient.
  embeddings = rows.at[jnp.maximum(inverse, 0)].get(mode='promise_in_bounds')
  embeddings = jnp.where(
    (inverse >= 0)[..., None], embeddings, jnp.zeros((), embeddings.dtype)
  )
  if shares is not None:
    embeddings = embeddings * shares[..., None]
  # Adjacent bags of one length are summed as one array.
  runs = [(length, len([*same])) for length, same in itertools.groupby(lengths)]
  parts = cut(embeddings, tuple(length * count for length, count in runs))
  examples, _, dim = embeddings.shape
  sums = [
    _in_order(part.reshape(examples, count, length, dim))
    for part, (length, count) in zip(parts, runs, strict=True)
  ]
  return jnp.concatenate(sums, axis=1) if len(sums) > 1 else sums[0]


# XLA's own sum has an order that depends on shapes and versions. The derived
# gradient of these sums would add L arrays of mostly zeros.
@jax.custom_vjp
def _in_order(bags: Float[jax.Array, 'B G L D']) -> Float[jax.Array, 'B G D']:
  """Sums over L, beginning with the first."""

  def plus(at: Any, total: jax.Array) -> jax.Array:
    return total + jax.lax.dynamic_index_in_dim(bags, at, 2, keepdims=False)

  total, length = bags[:, :, 0], bags.shape[2]
  for at in range(1, min(length, _UNROLLED)):
    total = total + bags[:, :, at]
  if length > _UNROLLED:  # slower, but compiled in no time
    total = jax.lax.fori_loop(_UNROLLED, length, plus, total)
  return total


def _in_order_forward(bags: jax.Array) -> tuple[jax.Array, jax.Array]:
  return _in_order(bags), bags


def _in_order_backward(
  bags: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
  return (jnp.broadcast_to(gradient[:, :, None], bags.shape),)


_in_order.defvjp(_in_order_forward, _in_order_backward)


# The derived gradient would pad each part with zeros and add all of them. In
# this form XLA sees that cutting and joining cancel, so both cost nothing where
# a model stacks its features.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def cut(
  whole: Float[jax.Array, 'B K D'], widths: tuple[int, ...]
) -> tuple[jax.Array, ...]:
  """Cuts K columns into parts [B, width, D]."""
  ends = np.cumsum(widths).tolist()
  return tuple(
    jax.lax.slice_in_dim(whole, end - width, end, axis=1)
    for width, end in zip(widths, ends, strict=True)
  )


def _cut_forward(
  whole: jax.Array, widths: tuple[int, ...]
) -> tuple[tuple[jax.Array, ...], None]:
  return cut(whole, widths), None


def _cut_backward(
  widths: tuple[int, ...], _: None, gradients: tuple[jax.Array, ...]
) -> tuple[jax.Array]:
  return (jnp.concatenate(gradients, axis=1),)


cut.defvjp(_cut_forward, _cut_backward)
