"""State of watched rows, for a loop that stores it apart from other row state.

`Entries` are those of `skip_stale` in a chain's state: found there, gathered
for the rows of a step, and put back. `WatchedRows` are for a loop that opens
and closes windows itself: `stale_at` returns which rows of a step are frozen,
and `touches_after` counts the rows that it touched.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int
import numpy as np
import optax

from slipstream_jax.errors import UserError
from slipstream_jax.transforms.skip import SkipStaleState
from slipstream_jax.types import Array, Rows

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


def entry_leaves(state: optax.OptState) -> tuple[bool, ...]:
  """Returns for each leaf of a chain's state whether it is one of `Entries`."""

  def mark(node: Any) -> Any:
    marks = jax.tree.map(lambda leaf: False, node)
    if not _is_skip(node):
      return marks
    entries = jax.tree.map(lambda leaf: True, node[-len(Entries._fields) :])
    return SkipStaleState(*marks[: -len(entries)], *entries)

  return tuple(jax.tree.leaves(jax.tree.map(mark, state, is_leaf=_is_skip)))


def check_apart(state: optax.OptState, where: str) -> None:
  """Checks that the entries can be separated from all other row state.

  Args:
    state: state of a chain with `skip_stale`.
    where: names the argument in errors.

  Raises:
    UserError: the chain has it twice, or within a transformation that may skip
      steps.
  """
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


def entries_at(
  entries: Entries, row_index: Int[jax.Array, ' P']
) -> tuple[Entries, Bool[jax.Array, ' P']]:
  """Returns the entries of a step's rows, and whether each row is stale.

  Args:
    entries: of the watched rows.
    row_index: each row's place among the watched rows, or a place past the
      last. Such a row gets an entry that is never judged.
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
    state: the current state. Only `count` and `every` are read.
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


class WatchedRows(NamedTuple):
  """State of H watched rows."""

  snapshot: Rows
  """Values of the rows [H, D] when the last window opened."""
  touches: Int[jax.Array, ' H']
  """Steps since then that touched each row."""
  stale: Bool[jax.Array, ' H']
  """Whether each row is frozen now."""


def stale_at(
  stale: Bool[jax.Array, ' H'], row_index: Int[jax.Array, ' P']
) -> Bool[jax.Array, ' P']:
  """Returns which of a step's rows are frozen.

  Args:
    stale: bool[H], whether each watched row is frozen.
    row_index: each row's place among the watched rows, or a place out of range.
  """
  at = stale.at[_inside(row_index, stale)]
  return at.get(mode='fill', fill_value=False)


def touches_after(
  touches: Int[jax.Array, ' H'],
  row_index: Int[jax.Array, ' P'],
  touched: Bool[jax.Array, ' P'],
) -> Int[jax.Array, ' H']:
  """Increments the counts of the watched rows that a step touched.

  Args:
    touches: counts of the watched rows.
    row_index: as in `stale_at`.
    touched: from `skip.touched_rows`.
  """
  at = touches.at[_inside(row_index, touches)]
  return at.add(touched.astype(jnp.int32), mode='drop')


def _inside(row_index: jax.Array, watched: jax.Array) -> jax.Array:
  # JAX would count a negative index from the end, but drops one past the end.
  return jnp.where(row_index < 0, watched.shape[0], row_index)
