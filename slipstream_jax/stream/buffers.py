"""Every copy between host and device; `grep buffers` shows what moves."""

from collections.abc import Iterator
import contextlib
import functools
from typing import Any

import jax
from jax.profiler import TraceAnnotation
import numpy as np

from slipstream_jax.errors import UserError

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
  with TraceAnnotation('put'):
    return jax.device_put(tree if owned else jax.tree.map(_private, tree))


@contextlib.contextmanager
def handing_over() -> Iterator[None]:
  """Programs in the block may take numpy arrays that nobody writes again.

  JAX puts the arguments of a program where they belong without Python's help,
  in a fifth of what `to_device` takes.
  """
  allowed = jax.transfer_guard_host_to_device('allow')
  with TraceAnnotation('put'), allowed:
    yield


def to_step(tree: Any) -> Any:
  """What `to_device` does, for what every step brings.

  A program that hands on its arguments, compiled for each set of shapes.

  Args:
    tree: of numpy arrays that nobody will write again.
  """
  with handing_over():
    return _handed_on(tree)


# Donated, so that nothing is copied on the device.
@functools.partial(jax.jit, donate_argnums=0)
def _handed_on(tree: Any) -> Any:
  return tree


def to_cpu(tree: Any, *, owned: bool = False) -> Any:
  """The leaves of `tree` as JAX arrays of the CPU; those there stay.

  Args:
    tree: any.
    owned: as of `to_device`.

  Raises:
    UserError: JAX was started without a CPU.
  """
  try:
    (cpu, *_) = jax.local_devices(backend='cpu')
  except RuntimeError as error:
    raise UserError(
      'rows are updated on the host by JAX on its CPU',
      got=str(error),
      where='JAX_PLATFORMS',
      hint='add cpu, as in JAX_PLATFORMS=cuda,cpu, or leave it out',
    ) from error
  return jax.device_put(tree if owned else jax.tree.map(_private, tree), cpu)


def from_cpu(tree: Any) -> Any:
  """What programs of the CPU computed, on the default device; waits for them.

  As if it had come from numpy: an array that was put on the CPU by name would
  draw every program that it is an argument of there.
  """
  return to_device(to_host(tree), owned=True)


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


def start_to_host(tree: Any) -> None:
  """Starts copying the leaves of `tree` to the host, once they are computed.

  Waits for nothing; `to_host` then finds them there.
  """
  for leaf in jax.tree.leaves(tree):
    if _is_remote(leaf):
      leaf.copy_to_host_async()


def to_host(tree: Any) -> Any:
  """The leaves of `tree` as numpy arrays; waits until they are computed."""
  # `jax.device_get` does the same in six times the time, each leaf of a batch.
  with TraceAnnotation('get'):
    start_to_host(tree)
    return jax.tree.map(_as_numpy, tree)


def _is_remote(leaf: Any) -> bool:
  # Of a CPU's array numpy sees the memory itself.
  return isinstance(leaf, jax.Array) and any(
    device.platform != 'cpu' for device in leaf.devices()
  )


def _as_numpy(leaf: Any) -> Any:
  return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf
