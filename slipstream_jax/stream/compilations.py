"""Counts and times compilations, so that runs can tell them from training."""

from typing import NamedTuple

import jax.monitoring

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
  if not _listening:
    jax.monitoring.register_event_duration_secs_listener(_listen)
    _listening = True
  return _total


def compilations() -> int:
  """The number of programs of `compiled()`."""
  return compiled().programs


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
  global _total
  if event in _PARTS:
    programs, seconds = _total
    _total = Compiled(programs + (event == _COMPILE), seconds + duration_secs)
