"""The device's side of a plan: gather from and write to the rows kept there.

Slots past the device's last row are padding: they read as 0 and are not
written. The padding of one block is distinct, as the hints to XLA promise.
"""

import functools

import jax
from jaxtyping import Int
import numpy as np

from slipstream_jax.placement import bucket
from slipstream_jax.types import RowBlock, Slots


def pad_slots(slots: Slots, device_rows: int) -> Int[np.ndarray, ' P']:
  """Slots padded to their bucket with distinct places past the last row."""
  padding = bucket(len(slots)) - len(slots)
  past = np.arange(device_rows, device_rows + padding, dtype=slots.dtype)
  dtype = np.int32 if device_rows + padding < 2**31 else np.int64
  return np.concatenate([slots, past]).astype(dtype)


@jax.jit
def gather_slots(kept: RowBlock, slots: Int[jax.Array, ' P']) -> RowBlock:
  """The rows [P, ...] at `slots` of the rows [C, ...] that the device keeps."""
  return jax.tree.map(
    lambda leaf: leaf.at[slots].get(
      mode='fill', fill_value=0, unique_indices=True
    ),
    kept,
  )


@functools.partial(jax.jit, donate_argnums=0)
def write_slots(
  kept: RowBlock, slots: Int[jax.Array, ' P'], block: RowBlock
) -> RowBlock:
  """`kept` with `block` written at `slots`, in place: `kept` is donated."""
  return jax.tree.map(
    lambda leaf, new: leaf.at[slots].set(new, mode='drop', unique_indices=True),
    kept,
    block,
  )
