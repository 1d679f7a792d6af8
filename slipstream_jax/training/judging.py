"""`skip_stale` over the hot rows: what it knows of them stays on the device.

A step gets the entries of its rows beside them, and the chain goes on with
these as it would with all; cold rows get an entry that is never judged. Rows
that stand still are left out of the step. So that all of a window's rows are
judged when it closes, and thaw when the next one opens, whether a step has them
or not, the chain itself is called with them at these edges, by programs of
their own.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import optax

from slipstream_jax.engine.buffers import to_host
from slipstream_jax.engine.frozen import FrozenRows, Mask, Windows
from slipstream_jax.errors import UserError
from slipstream_jax.training.recipe import TrainState
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
from slipstream_jax.types import HotRows, RowBlock

EntriesOfGroups = tuple[Entries | None, ...]
Layouts = tuple[RowStateLayout, ...]
Blocks = tuple[RowBlock, ...]
RowIndices = tuple[Int[jax.Array, ' _P'], ...]
Masks = tuple[Bool[jax.Array, ' _P'], ...]


class Judge(NamedTuple):
  """The chain of one group, as the judge of its hot rows."""

  layout: RowStateLayout
  start: Callable[[int], Entries]
  """Of so many rows, before the first step."""
  judge: Callable[..., Entries]
  """See `judge_of`."""
  renew: Callable[..., Entries]
  """Likewise."""

  def windows(self, row_globals: tuple[Any, ...]) -> Windows:
    """`every` and `window` of the chain, looked at.

    Raises:
      UserError: arrays of other numbers than these can be.
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
  """The judge of rows [H, dim] that a chain with `skip_stale` trains."""
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
    """The entries at an edge of a window.

    Rows are as they are now, or None where a window opens: then all thaw, and
    the next step that has a row takes its snapshot. Entries are donated.
    """
    now = entries.snapshot if rows is None else rows
    now = now.astype(jnp.float32)
    # Of what comes before `skip_stale` any state will do: nothing of it is
    # used, so that nothing of it is computed.
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
  def renew(
    entries: Entries,
    row_globals: tuple[jax.Array, ...],
    row_index: Int[jax.Array, ' n'],
  ) -> Entries:
    """The entries where some rows got another id; not donated."""
    return renewed(entries, row_index, _skip(layout, row_globals))

  return Judge(layout, start, judge, renew)


def _skip(layout: RowStateLayout, row_globals: tuple[Any, ...]) -> Any:
  """The state of `skip_stale`, without the leaves that have a row axis."""
  none = (None,) * len(layout.of_skip)
  return skip_state(join(layout, none, row_globals))


def beside(
  layouts: Layouts,
  blocks: Blocks,
  entries: EntriesOfGroups,
  row_index: RowIndices,
) -> tuple[Blocks, Masks]:
  """A step's rows with their entries, and which of them stand still.

  Args:
    layouts: of the groups.
    blocks: rows without entries.
    entries: of the hot rows.
    row_index: place i32[P] of each row among its group's hot ones; H_g if cold.
  """
  some, still = _at(entries, row_index)
  blocks = tuple(
    block
    if one is None
    else block._replace(state=with_entries(layout, block.state, one))
    for layout, block, one in zip(layouts, blocks, some, strict=True)
  )
  return blocks, still


def apart(
  layouts: Layouts,
  blocks: Blocks,
  entries: EntriesOfGroups,
  row_index: RowIndices,
) -> tuple[Blocks, EntriesOfGroups]:
  """After the step the rows alone, and all entries; these are donated."""
  rows: list[RowBlock] = []
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
  """Per group a mask bool[H] of those that stand still; a copy that lasts."""
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
  some, still = zip(*pairs, strict=True)
  return some, still


@functools.partial(jax.jit, donate_argnums=0)
def _put(
  entries: EntriesOfGroups, row_index: RowIndices, some: EntriesOfGroups
) -> EntriesOfGroups:
  groups = zip(entries, row_index, some, strict=True)
  return tuple(
    None if one is None or new is None else entries_after(one, index, new)
    for one, index, new in groups
  )


def frozen_rows_of(
  windows: Sequence[Windows | None],
  hot: Sequence[HotRows | None],
  state: TrainState,
  frozen: Sequence[Mask],
  judged: Callable[[int], Sequence[Mask]],
) -> FrozenRows:
  """What the planner knows of rows that stand still, as of `state`.

  Args:
    windows: when the groups' chains judge.
    hot: the groups' hot rows.
    state: of the trainer; waits for the step that it is of.
    frozen: per group, hot rows that the engine holds for standing still.
    judged: as of `FrozenRows`.
  """
  masks = tuple(None if one is None else one.stale for one in state.entries)
  step, stale = to_host((state.step, masks))
  return FrozenRows(windows, hot, int(step), frozen, stale, judged)
