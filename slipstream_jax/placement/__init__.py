"""Which rows stay on the device between steps: pure plans over row ids."""

from slipstream_jax.placement.base import bucket, Placement, Plan, StaleRows
from slipstream_jax.placement.pinned import PINNED
from slipstream_jax.placement.resident import RESIDENT
from slipstream_jax.placement.streamed import STREAMED

PLACEMENTS: dict[str, Placement] = {
  p.name: p for p in (RESIDENT, STREAMED, PINNED)
}
"""Every placement by its name; all obey the laws in tests/laws."""

__all__ = ['PLACEMENTS', 'Placement', 'Plan', 'StaleRows', 'bucket']
