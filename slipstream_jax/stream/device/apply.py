"""The device's side of a plan: the batch's rows together, and apart again.

Slots past the device's last row mean that the row is not there: they read as
0 and are not written. Positions past the block's last row are padding. All
slots or positions of one array are unique, padding too, because
`unique_indices` promises that to XLA: repeated ones would be undefined.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

from slipstream_jax.placement import bucket
from slipstream_jax.stream.device import slot_kernels as kernels
from slipstream_jax.types import Positions, RowBlock, Slots


def pad_slots(slots: Slots, device_rows: int) -> Int[np.ndarray, ' P']:
  """Slots padded to their bucket; padding and -1 lie past the last row."""
  padded = np.empty(bucket(len(slots)), np.int32)
  kernels.pad_slots(slots, device_rows, padded)
  return padded


def pad_positions(positions: Positions, rows: int) -> Int[np.ndarray, ' Q']:
  """Positions in a block of `rows` rows, padded to a bucket, i32."""
  padded = np.empty(bucket(len(positions), smallest=1024), np.int32)
  kernels.pad_positions(positions, rows, padded)
  return padded


def sources(
  at: Int[np.ndarray, ' load'], loaded: int, held: int, size: int
) -> Int[np.ndarray, ' Q']:
  """What `join` takes its rows from, i32[size].

  Args:
    at: of each row its place among those held; -1 if it is not, and comes from
      the host, in this order.
    loaded: L, rows from the host, padding included.
    held: S, likewise.
    size: Q, at least as many as rows.
  """
  source = np.empty(size, np.int32)
  kernels.sources(at, loaded, held, source)
  return source


@jax.jit
def gather_slots(kept: RowBlock, slots: Int[jax.Array, ' P']) -> RowBlock:
  """The rows [P, ...] at `slots` of the rows [C, ...] that the device keeps."""
  return _take(kept, slots)


@functools.partial(jax.jit, donate_argnums=1)
def gather_at(
  kept: RowBlock, slots: Int[jax.Array, ' P']
) -> tuple[RowBlock, Int[jax.Array, ' P']]:
  """`gather_slots`, and the slots, which are then on the device."""
  return _take(kept, slots), slots


@functools.partial(jax.jit, donate_argnums=(1, 3))
def assemble(
  kept: RowBlock,
  slots: Int[jax.Array, ' P'],
  loaded: RowBlock,
  positions: Int[jax.Array, ' Q'],
  joined: tuple[RowBlock, Int[jax.Array, ' Q']] | None = None,
) -> tuple[RowBlock, Int[jax.Array, ' P'], Int[jax.Array, ' Q']]:
  """Rows [P, ...]: those at `slots`, and others [Q, ...] at `positions`.

  The others are `loaded`, or what `join` makes of it and of `joined`. With the
  rows come slots and positions, which are then on the device.
  """
  # One program, so that XLA may write into what it has just gathered.
  if joined is not None:
    loaded = _join(loaded, *joined)
  return _put(_take(kept, slots), positions, loaded), slots, positions


@jax.jit
def join(
  loaded: RowBlock, held: RowBlock, source: Int[jax.Array, ' Q']
) -> RowBlock:
  """Rows [Q, ...] of `loaded` [L, ...] and of `held` [S, ...].

  Args:
    loaded: rows from the host.
    held: rows of the step before.
    source: place of each row in `loaded`, or L + its place in `held`; the row
      is 0 past both.
  """
  return _join(loaded, held, source)


@functools.partial(jax.jit, donate_argnums=0)
def write_slots(
  kept: RowBlock, slots: Int[jax.Array, ' P'], block: RowBlock
) -> RowBlock:
  """`kept` with `block` written at `slots`, in place: `kept` is donated."""
  # Else each step would copy all C rows. Whoever still holds `kept` finds it
  # deleted, so `Kept` has the only reference (see `Engine.hot_rows_now`).
  return _put(kept, slots, block)


@functools.partial(jax.jit, donate_argnums=0)
def write_and_take(
  kept: RowBlock,
  slots: Int[jax.Array, ' P'],
  block: RowBlock,
  positions: Int[jax.Array, ' Q'],
) -> tuple[RowBlock, RowBlock]:
  """As `write_slots`, and the rows [Q, ...] of `block` at some positions."""
  return _put(kept, slots, block), _take(block, positions)


@functools.partial(jax.jit, static_argnums=1)
def zeros_like(block: RowBlock, rows: int) -> RowBlock:
  """Zeros [rows, ...] of the block's dtypes."""
  return jax.tree.map(
    lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), block
  )


@functools.partial(jax.jit, static_argnums=1)
def first_rows(
  rows: Float[jax.Array, 'P D'], count: int
) -> Float[jax.Array, 'H D']:
  """The first `count` rows [count, D]."""
  return rows[:count]


def _join(loaded: RowBlock, held: RowBlock, source: jax.Array) -> RowBlock:
  # On a CPU faster than to gather from one and select or scatter.
  both = jax.tree.map(lambda *parts: jnp.concatenate(parts), loaded, held)
  return _take(both, source)


def _take(block: RowBlock, at: jax.Array) -> RowBlock:
  return jax.tree.map(
    lambda leaf: leaf.at[at].get(
      mode='fill', fill_value=0, unique_indices=True
    ),
    block,
  )


def _put(block: RowBlock, at: jax.Array, new: RowBlock) -> RowBlock:
  return jax.tree.map(
    lambda leaf, new: leaf.at[at].set(new, mode='drop', unique_indices=True),
    block,
    new,
  )
