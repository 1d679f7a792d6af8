"""From the rows that a query names to blocks of rows, for a program."""

from collections.abc import Iterator, Sequence
import os
import pathlib
import threading
from typing import Literal, NamedTuple

import numpy as np

from slip_serve import kernels
from slip_serve.layout import Group, Layout
from slip_serve.queries import Query
from slip_serve.rows import DiskRows, MemoryRows, Rows

Memory = Literal['dram', 'mmap', 'ssd']


class Part(NamedTuple):
  """Some examples of a query, padded to the size of a program."""

  real: int
  """Examples that are no padding."""
  size: int
  """B, those of the program."""
  blocks: tuple[np.ndarray, ...]
  """Rows of each group, f32[B * K_g, D]; each once, then zeros."""
  inverses: tuple[np.ndarray, ...]
  """Place in them of each of the group's lookups, i32[B, K_g]; -1: none."""
  dense: np.ndarray
  weights: np.ndarray | None


class Stats(NamedTuple):
  """What was asked so far."""

  examples: int
  lookups: int
  """Padding left out."""
  unique_rows: int
  """Each once for each part of a query."""
  hit_rate: float | None
  """Share of those that was in memory; None before the first."""
  bytes_per_lookup: float
  """Read from the disk."""


class Fetcher:
  """Finds the rows of queries; threads may share one."""

  def __init__(
    self,
    folder: str | os.PathLike[str],
    layout: Layout,
    firsts: np.ndarray,
    memory: Memory,
    cache: float,
    depth: int,
    direct: bool,
  ) -> None:
    """Opens the files of rows; arguments as of `Scorer`.

    Args:
      folder: of the export.
      layout: of it.
      firsts: as of `Door`.
      memory: where rows are.
      cache: rows to keep.
      depth: reads under way at a time.
      direct: whether to go round the page cache.
    """
    self._layout, self._firsts = layout, firsts
    self._lock = threading.Lock()
    self._examples = self._lookups = 0
    self._rows: list[Rows] = []
    for group in layout.groups:
      record, path = layout.record(group), pathlib.Path(folder) / group.file
      if memory != 'ssd':
        mapped = memory == 'mmap'
        self._rows.append(MemoryRows(path, group.rows, record, mapped))
      else:
        kept = round(cache * group.rows if cache <= 1 else cache)
        kept = min(kept, group.rows)
        popular = _popular(folder, group) if kept else None
        self._rows.append(DiskRows(path, record, kept, depth, direct, popular))

  def parts(self, query: Query, sizes: Sequence[int]) -> Iterator[Part]:
    """The query in pieces of these sizes, rising; one of no example, of one."""
    count, first = len(query.rows), 0
    while first < count or not first:
      left = count - first
      size = next((size for size in sizes if size >= left), sizes[-1])
      yield self._part(query, first, size)
      first += size

  def _part(self, query: Query, first: int, size: int) -> Part:
    some = slice(first, first + size)
    given, weights = query.rows[some], query.weights
    lookups = np.full((size, self._layout.columns), -1, np.int64)
    np.copyto(lookups[: len(given)], given + self._firsts, where=given >= 0)
    pairs = [
      self._rows_of(number, lookups) for number in range(len(self._rows))
    ]
    blocks, inverses = zip(*pairs, strict=True)
    with self._lock:
      self._examples += len(given)
      self._lookups += int((given >= 0).sum())
    return Part(
      len(given),
      size,
      blocks,
      inverses,
      _padded(query.dense[some], size),
      None if weights is None else _padded(weights[some], size),
    )

  def _rows_of(
    self, number: int, lookups: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    layout = self._layout
    group = layout.groups[number]
    own = lookups
    if len(group.columns) < layout.columns:
      own = lookups[:, np.array(group.columns, np.int64)]
    flat = np.ascontiguousarray(own).ravel()
    rows = np.empty(len(flat), np.int64)
    inverse = np.empty(len(flat), np.int32)
    scratch = np.empty(1 << (2 * len(flat)).bit_length(), np.int32)
    unique = rows[: kernels.unique(flat, scratch, rows, inverse)]
    block = np.zeros((len(flat), group.dim), np.float32)
    if layout.codec == 'float32':  # right where they belong
      records = block[: len(unique)].view(np.uint8)
    else:
      records = np.empty((len(unique), layout.record(group)), np.uint8)
    self._rows[number].read(unique, records)
    decode(layout.codec, records, block[: len(unique)])
    return block, inverse.reshape(own.shape)

  @property
  def stats(self) -> Stats:
    """What was asked so far, and what of it was in memory."""
    counts = zip(*(rows.counts for rows in self._rows), strict=True)
    asked, hits, nbytes = map(sum, counts)
    return Stats(
      self._examples,
      self._lookups,
      asked,
      hits / asked if asked else None,
      nbytes / max(self._lookups, 1),
    )

  def close(self) -> None:
    """Gives back files and threads; may be called again."""
    for rows in self._rows:
      rows.close()


def decode(codec: str, records: np.ndarray, out: np.ndarray) -> None:
  """Records u8[U, record] to rows f32[U, D]; of float32 they are there."""
  if codec == 'float16':
    np.copyto(out, records.view('<f2'))
  elif codec == 'int8':
    scales = np.ascontiguousarray(records[:, :8]).view('<f4')
    np.multiply(records[:, 8:], scales[:, :1], out=out)
    out += scales[:, 1:]


def _popular(folder: str | os.PathLike[str], group: Group) -> np.ndarray | None:
  """Rows that the export says are popular, the most popular first."""
  if not group.popular:
    return None
  rows = np.fromfile(pathlib.Path(folder) / group.popular, '<i8')
  # Whoever left checksums out still reads no other file's bytes, and no row
  # twice.
  good = np.unique(rows, return_index=True)[1]
  rows = rows[np.sort(good)]
  return rows[(rows >= 0) & (rows < group.rows)].astype(np.int64)


def _padded(values: np.ndarray, size: int) -> np.ndarray:
  short = size - len(values)
  return np.pad(values, [(0, short), (0, 0)]) if short else values
