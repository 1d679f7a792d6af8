"""What a schedule gives: which inputs run, in which order, when to look.

A schedule turns the batches of a source into the batches to train. It runs
on the host, some batches ahead of the step, and touches no device.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool
import numpy as np

from slipstream_jax.types import Batch, RowChange

State = dict[str, Any]
"""Position of a schedule: nested dicts of numbers, strings and arrays."""


class Scheduled(NamedTuple):
  """A batch to train, and what is to happen around its step."""

  batch: Batch
  state: State
  """Position of the schedule right after this batch."""
  seen: int
  """Inputs read from the source since the batch before."""
  dropped: int = 0
  """Of those, the ones left out."""
  opens: bool = False
  """Before the step all rows thaw, and a snapshot is taken."""
  closes: int | None = None
  """After the step, rows are compared with the snapshot; under this number
  the probe then tells how far they moved."""
  stale: Bool[np.ndarray, ' H'] | None = None
  """The hot rows that stand still from this step on, until a window opens."""
  event: dict[str, Any] | None = None
  """What was decided before this batch, for the metrics."""

  @property
  def marked(self) -> bool:
    """Whether the schedule counts on the step around this batch."""
    return self.opens or self.closes is not None or self.stale is not None


@runtime_checkable
class Schedule(Protocol):
  """An iterator of batches to train that can be stopped and resumed."""

  @property
  def seconds(self) -> float:
    """CPU time spent on deciding and on choosing inputs so far."""
    ...

  def __iter__(self) -> Iterator[Scheduled]: ...

  def __next__(self) -> Scheduled: ...

  def get_state(self) -> State:
    """Position after the last batch delivered."""
    ...

  def set_state(self, state: State) -> None:
    """Continues as if the batches up to `state` had just been delivered."""
    ...

  def unreported(self) -> tuple[int, int]:
    """Inputs seen, and dropped, since the last batch delivered."""
    ...

  def close(self) -> None:
    """Closes the source; may be called more than once."""
    ...


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
