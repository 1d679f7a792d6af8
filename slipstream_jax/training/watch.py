"""The hot rows under watch: a snapshot on the device, and what became of it.

What `skip_stale` does, where a schedule has the windows. Around each step,
`still` says which of its rows may not move, and `touched` counts those it
touched; the other functions run at the edges of a window only. They are
programs of their own, so that the step is the same one whether rows are watched
or not.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from slipstream_jax.engine.buffers import to_device
from slipstream_jax.selection.change import row_change
from slipstream_jax.tables import TableSet
from slipstream_jax.transforms.entries import (
  stale_at,
  touches_after,
  WatchedRows,
)
from slipstream_jax.types import HotRows, RowChange


class Watch(NamedTuple):
  """What is known of the H hot rows, on the device."""

  skip: WatchedRows
  """Snapshot, touches and stale rows."""
  moved: RowChange
  """What they did in the last window that closed."""


HotRowsOfGroups = tuple[Float[jax.Array, '_H _D'], ...]
Watches = tuple[Watch, ...]
"""Per group; all that is of hot rows is of them in the order of the groups."""


@jax.jit
def start(rows: HotRowsOfGroups) -> Watches:
  """A watch over the hot rows [H_g, D_g] of each group, none of them stale."""
  return tuple(map(_start, rows))


def of_nothing(tables: TableSet, hot: Sequence[HotRows | None]) -> Watches:
  """A watch to be replaced: as `start` makes it, over rows of zeros."""
  zeros = tuple(
    np.zeros((0 if one is None else len(one.rows), group.dim), group.dtype)
    for group, one in zip(tables.groups, hot, strict=True)
  )
  return start(to_device(zeros, owned=True))


def of_no_row(size: int) -> Bool[jax.Array, ' P']:
  """A mask [P] of no row: what `still` says where nothing is watched."""
  # Outside of any program: it is kept, and one may be traced right now.
  with jax.ensure_compile_time_eval():
    mask: jax.Array = to_device(np.zeros(size, bool), owned=True)
  return mask


def _start(rows: jax.Array) -> Watch:
  none = jnp.zeros(len(rows), jnp.int32)
  watched = WatchedRows(jnp.copy(rows), none, jnp.zeros(len(rows), bool))
  return Watch(watched, RowChange(jnp.zeros(len(rows), jnp.float32), none))


@functools.partial(jax.jit, donate_argnums=0)
def opened(watches: Watches, rows: HotRowsOfGroups) -> Watches:
  """The watches as a window opens: rows [H_g, D_g] copied, all thawed."""
  return tuple(map(_opened, watches, rows))


def _opened(watch: Watch, rows: jax.Array) -> Watch:
  touches, stale = (jnp.zeros_like(x) for x in watch.skip[1:])
  return watch._replace(skip=WatchedRows(jnp.copy(rows), touches, stale))


@functools.partial(jax.jit, donate_argnums=0)
def closed(
  watches: Watches, rows: HotRowsOfGroups
) -> tuple[Watches, RowChange]:
  """The watches as a window closes, and what all H rows did in it."""
  pairs = zip(watches, rows, strict=True)
  # A copy: the same buffer must not be donated twice, as touches and as moved.
  watches = tuple(
    w._replace(
      moved=RowChange(row_change(r, w.skip.snapshot), jnp.copy(w.skip.touches))
    )
    for w, r in pairs
  )
  return watches, moved(watches)


@functools.partial(jax.jit, donate_argnums=0)
def frozen(watches: Watches, stale: Bool[jax.Array, ' H']) -> Watches:
  """The watches with these of all H rows standing still."""
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
  """What all H rows did in the last window that closed.

  A copy that lasts: the watches are donated to what changes them next.
  """
  if len(watches) == 1:
    return jax.tree.map(jnp.copy, watches[0].moved)
  return RowChange(
    *(jnp.concatenate(c) for c in zip(*(w.moved for w in watches), strict=True))
  )


@jax.jit
def still(
  watches: Watches, row_index: tuple[Int[jax.Array, ' _P'], ...]
) -> tuple[Bool[jax.Array, ' _P'], ...]:
  """Per group, which of a step's rows stand still.

  Args:
    watches: of the hot rows.
    row_index: place of each row among its group's hot ones; H_g and above if
      cold.
  """
  pairs = zip(watches, row_index, strict=True)
  # Of a group without hot rows, where there is nothing to look up, none does.
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
  """The watches with one more touch of those of a step's rows that had one."""
  touches = _touches_after(
    tuple(w.skip.touches for w in watches), row_index, rows
  )
  return tuple(
    w._replace(skip=w.skip._replace(touches=t))
    for w, t in zip(watches, touches, strict=True)
  )


# Donates the touches alone: the rest of a watch goes on as it is.
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
