"""Measures what a step could take at best: its matrix products and its link.

The products of a step, forward and backward, are read from the program itself
and run alone: same shapes, nothing in between. No step that computes them in
this precision can take less time. The link is what rows cross between host and
device.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.bench.contest import seconds_of
from slipstream_jax.engine.buffers import to_device, to_host

_HOW = {'dimension_numbers', 'precision', 'preferred_element_type'}
_BYTES = 1 << 28  # of one large copy
_TURNS = 6
_FASTEST = 1e12  # bytes/s; nothing that is faster is a copy


class Product(NamedTuple):
  """A matrix product, of whatever batch dimensions."""

  left: jax.ShapeDtypeStruct
  right: jax.ShapeDtypeStruct
  how: dict[str, Any]
  """Arguments of `jax.lax.dot_general`."""

  def __call__(self, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the product of arrays of these shapes."""
    return jax.lax.dot_general(left, right, **self.how)


def products_of(function: Callable[..., Any], *arguments: Any) -> list[Product]:
  """Lists the matrix products of a function that JAX can trace, in order.

  A product in a loop counts once.
  """
  return list(_products(jax.make_jaxpr(function)(*arguments).jaxpr))


def _products(jaxpr: Any) -> Iterator[Product]:
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      left, right = (
        jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
        for x in equation.invars
      )
      how = {k: v for k, v in equation.params.items() if k in _HOW}
      yield Product(left, right, how)
    for inner in jax.tree.leaves(
      list(equation.params.values()), is_leaf=_is_program
    ):
      if _is_program(inner):
        yield from _products(getattr(inner, 'jaxpr', inner))


def _is_program(value: Any) -> bool:
  return hasattr(value, 'eqns')


def alone(products: list[Product]) -> Callable[[], list[jax.Array]]:
  """Returns a call that computes these products of ones, and nothing else."""
  pairs = [
    [to_device(np.ones(x.shape, x.dtype)) for x in (one.left, one.right)]
    for one in products
  ]

  @jax.jit
  def compute(pairs: Any) -> list[jax.Array]:
    return [one(*pair) for one, pair in zip(products, pairs, strict=True)]

  return lambda: compute(pairs)


def link_speeds() -> dict[str, float | None]:
  """Returns the best bytes/s of a large copy to and from pageable memory.

  On a CPU both ends are host memory, and storing copies nothing: None.
  """
  host = np.ones(_BYTES // 4, np.float32)
  one = to_device(np.float32(1))
  device = jax.block_until_ready(to_device(host))
  # Separate arrays, because jax keeps the host's copy of one it has fetched.
  others = [jax.block_until_ready(device + one) for _ in range(_TURNS)]
  load = min(
    seconds_of(lambda: jax.block_until_ready(to_device(host)))
    for _ in range(_TURNS)
  )
  store = min(seconds_of(to_host, other) for other in others)
  copies = store > _BYTES / _FASTEST
  return {'load': _BYTES / load, 'store': _BYTES / store if copies else None}
