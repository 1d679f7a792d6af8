"""Device programs of a plan, and the arrays of indices that they take.

Slots past the device's last row mean that the row is not there. They read as 0
and are not written. Positions past the block's last row are padding. All slots
or positions in an array are unique, including padding, because `unique_indices`
promises that to XLA.
"""

import functools
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numba
import numpy as np

from slipstream_jax.placement import bucket
from slipstream_jax.types import Positions, RowBlock, Slots

# Compiled loops, as numpy would take several passes over i64 arrays.
_kernel = numba.njit(cache=True, nogil=True, boundscheck=False)


def pad_slots(slots: Slots, device_rows: int) -> Int[np.ndarray, ' P']:
  """Pads slots to their bucket. Padding and -1 become slots past the last."""
  padded = np.empty(bucket(len(slots)), np.int32)
  _pad_slots(slots, device_rows, padded)
  return padded


@_kernel
@no_type_check
def _pad_slots(slots: np.ndarray, past: int, out: np.ndarray) -> None:
  """Copies slots. Each absent row and all padding get distinct numbers.

  Args:
    slots: integer[U], -1 where a row has none.
    past: the first number that is not a slot.
    out: i32[P], P >= U.
  """
  for i in range(len(out)):
    out[i] = past + i
  for u in range(len(slots)):
    if slots[u] >= 0:
      out[u] = slots[u]


def pad_positions(positions: Positions, rows: int) -> Int[np.ndarray, ' Q']:
  """Pads positions in a block of `rows` rows to a bucket, i32."""
  padded = np.empty(bucket(len(positions), smallest=1024), np.int32)
  _pad_positions(positions, rows, padded)
  return padded


@_kernel
@no_type_check
def _pad_positions(positions: np.ndarray, past: int, out: np.ndarray) -> None:
  """Copies positions and pads them with numbers that are not positions.

  Args:
    positions: integer[q].
    past: the first such number.
    out: i32[Q], Q >= q.
  """
  count = len(positions)
  for i in range(count):
    out[i] = positions[i]
  for i in range(count, len(out)):
    out[i] = past + i - count


def sources(
  at: Int[np.ndarray, ' load'], loaded: int, held: int, size: int
) -> Int[np.ndarray, ' Q']:
  """Returns the source of each row for `join`, i32[size].

  Args:
    at: place of each row in the held block, or -1 if it comes from the host, in
      this order.
    loaded: L, rows from the host with padding.
    held: S, held rows with padding.
    size: Q, at least as many as rows.
  """
  source = np.empty(size, np.int32)
  _sources(at, loaded, held, source)
  return source


@_kernel
@no_type_check
def _sources(at: np.ndarray, loaded: int, held: int, out: np.ndarray) -> None:
  """Writes the result of `sources` to `out`, i32[Q]."""
  from_host = 0
  for i in range(len(at)):
    if at[i] >= 0:
      out[i] = loaded + at[i]
    else:
      out[i] = from_host
      from_host += 1
  for i in range(len(at), len(out)):
    out[i] = loaded + held + i


@jax.jit
def gather_slots(kept: RowBlock, slots: Int[jax.Array, ' P']) -> RowBlock:
  """Returns the rows [P, ...] at `slots` of the device's rows [C, ...]."""
  return _take(kept, slots)


@functools.partial(jax.jit, donate_argnums=1)
def gather_at(
  kept: RowBlock, slots: Int[jax.Array, ' P']
) -> tuple[RowBlock, Int[jax.Array, ' P']]:
  """Runs `gather_slots` and also returns the slots as a device array."""
  return _take(kept, slots), slots


@functools.partial(jax.jit, donate_argnums=(1, 3))
def assemble(
  kept: RowBlock,
  slots: Int[jax.Array, ' P'],
  loaded: RowBlock,
  positions: Int[jax.Array, ' Q'],
  joined: tuple[RowBlock, Int[jax.Array, ' Q']] | None = None,
) -> tuple[RowBlock, Int[jax.Array, ' P'], Int[jax.Array, ' Q']]:
  """Returns rows [P, ...]: those at `slots`, others [Q, ...] at `positions`.

  The others are `loaded`, or `join` of it and of `joined`. Also returns slots
  and positions as device arrays.
  """
  # One program, so that XLA can write in place into what it gathered.
  if joined is not None:
    loaded = _join(loaded, *joined)
  return _put(_take(kept, slots), positions, loaded), slots, positions


@jax.jit
def join(
  loaded: RowBlock, held: RowBlock, source: Int[jax.Array, ' Q']
) -> RowBlock:
  """Returns rows [Q, ...] of `loaded` [L, ...] and of `held` [S, ...].

  Args:
    loaded: rows from the host.
    held: rows of the previous step.
    source: place of each row in `loaded`, or L + its place in `held`. Beyond
      both, the row is 0.
  """
  return _join(loaded, held, source)


@functools.partial(jax.jit, donate_argnums=0)
def write_slots(
  kept: RowBlock, slots: Int[jax.Array, ' P'], block: RowBlock
) -> RowBlock:
  """Writes `block` at `slots` of `kept`, in place: `kept` is donated."""
  # A copy would move all C rows in each step. Other references to `kept` become
  # invalid, so the device's rows have only one (see `Engine.hot_rows_now`).
  return _put(kept, slots, block)


@functools.partial(jax.jit, donate_argnums=0)
def write_and_take(
  kept: RowBlock,
  slots: Int[jax.Array, ' P'],
  block: RowBlock,
  positions: Int[jax.Array, ' Q'],
) -> tuple[RowBlock, RowBlock]:
  """Runs `write_slots`, and returns the block's rows [Q, ...] at positions."""
  return _put(kept, slots, block), _take(block, positions)


@functools.partial(jax.jit, static_argnums=1)
def zeros_like(block: RowBlock, rows: int) -> RowBlock:
  """Returns zeros [rows, ...] of the block's dtypes."""
  return jax.tree.map(
    lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), block
  )


@functools.partial(jax.jit, static_argnums=1)
def first_rows(
  rows: Float[jax.Array, 'P D'], count: int
) -> Float[jax.Array, 'H D']:
  """Returns the first `count` rows, [count, D]."""
  return rows[:count]


def _join(loaded: RowBlock, held: RowBlock, source: jax.Array) -> RowBlock:
  # Faster on a CPU than a gather followed by a select or scatter.
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
