"""Schedules and systems by name, as a comparison of them needs."""

from collections.abc import Callable
from typing import NamedTuple

from slipstream_jax.schedules.base import ScheduleSpec
from slipstream_jax.schedules.plain import plain
from slipstream_jax.schedules.slipstream import slipstream

SCHEDULES: dict[str, Callable[..., ScheduleSpec]] = {
  'plain': plain,
  'slipstream': slipstream,
}
"""Every schedule by its name, as a function of its own settings; all obey the
laws in tests/laws."""


class System(NamedTuple):
  """A way to train: which examples run when, and where rows live."""

  name: str
  schedule: str
  """Its key in `SCHEDULES`."""
  placement: str
  """Its key in `PLACEMENTS`."""


SYSTEMS: dict[str, System] = {
  system.name: system
  for system in (
    System('resident', 'plain', 'resident'),
    System('streamed', 'plain', 'streamed'),
    System('pinned', 'plain', 'pinned'),
    System('slipstream', 'slipstream', 'pinned'),
  )
}
"""Every system by its name; where nothing is left out, all train the same
tables to the bit."""
