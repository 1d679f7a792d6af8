"""Splits an optax chain's state into leaves per row and global leaves.

Nearly any chain can train rows. Leaves of its state whose leading axis is the
number of rows live beside the rows in host memory and move with them. The
others (step counts, schedules) stay on the device. A chain whose state cannot
be split is refused: its results would depend on the order of the examples, or
on the number of rows in a batch.

`Entries`, the row leaves of `skip_stale`, can be stored apart from the others.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int
import numpy as np
import optax

from slipstream_jax.errors import running_optimizer, UserError
from slipstream_jax.transforms.skip import SkipStaleState
from slipstream_jax.types import Array

# Chains that depend on shapes may treat large ones differently. None is
# allocated. Three sizes, as a leaf of fixed shape may match one by accident.
_ROWS = (3, 5, 2**20 + 1)
# They defer gradients to a step that does not have most of their rows.
_ACCUMULATORS = (optax.MultiStepsState, optax.ApplyEvery)
# Later than any step: such an entry is never due and never stale.
_NEVER = np.int32(np.iinfo(np.int32).max)
# Allowed around `skip_stale`. Other wrappers may skip steps, so their count
# would be wrong.
_LINKS = (
  optax.MaskedState,
  optax.PartitionState,
  optax.InjectHyperparamsState,
  optax.InjectStatefulHyperparamsState,
)


class RowStateLayout(NamedTuple):
  """The split of a chain's state into row leaves and global leaves."""

  treedef: Any
  """Structure of the whole state."""
  has_row_axis: tuple[bool, ...]
  """Whether each leaf of the state has one entry per row."""
  of_skip: tuple[bool, ...] = ()
  """Whether each row leaf is one of `skip_stale`."""

  @property
  def skips(self) -> bool:
    """Whether `skip_stale` is in the chain."""
    return any(self.of_skip)


def row_state_layout(
  optimizer: optax.GradientTransformation,
  dim: int,
  where: str = 'Trainer, row_optimizer',
) -> RowStateLayout:
  """Finds the row leaves of the optimizer's state over rows [U, dim].

  Compares the shapes of the state at several U, before and after an update,
  without computing anything. `where` names the argument in errors.

  Raises:
    UserError: the optimizer cannot run, its state does not split into leaves
      per row and leaves independent of U, an update changes shapes, or it
      accumulates gradients over several steps.
  """
  states = [_traced_state(optimizer, rows, dim, where) for rows in _ROWS]
  treedef = jax.tree.structure(states[0])
  leaves = zip(*map(jax.tree.leaves, states), strict=True)
  has_row_axis = tuple(_has_row_axis(where, *leaf) for leaf in leaves)
  pairs = zip(_entry_leaves(states[0]), has_row_axis, strict=True)
  return RowStateLayout(
    treedef, has_row_axis, tuple(mark for mark, row in pairs if row)
  )


def _traced_state(
  optimizer: optax.GradientTransformation, rows: int, dim: int, where: str
) -> Any:
  """Returns the state's shapes for rows [rows, dim], kept by an update."""

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
  if _shapes_of(state) != _shapes_of(after):
    raise UserError(
      "a row optimizer's update must keep the shapes of its state, "
      f'{_shapes_of(state)[1]} of {rows} rows',
      got=_shapes_of(after)[1],
      where=where,
      hint='choose one whose state has one entry per row, e.g. '
      'optax.adafactor(factored=False)',
    )
  return state


def _shapes_of(state: Any) -> tuple[Any, list[str]]:
  leaves, treedef = jax.tree.flatten(state)
  return treedef, [f'{leaf.dtype}{list(leaf.shape)}' for leaf in leaves]


def _check_steps(state: Any, where: str) -> None:
  def accumulates(node: Any) -> bool:
    return isinstance(node, _ACCUMULATORS)

  nodes = jax.tree.leaves(state, is_leaf=accumulates)
  for node in filter(accumulates, nodes):
    raise UserError(
      'a row optimizer must apply gradients in the step that has them, as '
      'later steps have other rows and would lose them',
      got=type(node).__name__,
      where=where,
      hint='take larger batches instead',
    )


def _has_row_axis(where: str, *leaf: Any) -> bool:
  """Whether a leaf, given for each size of `_ROWS`, has one entry per row."""
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


def split(
  layout: RowStateLayout, state: optax.OptState
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
  """Returns the state's row leaves [U, ...], and its global leaves."""
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
  """Rebuilds the state from the leaves of `split`."""
  rows, others = iter(row_leaves), iter(global_leaves)
  leaves = [next(rows if row else others) for row in layout.has_row_axis]
  return jax.tree.unflatten(layout.treedef, leaves)


class Entries(NamedTuple):
  """The leaves of `SkipStaleState` that have a row axis, in their order."""

  snapshot: Array
  """f32[R, D]."""
  touches: Array
  """i32[R]."""
  stale: Array
  """bool[R]."""
  as_of: Array
  """i32[R]."""


def skip_state(state: optax.OptState) -> SkipStaleState | None:
  """Returns the state of `skip_stale` within a chain's state, or None."""
  nodes = jax.tree.leaves(state, is_leaf=_is_skip)
  return next(filter(_is_skip, nodes), None)


def _entry_leaves(state: optax.OptState) -> tuple[bool, ...]:
  """Returns for each leaf of a chain's state whether it is one of `Entries`."""

  def mark(node: Any) -> Any:
    marks = jax.tree.map(lambda leaf: False, node)
    if not _is_skip(node):
      return marks
    entries = jax.tree.map(lambda leaf: True, node[-len(Entries._fields) :])
    return SkipStaleState(*marks[: -len(entries)], *entries)

  return tuple(jax.tree.leaves(jax.tree.map(mark, state, is_leaf=_is_skip)))


def check_entries(layout: RowStateLayout, where: str) -> None:
  """Checks that the entries of `skip_stale` can be stored apart from the rows.

  Raises:
    UserError: the chain has it twice, or within a transformation that may skip
      steps. `where` names the argument.
  """
  numbers = range(len(layout.has_row_axis))
  state = jax.tree.unflatten(layout.treedef, numbers)
  nodes = jax.tree.leaves(state, is_leaf=_is_skip)
  if sum(map(_is_skip, nodes)) > 1:
    raise UserError(
      'a chain may have only one skip_stale',
      got='a chain with two of them',
      where=where,
      hint='leave one out',
    )
  _check_links(state, where)


def _is_skip(node: Any) -> bool:
  return isinstance(node, SkipStaleState)


def _check_links(node: Any, where: str) -> None:
  """Checks that all transformations around `skip_stale` pass on every step."""
  if _is_skip(node) or skip_state(node) is None:
    return
  if not isinstance(node, _LINKS) and type(node) not in (tuple, list, dict):
    raise UserError(
      'skip_stale must see each step, so it must be in the chain itself',
      got=f'one within {type(node).__name__}',
      where=where,
      hint='chain it after that: optax.chain(..., skip_stale(...))',
    )
  inner = node.values() if isinstance(node, dict) else node
  for one in inner:
    _check_links(one, where)


def with_entries(
  layout: RowStateLayout, row_leaves: tuple[Array, ...], entries: Entries
) -> tuple[Array, ...]:
  """Returns all row leaves [U, ...], with `skip_stale`'s entries inserted.

  Args:
    layout: of a chain with `skip_stale`.
    row_leaves: the leaves without the entries.
    entries: entries of the same rows.
  """
  others, own = iter(row_leaves), iter(entries)
  return tuple(next(own if skip else others) for skip in layout.of_skip)


def without_entries(
  layout: RowStateLayout, row_leaves: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Entries]:
  """Separates the row leaves from the entries that `with_entries` inserted."""
  pairs = list(zip(row_leaves, layout.of_skip, strict=True))
  return (
    tuple(leaf for leaf, skip in pairs if not skip),
    Entries(*(leaf for leaf, skip in pairs if skip)),
  )


def entries_at(
  entries: Entries, row_index: Int[jax.Array, ' P']
) -> tuple[Entries, Bool[jax.Array, ' P']]:
  """Returns the entries of a step's rows, and whether each row is stale.

  Args:
    entries: of the watched rows.
    row_index: each row's place among them, or a place past the last. Such a row
      gets an entry that is never judged.
  """
  if not len(entries.stale):  # no row is watched
    rows = len(row_index)
    snapshot = jnp.zeros((rows, *entries.snapshot.shape[1:]))
    some = Entries(
      snapshot.astype(entries.snapshot.dtype),
      jnp.zeros(rows, jnp.int32),
      jnp.zeros(rows, bool),
      jnp.full(rows, _NEVER),
    )
    return some, jnp.zeros(rows, bool)
  fills = Entries(0, 0, False, _NEVER)
  some = jax.tree.map(
    lambda leaf, fill: leaf.at[row_index].get(mode='fill', fill_value=fill),
    entries,
    fills,
  )
  return some, some.stale


def entries_after(
  entries: Entries, row_index: Int[jax.Array, ' P'], some: Entries
) -> Entries:
  """Returns the entries, with those of a step's rows replaced."""
  if not len(entries.stale):
    return entries
  return jax.tree.map(
    lambda leaf, new: leaf.at[row_index].set(new, mode='drop'), entries, some
  )


def renewed(
  entries: Entries, row_index: Int[jax.Array, ' n'], state: SkipStaleState
) -> Entries:
  """Returns the entries, with some reset for rows that were reassigned.

  The next window can judge these rows, and the last one cannot.

  Args:
    entries: of the watched rows.
    row_index: places of the rows that are reassigned before the next step.
    state: the current state, of which only `count` and `every` are read.
  """
  closed = state.count - state.count % state.every
  # After the last window, so that it does not judge them, and before the next
  # opens.
  values = Entries(0, 0, False, closed + 1)
  return jax.tree.map(
    lambda leaf, value: leaf.at[row_index].set(value, mode='drop'),
    entries,
    values,
  )
