"""Every copy between host and device; `grep buffers` shows what moves."""

from typing import Any

import jax


def to_device(tree: Any) -> Any:
  """Starts copying the numpy leaves of `tree` to the default device.

  Never an alias: on a CPU, JAX would otherwise share the host's memory, and
  a row written there later would change under a step in flight.
  """
  return jax.device_put(tree, may_alias=False)


def to_host(tree: Any) -> Any:
  """The leaves of `tree` as numpy arrays; waits until they are computed."""
  return jax.device_get(tree)
