"""What `skip_stale` knows of each row, in the midst of a chain's state.

For a loop that keeps it apart from the rest of the row state: it finds the
entries in the state, takes those of a step's rows out of all, and puts them
back.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int
import numpy as np
import optax

from slipstream_jax.errors import UserError
from slipstream_jax.transforms.skip import SkipStaleState
from slipstream_jax.types import Array

# Later than any step: such an entry is never due, and stands still never.
_NEVER = np.int32(np.iinfo(np.int32).max)
# What may lie around it: all else may leave steps out, and lose count of them.
_LINKS = (
  optax.MaskedState,
  optax.PartitionState,
  optax.InjectHyperparamsState,
  optax.InjectStatefulHyperparamsState,
)


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
  """The state of `skip_stale` in that of a chain; None if it is not in it."""
  nodes = jax.tree.leaves(state, is_leaf=_is_skip)
  return next(filter(_is_skip, nodes), None)


def entry_leaves(state: optax.OptState) -> tuple[bool, ...]:
  """Per leaf of a chain's state over one array, if it is of `Entries`."""

  def mark(node: Any) -> Any:
    marks = jax.tree.map(lambda leaf: False, node)
    if not _is_skip(node):
      return marks
    entries = jax.tree.map(lambda leaf: True, node[-len(Entries._fields) :])
    return SkipStaleState(*marks[: -len(entries)], *entries)

  return tuple(jax.tree.leaves(jax.tree.map(mark, state, is_leaf=_is_skip)))


def check_apart(state: optax.OptState, where: str) -> None:
  """Looks whether the entries can be kept apart from all other row state.

  Args:
    state: of a chain with `skip_stale`.
    where: names the argument in errors.

  Raises:
    UserError: it is in the chain twice, or within a transformation that may
      leave out steps.
  """
  nodes = jax.tree.leaves(state, is_leaf=_is_skip)
  if sum(map(_is_skip, nodes)) > 1:
    raise UserError(
      'rows are judged by one skip_stale',
      got='a chain with two of them',
      where=where,
      hint='leave one out',
    )
  _check_links(state, where)


def _is_skip(node: Any) -> bool:
  return isinstance(node, SkipStaleState)


def _check_links(node: Any, where: str) -> None:
  """Looks whether all that lies around `skip_stale` passes each step on."""
  if _is_skip(node) or skip_state(node) is None:
    return
  if not isinstance(node, _LINKS) and type(node) not in (tuple, list, dict):
    raise UserError(
      'skip_stale must see each step: it is a link of the chain itself',
      got=f'one within {type(node).__name__}',
      where=where,
      hint='chain it after that: optax.chain(..., skip_stale(...))',
    )
  inner = node.values() if isinstance(node, dict) else node
  for one in inner:
    _check_links(one, where)


def entries_at(
  entries: Entries, row_index: Int[jax.Array, ' P']
) -> tuple[Entries, Bool[jax.Array, ' P']]:
  """The entries of a step's rows, and which of these stand still.

  Args:
    entries: of the watched rows.
    row_index: place of each row among those; past the last one if it is none:
      such a row gets an entry that is never judged.
  """
  if not len(entries.stale):  # there is nothing to look up
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
  """The entries with those of a step's rows in their places."""
  if not len(entries.stale):
    return entries
  return jax.tree.map(
    lambda leaf, new: leaf.at[row_index].set(new, mode='drop'), entries, some
  )


def renewed(
  entries: Entries, row_index: Int[jax.Array, ' n'], state: SkipStaleState
) -> Entries:
  """The entries with some as those of rows that the next window may judge.

  Args:
    entries: of the watched rows.
    row_index: places of rows that are others from the next step on.
    state: as it is now; of it, the count of steps and `every` are read.
  """
  closed = state.count - state.count % state.every
  # After the last window, so that it does not judge them, and before the next
  # one opens, so that this one does.
  values = Entries(0, 0, False, closed + 1)
  return jax.tree.map(
    lambda leaf, value: leaf.at[row_index].set(value, mode='drop'),
    entries,
    values,
  )
