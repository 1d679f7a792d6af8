"""Which part of an optax chain's state belongs to rows.

Nearly any chain may train rows. The leaves of its state whose leading axis is
the number of rows live beside the rows, in host memory, and move with them;
the others (step counts, schedules) are global and stay on the device. A chain
is refused if its state can be split in no such way: it would change with the
order of the examples, or with how many rows a batch happens to have.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slipstream_jax.errors import running_optimizer, UserError
from slipstream_jax.transforms.entries import check_apart, Entries, entry_leaves
from slipstream_jax.types import Array

# Chains that look at shapes look for large ones, too; none is ever allocated.
# Three, as a leaf of a fixed shape may have the size of one by accident.
_ROWS = (3, 5, 2**20 + 1)
# They hold back gradients until a step that most rows have no part in.
_ACCUMULATORS = (optax.MultiStepsState, optax.ApplyEvery)


class RowStateLayout(NamedTuple):
  """How a chain's state splits into row leaves and global leaves."""

  treedef: Any
  """Structure of the whole state."""
  has_row_axis: tuple[bool, ...]
  """Per leaf of the state: does it have one entry per row."""
  of_skip: tuple[bool, ...] = ()
  """Per leaf that has: is it one of `skip_stale`."""

  @property
  def skips(self) -> bool:
    """Whether `skip_stale` is in the chain."""
    return any(self.of_skip)


def row_state_layout(
  optimizer: optax.GradientTransformation,
  dim: int,
  where: str = 'Trainer, rows',
) -> RowStateLayout:
  """Finds the row leaves of the optimizer's state over rows [U, dim].

  Nothing is computed: the shapes of states of several U are compared, before
  and after an update. `where` names the argument in errors.

  Raises:
    UserError: the state does not split into entries per row and others that
      do not depend on U, an update changes its shapes, or it accumulates
      gradients over several steps; or the optimizer cannot run.
  """
  states = [_traced_state(optimizer, rows, dim, where) for rows in _ROWS]
  treedef = jax.tree.structure(states[0])
  leaves = zip(*map(jax.tree.leaves, states), strict=True)
  has_row_axis = tuple(_has_row_axis(where, *leaf) for leaf in leaves)
  pairs = zip(entry_leaves(states[0]), has_row_axis, strict=True)
  return RowStateLayout(
    treedef, has_row_axis, tuple(mark for mark, row in pairs if row)
  )


def _traced_state(
  optimizer: optax.GradientTransformation, rows: int, dim: int, where: str
) -> Any:
  """Shapes of the state over rows [rows, dim], which an update must keep."""

  def update(gradients: Any, state: Any, seen: Any, weights: Any) -> Any:
    chain = optax.with_extra_args_support(optimizer)
    return chain.update(
      gradients,
      state,
      gradients,
      batches_seen=seen,
      example_weight=weights,
      value=seen,
    )[1]

  like = jax.ShapeDtypeStruct((rows, dim), jnp.float32)
  with running_optimizer(where):
    state = jax.eval_shape(optimizer.init, like)
  _check_steps(state, where)
  number, per_row = (
    jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((), (rows,))
  )
  with running_optimizer(where):
    after = jax.eval_shape(update, like, state, number, per_row)
  if _kinds(state) != _kinds(after):
    raise UserError(
      "a row optimizer's update must keep the shapes of its state, "
      f'{_kinds(state)[1]} of {rows} rows',
      got=_kinds(after)[1],
      where=where,
      hint='choose one whose state has one entry per row, e.g. '
      'optax.adafactor(factored=False)',
    )
  return state


def _kinds(state: Any) -> tuple[Any, list[str]]:
  leaves, treedef = jax.tree.flatten(state)
  return treedef, [f'{leaf.dtype}{list(leaf.shape)}' for leaf in leaves]


def _check_steps(state: Any, where: str) -> None:
  def accumulates(node: Any) -> bool:
    return isinstance(node, _ACCUMULATORS)

  nodes = jax.tree.leaves(state, is_leaf=accumulates)
  for node in filter(accumulates, nodes):
    raise UserError(
      'a row optimizer must apply gradients in the step that has them: when '
      'others are due, other rows are in the batch, and these would be lost',
      got=type(node).__name__,
      where=where,
      hint='take larger batches instead',
    )


def _has_row_axis(where: str, *leaf: Any) -> bool:
  """Of one leaf of the state over each of `_ROWS`."""
  shapes = [one.shape for one in leaf]
  if shapes == [(rows, *shapes[0][1:]) for rows in _ROWS]:
    return True
  if len(set(shapes)) == 1:
    return False
  sizes = ' and '.join(
    f'{list(shape)} of {rows}'
    for shape, rows in zip(shapes, _ROWS, strict=True)
  )
  raise UserError(
    "a leaf of a row optimizer's state must have one entry per row, along its "
    'first axis, or not depend on the number of rows',
    got=f'{sizes} rows',
    where=where,
    hint='choose another, e.g. optax.adafactor(factored=False)',
  )


def check_entries(layout: RowStateLayout, where: str) -> None:
  """Looks whether the entries of `skip_stale` can be kept apart from the rows.

  Raises:
    UserError: as `check_apart`.
  """
  numbers = range(len(layout.has_row_axis))
  check_apart(jax.tree.unflatten(layout.treedef, numbers), where)


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


def with_entries(
  layout: RowStateLayout, row_leaves: tuple[Array, ...], entries: Entries
) -> tuple[Array, ...]:
  """All row leaves [U, ...]: those that travel, and `skip_stale`'s among them.

  Args:
    layout: of a chain with `skip_stale`.
    row_leaves: without its entries.
    entries: of the same rows.
  """
  others, own = iter(row_leaves), iter(entries)
  return tuple(next(own if skip else others) for skip in layout.of_skip)


def without_entries(
  layout: RowStateLayout, row_leaves: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Entries]:
  """The inverse of `with_entries`."""
  pairs = list(zip(row_leaves, layout.of_skip, strict=True))
  return (
    tuple(leaf for leaf, skip in pairs if not skip),
    Entries(*(leaf for leaf, skip in pairs if skip)),
  )
