"""The hot rows under watch: a snapshot on the device, and what became of it.

The streamed form of `skip_stale`: the transformation zeroes the updates of
stale rows and counts touches in every step; the functions here run at the
edges of a window only.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from slipstream_jax.staleness.change import row_change
from slipstream_jax.transforms.skip import (
  open_window,
  skip_stale,
  SkipStaleState,
)
from slipstream_jax.types import RowChange, Rows

# Streamed, its windows are ours: the numbers are not used.
_SKIP = skip_stale(threshold=0.0, every=1, window=1)


class Watch(NamedTuple):
  """What is known of the H hot rows, on the device."""

  skip: SkipStaleState
  """Snapshot [H, D], touches i32[H] and stale rows bool[H]."""
  moved: RowChange
  """What they did in the last window that closed."""


@jax.jit
def start(rows: Rows) -> Watch:
  """A watch over hot rows [H, D], none of them stale."""
  skip = _SKIP.init(rows)
  assert isinstance(skip, SkipStaleState)
  nothing = RowChange(jnp.zeros(len(rows)), jnp.zeros(len(rows), jnp.int32))
  return Watch(skip, nothing)


@functools.partial(jax.jit, donate_argnums=0)
def opened(watch: Watch, rows: Rows) -> Watch:
  """The watch as a window opens: the rows [H, D] copied, all thawed."""
  return watch._replace(skip=open_window(watch.skip, rows))


@functools.partial(jax.jit, donate_argnums=0)
def closed(watch: Watch, rows: Rows) -> tuple[Watch, RowChange]:
  """The watch as a window closes, and what the rows [H, D] did in it."""
  change = row_change(rows, watch.skip.snapshot)
  moved = RowChange(change, jnp.copy(watch.skip.touches))
  return watch._replace(moved=moved), copy_of(moved)


@functools.partial(jax.jit, donate_argnums=0)
def frozen(watch: Watch, stale: Bool[jax.Array, ' H']) -> Watch:
  """The watch with these rows standing still."""
  return watch._replace(skip=watch.skip._replace(stale=stale))


@jax.jit
def copy_of(moved: RowChange) -> RowChange:
  """A copy, as the watch itself is donated to the next step."""
  return jax.tree.map(jnp.copy, moved)


def hold_stale(
  watch: Watch,
  updates: Rows,
  old_state: tuple[jax.Array, ...],
  new_state: tuple[jax.Array, ...],
  row_index: Int[jax.Array, ' P'],
) -> tuple[Watch, Rows, tuple[jax.Array, ...]]:
  """Makes the stale among a step's rows stand still, with their row state.

  Args:
    watch: of the hot rows.
    updates: of the batch's rows, [P, D].
    old_state: their row state before the step, leaves [P, ...].
    new_state: after it.
    row_index: place of each row among the hot ones; H and above if cold.

  Returns:
    The watch with the touches counted, the updates, and the row state.
  """
  kept, skip = _SKIP.update(updates, watch.skip, row_index=row_index)
  still = watch.skip.stale.at[row_index].get(mode='fill', fill_value=False)
  state = tuple(
    jnp.where(still.reshape(still.shape + (1,) * (new.ndim - 1)), old, new)
    for old, new in zip(old_state, new_state, strict=True)
  )
  return watch._replace(skip=skip), kept, state
