"""Measures the rows/s of a disk of which the system keeps nothing in memory."""

from collections.abc import Callable, Iterator
from concurrent import futures
import functools
from typing import Any

import numpy as np

from experiments.bench.contest import seconds_of
from experiments.bench.runner import Item
from experiments.common.progress import Bar
from slipstream_jax.store.base import FirstRows, pieces_of
from slipstream_jax.store.scratch import (
  aligned,
  BLOCK,
  read_records,
  ScratchFile,
)
from slipstream_jax.store.tiered import TieredStore
from slipstream_jax.types import RowBlock, RowIds

THREADS = (1, 8, 32, 64)
"""Numbers of threads of the plain loop."""
_WANTED = 1 << 14  # rows of a call
_TURNS = 5


def measure(bar: Bar, rows: int, dim: int, path: str) -> Iterator[Item]:
  """Yields the rows/s of every way to read or write.

  The arguments are those of the program `experiments.bench.disk`.
  """
  bar.begin('reading and writing rows')
  title = f'{rows:,} rows of {4 * dim + 4} bytes, cold'
  yield title, list(speeds(rows, dim, path))


def speeds(num_rows: int, dim: int, path: str) -> Iterator[dict[str, Any]]:
  """Yields the median rows/s of each way."""

  def scatter(rows: RowIds) -> None:
    store.scatter(rows, _ones(len(rows), dim))
    store.flush()

  first = FirstRows(
    num_rows, lambda rows: _ones(len(rows), dim), lambda: _ones(num_rows, dim)
  )
  store = TieredStore(first, path, capacity=0)
  store.reset(first)
  for rows in pieces_of(num_rows, store.row_bytes):
    store.scatter(rows, _ones(len(rows), dim))
  store.flush()
  ways: dict[str, Callable[[RowIds], object]] = {
    f'pread, {n} at a time': functools.partial(_read_blocks, store.file, n)
    for n in THREADS
  }
  ways['file, gather'] = lambda rows: store.gather(rows, len(rows))
  ways['file, scatter'] = scatter
  rng = np.random.default_rng(0)
  for name, way in ways.items():
    wanted = _WANTED // 8 if name == 'pread, 1 at a time' else _WANTED
    figures = []
    for _ in range(_TURNS):
      rows = rng.choice(num_rows, wanted, replace=False)
      store.file.cool()
      figures.append(wanted / seconds_of(way, rows))
    yield {'what': name, 'rows/s': float(np.median(figures))}
  store.close()


def _ones(rows: int, dim: int) -> RowBlock:
  values = np.ones((rows, dim), np.float32)
  return RowBlock(values, (np.ones(rows, np.float32),))


def _read_blocks(file: ScratchFile, threads: int, rows: RowIds) -> None:
  """Reads the blocks that hold some rows, in any order."""
  out, to = np.empty((len(rows), 8), np.uint8), np.arange(len(rows))
  blocks = rows // file.per

  def read(part: np.ndarray) -> None:
    buffer = aligned(BLOCK)
    read_records(file.fd, blocks[part], 1, out, to[part], buffer, 0)

  with futures.ThreadPoolExecutor(threads) as pool:
    list(pool.map(read, np.array_split(to, threads)))
