"""The process around a run: what it compiles, and the memory it keeps."""

import ctypes
import sys
from typing import NamedTuple

import jax.monitoring

# From malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def reuse_host_memory() -> bool:
  """Tells glibc to keep freed blocks of up to 1 GiB for reuse.

  XLA's CPU backend and numpy allocate tens of MB per step. glibc returns such
  blocks to the kernel at once, so that every step pays for the page faults of
  its own scratch memory: 40 % of a DLRM RM2 step at batch 2048 on the CPU.

  For programs to call once, before their first step: it changes the whole
  process, whose resident memory then stays near its peak.

  Returns:
    Whether it took effect; False where the C library is not glibc.
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


_COMPILE = '/jax/core/compile/backend_compile_duration'
_PARTS = (
  _COMPILE,
  '/jax/core/compile/jaxpr_trace_duration',
  '/jax/core/compile/jaxpr_to_mlir_module_duration',
)


class Compiled(NamedTuple):
  """What this process compiled since it first asked."""

  programs: int
  """XLA compilations."""
  seconds: float
  """Spent on tracing, lowering and compiling."""


_total = Compiled(0, 0.0)
_listening = False


def compiled() -> Compiled:
  """Compilations of this process since the first call of this function."""
  global _listening
  # Once: a second listener would count every compilation twice.
  if not _listening:
    jax.monitoring.register_event_duration_secs_listener(_listen)
    _listening = True
  return _total


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
  global _total
  if event in _PARTS:
    programs, seconds = _total
    _total = Compiled(programs + (event == _COMPILE), seconds + duration_secs)
