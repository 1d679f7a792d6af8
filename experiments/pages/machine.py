"""What was run and where, as a page says it."""

from collections.abc import Mapping
import datetime
import os
import platform
from typing import Any

import jax

from experiments.common.machine import cpu

_FACTS = (
  ('command', '{}'),
  ('date', '{}'),
  ('cpu', '{}'),
  ('cores', '{} cores'),
  ('device', 'device {}'),
  ('jax', 'JAX {}'),
  ('python', 'Python {}'),
  ('minutes', '{:.1f} minutes so far'),
)


def here(command: str) -> dict[str, Any]:
  """The command, and the machine that it runs on."""
  device = jax.devices()[0]
  return {
    'command': command,
    'date': datetime.date.today().isoformat(),
    'cpu': cpu(),
    'cores': os.cpu_count(),
    'device': f'{device.device_kind} ({device.platform})',
    'jax': jax.__version__,
    'python': platform.python_version(),
  }


def in_words(setting: Mapping[str, Any]) -> list[str]:
  """Of the facts of `here`, and the minutes spent, those that are known."""
  return [
    form.format(setting[key])
    for key, form in _FACTS
    if setting.get(key) is not None
  ]
