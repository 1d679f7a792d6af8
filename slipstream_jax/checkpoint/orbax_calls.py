"""Calls into orbax whose failure is one sentence, and nothing besides.

Where one of many files fails, orbax closes its event loop under the others:
their tasks and callbacks then complain one by one, on stderr and of no use.
"""

from collections.abc import Callable
import gc
import logging
import sys
from typing import Any, TypeVar
import warnings

from slipstream_jax.errors import UserError

_T = TypeVar('_T')
_MOST = 300  # characters of an error, which may quote whole trees
_ECHO = 'Event loop is closed'


def call_orbax(call: Callable[[], _T], rule: str, where: str, hint: str) -> _T:
  """Makes the call, and returns what it returns.

  Raises:
    UserError: it failed, in whatever way.
  """
  _drop_echoes()
  asyncio = logging.getLogger('asyncio')
  disabled, asyncio.disabled = asyncio.disabled, True
  try:
    return call()
  except Exception as error:
    message = ' '.join(str(error).split())[:_MOST] or type(error).__name__
  finally:
    asyncio.disabled = disabled
  # Out here, where the error and the tasks that it holds can be collected.
  _collect_quietly()
  raise UserError(rule, got=f'"{message}"', where=where, hint=hint)


class _UnlessEcho:
  """Hands to another hook what is no echo."""

  def __init__(self, hook: Callable[[Any], object]) -> None:
    self._hook = hook

  def __call__(self, unraisable: Any) -> None:
    if str(unraisable.exc_value) != _ECHO:
      self._hook(unraisable)


def _drop_echoes() -> None:
  """From here on: reads still under way call back when they please."""
  if not isinstance(sys.unraisablehook, _UnlessEcho):  # others may replace it
    sys.unraisablehook = _UnlessEcho(sys.unraisablehook)


def _collect_quietly() -> None:
  """Lets go of what orbax left undone, which would complain of that later."""
  asyncio = logging.getLogger('asyncio')
  disabled, hook = asyncio.disabled, sys.unraisablehook
  asyncio.disabled, sys.unraisablehook = True, lambda _: None
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    gc.collect()
  asyncio.disabled, sys.unraisablehook = disabled, hook
