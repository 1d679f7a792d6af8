"""What schedules ask of the rows they cannot see."""

from typing import Protocol, runtime_checkable

from slipstream_jax.types import RowChange


@runtime_checkable
class Probe(Protocol):
  """How a schedule learns of the rows; `train` builds it."""

  def row_change(self, window: int) -> RowChange:
    """What rows did in the window closed under this number; waits for it."""
    ...
