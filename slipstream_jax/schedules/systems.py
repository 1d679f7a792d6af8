"""Lists of all schedules and systems by name."""

from collections.abc import Callable
from typing import NamedTuple

from slipstream_jax.schedules.base import plain, ScheduleSpec
from slipstream_jax.schedules.fae import fae
from slipstream_jax.schedules.hotline import hotline, hotline_micro, WORKING_SET
from slipstream_jax.schedules.slipstream import slipstream

SCHEDULES: dict[str, Callable[..., ScheduleSpec]] = {
  'plain': plain,
  'slipstream': slipstream,
  'fae': fae,
  'hotline': hotline,
  'hotline_micro': hotline_micro,
}
"""Schedules by name, as functions of their own settings. They obey the laws in
tests/laws."""


ROWS = ('stream', 'parameter_server', 'pooled')
"""Data that crosses the link in a step. 'stream': rows with their state, which
the device updates. The host updates rows otherwise: 'parameter_server' moves
rows and their gradients, 'pooled' moves embeddings and their gradients."""


class System(NamedTuple):
  """A way to train: which examples run when, and where rows live."""

  name: str
  schedule: str
  """Its key in `SCHEDULES`."""
  placement: str | None = None
  """Its key in `PLACEMENTS`, or 'cached'. None: as one likes."""
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
