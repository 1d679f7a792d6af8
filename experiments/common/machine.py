"""The machine and the versions that a page's figures were taken with."""

from collections.abc import Mapping
import datetime
import os
import pathlib
import platform
import re
from typing import Any

import jax

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
  """Returns the facts of this machine, with the command that was run."""
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


def in_words(setting: Mapping[str, Any]) -> str:
  """Returns those facts of `here` that are known, in one line."""
  known = [
    form.format(setting[key])
    for key, form in _FACTS
    if setting.get(key) is not None
  ]
  return '; '.join(known)


def cpu() -> str:
  """Returns the processor's name with its family and model numbers."""
  path = pathlib.Path('/proc/cpuinfo')
  text = path.read_text() if path.exists() else ''
  facts = dict(re.findall(r'^(.+?)\s*: (.+)$', text, re.MULTILINE))
  name = facts.get('model name') or platform.processor() or platform.machine()
  if 'cpu family' not in facts:
    return name
  return f'{name} (family {facts["cpu family"]}, model {facts.get("model")})'
