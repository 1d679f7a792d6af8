"""The link between host and device: what it could move, and what is moved."""

from collections.abc import Callable
import time
from typing import Any

import jax
import numpy as np
from rich.table import Table as ShownTable

from slipstream_jax.stream.buffers import to_device, to_host

_BYTES = 1 << 28
_TURNS = 6
_GB = 1e9


def speeds() -> dict[str, float]:
  """Best GB/s of one large copy from pageable memory, each way.

  On a CPU both ends are host memory.
  """
  host = np.ones(_BYTES // 4, np.float32)
  device = jax.block_until_ready(to_device(host))

  def fetch() -> Any:
    # A new array each time: jax keeps the host's copy of one it has fetched.
    return to_host(jax.block_until_ready(device + one))

  one = to_device(np.float32(1))
  added = _seconds(lambda: jax.block_until_ready(device + one))
  return {
    'load_gb_per_s': _BYTES / _GB / _seconds(lambda: _loaded(host)),
    'store_gb_per_s': _BYTES / _GB / max(_seconds(fetch) - added, 1e-9),
  }


def _loaded(host: np.ndarray) -> Any:
  return jax.block_until_ready(to_device(host))


def _seconds(call: Callable[[], Any]) -> float:
  spent = []
  for _ in range(_TURNS):
    started = time.perf_counter()
    call()
    spent.append(time.perf_counter() - started)
  return min(spent)


def used(
  link: dict[str, float], bytes_moved: tuple[float, float], seconds: float
) -> dict[str, float]:
  """Adds the share of a step that its rows take on the link.

  Args:
    link: from `speeds`.
    bytes_moved: loaded and stored by a step, in the mean.
    seconds: of a step, end to end.
  """
  shares = {}
  for way, moved in zip(('load', 'store'), bytes_moved, strict=True):
    shares[f'{way}_bytes_per_step'] = moved
    busy = moved / (_GB * link[f'{way}_gb_per_s'])
    shares[f'{way}_share_of_step'] = busy / seconds
  return link | shares


def table(link: dict[str, float]) -> ShownTable:
  """The figures for people to read."""
  shown = ShownTable(title='rows on the link', title_justify='left')
  for name in ('way', 'link GB/s', 'MB per step', 'share of the step'):
    shown.add_column(name, justify='left' if name == 'way' else 'right')
  for way in ('load', 'store'):
    shown.add_row(
      way,
      f'{link[f"{way}_gb_per_s"]:.1f}',
      f'{link[f"{way}_bytes_per_step"] / 1e6:.2f}',
      f'{link[f"{way}_share_of_step"]:.2%}',
    )
  return shown
