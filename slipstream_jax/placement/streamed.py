"""Keeps no row on the device: each step loads its rows and stores them back.

This is how a parameter server (XDL) works, and needs the least device memory.
Frozen rows are the exception. The device has a copy of them, equal to the
host's until they thaw, so they are neither loaded nor stored.
"""

from collections.abc import Sequence

from jaxtyping import Bool
import numpy as np

from slipstream_jax.placement.base import (
  NO_ROWS,
  Placement,
  Plan,
  plan_with,
)
from slipstream_jax.types import StaleRows, Unique

State = Bool[np.ndarray, ' H_and_1'] | None
"""The frozen rows, with a final False for all cold rows. None: no row is
frozen."""


def _plan(frozen: State, upcoming: Sequence[Unique]) -> tuple[State, Plan]:
  batch = upcoming[0]
  slots = np.full(len(batch.rows), -1, np.int64)
  if frozen is not None and batch.hot is not None:
    # `Engine.freeze` puts each copy at its row's place among the hot rows.
    slots = np.where(frozen.take(batch.hot), batch.hot, slots)
  return frozen, plan_with(batch, slots)


def _freeze(frozen: State, stale: StaleRows | None) -> State:
  return None if stale is None else np.append(stale, False)


STREAMED = Placement(
  name='streamed',
  keeps=lambda num_rows, hot: NO_ROWS,
  start=lambda num_rows, hot, contents: None,
  plan=_plan,
  freeze=_freeze,
  copies_frozen=True,
)
