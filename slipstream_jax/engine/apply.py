"""Device programs of a plan, and the arrays of indices that they take.

Slots past the device's last row mean that the row is not there. They read as 0
and are not written. Positions past the block's last row are padding. All in an
array are unique, including padding, as `unique_indices` promises to XLA.
"""

import functools
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Int
import numpy as np

from slipstream_jax import row_kernels
from slipstream_jax.hashing import kernel
from slipstream_jax.placement import bucket
from slipstream_jax.store.records import aligned
from slipstream_jax.types import Positions, RowBlock, Slots

_WIDE = 128  # bytes of a row from which XLA's gather on a CPU is slower


def pad_slots(slots: Slots, device_rows: int) -> Int[np.ndarray, ' P']:
  """Pads slots to their bucket. Padding and -1 become slots past the last."""
  return padded(slots, device_rows, bucket(len(slots)))


def pad_positions(positions: Positions, rows: int) -> Int[np.ndarray, ' Q']:
  """Pads positions in a block of `rows` rows to a bucket, i32."""
  return padded(positions, rows, bucket(len(positions), smallest=1024))


def padded(slots: Slots, past: int, size: int) -> Int[np.ndarray, ' P']:
  """Returns i32[size], with numbers from `past` on for padding and for -1."""
  out = aligned((size,), np.int32)
  _pad(slots, past, out)
  return out


# A compiled loop, as numpy would take several passes over i64 arrays.
@kernel
@no_type_check
def _pad(slots: np.ndarray, past: int, out: np.ndarray) -> None:
  for i in range(len(slots)):
    absent = slots[i] < 0
    out[i] = past if absent else slots[i]  # without a branch
    past += absent
  for i in range(len(slots), len(out)):
    out[i] = past
    past += 1


def pad_lanes(
  values: Int[np.ndarray, ' n'],
  bounds: Int[np.ndarray, ' W_and_1'],
  past: int,
  size: int,
) -> Int[np.ndarray, ' W_size']:
  """Returns the values of each lane, which begins at its bound, as `padded`."""
  out = aligned(((len(bounds) - 1) * size,), np.int32)
  _pad_lanes(values, bounds, past, size, out)
  return out


@kernel
@no_type_check
def _pad_lanes(
  values: np.ndarray, bounds: np.ndarray, past: int, size: int, out: np.ndarray
) -> None:
  for lane in range(len(bounds) - 1):
    own = values[bounds[lane] : bounds[lane + 1]]
    _pad(own, past, out[lane * size : (lane + 1) * size])


def sources(
  at: Int[np.ndarray, ' load'], loaded: int, held: int, size: int
) -> Int[np.ndarray, ' Q']:
  """Returns the source of each row for `join`, i32[size].

  `at` has the place of each row in the held block, or -1 if it is loaded. There
  are `loaded` and `held` rows, with padding.
  """
  source = aligned((size,), np.int32)
  _sources(at, loaded, held, source)
  return source


@kernel
@no_type_check
def _sources(at: np.ndarray, loaded: int, held: int, out: np.ndarray) -> None:
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
    loaded = join(loaded, *joined)
  return _put(_take(kept, slots), positions, loaded), slots, positions


@jax.jit
def join(
  loaded: RowBlock, held: RowBlock, source: Int[jax.Array, ' Q']
) -> RowBlock:
  """Returns rows [Q, ...] of `loaded` [L, ...] and of `held` [S, ...].

  The source of a row is its place in `loaded`, or L + its place in `held`.
  Beyond both, the row is 0.
  """
  return jax.tree.map(
    lambda *leaves: _take_leaf(leaves[0], source, *leaves[1:]), loaded, held
  )


@functools.partial(jax.jit, donate_argnums=0)
def write_slots(
  kept: RowBlock, slots: Int[jax.Array, ' P'], block: RowBlock
) -> RowBlock:
  """Writes `block` at `slots` of `kept`, in place: `kept` is donated."""
  # A copy would move all C rows in each step. Other references to `kept` become
  # invalid, so the device's rows have only one.
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


def zeros(size: int, like: RowBlock, sharding: Any = None) -> RowBlock:
  """Returns rows of zeros [size, ...] with the dtypes and shapes of `like`."""
  leaves, form = jax.tree.flatten(like)
  shapes = tuple(((size, *leaf.shape[1:]), leaf.dtype) for leaf in leaves)
  block: RowBlock = jax.tree.unflatten(form, _zeros(shapes, sharding)())
  return block


@functools.cache
def _zeros(shapes: tuple[tuple[Any, Any], ...], sharding: Any) -> Any:
  def zeros() -> list[jax.Array]:
    return [jnp.zeros(shape, dtype) for shape, dtype in shapes]

  return jax.jit(zeros, out_shardings=sharding)


def _put(block: RowBlock, at: jax.Array, new: RowBlock) -> RowBlock:
  return jax.tree.map(
    lambda leaf, new: leaf.at[at].set(new, mode='drop', unique_indices=True),
    block,
    new,
  )


def _take(block: RowBlock, at: jax.Array) -> RowBlock:
  return jax.tree.map(lambda leaf: _take_leaf(leaf, at), block)


def _take_leaf(leaf: jax.Array, at: jax.Array, *held: jax.Array) -> jax.Array:
  """Returns rows at places of a leaf, or of the held rows after it."""

  def by_xla(leaf: jax.Array, at: jax.Array, *held: jax.Array) -> jax.Array:
    # Faster on a CPU than a gather followed by a select or scatter.
    leaf = jnp.concatenate([leaf, *held]) if held else leaf
    return leaf.at[at].get(mode='fill', fill_value=0, unique_indices=True)

  def kernel(leaf: jax.Array, at: jax.Array, *held: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct((len(at), *leaf.shape[1:]), leaf.dtype)
    take = jax.ffi.ffi_call(row_kernels.TAKE, result)
    return take(leaf, at, np.array([row_bytes], np.int32), *held)

  row_bytes = leaf.nbytes // max(1, len(leaf))
  if row_bytes < _WIDE or not len(at) or not row_kernels.register():
    return by_xla(leaf, at, *held)
  return jax.lax.platform_dependent(leaf, at, *held, cpu=kernel, default=by_xla)
