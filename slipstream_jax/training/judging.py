"""Hot rows that `skip_stale` in a chain judges; their entries stay on a device.

A step attaches the entries of its rows to their row state, and the chain
updates both. Cold rows get an entry that is never judged, and frozen rows are
left out of steps. When a window closes or opens, separate programs call the
chain with all hot rows. So every row is judged and thaws in time, whether a
step uses it or not.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import optax

from slipstream_jax.engine.buffers import to_host
from slipstream_jax.engine.frozen import Windows
from slipstream_jax.errors import UserError
from slipstream_jax.training.step import Blocks, Masks, RowIndices
from slipstream_jax.transforms.entries import (
  Entries,
  entries_after,
  entries_at,
  renewed,
  skip_state,
)
from slipstream_jax.transforms.row_state import (
  join,
  RowStateLayout,
  split,
  with_entries,
  without_entries,
)

EntriesOfGroups = tuple[Entries | None, ...]
Layouts = tuple[RowStateLayout, ...]


class Judge(NamedTuple):
  """Judges the hot rows of one group by the chain that trains them."""

  layout: RowStateLayout
  start: Callable[[int], Entries]
  """Number of rows to their entries before the first step."""
  judge: Callable[..., Entries]
  """Entries, row globals and rows [H, D] or None to the entries at the edge of
  a window. See `judge_of`."""
  reset: Callable[..., Entries]
  """Entries, row globals and places i32[n] to the entries with those at the
  places reset, as their rows are reassigned. Donates nothing."""

  def windows(self, row_globals: tuple[Any, ...]) -> Windows:
    """Returns `every` and `window` of the chain.

    Raises:
      UserError: they are arrays with numbers out of range.
    """
    state = _skip(self.layout, to_host(row_globals))
    windows = Windows(int(state.every), int(state.window))
    if not 1 <= windows.window <= windows.every:
      raise UserError(
        'window must be a number of steps in [1, every]',
        got=f'window {windows.window}, every {windows.every}',
        where='skip_stale, window',
        hint='give arrays of such numbers',
      )
    return windows


def judge_of(
  optimizer: optax.GradientTransformation, layout: RowStateLayout, dim: int
) -> Judge:
  """Returns the judge of rows [H, dim] for a chain with `skip_stale`."""
  chain = optax.with_extra_args_support(optimizer)

  @functools.partial(jax.jit, static_argnums=0)
  def start(rows: int) -> Entries:
    state = chain.init(jnp.zeros((rows, dim), jnp.float32))
    return without_entries(layout, split(layout, state)[0])[1]

  @functools.partial(jax.jit, donate_argnums=0)
  def judge(
    entries: Entries,
    row_globals: tuple[jax.Array, ...],
    rows: Float[jax.Array, 'H D'] | None,
  ) -> Entries:
    """Judges the rows if a window closes, or thaws them if one opens.

    It donates the entries. Rows are current values. They are None if a window
    opens: the next step that uses a row takes its snapshot.
    """
    now = entries.snapshot if rows is None else rows
    now = now.astype(jnp.float32)
    # Any state will do for what comes before `skip_stale`: its results are not
    # used, so XLA does not compute them.
    others, _ = without_entries(layout, split(layout, chain.init(now))[0])
    leaves = with_entries(layout, others, entries)
    _, state = chain.update(
      jnp.zeros_like(now),
      join(layout, leaves, row_globals),
      now,
      batches_seen=jnp.float32(0),
      example_weight=jnp.ones(len(now), jnp.float32),
      value=jnp.float32(0),
    )
    _, new = without_entries(layout, split(layout, state)[0])
    return entries._replace(stale=new.stale) if rows is None else new

  @jax.jit
  def reset(
    entries: Entries,
    row_globals: tuple[jax.Array, ...],
    row_index: Int[jax.Array, ' n'],
  ) -> Entries:
    return renewed(entries, row_index, _skip(layout, row_globals))

  return Judge(layout, start, judge, reset)


def _skip(layout: RowStateLayout, row_globals: tuple[Any, ...]) -> Any:
  """Returns the state of `skip_stale` without the leaves with a row axis."""
  none = (None,) * len(layout.of_skip)
  return skip_state(join(layout, none, row_globals))


def attach(
  layouts: Layouts,
  blocks: Blocks,
  entries: EntriesOfGroups,
  row_index: RowIndices,
) -> tuple[Blocks, Masks]:
  """Returns a step's rows with their entries, and masks of frozen rows.

  The place of a row among its group's hot ones is H_g if the row is cold.
  """
  some, frozen = _at(entries, row_index)
  blocks = tuple(
    block
    if one is None
    else block._replace(state=with_entries(layout, block.state, one))
    for layout, block, one in zip(layouts, blocks, some, strict=True)
  )
  return blocks, frozen


def detach(
  layouts: Layouts,
  blocks: Blocks,
  entries: EntriesOfGroups,
  row_index: RowIndices,
) -> tuple[Blocks, EntriesOfGroups]:
  """Returns the rows after a step, and all entries, which are donated."""
  rows: list[Any] = []
  some: list[Entries | None] = []
  for layout, block, one in zip(layouts, blocks, entries, strict=True):
    leaves, own = block.state, None
    if one is not None:
      leaves, own = without_entries(layout, leaves)
    rows.append(block._replace(state=leaves))
    some.append(own)
  return tuple(rows), _put(entries, row_index, tuple(some))


@jax.jit
def stale_rows_of(entries: EntriesOfGroups) -> tuple[jax.Array | None, ...]:
  """Returns per group a mask bool[H] of its stale rows, as a copy."""
  return tuple(None if one is None else jnp.copy(one.stale) for one in entries)


@jax.jit
def _at(
  entries: EntriesOfGroups, row_index: RowIndices
) -> tuple[EntriesOfGroups, Masks]:
  pairs = [
    (None, jnp.zeros(len(index), bool))
    if one is None
    else entries_at(one, index)
    for one, index in zip(entries, row_index, strict=True)
  ]
  some, frozen = zip(*pairs, strict=True)
  return some, frozen


@functools.partial(jax.jit, donate_argnums=0)
def _put(
  entries: EntriesOfGroups, row_index: RowIndices, some: EntriesOfGroups
) -> EntriesOfGroups:
  groups = zip(entries, row_index, some, strict=True)
  return tuple(
    None if one is None or new is None else entries_after(one, index, new)
    for one, index, new in groups
  )
