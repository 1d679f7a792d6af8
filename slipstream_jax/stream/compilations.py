"""Counts compilations, so that a run can show its steady state has none."""

import jax.monitoring

_EVENT = '/jax/core/compile/backend_compile_duration'
_count = 0
_listening = False


def compilations() -> int:
  """XLA compilations of this process since the first call of this function."""
  global _listening
  if not _listening:
    jax.monitoring.register_event_duration_secs_listener(_listen)
    _listening = True
  return _count


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
  global _count
  del duration_secs
  _count += event == _EVENT
