"""What schedules ask of the rows they cannot see."""

from typing import Protocol, runtime_checkable

from slipstream_jax.types import RowChange


@runtime_checkable
class Probe(Protocol):
  """How a schedule learns of the rows; `train` builds it."""

  def row_change(self, window: int) -> RowChange:
    """What rows did in the window closed under this number; waits for it."""
    ...

  def resume(self, window: int | None) -> None:
    """A schedule goes on from a position that was saved.

    Args:
      window: the one that closed before that position, and that the schedule
        is yet to ask for; None if there is none. Of windows before, nothing
        will be asked.

    Raises:
      UserError: what rows did in that window is not known here.
    """
    ...
