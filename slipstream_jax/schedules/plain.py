"""The schedule that trains everything."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from slipstream_jax.data.base import BatchSource
from slipstream_jax.schedules.base import Edge, Scheduled, ScheduleSpec, State


def plain() -> ScheduleSpec:
  """Every example, in the order of the source."""
  return ScheduleSpec(lambda source, hot, probe: Plain(source))


class Plain:
  """See `plain`."""

  seconds = 0.0
  """Spent on choosing: none."""

  def __init__(self, source: BatchSource) -> None:
    """Trains the batches of `source`, which it takes over."""
    self._source = source

  def __iter__(self) -> Iterator[Scheduled]:
    return self

  def __next__(self) -> Scheduled:
    batch = next(self._source)
    edge = edge_of(self._source)  # first, as the position is behind it
    state: State = self._source.get_state()
    grown = state.get('vocabularies', {})
    seen = int(np.count_nonzero(batch.weights))  # the rest is padding
    return Scheduled(batch, state, seen, edge=edge, grown=grown)

  def get_state(self) -> State:
    """The source's."""
    return self._source.get_state()

  def set_state(self, state: State) -> None:
    """Hands it to the source."""
    self._source.set_state(state)
    resumed(self._source)

  def unreported(self) -> tuple[int, int]:
    """None ever: each batch reports its own."""
    return 0, 0

  def close(self) -> None:
    """Closes the source."""
    self._source.close()


def edge_of(source: BatchSource, **own: Any) -> Edge:
  """What becomes of the hot rows with a batch that is delivered now.

  Args:
    source: asked, if it puts examples into an order that depends on losses.
    own: what the schedule itself says.
  """
  take: Any = getattr(source, 'take_edge', dict)
  return Edge(**{**own, **take()})


def resumed(source: BatchSource) -> None:
  """Says that the schedule is where it goes on, if the source wants to know."""
  getattr(source, 'resumed', lambda: None)()
