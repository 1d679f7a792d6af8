"""The schedule that trains everything."""

from collections.abc import Iterator

import numpy as np

from slipstream_jax.schedules.base import (
  Edge,
  Ordered,
  Scheduled,
  ScheduleSpec,
  State,
)


def plain() -> ScheduleSpec:
  """Every example, in the order of the source."""
  return ScheduleSpec(lambda source, hot, probe: Plain(Ordered(source)))


class Plain:
  """See `plain`."""

  seconds = 0.0
  """Spent on choosing: none."""

  def __init__(self, source: Ordered) -> None:
    """Trains the batches of `source`, which it takes over."""
    self._source = source

  def __iter__(self) -> Iterator[Scheduled]:
    return self

  def __next__(self) -> Scheduled:
    batch = next(self._source)
    # First, because the position includes it.
    edge = Edge(**self._source.take_edge())
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
    self._source.resumed()

  def unreported(self) -> tuple[int, int]:
    """None ever: each batch reports its own."""
    return 0, 0

  def close(self) -> None:
    """Closes the source."""
    self._source.close()
