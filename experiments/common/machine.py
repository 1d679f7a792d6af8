"""Facts of this machine: processor, versions, and the memory that is left."""

from collections.abc import Mapping
import contextlib
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


def memory_left() -> int | None:
  """Returns the bytes that a process may still allocate, or None if unknown."""
  limits = []
  with contextlib.suppress(OSError):
    for line in pathlib.Path('/proc/meminfo').read_text().splitlines():
      if line.startswith('MemAvailable:'):
        limits.append(1024 * int(line.split()[1]))
  # A container may allow less.
  with contextlib.suppress(OSError, ValueError):  # 'max' is no number
    group = pathlib.Path('/sys/fs/cgroup')
    most = int((group / 'memory.max').read_text())
    limits.append(max(0, most - int((group / 'memory.current').read_text())))
  return min(limits, default=None)


def cpu() -> str:
  """Returns the processor's name with its family and model numbers."""
  path = pathlib.Path('/proc/cpuinfo')
  text = path.read_text() if path.exists() else ''
  facts = dict(re.findall(r'^(.+?)\s*: (.+)$', text, re.MULTILINE))
  name = facts.get('model name') or platform.processor() or platform.machine()
  if 'cpu family' not in facts:
    return name
  return f'{name} (family {facts["cpu family"]}, model {facts.get("model")})'
