"""Which part of an optax chain's state belongs to rows.

Any chain may train rows. The leaves of its state whose leading axis follows
the number of rows live beside the rows, in host memory, and move with them;
the others (step counts, schedules) are global and stay on the device.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slipstream_jax.types import Array


class RowStateLayout(NamedTuple):
  """How a chain's state splits into row leaves and global leaves."""

  treedef: Any
  """Structure of the whole state."""
  has_row_axis: tuple[bool, ...]
  """Per leaf of the state: does it have one entry per row."""


def row_state_layout(
  optimizer: optax.GradientTransformation, dim: int
) -> RowStateLayout:
  """Finds the row leaves of the optimizer's state over rows [U, dim].

  Nothing is computed: the shapes of two states of different U are compared.
  """

  def shapes(rows: int) -> Any:
    like = jax.ShapeDtypeStruct((rows, dim), jnp.float32)
    return jax.eval_shape(optimizer.init, like)

  few, treedef = jax.tree.flatten(shapes(3))
  more = jax.tree.leaves(shapes(5))
  pairs = zip(few, more, strict=True)
  return RowStateLayout(treedef, tuple(a.shape != b.shape for a, b in pairs))


def split(
  layout: RowStateLayout, state: optax.OptState
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
  """The state's row leaves [U, ...], and its global leaves."""
  leaves = jax.tree.leaves(state)
  pairs = list(zip(leaves, layout.has_row_axis, strict=True))
  return (
    tuple(leaf for leaf, row in pairs if row),
    tuple(leaf for leaf, row in pairs if not row),
  )


def join(
  layout: RowStateLayout,
  row_leaves: tuple[Array, ...],
  global_leaves: tuple[Array, ...],
) -> optax.OptState:
  """The inverse of `split`."""
  rows, others = iter(row_leaves), iter(global_leaves)
  leaves = [next(rows if row else others) for row in layout.has_row_axis]
  return jax.tree.unflatten(layout.treedef, leaves)
