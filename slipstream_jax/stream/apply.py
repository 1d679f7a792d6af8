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
from slipstream_jax.types import Positions, RowBlock, Slots


def pad_slots(slots: Slots, device_rows: int) -> Int[np.ndarray, ' P']:
  """Slots padded to their bucket; padding and -1 lie past the last row."""
  size = bucket(len(slots))
  # Each absent row gets a number of its own past the last row, not one for all.
  padded = np.arange(device_rows, device_rows + size, dtype=np.int32)
  np.copyto(padded[: len(slots)], slots, where=slots >= 0, casting='unsafe')
  return padded


def pad_positions(positions: Positions, rows: int) -> Int[np.ndarray, ' Q']:
  """Positions in a block of `rows` rows, padded to a bucket, i32."""
  padding = bucket(len(positions), smallest=1024) - len(positions)
  past = np.arange(rows, rows + padding)
  return np.concatenate([positions, past]).astype(np.int32)


@jax.jit
def gather_slots(kept: RowBlock, slots: Int[jax.Array, ' P']) -> RowBlock:
  """The rows [P, ...] at `slots` of the rows [C, ...] that the device keeps."""
  return _take(kept, slots)


@jax.jit
def assemble(
  kept: RowBlock,
  slots: Int[jax.Array, ' P'],
  loaded: RowBlock,
  positions: Int[jax.Array, ' Q'],
) -> RowBlock:
  """Rows [P, ...]: those at `slots`, and `loaded` [Q, ...] at `positions`."""
  # One program, so that XLA may write into what it has just gathered.
  return _put(_take(kept, slots), positions, loaded)


@functools.partial(jax.jit, donate_argnums=0)
def write_slots(
  kept: RowBlock, slots: Int[jax.Array, ' P'], block: RowBlock
) -> RowBlock:
  """`kept` with `block` written at `slots`, in place: `kept` is donated."""
  # Else each step would copy all C rows. Whoever still holds `kept` finds it
  # deleted, so `Kept` has the only reference (see `Engine.hot_rows_now`).
  return _put(kept, slots, block)


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
