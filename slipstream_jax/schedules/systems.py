"""Schedules and systems by name, as a comparison of them needs."""

from collections.abc import Callable
from typing import NamedTuple

from slipstream_jax.schedules.base import ScheduleSpec
from slipstream_jax.schedules.fae import fae
from slipstream_jax.schedules.hotline import hotline, hotline_micro, WORKING_SET
from slipstream_jax.schedules.plain import plain
from slipstream_jax.schedules.slipstream import slipstream

SCHEDULES: dict[str, Callable[..., ScheduleSpec]] = {
  'plain': plain,
  'slipstream': slipstream,
  'fae': fae,
  'hotline': hotline,
  'hotline_micro': hotline_micro,
}
"""Every schedule by its name, as a function of its own settings; all obey the
laws in tests/laws."""


ROWS = ('stream', 'parameter_server', 'pooled')
"""What may cross the link in a step: rows with their state, trained on the
device; or, trained on the host, rows and their gradients, or embeddings and
theirs."""


class System(NamedTuple):
  """A way to train: which examples run when, and where rows live."""

  name: str
  schedule: str
  """Its key in `SCHEDULES`."""
  placement: str | None = None
  """Its key in `PLACEMENTS`, or 'cached'; None: as one likes."""
  rows: str = 'stream'
  """What crosses the link in a step, of `ROWS`."""
  microbatches: int = 1
  """Equal parts of a batch whose gradients are summed."""


SYSTEMS: dict[str, System] = {
  system.name: system
  for system in (
    System('plain', 'plain'),
    System('cached', 'plain', 'cached'),
    System('xdl', 'plain', 'streamed', 'parameter_server'),
    System('dlrm_hybrid', 'plain', 'streamed', 'pooled'),
    System('fae', 'fae', 'swapped', 'pooled'),
    System('fae_pinned', 'fae', 'pinned'),
    System('hotline', 'hotline', 'pinned'),
    System(
      'hotline_micro', 'hotline_micro', 'pinned', microbatches=WORKING_SET
    ),
  )
}
"""Every system by its name. On the same order of examples all train the same
tables: to the bit, or but for the order of float32 sums where rows are updated
on the host, or batches cut into parts. Slipstream goes with each of them."""
