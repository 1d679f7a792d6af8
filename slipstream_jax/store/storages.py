"""The ways to keep rows on the host, by name."""

from collections.abc import Callable

from slipstream_jax.store.base import Storage
from slipstream_jax.store.file import file
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.store.tiered import tiered

STORES: dict[str, Callable[[int, str], Storage]] = {
  'memory': lambda dram_bytes, path: MEMORY,
  'file': lambda dram_bytes, path: file(path),
  'tiered': tiered,
}
"""By name, from bytes of host memory for rows, and a folder; all of them obey
the laws in tests/store and tests/laws."""
