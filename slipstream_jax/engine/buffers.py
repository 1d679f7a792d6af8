"""All copies between host and device, and memory of the host to copy from.

`grep buffers` shows what moves.
"""

import ctypes
import functools
import sys
from typing import Any

import jax
from jax.profiler import TraceAnnotation
import numpy as np

from slipstream_jax.errors import UserError
from slipstream_jax.store.records import aligned


def to_device(tree: Any, *, owned: bool = False) -> Any:
  """Starts copying the numpy leaves of `tree` to the default device.

  The result never aliases memory that the caller may still write. On a CPU, JAX
  shares the memory of an aligned array, whatever `may_alias` says, and reads
  any other array later. A write to it meanwhile would change a step in flight.

  Args:
    tree: any. Leaves that are not numpy arrays are put as they are.
    owned: no one will write these arrays again, so no copy is needed.
  """
  with TraceAnnotation('put'):
    return jax.device_put(tree if owned else jax.tree.map(_private, tree))


class _Handover:
  # Not a generator, which would take as long as what it does.
  def __enter__(self) -> None:
    self._named = TraceAnnotation('put')
    self._allowed = jax.transfer_guard_host_to_device('allow')
    self._named.__enter__()
    self._allowed.__enter__()

  def __exit__(self, *error: Any) -> None:
    self._allowed.__exit__(*error)
    self._named.__exit__(*error)


def handing_over() -> _Handover:
  """Allows programs in the block to take numpy arrays as arguments.

  The arrays must not be written again. JAX then transfers a program's arguments
  without Python, in a fifth of the time of `to_device`. On a CPU a program
  reads an array from `aligned` where it is, and copies any other.
  """
  return _Handover()


def to_step(tree: Any) -> Any:
  """Puts arrays of a step on the device, which will not be written again.

  It runs an identity program, compiled for each set of shapes.
  """
  with handing_over():
    return _handed_on(tree)


# Donated, so that nothing is copied on the device.
@functools.partial(jax.jit, donate_argnums=0)
def _handed_on(tree: Any) -> Any:
  return tree


def to_cpu(tree: Any, *, owned: bool = False) -> Any:
  """Returns the leaves of `tree` as JAX arrays on the CPU; see `to_device`.

  Raises:
    UserError: JAX was started without a CPU.
  """
  try:
    (cpu, *_) = jax.local_devices(backend='cpu')
  except RuntimeError as error:
    raise UserError(
      "JAX's CPU backend must be available to update rows on the host",
      got=str(error),
      where='JAX_PLATFORMS',
      hint='add cpu, as in JAX_PLATFORMS=cuda,cpu, or leave it out',
    ) from error
  return jax.device_put(tree if owned else jax.tree.map(_private, tree), cpu)


def from_cpu(tree: Any) -> Any:
  """Moves results of CPU programs to the default device. Waits for them.

  They are passed through numpy. An array committed to the CPU would make all
  programs that use it run there.
  """
  return to_device(to_host(tree), owned=True)


def _private(leaf: Any) -> Any:
  """Returns a copy with the alignment that lets XLA's CPU backend share it."""
  if not isinstance(leaf, np.ndarray):
    return leaf
  copy = aligned(leaf.shape, leaf.dtype)
  np.copyto(copy, leaf)
  return copy


@functools.cache
def _is_only_cpu() -> bool:
  """Whether the CPU is the only device that JAX has."""
  return jax.default_backend() == 'cpu'


def start_to_host(tree: Any) -> None:
  """Starts copying the leaves of `tree` to the host, once they are computed.

  Does not wait. A later `to_host` finds them there.
  """
  # numpy reads a CPU array's memory directly.
  if _is_only_cpu():
    return
  # JAX's guard takes these copies for unplanned ones, but not on a CPU.
  with jax.transfer_guard_device_to_host('allow'):
    for leaf in jax.tree.leaves(tree):
      if isinstance(leaf, jax.Array) and any(
        device.platform != 'cpu' for device in leaf.devices()
      ):
        leaf.copy_to_host_async()


def to_host(tree: Any) -> Any:
  """Returns the leaves of `tree` as numpy arrays, once they are computed."""
  with TraceAnnotation('get'), jax.transfer_guard_device_to_host('allow'):
    start_to_host(tree)
    return jax.tree.map(
      lambda leaf: _on_host(leaf) if isinstance(leaf, jax.Array) else leaf,
      tree,
    )


def _on_host(leaf: jax.Array) -> np.ndarray:
  # `jax.device_get` is six times slower on the leaves of a batch. JAX 0.12
  # takes the other way for an implicit transfer if there are several devices.
  if leaf.sharding.num_devices == 1:
    return np.asarray(leaf)
  on_host: np.ndarray = jax.device_get(leaf)
  return on_host


# From malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def reuse_host_memory() -> bool:
  """Tells glibc to keep freed blocks of up to 1 GiB for reuse.

  XLA's CPU backend and numpy allocate tens of MB per step. glibc returns such
  blocks to the kernel at once, so every step pays for the page faults of its
  own scratch memory.

  Programs call it once, before their first step. It affects the whole process,
  whose resident memory then stays near its peak.

  Returns:
    Whether it took effect. False if the C library is not glibc.
  """
  if not sys.platform.startswith('linux'):
    return False
  libc = ctypes.CDLL(None)
  if not hasattr(libc, 'gnu_get_libc_version'):
    return False
  settings = {
    _M_MMAP_THRESHOLD: 1 << 30,
    _M_TRIM_THRESHOLD: (1 << 31) - 1,
    _M_TOP_PAD: 1 << 26,
    _M_ARENA_MAX: 1,  # other arenas cannot hold blocks above 64 MiB
  }
  return all(libc.mallopt(key, value) for key, value in settings.items())
