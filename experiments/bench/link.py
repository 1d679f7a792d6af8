"""The link between host and device: what it could move, and what is moved."""

from collections.abc import Callable
import time
from typing import Any

import jax
import numpy as np

from slipstream_jax.engine.buffers import to_device, to_host

_BYTES = 1 << 28
_TURNS = 6
_GB = 1e9
_FASTEST = 1000.0  # GB/s; what is faster is no copy


def speeds() -> dict[str, float | None]:
  """Best GB/s of one large copy from and to pageable memory.

  On a CPU both ends are host memory, and fetching copies nothing: None.
  """
  host = np.ones(_BYTES // 4, np.float32)
  device = jax.block_until_ready(to_device(host))
  one = to_device(np.float32(1))
  # An array each: jax keeps the host's copy of one that it has fetched.
  others = iter([jax.block_until_ready(device + one) for _ in range(_TURNS)])
  fetched = _seconds(lambda: to_host(next(others)))
  copies = fetched > _BYTES / _GB / _FASTEST
  return {
    'load_gb_per_s': _BYTES / _GB / _seconds(lambda: _loaded(host)),
    'store_gb_per_s': _BYTES / _GB / fetched if copies else None,
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
  link: dict[str, float | None],
  bytes_moved: tuple[float, float],
  seconds: float,
) -> dict[str, float | None]:
  """Adds the share of a step that its rows take on the link.

  Args:
    link: from `speeds`.
    bytes_moved: loaded and stored by a step, in the mean.
    seconds: of a step, end to end.
  """
  shares: dict[str, float | None] = {}
  for way, moved in zip(('load', 'store'), bytes_moved, strict=True):
    shares[f'{way}_bytes_per_step'] = moved
    speed = link[f'{way}_gb_per_s']
    busy = moved / (_GB * speed) if speed else 0.0
    shares[f'{way}_share_of_step'] = busy / seconds
  return link | shares
