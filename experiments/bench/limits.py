"""Measures what a step could take at best: its matrix products.

The products of a step, forward and backward, are read from the program itself
and run alone: same shapes, nothing in between. No step that computes them in
this precision can take less time.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from slipstream_jax.engine.buffers import to_device

_HOW = {'dimension_numbers', 'precision', 'preferred_element_type'}


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
