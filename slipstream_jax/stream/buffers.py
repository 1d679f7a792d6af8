"""Every copy between host and device; `grep buffers` shows what moves."""

from typing import Any

import jax
import numpy as np

_ALIGNMENT = 64  # bytes; what XLA's CPU backend shares, and else copies


def to_device(tree: Any, *, owned: bool = False) -> Any:
  """Starts copying the numpy leaves of `tree` to the default device.

  Never an alias of what the caller may still write: JAX shares the memory of
  an aligned array on a CPU, whatever `may_alias` says, and reads any other one
  at its leisure; a row written there meanwhile would change under a step in
  flight.

  Args:
    tree: any; leaves that are no numpy arrays are put as they are.
    owned: nobody will write these arrays again, so they need no copy first.
  """
  return jax.device_put(tree if owned else jax.tree.map(_private, tree))


def _private(leaf: Any) -> Any:
  """A copy that lies where XLA's CPU backend needs no second one."""
  if not isinstance(leaf, np.ndarray):
    return leaf
  memory = np.empty(leaf.nbytes + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  copy = memory[start : start + leaf.nbytes].view(leaf.dtype)
  copy = copy.reshape(leaf.shape)
  np.copyto(copy, leaf)
  return copy


def to_host(tree: Any) -> Any:
  """The leaves of `tree` as numpy arrays; waits until they are computed."""
  return jax.device_get(tree)
