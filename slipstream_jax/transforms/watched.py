"""The state of `skip_stale` over rows that steps have only some of.

For a loop that opens and closes windows itself, and finds the stale rows
itself: around each step, `stale_at` says which of its rows may not move and
`touches_after` counts those that it touched.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from slipstream_jax.types import Rows


class WatchedRows(NamedTuple):
  """What is known of H watched rows."""

  snapshot: Rows
  """The rows [H, D] when the last window opened."""
  touches: Int[jax.Array, ' H']
  """Steps that touched each of them since."""
  stale: Bool[jax.Array, ' H']
  """Those that stand still now."""


def stale_at(
  stale: Bool[jax.Array, ' H'], row_index: Int[jax.Array, ' P']
) -> Bool[jax.Array, ' P']:
  """Which of a step's rows stand still.

  Args:
    stale: of the watched rows.
    row_index: place of each row among those; no place of them if it is none.
  """
  at = stale.at[_inside(row_index, stale)]
  return at.get(mode='fill', fill_value=False)


def touches_after(
  touches: Int[jax.Array, ' H'],
  row_index: Int[jax.Array, ' P'],
  touched: Bool[jax.Array, ' P'],
) -> Int[jax.Array, ' H']:
  """The touches with one more of those of a step's rows that had one.

  Args:
    touches: of the watched rows.
    row_index: as in `stale_at`.
    touched: from `skip.touched_rows`.
  """
  at = touches.at[_inside(row_index, touches)]
  return at.add(touched.astype(jnp.int32), mode='drop')


def _inside(row_index: jax.Array, watched: jax.Array) -> jax.Array:
  # A negative index would count from the end; past it, it is dropped.
  return jnp.where(row_index < 0, watched.shape[0], row_index)
