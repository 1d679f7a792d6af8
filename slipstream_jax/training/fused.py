"""Row optimizers in the kernel that sums gradients, on a CPU.

For SGD and row-wise Adagrad it saves writing the gradient of the rows [P, D]
and reading it three times. The kernel computes every update of such a chain,
so that no bit depends on where the gradient comes from.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np
import optax

from slipstream_jax.models.bags import spread, starts, Unsummed
from slipstream_jax.models.embedding import bag_lengths
from slipstream_jax.training.recipe import Recipe
from slipstream_jax.transforms.rowwise import KnownUpdate
from slipstream_jax.types import RowBlock


class OfBags(NamedTuple):
  """The gradient of rows, as that of the sums of their bags."""

  sums: Float[jax.Array, 'B G D']
  inverse: Int[jax.Array, 'B K']
  """Place of the row of each lookup, or -1."""
  lengths: tuple[int, ...]
  """Columns of each bag."""


Gradient = Float[jax.Array, '_P _D'] | OfBags


def known(
  optimizer: optax.GradientTransformation, block: RowBlock
) -> KnownUpdate | None:
  """Returns the update that the kernel can compute, or None."""
  from slipstream_jax import row_kernels  # numba, which loads slowly

  update = optimizer.update
  fits = isinstance(update, KnownUpdate) and block.rows.dtype == np.float32
  fits = fits and block.rows.size > 0 and row_kernels.register()
  return update if fits else None


def rows(
  recipe: Recipe,
  blocks: tuple[RowBlock, ...],
  inverses: tuple[Int[jax.Array, 'B _K'], ...],
) -> tuple[Any, ...]:
  """Returns each group's rows, as `Unsummed` if the kernel can update them."""
  results: list[Any] = []
  tables = recipe.tables
  whole = recipe.microbatches == 1 and not recipe.skips_bad_steps
  for group, block, inverse in zip(
    tables.groups, blocks, inverses, strict=True
  ):
    features = [tables.features[name] for name in group.features]
    fits = whole and inverse.size > 0
    fits = fits and not any(feature.weighted for feature in features)
    if fits and known(recipe.optimizer_of(group), block) is not None:
      shape = len(inverse), len(bag_lengths(features)), group.dim
      sums = jnp.zeros(shape, jnp.float32)
      results.append(Unsummed(block.rows, sums))
    else:
      results.append(block.rows)
  return tuple(results)


def with_bags(
  recipe: Recipe,
  gradients: tuple[Any, ...],
  inverses: tuple[Int[jax.Array, 'B _K'], ...],
) -> tuple[Gradient, ...]:
  """Returns the gradients of `rows`, with the bags of those of sums."""
  groups = zip(recipe.tables.groups, gradients, inverses, strict=True)
  return tuple(
    OfBags(
      gradient.sums,
      inverse,
      bag_lengths([recipe.tables.features[name] for name in group.features]),
    )
    if isinstance(gradient, Unsummed)
    else gradient
    for group, gradient, inverse in groups
  )


def update(
  known: KnownUpdate,
  block: RowBlock,
  state: Any,
  gradient: Gradient,
  frozen: Bool[jax.Array, ' P'],
  by_chain: Callable[[jax.Array], Any],
) -> Any:
  """Updates rows by the kernel on a CPU, and by the chain elsewhere.

  Returns what `by_chain` returns: the new block, the leaves of the chain's
  state without a row axis, and which rows were touched.
  """
  from slipstream_jax import row_kernels

  def by_kernel() -> Any:
    of_bags = gradient
    if not isinstance(of_bags, OfBags):  # a bag of each row
      places = jnp.arange(len(of_bags), dtype=jnp.int32)
      of_bags = OfBags(of_bags[:, None], places[:, None], (1,))
    factor, scale_state = known.scale(state[-1])
    eps = 0 if known.eps is None else known.eps
    numbers = jnp.stack([factor, jnp.asarray(eps, jnp.float32)])
    words = jnp.int32
    results = (
      jax.ShapeDtypeStruct(block.rows.shape, np.float32),
      jax.ShapeDtypeStruct(frozen.shape, np.bool_),
      jax.ShapeDtypeStruct(frozen.shape, words),
      jax.ShapeDtypeStruct((of_bags.inverse.size,), words),
      *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in block.state),
    )
    in_place = {3: 0, 6: 4} if block.state else {3: 0}
    call = jax.ffi.ffi_call(
      row_kernels.UPDATE, results, input_output_aliases=in_place
    )
    rows, touched, _, _, *row_state = call(
      of_bags.sums,
      of_bags.inverse,
      starts(of_bags.lengths),
      block.rows,
      frozen,
      numbers,
      *block.state,
    )
    leaves = tuple(jax.tree.leaves(scale_state))
    return RowBlock(rows, tuple(row_state)), leaves, touched

  def by_xla() -> Any:
    if isinstance(gradient, OfBags):
      return by_chain(spread(block.rows, *gradient))
    return by_chain(gradient)

  return jax.lax.platform_dependent(cpu=by_kernel, default=by_xla)
