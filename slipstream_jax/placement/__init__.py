"""Placements: which rows stay on the device, as pure plans over row ids."""

from slipstream_jax.placement.base import bucket, Placement, Plan
from slipstream_jax.placement.cached import cached
from slipstream_jax.placement.evictions import EVICTIONS
from slipstream_jax.placement.fixed import PLACEMENTS

__all__ = ['EVICTIONS', 'PLACEMENTS', 'Placement', 'Plan', 'bucket', 'cached']
