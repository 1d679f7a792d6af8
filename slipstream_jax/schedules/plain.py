"""The schedule that trains everything."""

from collections.abc import Iterator

from slipstream_jax.data.base import BatchSource
from slipstream_jax.schedules.base import Scheduled, ScheduleSpec, State


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
    state: State = self._source.get_state()
    grown = state.get('vocabularies', {})
    return Scheduled(batch, state, len(batch.labels), grown=grown)

  def get_state(self) -> State:
    """The source's."""
    return self._source.get_state()

  def set_state(self, state: State) -> None:
    """Hands it to the source."""
    self._source.set_state(state)

  def unreported(self) -> tuple[int, int]:
    """None ever: each batch reports its own."""
    return 0, 0

  def close(self) -> None:
    """Closes the source."""
    self._source.close()
