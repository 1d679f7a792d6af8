"""Scores examples with an export: ids to rows, rows to logits."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
import math
import pathlib
import threading
import time
from typing import Any, NamedTuple

import jax
from jax import export
import numpy as np

from slip_serve.bags import BagSums, can_keep
from slip_serve.errors import ServeError
from slip_serve.layout import check_file, DENSE, Layout, read_layout
from slip_serve.queries import Query, QueryMaker, Values
from slip_serve.reading import DEPTH, RecordFile
from slip_serve.rows import (
  BOOKKEEPING,
  decode,
  DiskRows,
  Memory,
  MemoryRows,
  popular_rows,
  unique,
)
from slipstream_jax.files import Path

_AHEAD = 2  # queries whose rows are read at once, so that no disk idles
_MEMORY = ('dram', 'mmap', 'ssd')


class Stats(NamedTuple):
  """Counts of all queries so far."""

  examples: int
  lookups: int
  """Without padding."""
  unique_rows: int
  """Unique rows of each part of a query."""
  hit_rate: float | None
  """Share of the unique rows that was in memory. None before the first."""
  bytes_per_lookup: float
  """Bytes read from the disk."""
  bags_found: int = 0
  """Bags whose rows were not needed, as what they combine to was in memory."""


class _Part(NamedTuple):
  """Some examples of a query, padded to B, the size of a program."""

  real: int
  """Examples that are no padding."""
  blocks: tuple[np.ndarray, ...]
  """Unique rows of each group, f32[B * K_g, D], then zeros."""
  inverses: tuple[np.ndarray, ...]
  """Place in them of each of the group's lookups, i32[B, K_g]. -1: padding."""
  dense: np.ndarray
  """Dense features f32[B, I]."""
  weights: np.ndarray | None
  """Weights of the lookups f32[B, K], if they have some."""


class Scorer:
  """An opened export. Use it in `with` to close it. Threads may share it.

    with slip_serve.load('export', memory='ssd', cache=0.1) as scorer:
      scorer.probabilities(dense, ids)

  Attributes:
    layout: describes the export.
    memory: where rows are, as given.
  """

  def __init__(
    self,
    folder: Path,
    memory: Memory = 'dram',
    cache: float = 0.1,
    check: bool = True,
    depth: int = DEPTH,
    direct: bool = True,
    pinned: Sequence[str] = (),
    bags: float = 0.0,
  ) -> None:
    """Opens an export.

    Args:
      folder: the folder of the export.
      memory: where rows are: all in memory ('dram'), paged in by the system
        ('mmap'), or in their file with popular ones in a cache ('ssd').
      cache: with 'ssd', rows that are kept in memory: up to 1 a share of all,
        above 1 a number for each group. It includes the next two.
      check: whether all checksums are compared, which reads all files.
      depth: with 'ssd', reads under way at a time.
      direct: with 'ssd', whether to bypass the page cache.
      pinned: with 'ssd', names of tables whose rows all stay in memory.
      bags: with 'ssd', share of the other rows' memory that keeps sums of bags,
        by what they look up.

    Raises:
      ServeError: the export is incomplete, or an argument is invalid.
    """
    if memory not in _MEMORY:
      raise ServeError(
        f'memory must be one of {", ".join(_MEMORY)}',
        got=repr(memory),
        where='load, memory',
        hint='pick one of them',
      )
    if not (0 <= cache < float('inf') and depth >= 1):
      raise ServeError(
        'cache must be a share of the rows up to 1 or a number of rows, and'
        ' depth at least 1',
        got=f'{cache} and {depth}',
        where='load, cache and depth',
        hint=f'give 0.1 and {DEPTH}',
      )
    self.layout, self.memory = read_layout(folder), memory
    layout = self.layout
    _check_cached(layout, pinned, bags)
    for file in layout.files if check else ():
      check_file(folder, file)
    self._maker = QueryMaker(folder, layout)
    self._programs = _Programs(folder, layout)
    self._rows: list[MemoryRows | DiskRows] = []
    self._bags: list[BagSums | None] = [None] * len(layout.groups)
    for number, group in enumerate(layout.groups):
      record, path = layout.record(group), pathlib.Path(folder) / group.file
      if memory != 'ssd':
        mapped = memory == 'mmap'
        self._rows.append(MemoryRows(path, group.rows, record, mapped))
        continue
      kept = round(cache * group.rows if cache <= 1 else cache)
      ranges = _ranges(layout, number, pinned)
      kept = _left(min(kept, group.rows), ranges)
      features = layout.features_in(number)
      if bags and any(map(can_keep, features)):
        nbytes = round(bags * kept * (record + BOOKKEEPING))
        self._bags[number] = BagSums(group, features, nbytes)
        kept = round((1 - bags) * kept)
      popular = popular_rows(folder, group) if kept else None
      records = RecordFile(path, record, depth, direct)
      self._rows.append(DiskRows(records, kept, popular, ranges))
    # Examples, lookups, unique rows, hits, bytes read, and bags found.
    self._counts, self._lock = np.zeros(6, np.int64), threading.Lock()
    self._ahead = futures.ThreadPoolExecutor(_AHEAD, 'slip-serve-ahead')

  def __enter__(self) -> 'Scorer':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def query(
    self, dense: Values | None, ids: Values, weights: Values | None = None
  ) -> Query:
    """Makes a query of examples by their raw ids.

    Args:
      dense: dense features [n, I], as the model gets them. Or by name as in
        the data: missing values are filled and all are transformed as in
        training, as far as the export says how. None: there are none.
      ids: raw ids by feature: for each example an integer, a text, None for a
        missing id, or a list of these. In an array of integers [n, L] -1 is
        padding. Or ids [n, K] as the format of the data gives them: -1 is a
        missing id, -2 the end of a list.
      weights: weights of the lookups, shaped as the ids. None: all are 1.

    Raises:
      ServeError: other shapes, types or names, or ids that are rows and not in
        their table.
    """
    return self._maker.query(dense, ids, weights)

  def probabilities(
    self, dense: Values | None, ids: Values, weights: Values | None = None
  ) -> np.ndarray:
    """Returns chances of a click f32[n] or f32[n, T], given as to `query`.

    Raises:
      ServeError: as `query`, or a head does not predict clicks.
    """
    if self.layout.numbers:
      raise ServeError(
        'a model must predict clicks to give their probabilities',
        got='one that predicts numbers',
        where='Scorer.probabilities',
        hint='use predictions',
      )
    return self.predictions(dense, ids, weights)

  def predictions(
    self, dense: Values | None, ids: Values, weights: Values | None = None
  ) -> np.ndarray:
    """Returns chances of a click, or numbers if a head predicts these.

    Both are f32[n] or f32[n, T], and are given as to `query`.
    """
    logits = self.logits(self.query(dense, ids, weights))
    # 1 / (1 + e^-x), in a form that does not overflow.
    chances = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
    scores: np.ndarray = chances.astype(np.float32)
    by_head, given = (
      x[:, None] if x.ndim == 1 else x for x in (scores, logits)
    )
    for head in self.layout.numbers:
      by_head[:, head] = given[:, head]
    return scores

  def logits(self, query: Query) -> np.ndarray:
    """Returns the model's logits, f32[n], or f32[n, T] of T heads.

    Examples are scored in batches of the sizes that were exported. Batches of
    such a size have, with rows in float32, the trainer's bits.

    Raises:
      ServeError: other shapes, rows outside of their table, or a read error.
    """
    return self._scored(self._parts(query))

  def stream(
    self, queries: Iterable[Query], ahead: int = 2
  ) -> Iterator[np.ndarray]:
    """Yields logits of each query, and reads the rows of the next ones ahead.

    Args:
      queries: as for `logits`.
      ahead: how many queries are read ahead, at least 1.

    Raises:
      ServeError: as `logits`, when it is that query's turn.
    """
    jobs = collections.deque[futures.Future[list[_Part]]]()
    try:
      for query in queries:
        jobs.append(self._ahead.submit(lambda one: [*self._parts(one)], query))
        if len(jobs) > ahead:
          yield self._scored(jobs.popleft().result())
      while jobs:
        yield self._scored(jobs.popleft().result())
    finally:  # a stream that is closed early leaves no job behind
      for job in jobs:
        job.cancel()
      futures.wait(jobs)

  def warm(self, queries: Iterable[Query]) -> None:
    """Reads the rows of queries into the cache, without scoring."""
    for query in queries:
      collections.deque(self._parts(query), maxlen=0)

  def compile(self) -> dict[int, float]:
    """Compiles all programs. Else the first query of each size waits for it.

    Returns:
      For each batch size the seconds that its program takes.

    Raises:
      ServeError: this JAX cannot read a program.
    """
    columns, dense = self.layout.columns, self.layout.dense_features
    nobody = Query(np.empty((0, dense)), np.empty((0, columns), np.int64))
    query = self._maker.checked(nobody)
    seconds = {}
    for size in self._programs.sizes:
      times = []
      for _ in range(9):  # the first one compiles
        start = time.perf_counter()
        self._programs(*self._part(query, 0, size)[1:])
        times.append(time.perf_counter() - start)
      seconds[size] = min(times)
    return seconds

  @property
  def stats(self) -> Stats:
    """Counts of all queries so far."""
    examples, lookups, rows, hits, nbytes, bags = self._counts.tolist()
    hit_rate = hits / rows if rows else None
    per_lookup = nbytes / max(lookups, 1)
    return Stats(examples, lookups, rows, hit_rate, per_lookup, bags)

  def close(self) -> None:
    """Releases files and threads. Idempotent."""
    self._ahead.shutdown()
    for rows in self._rows:
      rows.close()

  def _parts(self, query: Query) -> Iterator[_Part]:
    """Yields the query in at least one part, of the programs' sizes."""
    query, sizes = self._maker.checked(query), self._programs.sizes
    count, first = len(query.rows), 0
    while first < count or not first:
      left = count - first
      size = next((size for size in sizes if size >= left), sizes[-1])
      yield self._part(query, first, size)
      first += size

  def _part(self, query: Query, first: int, size: int) -> _Part:
    some = slice(first, first + size)
    given, weights = query.rows[some], query.weights
    lookups = np.full((size, self.layout.columns), -1, np.int64)
    real = given >= 0
    np.copyto(lookups[: len(given)], given + self._maker.firsts, where=real)
    counts = np.array([len(given), real.sum(), 0, 0, 0, 0])
    blocks, inverses = [], []
    of_groups = zip(self.layout.groups, self._rows, self._bags, strict=True)
    for group, source, bags in of_groups:
      own = lookups
      if len(group.columns) < self.layout.columns:
        own = lookups[:, np.array(group.columns, np.int64)]
      known = None if bags is None else bags.find(own)
      rows, inverse = unique(own.ravel())
      inverse = inverse.reshape(own.shape)
      block = np.zeros((own.size, group.dim), np.float32)
      if self.layout.codec == 'float32':  # read directly into the block
        records = block[: len(rows)].view(np.uint8)
      else:
        records = np.empty((len(rows), self.layout.record(group)), np.uint8)
      counts[2:5] += len(rows), *source.read(rows, records)
      decode(self.layout.codec, records, block[: len(rows)])
      if bags is not None and known is not None:
        counts[5] += len(known.vectors)
        bags.give_back(known, block, inverse, len(rows))
      blocks.append(block)
      inverses.append(inverse)
    with self._lock:
      self._counts += counts
    return _Part(
      len(given),
      tuple(blocks),
      tuple(inverses),
      _padded(query.dense[some], size),
      None if weights is None else _padded(weights[some], size),
    )

  def _scored(self, parts: Iterable[_Part]) -> np.ndarray:
    return np.concatenate(
      [self._programs(*part[1:])[: part.real] for part in parts]
    )


def _check_cached(layout: Layout, pinned: Sequence[str], bags: float) -> None:
  names = [table.name for table in layout.tables]
  unknown = [name for name in pinned if name not in names]
  if isinstance(pinned, str) or unknown:
    raise ServeError(
      f'pinned tables must be of the export: {", ".join(names):.200}',
      got=repr(pinned if isinstance(pinned, str) else unknown[0]),
      where='load, pinned',
      hint=f'give a list of names, such as {names[:1]}',
    )
  if not 0 <= bags <= 1:
    raise ServeError(
      'the share of memory for bags must be from 0 to 1',
      got=bags,
      where='load, bags',
      hint='give 0.5',
    )
  if bags and (layout.weighted or not any(map(can_keep, layout.features))):
    raise ServeError(
      'bags can be kept that have several lookups, a combiner and no weights',
      got='no such feature',
      where='load, bags',
      hint='leave bags out; if it has some, export the model again',
    )


def _ranges(
  layout: Layout, number: int, pinned: Sequence[str]
) -> list[tuple[int, int]]:
  """Returns the rows of pinned tables in a group, [first, end) each."""
  return sorted(
    (table.first, table.first + table.rows)
    for table in layout.tables
    if table.group == number and table.name in pinned
  )


def _left(kept: int, ranges: Sequence[tuple[int, int]]) -> int:
  """Returns how many of the kept rows are not pinned."""
  taken = sum(end - first for first, end in ranges)
  if taken > kept:
    raise ServeError(
      f'pinned tables must fit the {kept:,} rows that are kept in memory',
      got=f'{taken:,} rows',
      where='load, pinned',
      hint='pin fewer tables, or give a larger cache',
    )
  return kept - taken


def _padded(values: np.ndarray, size: int) -> np.ndarray:
  short = size - len(values)
  return np.pad(values, [(0, short), (0, 0)]) if short else values


class _Programs:
  """The forward passes of an export. Each is compiled at its first use.

  Attributes:
    sizes: the batch sizes of the programs, ascending.
  """

  def __init__(self, folder: Path, layout: Layout) -> None:
    """Reads the model's parameters."""
    self._folder = pathlib.Path(folder)
    self._files = {one.examples: one.file for one in layout.programs}
    self.sizes = sorted(self._files)
    self._leaves = jax.device_put(self._read(layout))
    self._compiled: dict[int, Callable[..., Any]] = {}
    self._lock = threading.Lock()

  def _read(self, layout: Layout) -> list[np.ndarray]:
    path = self._folder / DENSE
    whole, at, leaves = path.read_bytes(), 0, []
    try:
      for dtype, shape in layout.leaves:
        # numpy knows 'bfloat16' once JAX is imported.
        kind = np.dtype(dtype)
        if kind.hasobject:
          raise TypeError('objects')
        count = math.prod(shape)
        leaf = np.frombuffer(whole, kind, count, at)
        leaves.append(leaf.reshape(shape).copy())
        at += leaf.nbytes
    except (TypeError, ValueError) as error:
      raise ServeError(
        f'the parameters must be the {len(layout.leaves)} of the manifest',
        got=str(error),
        where=str(path),
        hint='export the model again',
      ) from error
    return leaves

  def __call__(
    self,
    rows: tuple[np.ndarray, ...],
    inverses: tuple[np.ndarray, ...],
    dense: np.ndarray,
    weights: np.ndarray | None,
  ) -> np.ndarray:
    """Returns logits f32[B] or f32[B, T] of a batch, given as in `_Part`."""
    program = self._program(len(dense))
    rest = (dense,) if weights is None else (dense, weights)
    # Explicitly, because a user may have forbidden implicit transfers.
    inputs = jax.device_put((rows, inverses, *rest))
    return np.asarray(jax.device_get(program(self._leaves, *inputs)))

  def _program(self, examples: int) -> Callable[..., Any]:
    with self._lock:
      if examples not in self._compiled:
        path = self._folder / self._files[examples]
        try:
          exported = export.deserialize(bytearray(path.read_bytes()))
          self._compiled[examples] = jax.jit(exported.call)
        except Exception as error:  # JAX may raise anything here
          raise ServeError(
            'a program must be one that this JAX can read',
            got=f'{type(error).__name__}: {str(error)[:200]}',
            where=str(path),
            hint=f'export the model with JAX {jax.__version__}',
          ) from error
      return self._compiled[examples]
