"""State for skipping stale rows in a loop that opens and closes windows itself.

In each step, `stale_at` returns which of its rows are frozen, and
`touches_after` counts the rows that it touched.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from slipstream_jax.types import Rows


class WatchedRows(NamedTuple):
  """State of H watched rows."""

  snapshot: Rows
  """Values of the rows [H, D] when the last window opened."""
  touches: Int[jax.Array, ' H']
  """Steps since then that touched each row."""
  stale: Bool[jax.Array, ' H']
  """Whether each row is frozen now."""


def stale_at(
  stale: Bool[jax.Array, ' H'], row_index: Int[jax.Array, ' P']
) -> Bool[jax.Array, ' P']:
  """Returns which of a step's rows are frozen.

  Args:
    stale: bool[H], whether each watched row is frozen.
    row_index: each row's place among the watched rows, or a place out of range.
  """
  at = stale.at[_inside(row_index, stale)]
  return at.get(mode='fill', fill_value=False)


def touches_after(
  touches: Int[jax.Array, ' H'],
  row_index: Int[jax.Array, ' P'],
  touched: Bool[jax.Array, ' P'],
) -> Int[jax.Array, ' H']:
  """Increments the counts of the watched rows that a step touched.

  Args:
    touches: counts of the watched rows.
    row_index: as in `stale_at`.
    touched: from `skip.touched_rows`.
  """
  at = touches.at[_inside(row_index, touches)]
  return at.add(touched.astype(jnp.int32), mode='drop')


def _inside(row_index: jax.Array, watched: jax.Array) -> jax.Array:
  # JAX would count a negative index from the end, but drops one past the end.
  return jnp.where(row_index < 0, watched.shape[0], row_index)
