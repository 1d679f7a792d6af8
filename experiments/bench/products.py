"""How near a step comes to what its matrix products alone would take.

The products of a step, forward and backward, are read off the program itself,
and run by themselves: same shapes, nothing in between. No step that computes
them in this precision can take less.
"""

from collections.abc import Callable, Iterator
import math
import pathlib
import platform
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from slipstream_jax.engine.buffers import to_device


class Product(NamedTuple):
  """A matrix product, of whatever batch dimensions."""

  left: jax.ShapeDtypeStruct
  right: jax.ShapeDtypeStruct
  how: tuple[tuple[str, Any], ...]
  """Arguments of `jax.lax.dot_general`."""

  @property
  def flops(self) -> int:
    """Products and sums."""
    (contracting, _), _ = dict(self.how)['dimension_numbers']
    result = jax.eval_shape(self.__call__, self.left, self.right)
    depth = math.prod(self.left.shape[axis] for axis in contracting)
    return 2 * math.prod(result.shape) * depth

  def __call__(self, left: jax.Array, right: jax.Array) -> jax.Array:
    """The product of arrays of these shapes."""
    return jax.lax.dot_general(left, right, **dict(self.how))


def products_of(function: Callable[..., Any], *arguments: Any) -> list[Product]:
  """The matrix products of a function that JAX can trace, in order.

  What is in a loop counts once.
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
      yield Product(left, right, tuple(how.items()))
    for inner in jax.tree.leaves(
      list(equation.params.values()), is_leaf=_is_program
    ):
      if _is_program(inner):
        yield from _products(getattr(inner, 'jaxpr', inner))


_HOW = {'dimension_numbers', 'precision', 'preferred_element_type'}


def _is_program(value: Any) -> bool:
  return hasattr(value, 'eqns')


def alone(products: list[Product]) -> Callable[[], Any]:
  """A call that computes these products, of ones, and nothing else."""
  pairs = [
    tuple(
      to_device(np.ones(side.shape, side.dtype))
      for side in (product.left, product.right)
    )
    for product in products
  ]

  @jax.jit
  def compute(pairs: Any) -> list[jax.Array]:
    return [
      product(*pair) for product, pair in zip(products, pairs, strict=True)
    ]

  return lambda: compute(pairs)


def cpu() -> str:
  """The processor's name, with the numbers that tell its generation."""
  path = pathlib.Path('/proc/cpuinfo')
  text = path.read_text() if path.exists() else ''
  facts = dict(re.findall(r'^(.+?)\s*: (.+)$', text, re.MULTILINE))
  name = facts.get('model name') or platform.processor() or platform.machine()
  if 'cpu family' not in facts:
    return name
  return f'{name} (family {facts["cpu family"]}, model {facts.get("model")})'
