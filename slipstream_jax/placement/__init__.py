"""Which rows stay on the device between steps: pure plans over row ids."""

from slipstream_jax.placement.base import bucket, Placement, Plan
from slipstream_jax.placement.cached import cached
from slipstream_jax.placement.evictions import EVICTIONS
from slipstream_jax.placement.pinned import PINNED
from slipstream_jax.placement.resident import RESIDENT
from slipstream_jax.placement.streamed import STREAMED
from slipstream_jax.types import StaleRows

PLACEMENTS: dict[str, Placement] = {
  p.name: p for p in (RESIDENT, STREAMED, PINNED)
}
"""The placements without parameters by name; like every `cached` one they
obey the laws in tests/laws."""

__all__ = [
  'EVICTIONS',
  'PLACEMENTS',
  'Placement',
  'Plan',
  'StaleRows',
  'bucket',
  'cached',
]
