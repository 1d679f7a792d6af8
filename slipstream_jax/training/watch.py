"""The hot rows under watch: a snapshot on the device, and what became of it.

What `skip_stale` does, where a schedule has the windows. Around each step,
`still` says which of its rows may not move, and `touched` counts those it
touched; the other functions run at the edges of a window only. They are
programs of their own, so that the step is the same one whether rows are watched
or not.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from slipstream_jax.selection.change import row_change
from slipstream_jax.transforms.watched import (
  stale_at,
  touches_after,
  WatchedRows,
)
from slipstream_jax.types import RowChange, Rows


class Watch(NamedTuple):
  """What is known of the H hot rows, on the device."""

  skip: WatchedRows
  """Snapshot, touches and stale rows."""
  moved: RowChange
  """What they did in the last window that closed."""


@jax.jit
def start(rows: Rows) -> Watch:
  """A watch over hot rows [H, D], none of them stale."""
  none = jnp.zeros(len(rows), jnp.int32)
  watched = WatchedRows(jnp.copy(rows), none, jnp.zeros(len(rows), bool))
  return Watch(watched, RowChange(jnp.zeros(len(rows), jnp.float32), none))


@functools.partial(jax.jit, donate_argnums=0)
def opened(watch: Watch, rows: Rows) -> Watch:
  """The watch as a window opens: the rows [H, D] copied, all thawed."""
  touches, stale = (jnp.zeros_like(x) for x in watch.skip[1:])
  return watch._replace(skip=WatchedRows(jnp.copy(rows), touches, stale))


@functools.partial(jax.jit, donate_argnums=0)
def closed(watch: Watch, rows: Rows) -> tuple[Watch, RowChange]:
  """The watch as a window closes, and what the rows [H, D] did in it."""
  change = row_change(rows, watch.skip.snapshot)
  # A copy: the same buffer must not be donated twice, as touches and as moved.
  moved = RowChange(change, jnp.copy(watch.skip.touches))
  return watch._replace(moved=moved), copy_of(moved)


@functools.partial(jax.jit, donate_argnums=0)
def frozen(watch: Watch, stale: Bool[jax.Array, ' H']) -> Watch:
  """The watch with these rows standing still."""
  return watch._replace(skip=watch.skip._replace(stale=stale))


@jax.jit
def copy_of(moved: RowChange) -> RowChange:
  """A copy that lasts: the watch is donated to what changes it next."""
  return jax.tree.map(jnp.copy, moved)


@jax.jit
def still(
  watch: Watch, row_index: Int[jax.Array, ' P']
) -> Bool[jax.Array, ' P']:
  """Which of a step's rows stand still.

  Args:
    watch: of the hot rows.
    row_index: place of each row among the hot ones; H and above if cold.
  """
  return stale_at(watch.skip.stale, row_index)


def touched(
  watch: Watch,
  row_index: Int[jax.Array, ' P'],
  rows: Bool[jax.Array, ' P'],
) -> Watch:
  """The watch with one more touch of those of a step's rows that had one."""
  touches = _touches_after(watch.skip.touches, row_index, rows)
  return watch._replace(skip=watch.skip._replace(touches=touches))


# Donates the touches alone: the rest of a watch goes on as it is.
_touches_after = jax.jit(touches_after, donate_argnums=0)
