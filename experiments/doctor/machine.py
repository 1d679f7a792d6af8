"""What the machine has: versions, memory, disk, device."""

from collections.abc import Iterator
import importlib.metadata
import os
import pathlib
import sys
import tempfile
import time
from typing import Literal, NamedTuple

import jax

from experiments.common import report, workdir
from slipstream_jax.errors import UserError

Verdict = Literal['good', 'doubtful', 'bad']
_PYTHONS = ((3, 11), (3, 13))
_JAXES = ((0, 10), (0, 12))
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'numpy')
_TRIED_BYTES = 1 << 24


class Finding(NamedTuple):
  """What one look came to."""

  name: str
  verdict: Verdict
  words: str


def versions() -> Finding:
  """Whether Python and JAX are of those that are tested."""
  python, releases = sys.version_info[:2], {}
  for name in _PACKAGES:
    try:
      releases[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      return Finding('versions', 'bad', f'{name} is not installed')
  release = tuple(int(part) for part in jax.__version_info__[:2])
  words = ', '.join(f'{name} {version}' for name, version in releases.items())
  words = f'Python {python[0]}.{python[1]}, {words}'
  tested = (
    _PYTHONS[0] <= python <= _PYTHONS[1] and _JAXES[0] <= release <= _JAXES[1]
  )
  if tested:
    return Finding('versions', 'good', words)
  return Finding(
    'versions',
    'doubtful',
    f'{words}: tested are Python 3.11 to 3.13 and JAX 0.10 to 0.12',
  )


def device() -> Finding:
  """Which device trains, and what memory it has."""
  try:
    devices = jax.devices()
  except RuntimeError as error:
    return Finding('device', 'bad', str(error).splitlines()[0])
  first, memory = devices[0], device_bytes()
  words = f'{len(devices)} of {first.platform}, {first.device_kind}'
  if memory is not None:
    words += f', {report.size(memory)} of memory'
  if first.platform == 'cpu':
    words += ': no accelerator'
  return Finding('device', 'good', words)


def device_bytes() -> int | None:
  """Memory of the first device; None where it does not tell."""
  limit = (jax.devices()[0].memory_stats() or {}).get('bytes_limit')
  return None if limit is None else int(limit)


def memory_left() -> int | None:
  """Bytes of memory that a process may yet take; None where nobody tells."""
  limits = [*_limits()]
  return min(limits, default=None)


def _limits() -> Iterator[int]:
  try:
    for line in pathlib.Path('/proc/meminfo').read_text().splitlines():
      if line.startswith('MemAvailable:'):
        yield 1024 * int(line.split()[1])
  except OSError:
    pass
  # In a container less may be allowed than there is.
  group = pathlib.Path('/sys/fs/cgroup')
  try:
    most = (group / 'memory.max').read_text().strip()
    used = (group / 'memory.current').read_text().strip()
    if most != 'max':
      yield max(0, int(most) - int(used))
  except (OSError, ValueError):
    pass


def fits(
  name: str, wanted: int, there: int | None, of: str, hint: str
) -> Finding:
  """Whether bytes find room, with a tenth to spare.

  Args:
    name: of the finding.
    wanted: bytes.
    there: bytes that are left; None: nobody tells.
    of: what takes them, in words.
    hint: what to do where they do not fit.
  """
  if there is None:
    words = f'{of} {report.size(wanted)}; how much there is nobody tells'
    return Finding(name, 'doubtful', words)
  words = f'{of} {report.size(wanted)} of {report.size(there)} that are left'
  if wanted > there:
    return Finding(name, 'bad', f'{words}: {hint}')
  if wanted > 0.9 * there:
    return Finding(name, 'doubtful', f'{words}: {hint}')
  return Finding(name, 'good', words)


def disk(where: pathlib.Path) -> Finding:
  """Whether a folder can be written, and how fast its disk takes it.

  Args:
    where: of a run, which need not be there yet; nothing is left in it.
  """
  there = workdir.existing(where)
  try:
    with tempfile.TemporaryFile(dir=there) as file:
      began = time.perf_counter()
      file.write(os.urandom(_TRIED_BYTES))
      file.flush()
      os.fsync(file.fileno())
      seconds = time.perf_counter() - began
  except OSError as error:
    return Finding('disk', 'bad', f'{there}: {error.strerror}')
  rate = _TRIED_BYTES / max(seconds, 1e-9)
  free = report.size(workdir.free_bytes(where))
  words = f'{there} takes {report.size(rate)}/s, {free} are left'
  return Finding('disk', 'good', words)


def sentence(name: str, error: UserError) -> Finding:
  """The finding that a mistake of the user makes."""
  return Finding(name, 'bad', str(error))
