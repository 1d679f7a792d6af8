"""The ways to keep rows on the host, by name."""

from collections.abc import Callable, Sequence
import functools
import os

import numpy as np

from slipstream_jax.errors import check_whole
from slipstream_jax.store.base import FirstRows, Storage
from slipstream_jax.store.memory import MEMORY
from slipstream_jax.store.records import layout_of
from slipstream_jax.store.tiered import SLOT_BYTES, TieredStore


def _open(
  dram_bytes: int, path: str | os.PathLike[str], groups: Sequence[FirstRows]
) -> tuple[TieredStore, ...]:
  widths = [
    layout_of(first.rows(np.empty(0, np.int64))).width + SLOT_BYTES
    for first in groups
  ]
  sizes = [
    first.num_rows * width for first, width in zip(groups, widths, strict=True)
  ]
  share, least = dram_bytes / sum(sizes), 1 if dram_bytes else 0
  return tuple(
    TieredStore(first, path, max(least, int(share * first.num_rows)))
    for first in groups
  )


def file(path: str | os.PathLike[str]) -> Storage:
  """Keeps all rows on a disk, and reads each when it is needed.

  Host memory has 4 bytes for each row of the tables as an index, and a queue of
  64 MiB for each group.

  Args:
    path: a folder on that disk. Each group has an unnamed file there that ends
      with the process.
  """
  return Storage('file', functools.partial(_open, 0, path))


def tiered(dram_bytes: int, path: str | os.PathLike[str]) -> Storage:
  """Keeps rows on a disk, with a cache of recently used rows in memory.

  Args:
    dram_bytes: host memory for the cached rows of all groups, split in
      proportion to the groups' bytes. In addition, the store takes 12 bytes for
      each row of the tables as an index, and a queue of 64 MiB for each group.
    path: a folder on the disk, as in `file`.

  Raises:
    UserError: `dram_bytes` is not a positive whole number.
  """
  hint = 'give bytes of host memory, such as 1 << 30'
  check_whole(dram_bytes, 1, 'tiered, dram_bytes', hint)
  return Storage('tiered', functools.partial(_open, dram_bytes, path))


STORES: dict[str, Callable[[int, str], Storage]] = {
  'memory': lambda dram_bytes, path: MEMORY,
  'file': lambda dram_bytes, path: file(path),
  'tiered': tiered,
}
"""Constructors by name, from bytes of host memory and a folder. The laws in
tests/store and tests/laws hold for all of them."""
