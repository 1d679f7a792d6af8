"""Hot rows under watch, where a schedule has the windows of `skip_stale`.

The watch keeps a snapshot of the hot rows on the device. In each step, `frozen`
returns which of its rows may not change, and `touched` counts the rows that it
touched. The other functions run at the edges of windows. They are programs of
their own, so the step is the same program whether rows are watched or not.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.engine.buffers import to_device
from slipstream_jax.selection.staleness import row_change
from slipstream_jax.tables import TableSet
from slipstream_jax.transforms.entries import (
  stale_at,
  touches_after,
  WatchedRows,
)
from slipstream_jax.types import HotRows, RowChange


class Watch(NamedTuple):
  """State of the watch over the H hot rows of a group, on the device."""

  skip: WatchedRows
  """Snapshot, touches and stale rows."""
  moved: RowChange
  """Change and touches of the rows in the last window that closed."""


HotRowsOfGroups = tuple[Float[jax.Array, '_H _D'], ...]
Watches = tuple[Watch, ...]
"""One watch per group. Arrays over all hot rows are in the groups' order."""


@jax.jit
def start(rows: HotRowsOfGroups) -> Watches:
  """Returns watches over the hot rows [H_g, D_g] of each group, none stale."""

  def watch(rows: jax.Array) -> Watch:
    none = jnp.zeros(len(rows), jnp.int32)
    watched = WatchedRows(jnp.copy(rows), none, jnp.zeros(len(rows), bool))
    return Watch(watched, RowChange(jnp.zeros(len(rows), jnp.float32), none))

  return tuple(map(watch, rows))


def start_empty(tables: TableSet, hot: Sequence[HotRows | None]) -> Watches:
  """Returns watches over rows of zeros, which a restore will replace."""
  zeros = tuple(
    np.zeros((0 if one is None else len(one.rows), group.dim), group.dtype)
    for group, one in zip(tables.groups, hot, strict=True)
  )
  return start(to_device(zeros, owned=True))


def no_row(size: int) -> Bool[jax.Array, ' P']:
  """Returns a mask [P] of no row, for steps without watched rows."""
  # Outside of any program: the mask is cached, and one may be traced right now.
  with jax.ensure_compile_time_eval():
    mask: jax.Array = to_device(np.zeros(size, bool), owned=True)
  return mask


@functools.partial(jax.jit, donate_argnums=0)
def opened(watches: Watches, rows: HotRowsOfGroups) -> Watches:
  """Returns the watches at the opening of a window: rows copied, all thawed."""

  def reset(watch: Watch, rows: jax.Array) -> Watch:
    touches, stale = (jnp.zeros_like(x) for x in watch.skip[1:])
    return watch._replace(skip=WatchedRows(jnp.copy(rows), touches, stale))

  return tuple(map(reset, watches, rows))


@functools.partial(jax.jit, donate_argnums=0)
def closed(
  watches: Watches, rows: HotRowsOfGroups
) -> tuple[Watches, RowChange]:
  """Returns the watches after a window, and the change of all H rows in it."""
  pairs = zip(watches, rows, strict=True)
  # A copy, because a buffer must not be donated twice: as touches and as moved.
  watches = tuple(
    w._replace(
      moved=RowChange(row_change(r, w.skip.snapshot), jnp.copy(w.skip.touches))
    )
    for w, r in pairs
  )
  return watches, moved(watches)


@functools.partial(jax.jit, donate_argnums=0)
def freeze(watches: Watches, stale: Bool[jax.Array, ' H']) -> Watches:
  """Returns the watches with the rows of this mask, over all H rows, frozen."""
  ends = np.cumsum([len(w.skip.stale) for w in watches]).tolist()
  masks = [
    stale[e - len(w.skip.stale) : e] for e, w in zip(ends, watches, strict=True)
  ]
  return tuple(
    w._replace(skip=w.skip._replace(stale=mask))
    for w, mask in zip(watches, masks, strict=True)
  )


@jax.jit
def moved(watches: Watches) -> RowChange:
  """Returns the change of all H rows in the last window that closed.

  It is a copy, because the next change of the watches donates them.
  """
  if len(watches) == 1:
    return jax.tree.map(jnp.copy, watches[0].moved)
  return RowChange(
    *(jnp.concatenate(c) for c in zip(*(w.moved for w in watches), strict=True))
  )


@jax.jit
def frozen(
  watches: Watches, row_index: tuple[Int[jax.Array, ' _P'], ...]
) -> tuple[Bool[jax.Array, ' _P'], ...]:
  """Returns per group which of a step's rows are frozen.

  The place of a row among its group's hot ones is H_g or above if it is cold.
  """
  pairs = zip(watches, row_index, strict=True)
  # A group without hot rows has no mask to look into.
  return tuple(
    stale_at(w.skip.stale, index)
    if len(w.skip.stale)
    else jnp.zeros(len(index), bool)
    for w, index in pairs
  )


def touched(
  watches: Watches,
  row_index: tuple[Int[jax.Array, ' _P'], ...],
  rows: tuple[Bool[jax.Array, ' _P'], ...],
) -> Watches:
  """Increments the touch count of every row that a step touched."""
  touches = _touches_after(
    tuple(w.skip.touches for w in watches), row_index, rows
  )
  return tuple(
    w._replace(skip=w.skip._replace(touches=t))
    for w, t in zip(watches, touches, strict=True)
  )


# Donates only the touches: the rest of a watch stays as it is.
@functools.partial(jax.jit, donate_argnums=0)
def _touches_after(
  touches: tuple[jax.Array, ...],
  row_index: tuple[jax.Array, ...],
  rows: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
  of_groups = zip(touches, row_index, rows, strict=True)
  return tuple(
    touches_after(*one) if len(one[0]) else one[0] for one in of_groups
  )
