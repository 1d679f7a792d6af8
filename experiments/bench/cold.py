"""Rows a second from a disk of which the system keeps nothing in memory."""

from collections.abc import Callable, Iterator
from concurrent import futures
import functools
import time
from typing import Any

import numpy as np

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
"""Of the plain loop."""
_WANTED = 1 << 14  # rows at a time
_TURNS = 5


def figures(num_rows: int, dim: int, path: str) -> Iterator[dict[str, Any]]:
  """What is measured, one after the other."""
  first = _first(num_rows, dim)
  store = TieredStore(first, path, capacity=0)
  store.reset(first)
  for rows in pieces_of(num_rows, store.row_bytes):
    store.scatter(rows, _block(len(rows), dim))
  store.flush()
  rng = np.random.default_rng(0)
  for threads in THREADS:
    read = functools.partial(_plain, store.file, threads)
    wanted = _WANTED if threads > 1 else _WANTED // 8
    yield _figure(f'pread, {threads} at a time', store, read, wanted, rng)

  def scatter(rows: RowIds) -> None:
    store.scatter(rows, _block(len(rows), dim))
    store.flush()

  def gather(rows: RowIds) -> None:
    store.gather(rows, len(rows))

  yield _figure('file, gather', store, gather, _WANTED, rng)
  yield _figure('file, scatter', store, scatter, _WANTED, rng)
  store.close()


def _first(num_rows: int, dim: int) -> FirstRows:
  def rows(wanted: RowIds) -> RowBlock:
    return _block(len(wanted), dim)

  return FirstRows(num_rows, rows, lambda: _block(num_rows, dim))


def _block(rows: int, dim: int) -> RowBlock:
  return RowBlock(
    np.ones((rows, dim), np.float32), (np.ones(rows, np.float32),)
  )


def _plain(file: ScratchFile, threads: int, rows: RowIds) -> None:
  """Reads the blocks that some rows are in, in any order."""
  out, to = np.empty((len(rows), 8), np.uint8), np.arange(len(rows))
  parts = np.array_split(np.arange(len(rows)), threads)

  def read(part: np.ndarray) -> None:
    at = rows[part] // file.per  # in which block
    read_records(file.fd, at, 1, out, to[part], aligned(BLOCK), 0)

  with futures.ThreadPoolExecutor(threads) as pool:
    list(pool.map(read, parts))


def _figure(
  name: str,
  store: TieredStore,
  call: Callable[[RowIds], None],
  wanted: int,
  rng: np.random.Generator,
) -> dict[str, Any]:
  """The median speed of a call with so many rows at random, cold."""
  speeds = []
  for _ in range(_TURNS):
    rows = rng.choice(store.num_rows, wanted, replace=False)
    store.file.cool()
    started = time.perf_counter()
    call(rows)
    speeds.append(wanted / (time.perf_counter() - started))
  return {'what': name, 'rows/s': float(np.median(speeds))}
